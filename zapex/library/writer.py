"""Writer: makes transitions from steps of vector environments, in any process's replay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zapex.chunks.arguments import BOOL, FLOAT64, column, magnitudes, observations, stage
from zapex.chunks.builder import ChunkBuilder
from zapex.chunks.layout import LIVE
from zapex.errors import ReplayError, SchemaError

if TYPE_CHECKING:
    from zapex.library.interface import SlotProvider

Autoreset = Literal["next_step", "same_step", "disabled"]

_STACK_CHECKS = 32  # steps in which a stack must have moved, at each of its places
_LOOK_AGAIN_STEPS = 1024  # after these, one step is checked again
_OTHER_MODE = (
    'autoreset="next_step" skips that step. Do the environments reset in the step of the end? '
    "Make the writer with writer(num_envs, autoreset=envs). Is a lost life reported as terminated? "
    "Report it as cut"
)
_SAME_FINALS = 4  # episodes that end in their successor's first observation, before a warning


class Writer:
    """Writes the steps of `num_envs` environments into a replay.

    Each environment is a stream of steps. The writer computes n-step returns, handles episode ends
    and stores each frame once. A transition can be drawn as soon as its n-step return is known.
    Make a writer with `replay.writer(num_envs)`, of a PrioritizedReplay or of a client; it is also
    a context manager. The loop that calls it, with Gymnasium's vector environments:

        obs, _ = envs.reset()
        writer.reset(obs)
        while True:
            action = policy(obs)
            next_obs, reward, terminated, truncated, info = envs.step(action)
            writer.add(action=action, reward=reward, next_obs=next_obs,
                       terminated=terminated, truncated=truncated)
            obs = next_obs

    `autoreset` says what `envs` does when an episode ends:

    * "next_step" (Gymnasium's default): the step after the last one returns the next episode's
      first observation. That step is no transition, and the writer skips it.
    * "same_step": the last step returns the next episode's first observation. Give `final_obs` to
      `add`.
    * "disabled": `envs` does nothing. Call `reset(obs, mask)` for the streams that you reset.

    Attributes:
        num_envs: the number of streams, S.
        autoreset: as given.
    """

    def __init__(self, replay: SlotProvider, num_envs: int, autoreset: Autoreset) -> None:
        self.num_envs, self.autoreset = num_envs, autoreset
        self._replay = replay
        self._schema = replay.layout.schema
        self._builder = ChunkBuilder(
            replay.store, num_envs, closed_state=LIVE, finite_rewards=True, linked=True
        )
        self._any_idle = True  # some stream has no episode
        self._ever_begun = self._closed = False
        # Steps until stacks are checked, 0: in this one; and by column how often they have moved.
        self._check_in = 0
        self._moved = {
            name: np.zeros(c.stack - 1, np.int64)
            for name, c in self._schema.obs_columns.items()
            if c.stack > 1
        }
        self._same_finals = 0  # final observations that equal the next one; -1: one did not
        self._noted = 0  # number of the builder's last completed transitions that were announced
        self._last: dict[str, NDArray[Any]] = {}
        self._may_warn = True  # once, of environments that seem to have another mode

    def __reduce__(self) -> NoReturn:
        raise ReplayError(
            "a Writer can't be copied or sent to another process: send replay.handle, and use "
            "zapex.connect(handle).writer(...) there"
        )

    def reset(self, obs: Any, mask: ArrayLike | None = None) -> None:
        """Begin new episodes. Steps that still wait for their n-step return are dropped.

        Args:
            obs: (S, *shape) first observations; a dict of arrays for Dict observations.
            mask: (S,) bool, the streams that begin; None is all of them.

        Raises:
            SchemaError: a wrong shape or dtype.
            ReplayError: the writer is closed.
        """
        found = observations(self._schema, obs, self.num_envs, "obs")
        every_stream = np.ones(self.num_envs, np.bool_)
        wanted = every_stream if mask is None else column(mask, BOOL, every_stream.shape, "mask")
        with self._replay.lock:
            self._demand_open()
            self._begin(wanted, found)
            self._any_idle = bool(self._builder.idle().any())
            self._ever_begun = True
            if self._moved:
                self._remember(found, wanted)

    def add(
        self,
        *,
        action: ArrayLike,
        reward: ArrayLike,
        next_obs: Any,
        terminated: ArrayLike,
        truncated: ArrayLike,
        cut: ArrayLike | None = None,
        exploratory: ArrayLike | None = None,
        priority: ArrayLike | None = None,
        final_obs: Any = None,
        **extras: ArrayLike,
    ) -> None:
        """Add one step of every stream, as `envs.step` returned it; an error changes nothing.

        Args:
            action: (S, ...), of the schema's dtype.
            reward: (S,) rewards of this step.
            next_obs: (S, *shape) observations after the step; a dict of arrays for Dict
                observations.
            terminated: (S,) bool, the episode ended in a terminal state: no bootstrap.
            truncated: (S,) bool, the episode was cut: the transition bootstraps from its last
                state.
            cut: (S,) bool, the return ends here without a bootstrap, but the episode continues, as
                after a lost life. Don't report these steps as terminated: then the next one would
                be taken for a reset, and skipped.
            exploratory: (S,) bool, the action is not the greedy one: n-step returns that began
                before end at the state where it was taken, with a bootstrap from there (Watkins
                1989; Sutton and Barto 2018, section 12.10). None: returns span such actions.
            priority: (S,) TD errors of the transitions that start with this step; the sign is
                ignored. None gives them the largest recent priority, as in `extend`.
            final_obs: `info["final_obs"]` with autoreset="same_step": the last observation of each
                episode that ends here, as an array, a dict, or an object array by stream.
            **extras: (S, ...), the schema's extra columns by name.

        Raises:
            SchemaError: a column is missing, unknown, or has a wrong shape or dtype; or a stacked
                observation is not the previous one shifted by a frame.
            InvalidPriority: a priority is NaN or infinite.
            ReplayError: the writer is closed, an episode has not begun, or the limiter did not
                admit the step within the replay's timeout_s.
        """
        streams, replay, builder = self.num_envs, self._replay, self._builder
        found = observations(self._schema, next_obs, streams, "next_obs")
        shape = (streams,)
        terminals = column(terminated, BOOL, shape, "terminated")
        truncations = column(truncated, BOOL, shape, "truncated")
        rewards = column(reward, FLOAT64, shape, "reward")
        cuts = None if cut is None else column(cut, BOOL, shape, "cut")
        explored = None if exploratory is None else column(exploratory, BOOL, shape, "exploratory")
        given = None if priority is None else magnitudes(priority, streams)
        with replay.lock:
            self._demand_open()
            stage(self._schema, action, extras, builder.staged)
            # Streams that this step gives the first observation of their next episode.
            begins = builder.idle() if self._any_idle else None
            last = self._last_of_step(begins, found, rewards, terminals, truncations, final_obs)
            replay.admit(streams * self._schema.n_step)
            while builder.wanted > 0:  # provide the slots now: then the step is one call
                builder.provide([replay.open_slot()])  # one at a time: the next may time out
            self._noted = 0
            self._write(
                lambda: builder.add(
                    last,
                    rewards,
                    terminals,
                    truncations,
                    cut=cuts,
                    exploratory=explored,
                    priority=given,
                )
            )
            self._any_idle = builder.ended > 0
            if self._any_idle and self.autoreset == "same_step":
                begins, self._any_idle = builder.idle(), False
            if begins is not None:
                self._begin(begins, found)
            if self._moved:
                self._check_in -= self._check_in > 0
                if self._check_in == 0:
                    self._remember(found)

    def flush(self) -> None:
        """Close every open chunk, so that it can be evicted like the others.

        In one process, sampling does not need this. Over a network only closed chunks are sent,
        so after `flush` all added transitions can be drawn.

        Raises:
            PeerTimeout: over a network, the chunks were not acknowledged in time.
        """
        with self._replay.lock:
            self._builder.flush()
            self._hand_over()
            self._replay.settle()

    def close(self) -> None:
        """Flush and give the slots back. Steps that wait for their n-step return are dropped."""
        with self._replay.lock:
            if not self._closed:
                self.flush()
                self._replay.release_streams(self.num_envs, self._builder.held)
                self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        except BaseException:
            self._replay.give_up()
            raise

    def _last_of_step(
        self,
        idle: NDArray[np.bool_] | None,
        found: dict[str, NDArray[Any]],
        rewards: NDArray[np.float64],
        terminals: NDArray[np.bool_],
        truncations: NDArray[np.bool_],
        final_obs: Any,
    ) -> dict[str, NDArray[Any]]:
        """The last observations of this step in its own episodes, checked. It changes nothing.

        idle: the streams that have no episode; None: all have one.
        """
        if idle is not None and (self.autoreset != "next_step" or not self._ever_begun):
            raise ReplayError(
                f"the episode of stream {int(idle.argmax())} is over or never began: give "
                "its first observation with reset(obs, mask)"
            )
        if final_obs is not None and self.autoreset != "same_step":
            raise ReplayError(
                'final_obs is of environments with autoreset="same_step", and this writer has '
                f'"{self.autoreset}": make it with writer(num_envs, autoreset=envs)'
            )
        if idle is not None:
            self._check_mode(rewards[idle], (terminals | truncations)[idle])
        last = found
        if self.autoreset == "same_step" and (terminals.any() or truncations.any()):
            last = self._with_final(found, terminals | truncations, final_obs)
        if self._moved and self._check_in == 0:
            self._check_stacks(slice(None) if idle is None else ~idle, last)
        return last

    def _check_mode(self, rewards: NDArray[np.float64], ends: NDArray[np.bool_]) -> None:
        """Refuse a skipped step that ends an episode; warn of one with a reward, once."""
        if ends.any():
            raise ReplayError(f"the step after the end of an episode ends one: {_OTHER_MODE}")
        if self._may_warn and rewards.any():
            self._may_warn = False
            warnings.warn(
                f"the step after the end of an episode has a reward: {_OTHER_MODE}", stacklevel=4
            )

    def _write(self, write: Callable[[], int]) -> None:
        """Let the builder write for all streams, with another slot whenever it needs one."""
        while write() < self.num_envs:
            self._hand_over()  # before the next slot, which may evict a chunk that is closed here
            self._builder.provide([self._replay.open_slot()])
        self._hand_over()

    def _begin(self, mask: NDArray[np.bool_], obs: dict[str, NDArray[Any]]) -> None:
        self._write(lambda: self._builder.begin(mask, obs))

    def _demand_open(self) -> None:
        if self._closed:
            raise ReplayError("this writer is closed: ask the replay for another")

    def _hand_over(self) -> None:
        """Announce completed transitions, which can then be drawn, and full chunks."""
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
        """A copy of `found` with the last observations of episodes that end."""
        if final_obs is None:
            raise ReplayError(
                f"the episode of stream {int(ends.argmax())} ends, and under autoreset="
                '"same_step" next_obs is already the next one: give final_obs=info["final_obs"]'
            )
        last = {name: array.copy() for name, array in found.items()}
        same = True
        for i in np.flatnonzero(ends):
            if isinstance(final_obs, dict):
                row: Any = {key: np.asarray(value[i])[None] for key, value in final_obs.items()}
            elif isinstance(final_obs[i], dict):
                row = {key: np.asarray(value)[None] for key, value in final_obs[i].items()}
            else:
                row = np.asarray(final_obs[i])[None]
            for name, array in observations(self._schema, row, 1, "final_obs").items():
                same = same and np.array_equal(last[name][i], array[0])
                last[name][i] = array[0]
        if self._same_finals >= 0:
            self._check_finals(same)
        return last

    def _check_finals(self, same: bool) -> None:
        """Warn once if each final observation so far equals the first one of the next episode."""
        self._same_finals = self._same_finals + 1 if same else -1
        if self._same_finals == _SAME_FINALS:
            self._same_finals = -1
            warnings.warn(
                "each final_obs so far equals next_obs, the first observation of the next episode: "
                "does the environment return the same array each time? Then its reset overwrites "
                "final_obs, and the last transitions of episodes are wrong: return a copy of the "
                "observation, from step and from reset",
                stacklevel=5,
            )

    def _remember(
        self, obs: dict[str, NDArray[Any]], mask: NDArray[np.bool_] | None = None
    ) -> None:
        for name, array in obs.items():
            before = self._last.setdefault(name, array.copy())
            before[mask] = array[mask]

    def _check_stacks(
        self, playing: NDArray[np.bool_] | slice, found: dict[str, NDArray[Any]]
    ) -> None:
        """Check that a stack is the previous one shifted by a frame: frames are stored once.

        Only a frame that differs from its successor is evidence: pictures that stand still are
        shifted and not shifted. Once each place has shown it often, one step in many is checked.
        """
        for name, moved in self._moved.items():
            axis = 1 if self._schema.columns[name].stack_axis == 0 else found[name].ndim - 1
            now = np.moveaxis(found[name], axis, 0)[:-1, playing]
            stack = np.moveaxis(self._last[name], axis, 0)[:, playing]
            if not np.array_equal(now, stack[1:]):
                raise SchemaError(
                    f"{name} has stack={len(stack)}, but next_obs is not the observation "
                    "before it shifted by one frame: if that axis is not time, build the "
                    "schema with stack=1"
                )
            differs = stack[:-1] != stack[1:]
            np.add(moved, differs.any(axis=tuple(range(1, differs.ndim))), out=moved)
        if all(moved.min() >= _STACK_CHECKS for moved in self._moved.values()):
            self._check_in = _LOOK_AGAIN_STEPS
