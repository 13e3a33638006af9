"""The calls that a replay offers its users, and argument checks.

The memory is in one of three places:

PrioritizedReplay   this process
HandleClient        another process of this host
UrlClient           another host
"""

from __future__ import annotations

import math
import sys
import warnings
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zapex.chunks.arguments import (
    BOOL,
    FLOAT32,
    FLOAT64,
    INT64,
    as_array,
    column,
    demand_finite,
    magnitudes,
    observations,
    stage,
    whole,
    within,
)
from zapex.chunks.batch import Batch, SequenceBatch
from zapex.chunks.builder import flat_observations
from zapex.chunks.layout import BatchLayout
from zapex.chunks.packer import TransitionPacker
from zapex.chunks.schema import Schema
from zapex.errors import ConfigError, ReplayError, SchemaError
from zapex.library.writer import Autoreset, Writer
from zapex.replay.draw import METHODS
from zapex.replay.sequences import MOST_STEPS, Sequences, mixed_priorities
from zapex.sumtree_numba import Method

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from gymnasium.vector import AutoresetMode, VectorEnv

    from zapex.chunks.store import ChunkStore
    from zapex.replay.core import ReplayLayout

Normalise = Literal["batch", "memory"]
_NORMALISE, _AUTORESETS = get_args(Normalise), get_args(Autoreset)
_NO_SLOTS = np.empty(0, np.int64)


