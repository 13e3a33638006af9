"""Steps of vectorised environments into a replay, of this process or of another one."""

from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zapex.arguments import BOOL, FLOAT64, column, magnitudes, observations, stage
from zapex.errors import ConfigError, ReplayError, SchemaError
from zapex.nstep import ChunkBuilder, flat_observations
from zapex.schema import LIVE

if TYPE_CHECKING:
    from zapex.replay_face import Home

Autoreset = Literal["next_step", "same_step", "disabled"]

_STACK_CHECKS = 32  # steps in which it is looked at whether a stack really is one


class Writer:
    """`num_envs` streams of steps; a transition can be drawn as soon as its return is known.

    The loop that calls it, with Gymnasium's vector environments (any of their autoreset modes):

        obs, _ = envs.reset()
        writer.reset(obs)
        while True:
            action = policy(obs)
            next_obs, reward, terminated, truncated, info = envs.step(action)
            writer.add(action=action, reward=reward, next_obs=next_obs,
                       terminated=terminated, truncated=truncated)
            obs = next_obs

    autoreset says what `envs` does after an episode: "next_step" returns the next one's first
    observation from the step after the last (Gymnasium's default; that step is no transition, and
    the writer knows), "same_step" returns it from the last step (then give `final_obs`),
    "disabled" leaves it to you (then call `reset(obs, mask)`).
    """

    def __init__(self, replay: "Home", num_envs: int, autoreset: Autoreset) -> None:
        if autoreset not in get_args(Autoreset):
            raise ConfigError(f"autoreset must be one of {get_args(Autoreset)}, got {autoreset!r}")
        self.num_envs, self.autoreset = num_envs, autoreset
        self._replay = replay
        self._schema = replay.layout.schema
        self._builder = ChunkBuilder(replay.store, num_envs, closed_state=LIVE)
        # True: the stream has no episode; its next observation begins one, or must be given.
        self._over = np.ones(num_envs, np.bool_)
        self._any_over = True
        self._ends = np.zeros(num_envs, np.bool_)
        self._ever_begun = self._closed = False
        self._stacks_to_check = _STACK_CHECKS if self._schema.stack > 1 else 0
        self._noted = 0  # of the builder's last completed transitions
        self._last: dict[str, NDArray[Any]] = {}

    def reset(self, obs: Any, mask: ArrayLike | None = None) -> None:
        """First observations (S, ...) of new episodes, of the streams in `mask` (S,) or of all.

        Steps of a broken-off episode whose n-step return is not known yet are dropped.
        """
        found = observations(self._schema, obs, self.num_envs, "obs")
        everyone = np.ones(self.num_envs, np.bool_)
        wanted = everyone if mask is None else column(mask, BOOL, everyone.shape, "mask")
        with self._replay.lock:
            self._demand_open()
            self._begin(wanted, found)
            self._over &= ~wanted
            self._any_over = bool(self._over.any())
            self._ever_begun = True
            if self._stacks_to_check:
                self._remember(found, wanted)

    def add(
        self,
        *,
        action: ArrayLike,
        reward: ArrayLike,
        next_obs: Any,
        terminated: ArrayLike,
        truncated: ArrayLike,
        priority: ArrayLike | None = None,
        final_obs: Any = None,
        **extras: ArrayLike,
    ) -> None:
        """One step of every stream, as `envs.step` returned it.

        action, extras (S, ...): the schema's columns. reward, terminated, truncated (S,).
        priority (S,): |TD error| of the transition that starts with this step; its sign is
        ignored; None is the largest so far. final_obs: info["final_obs"] under "same_step": the
        last observation of each episode that ends here, an array, dict or object array by stream.

        Raises SchemaError, InvalidPriority, ReplayError; nothing has changed then.
        """
        streams, replay, builder = self.num_envs, self._replay, self._builder
        found = observations(self._schema, next_obs, streams, "next_obs")
        shape = (streams,)
        terminals = column(terminated, BOOL, shape, "terminated")
        truncations = column(truncated, BOOL, shape, "truncated")
        rewards = column(reward, FLOAT64, shape, "reward")
        given = None if priority is None else magnitudes(priority, streams)
        with replay.lock:
            self._demand_open()
            stage(self._schema, action, extras, builder.staged)
            over, ends, same_step = self._over, self._ends, self.autoreset == "same_step"
            if self._any_over and (self.autoreset != "next_step" or not self._ever_begun):
                raise ReplayError(
                    f"the episode of stream {int(over.argmax())} is over or never began: give its "
                    "first observation with reset(obs, mask)"
                )
            last = found
            if same_step and (terminals.any() or truncations.any()):
                last = self._with_final(found, terminals | truncations, final_obs)
            if self._stacks_to_check:
                self._check_stacks(~over, last)
            replay.admit(streams * self._schema.n_step)
            flat = flat_observations(self._schema, last)
            if builder.wanted > 0:  # known before the step, so that it is one call
                builder.provide([replay.open_slot() for _ in range(builder.wanted)])
            self._noted = 0
            while True:
                done, some = builder.step(terminals, truncations, over, ends, flat, rewards, given)
                self._hand_over()  # first: what is closed here may be evicted for the next slot
                if done == streams:
                    break
                builder.provide([replay.open_slot()])
            begins, any_begin = (ends, some) if same_step else (over, self._any_over)
            if any_begin:
                self._begin(begins, found)
            if not same_step:
                self._over, self._ends, self._any_over = ends, over, some
            if self._stacks_to_check:
                self._remember(found)

    def flush(self) -> None:
        """Close every open chunk, so that the FIFO may evict it. Sampling does not wait for it.

        Over a network chunks travel closed: after this, all that was added can be drawn.
        """
        with self._replay.lock:
            self._builder.flush()
            self._hand_over()
            self._replay.settle()

    def close(self) -> None:
        """Flush, and give the slots back. Steps whose n-step return is not known are dropped."""
        with self._replay.lock:
            if not self._closed:
                self.flush()
                self._replay.give_back(self._builder.held)
                self._replay.release_streams(self.num_envs)
                self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _demand_open(self) -> None:
        if self._closed:
            raise ReplayError("this writer is closed: ask the replay for another")

    def _begin(self, mask: NDArray[np.bool_], obs: dict[str, NDArray[Any]]) -> None:
        while self._builder.begin(mask, obs) < self.num_envs:
            self._hand_over()
            self._builder.provide([self._replay.open_slot()])
        self._hand_over()

    def _hand_over(self) -> None:
        """Transitions completed since the last time can be drawn; full chunks can be evicted."""
        indices, magnitudes = self._builder.last_completed()
        if self._noted:
            indices, magnitudes = indices[self._noted :], magnitudes[self._noted :]
        self._noted += len(indices)
        closed = self._builder.take_closed()
        if len(indices) or len(closed):
            self._replay.grown(indices, magnitudes, closed)

    def _with_final(
        self, found: dict[str, NDArray[Any]], ends: NDArray[np.bool_], final_obs: Any
    ) -> dict[str, NDArray[Any]]:
        """`found` with the last observations of the episodes that end."""
        if final_obs is None:
            raise ReplayError(
                f"the episode of stream {int(ends.argmax())} ends, and under autoreset="
                '"same_step" next_obs is already the next one: give final_obs=info["final_obs"]'
            )
        last = {name: array.copy() for name, array in found.items()}
        for i in np.flatnonzero(ends):
            if isinstance(final_obs, dict):
                row: Any = {key: np.asarray(value[i])[None] for key, value in final_obs.items()}
            elif isinstance(final_obs[i], dict):
                row = {key: np.asarray(value)[None] for key, value in final_obs[i].items()}
            else:
                row = np.asarray(final_obs[i])[None]
            for name, array in observations(self._schema, row, 1, "final_obs").items():
                last[name][i] = array[0]
        return last

    def _remember(
        self, obs: dict[str, NDArray[Any]], mask: NDArray[np.bool_] | None = None
    ) -> None:
        for name, array in obs.items():
            before = self._last.setdefault(name, array.copy())
            before[mask] = array[mask]

    def _check_stacks(self, playing: NDArray[np.bool_], found: dict[str, NDArray[Any]]) -> None:
        """Frames are kept once, so a stack must be the one before it, shifted by a frame."""
        self._stacks_to_check -= 1
        for name, c in self._schema.obs_columns.items():
            if c.stack > 1:
                axis = 1 if c.stack_axis == 0 else found[name].ndim - 1
                now = np.moveaxis(found[name], axis, 0)[:-1, playing]
                before = np.moveaxis(self._last[name], axis, 0)[1:, playing]
                if not np.array_equal(now, before):
                    raise SchemaError(
                        f"{name} has stack={c.stack}, but next_obs is not the observation "
                        "before it shifted by one frame: if that axis is not time, build the "
                        "schema with stack=1"
                    )