class SlotProvider(Protocol):
    """Gives slots to a writer and takes them back. `lock` is held during all other calls."""

    layout: ReplayLayout
    store: ChunkStore
    shard: int

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held during the other calls."""

    def reserve_streams(self, streams: int) -> None:
        """Announce `streams` more streams, each with a slot. Raises ConfigError."""

    def release_streams(self, streams: int, slots: NDArray[np.int64]) -> None:
        """Announce streams that open no more chunks; give back their open `slots` without a row."""

    def admit(self, rows: int) -> None:
        """Wait until the limiter admits `rows` transitions. Raises ReplayError at the deadline."""

    def open_slot(self) -> int:
        """Get a slot to fill."""

    def grown(
        self,
        indices: NDArray[np.int64],
        magnitudes: NDArray[np.float64],
        closed: NDArray[np.int64],
    ) -> None:
        """Announce whole rows (R,) of open slots, |priorities| (-1: none), and `closed` slots."""

    def settle(self) -> None:
        """Wait until all clients can draw what was closed. Raises PeerTimeout."""

    def give_up(self) -> None:
        """End the link of a writer that could not be closed and that nobody closes again."""


class Rows(NamedTuple):
    """Whole transitions, checked: B rows by the schema's column names.

    staged (B,): records of the step columns. magnitudes (B,) float64: |priority|, -1 if none is
    given. The other fields are as in `extend`.
    """

    obs: dict[str, NDArray[Any]]
    next_obs: dict[str, NDArray[Any]]
    staged: NDArray[Any]
    reward: NDArray[np.float32]
    discount: NDArray[np.float32] | None
    terminated: NDArray[np.bool_] | None
    magnitudes: NDArray[np.float64]


class ReplayInterface:
    """Arguments and checks of every call. Hooks do what depends on the place of the memory."""

    _most_rows = sys.maxsize  # of a batch
    _where = ""  # the origin of a batch, for the error about a too large one

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._told = False  # that `extend` keeps too few
        self._batch_layout = lru_cache(partial(BatchLayout, schema))

    def __repr__(self) -> str:
        schema = self.schema
        columns = ", ".join(f"{n} {c.dtype} {c.value_shape}" for n, c in schema.columns.items())
        facts = f"{columns}; n_step={schema.n_step}, gamma={schema.gamma:g}"
        return f"<{type(self).__name__} of {facts}>"

    def __reduce__(self) -> NoReturn:
        raise ReplayError(
            f"a {type(self).__name__} can't be copied or sent to another process: send "
            "replay.handle (or the URL of a served replay), and use zapex.connect there"
        )

    # In: streams of steps, or whole transitions.

    def writer(
        self,
        num_envs: int,
        autoreset: Autoreset | AutoresetMode | VectorEnv[Any, Any, Any] = "next_step",
    ) -> Writer:
        """Make a writer for vector environments. See Writer for the loop that calls it.

        Args:
            num_envs: how many environments step together.
            autoreset: what they do when an episode ends: "next_step", "same_step" or "disabled", or
                the vector environment itself. Don't pass `envs.metadata["autoreset_mode"]`: other
                environments can change it, because they may share that dict.

        Raises:
            ConfigError: num_envs is below 1 or not that of the environment, its mode is not known,
                or the open chunks of all streams would take more than half of the capacity.
        """
        num_envs = whole(num_envs, "num_envs")
        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1, got {num_envs}")
        if hasattr(autoreset, "step"):
            autoreset = _mode_of(autoreset, num_envs)
        mode: Any = getattr(autoreset, "name", str(autoreset)).lower()
        if mode not in _AUTORESETS:
            raise ConfigError(
                f"autoreset must be the vector environment or one of {_AUTORESETS}, "
                f"got {autoreset!r}"
            )
        return self._writer(num_envs, mode)

    def extend(
        self,
        *,
        obs: Any,
        action: ArrayLike,
        reward: ArrayLike,
        next_obs: Any,
        terminated: ArrayLike | None = None,
        truncated: ArrayLike | None = None,
        discount: ArrayLike | None = None,
        priorities: ArrayLike | None = None,
        **extras: ArrayLike,
    ) -> NDArray[np.int64]:
        """Store B whole transitions without changes. On an error nothing is stored.

        Frames that rows of one chunk share are stored once, so give rows in the order of the
        episode.

        Args:
            obs: (B, *shape) observations s; a dict of arrays for Dict observations.
            action: (B, ...), of the schema's dtype.
            reward: (B,) n-step returns; n is the schema's `n_step`.
            next_obs: (B, *shape) observations s', n steps later.
            terminated: (B,) bool, rows that do not bootstrap. Required if there is no `discount`.
            truncated: (B,) bool, accepted and checked; these rows bootstrap from next_obs like
                others.
            discount: (B,) factors of the bootstrap; None is gamma ** n_step.
            priorities: (B,) TD errors; the sign is ignored. None is the largest recent one:
                of those given while the memory filled last, and since then.
            **extras: (B, ...), the schema's extra columns by name.

        Returns:
            (B,) int64 keys for `update_priorities`.

        Raises:
            SchemaError: a column is missing, unknown, or has a wrong shape or dtype.
            InvalidPriority: a priority is NaN or infinite.
            ConfigError: a reward or a discount is NaN or infinite.
            ReplayError: the limiter did not admit the rows within timeout_s.
        """
        schema = self.schema
        returns = as_array(reward, "reward")
        rows = returns.size
        returns = column(returns, FLOAT32, (rows,), "reward")
        if terminated is None and discount is None:
            raise SchemaError("extend needs terminated or discount: which rows do not bootstrap?")
        follows = None if discount is None else column(discount, FLOAT32, (rows,), "discount")
        demand_finite(reward=returns, discount=follows)
        ends = None if terminated is None else column(terminated, BOOL, (rows,), "terminated")
        if truncated is not None:
            column(truncated, BOOL, (rows,), "truncated")
        given = np.full(rows, -1.0) if priorities is None else magnitudes(priorities, rows)
        staged = np.empty(rows, schema.step_dtype)
        stage(schema, action, extras, staged)
        before = observations(schema, obs, rows, "obs")
        after = observations(schema, next_obs, rows, "next_obs")
        keys = self._take(Rows(before, after, staged, returns, follows, ends, given))
        if rows and not self._told and not self._holds(int(keys[0])):
            self._tell_of_rows_gone(rows)
        return keys

    def extend_from(self, dataset: Iterable[Any]) -> int:
        """Store the episodes of a Minari dataset, with n-step returns by the schema.

        Its last transitions of an episode span fewer steps, and bootstrap unless it terminated:

            dataset = minari.load_dataset("D4RL/door/human-v2")
            schema = Schema.from_spaces(dataset.observation_space, dataset.action_space)
            replay = PrioritizedReplay(dataset.total_steps, schema)
            replay.extend_from(dataset)

        Args:
            dataset: a MinariDataset, or other episodes of T steps with `observations` (T + 1, ...),
                `actions`, `rewards`, `terminations` and `truncations` (T, ...).

        Returns:
            How many transitions were stored.

        Raises:
            SchemaError, ConfigError, ReplayError: as `extend`, at an episode; those before it stay.
        """
        rows = 0
        for episode in dataset:
            columns = whole_transitions(episode, self.schema.n_step, self.schema.gamma)
            rows += len(self.extend(**columns))
        return rows

    def _tell_of_rows_gone(self, rows: int) -> None:
        """Warn once that an `extend` of so many rows has evicted some of them."""
        stats = self.stats()
        fit, chunks = int(stats["effective_capacity"]), stats["slots_live"] + 1
        if rows <= fit:
            return  # others have added more since, or the replay has lost its memory
        self._told = True
        more = math.ceil((rows - fit) * stats["chunk"] * chunks / stats["size"])
        warnings.warn(
            f"extend got {rows} transitions and keeps the newest: only {fit} like these fit (those "
            "that share no frames take more room); to keep all, give the replay a capacity of "
            f"{int(stats['capacity']) + more}",
            stacklevel=3,
        )

    # Out: batches; and priorities back.

    def sample(
        self,
        batch_size: int,
        beta: float = 0.4,
        out: Batch | None = None,
        *,
        method: Method = "stratified",
        normalise: Normalise = "batch",
    ) -> Batch:
        """Draw transitions by priority.

        Weights are (N q)^-beta, divided by the largest weight of the batch or of the memory (Schaul
        et al. 2016, sec. 3.4). q is the probability that was really used for the draw.

        Args:
            batch_size: rows, B.
            beta: how much of the bias the weights correct; 0 gives weights of 1.
            out: a batch of `empty_batch(batch_size)` to fill; None allocates a new one.
            method: "stratified", "independent" or "without_replacement"; see SumTree.sample.
            normalise: "batch" or "memory": the largest weight there becomes 1.

        Returns:
            `out`, or a new Batch.

        Raises:
            NotEnoughData: there are fewer than `min_size_to_sample` or `batch_size` transitions, or
                the limiter did not allow it within timeout_s.
            ConfigError: an unknown method, or `out` has another size.
            SchemaError: `out` is of another schema.
        """
        if method not in METHODS or normalise not in _NORMALISE:
            raise ConfigError(
                f"method must be one of {METHODS} and normalise one of {_NORMALISE}, "
                f"got {method!r} and {normalise!r}"
            )
        if not 0.0 <= beta < math.inf:
            raise ConfigError(f"beta must be a finite number, 0 or more, got {beta}")
        if batch_size > self._most_rows:
            raise ConfigError(
                f"a batch {self._where} has at most {self._most_rows} rows, "
                f"got {batch_size}: draw several"
            )
        if out is None:
            rows = whole(batch_size, "batch_size")
            out = Batch.empty(self._batch_layout(rows, False), zeroed=False)
        elif out.layout.batch_size != batch_size:
            raise ConfigError(f"out has {out.layout.batch_size} rows, not {batch_size}")
        elif out.layout.schema is not self.schema and out.layout.schema != self.schema:
            raise SchemaError("out is of another schema: make it with empty_batch of this replay")
        self._draw(out, beta, method, normalise == "memory")
        return out

    def sample_sequences(
        self,
        n: int,
        length: int,
        *,
        burn_in: int = 0,
        stride: int = 0,
        beta: float = 0.4,
        out: SequenceBatch | None = None,
    ) -> SequenceBatch:
        """Draw sequences of consecutive steps by priority, for recurrent networks.

        Sequences start at the first step of an episode, and of a chunk, and at every `stride`-th
        step after that. The probability of a sequence is the sum of the leaves of the steps before
        the next start. It ends with its episode; `valid` of the batch masks the rest. Only steps of
        a `writer` make sequences.

        Args:
            n: how many, B.
            length: steps to train on.
            burn_in: steps before these, which only bring the network's state up to date
                (Kapturowski et al. 2019, sec. 3). They come first, so a batch has burn_in + length
                steps. A stored state of the first one is an extra column of the schema.
            stride: steps between two starts; 0: half of the length.
            beta: exponent of the importance weights, as in `sample`; the largest one is 1.
            out: a batch of an equal earlier call, to fill again; None allocates a new one.

        Returns:
            `out`, or a new SequenceBatch.

        Raises:
            NotEnoughData: there are fewer than `min_size_to_sample` transitions, or the limiter
                (which counts n * length) did not allow it within timeout_s.
            ReplayError: the replay has rows of `extend`.
            ConfigError: a number is out of range, or `out` is of another call.
        """
        length = whole(length, "length")
        stride = whole(stride, "stride") or max(1, length // 2)
        asked = Sequences(length, whole(burn_in, "burn_in"), stride)
        rows = whole(n, "n")
        if not (0.0 <= beta < math.inf and rows > 0):
            raise ConfigError(f"n must be 1 or more and beta finite and 0 or more: {n}, {beta}")
        if not (length > 0 and asked.burn_in >= 0 and stride > 0 and asked.steps <= MOST_STEPS):
            raise ConfigError(
                "length must be 1 or more, burn_in and stride 0 or more, and length + burn_in at "
                f"most {MOST_STEPS}: {length}, {burn_in}, {stride}"
            )
        layout = asked.layout(self.schema, rows)
        if out is None:
            out = SequenceBatch.empty(layout, zeroed=False)
        elif out.layout != layout:
            raise ConfigError(f"out is of {out.layout}, and {layout} was asked for")
        self._draw_sequences(out, asked, beta)
        return out

    def update_sequences(
        self, batch: SequenceBatch, td_errors: ArrayLike, eta: float = 0.9
    ) -> tuple[int, int]:
        """Set new priorities of sequences. On an error nothing has changed.

        A sequence's priority is eta max |delta| + (1 - eta) mean |delta| over its valid steps after
        the burn-in (Kapturowski et al. 2019, sec. 2.3). Each of the steps that it stands for
        (`spans`) gets this priority.

        Args:
            batch: of `sample_sequences`.
            td_errors: (B, length) TD errors delta; those of masked steps are ignored.
            eta: the weight of the maximum, 0 to 1.

        Returns:
            Of how many steps the priority was set, and how many were evicted.

        Raises:
            InvalidPriority: a TD error of a valid step is NaN or infinite.
            ConfigError: eta is out of range.
            SchemaError: a wrong shape or dtype.
        """
        eta = within(eta, "eta", 0.0, 1.0)
        layout = batch.layout
        shape = layout.batch_size, layout.steps - layout.burn_in
        errors = column(as_array(td_errors, "td_errors"), FLOAT64, shape, "td_errors")
        return self._update(*mixed_priorities(batch, errors, eta))

    def can_sample(self, batch_size: int) -> bool:
        """Whether `sample(batch_size)` would return at once."""
        raise NotImplementedError

    def update_priorities(self, keys: ArrayLike, priorities: ArrayLike) -> tuple[int, int]:
        """Set new priorities. On an error nothing has changed.

        Args:
            keys: (B,) int64 keys of a batch; -1 is skipped. Of equal keys the last one counts.
            priorities: (B,) TD errors; the sign is ignored, eps and alpha are applied here.

        Returns:
            How many were applied, and how many were stale because their transition was evicted.

        Raises:
            InvalidPriority: a priority is NaN or infinite.
            SchemaError: a wrong shape or dtype.
        """
        keys = as_array(keys, "keys")
        keys = column(keys, INT64, (keys.size,), "keys")
        return self._update(keys, column(priorities, FLOAT64, keys.shape, "priorities"))

    def stats(self) -> dict[str, float]:
        """Counters by name.

        Returns:
            size: transitions that can be drawn; capacity: as given; chunk: transitions in a full
                chunk; effective_capacity: how many fit if new transitions share frames as the
                present ones do; inserted, sampled: transitions so far; updates_applied,
                updates_stale: priorities so far;
                total_priority: the sum of all leaves; bytes: of the memory; slots_free,
                slots_live, ...: slots by state.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def empty_batch(
        self, batch_size: int, layout: str = "channels_first", pin_memory: bool = False
    ) -> Batch:
        """Allocate memory for `sample(out=...)`, to reuse for every batch.

        Args:
            batch_size: rows, B.
            layout: "channels_first" or "channels_last". The latter stores stacked frames with the
                stack innermost, which is fastest for convolutions on a CPU. Shapes are the same.
            pin_memory: page-lock it, for copies to a GPU.

        Returns:
            A Batch whose arrays are zero.

        Raises:
            ConfigError: an unknown layout, or pin_memory without a GPU.
        """
        if layout not in ("channels_first", "channels_last"):
            raise ConfigError(f'layout must be "channels_first" or "channels_last", got "{layout}"')
        wanted = whole(batch_size, "batch_size"), layout == "channels_last"
        return Batch.empty(self._batch_layout(*wanted), pin_memory)

    # Hooks that depend on the place of the memory.

    def _writer(self, num_envs: int, autoreset: Autoreset) -> Writer:
        raise NotImplementedError

    def _take(self, rows: Rows) -> NDArray[np.int64]:
        """Store the rows. Returns their keys (B,)."""
        raise NotImplementedError

    def _holds(self, key: int) -> bool:
        """Whether the transition of a new key is still in the memory."""
        raise NotImplementedError

    def _draw(self, batch: Batch, beta: float, method: Method, by_memory: bool) -> None:
        """Fill `batch`. by_memory: divide its weights by the memory's largest weight."""
        raise NotImplementedError

    def _draw_sequences(self, batch: SequenceBatch, asked: Sequences, beta: float) -> None:
        """Fill `batch`."""
        raise NotImplementedError

    def _update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> tuple[int, int]:
        """As `update_priorities`, with checked arrays."""
        raise NotImplementedError


def whole_transitions(episode: Any, n_step: int, gamma: float) -> dict[str, Any]:
    """The columns of `extend` for an episode of T steps, as `extend_from` takes it.

    Of step t, with m = min(n_step, T - t): the return r_t + ... + gamma^(m-1) r_(t+m-1), the
    observation m steps later, and the discount gamma^m; 0 if the episode terminated by then.
    """
    rewards = np.asarray(episode.rewards, np.float64)
    steps = len(rewards)
    padded = np.append(rewards, np.zeros(n_step - 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, n_step)[:steps]
    after = np.minimum(np.arange(steps) + n_step, steps)
    discount = gamma ** (after - np.arange(steps))
    if steps and np.any(episode.terminations):
        discount[after == steps] = 0.0
    seen = episode.observations
    obs, next_obs = (
        {name: np.asarray(part)[index] for name, part in seen.items()}
        if isinstance(seen, dict)
        else np.asarray(seen)[index]
        for index in (slice(steps), after)
    )
    return {
        "obs": obs,
        "action": episode.actions,
        "reward": windows @ gamma ** np.arange(n_step),
        "next_obs": next_obs,
        "discount": discount,
    }


def _mode_of(envs: Any, num_envs: int) -> Any:
    """The autoreset mode that a vector environment has itself. Its metadata may be shared."""
    if getattr(envs, "num_envs", num_envs) != num_envs:
        raise ConfigError(f"num_envs is {num_envs}, and the environment has {envs.num_envs}")
    if getattr(getattr(envs, "spec", None), "kwargs", {}).get("life_loss_info"):
        raise ConfigError(
            "life_loss_info=True reports lost lives as terminated, and the writer would skip the "
            'next step: turn it off, and give add cut= where info["lives"] falls'
        )
    while not hasattr(envs, "autoreset_mode"):
        if not hasattr(envs, "env"):
            raise ConfigError(
                f"{type(envs).__name__} has no autoreset_mode: pass autoreset= one of {_AUTORESETS}"
            )
        envs = envs.env
    return envs.autoreset_mode


class Extender:
    """Writes whole transitions into the slots of a provider, one open slot after another."""

    def __init__(self, provider: SlotProvider) -> None:
        self._provider = provider
        self._packer: TransitionPacker | None = None

    def extend(self, rows: Rows) -> NDArray[np.int64]:
        """Store rows, with the provider's lock held. Returns their keys (B,)."""
        provider = self._provider
        if self._packer is None:
            packer = TransitionPacker(provider.store)
            provider.reserve_streams(1)
            self._packer = packer
        packer = self._packer
        count = len(rows.reward)
        if not count:
            return _NO_SLOTS
        provider.admit(count)
        schema = provider.layout.schema
        columns = flat_observations(schema, rows.obs), flat_observations(schema, rows.next_obs)
        records = rows.staged.view(np.uint8)
        indices, keys = np.empty(count, np.int64), np.empty(count, np.int64)
        done = 0
        while True:
            first = done
            done = packer.pack(
                first,
                *columns,
                records,
                rows.reward,
                rows.discount,
                rows.terminated,
                rows.magnitudes,
                provider.shard,
                indices,
                keys,
            )
            # Announce before the next slot is opened: that may evict these rows.
            provider.grown(indices[first:done], rows.magnitudes[first:done], _NO_SLOTS)
            if done == count:
                return keys
            self.close()
            packer.open(provider.open_slot())

    def close(self) -> None:
        """Close the open chunk."""
        if self._packer is not None and self._packer.slot is not None:
            self._provider.grown(_NO_SLOTS, np.empty(0), np.array([self._packer.slot]))
            self._packer.close()
