"""The core of a replay: slots, priorities and keys in one block of memory."""

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import (
    AGE_WEIGHT,
    COMMITTED,
    COUNT,
    LIVE,
    STATE,
    ChunkLayout,
    chunk_length,
    slots_needed,
)
from zapex.chunks.ledger import SlotLedger
from zapex.chunks.schema import Schema
from zapex.chunks.store import ChunkStore
from zapex.errors import ConfigError, InvalidPriority, NotEnoughData
from zapex.machine.memory import align
from zapex.machine.segment import private_bytes
from zapex.replay.draw import METHODS, Draw, draw_kernel
from zapex.replay.priorities import (
    LEAST_WEIGHT,
    MOST_RECENCY,
    NOT_A_KEY,
    REFUSED,
    RecentLargest,
    fade_kernel,
    forget_kernel,
    prioritise_kernel,
    reprioritise_kernel,
    weigh_ages_kernel,
)
from zapex.sumtree_numba import Method, SumTree

_WELL_BELOW = 0.9  # of the capacity: that a memory is full with so few is worth a warning


@dataclass(frozen=True)
class ReplayLayout:
    """The memory layout of a replay of `capacity` transitions from `streams` streams."""

    schema: Schema
    capacity: int
    streams: int = 1
    chunk: int = 0  # transitions in a chunk; 0: zapex chooses

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ConfigError(f"capacity must be at least 1 transition, got {self.capacity}")
        if not self.chunk:
            shortest = max(self.schema.n_step, self.schema.stack)
            chosen = chunk_length(self.capacity, self.streams, shortest)
            object.__setattr__(self, "chunk", chosen)

    @cached_property
    def chunk_layout(self) -> ChunkLayout:
        """The layout of a chunk."""
        return ChunkLayout(self.schema, self.chunk)

    @property
    def live_slots(self) -> int:
        """How many full chunks hold `capacity` transitions."""
        return -(-self.capacity // self.chunk)

    @property
    def slots(self) -> int:
        """Number of slots, with those that the actors hold."""
        return slots_needed(self.capacity, self.chunk, self.streams)

    @property
    def tree_offset(self) -> int:
        """The offset of the sum tree, after the slots, in bytes."""
        return align(ChunkStore.required_bytes(self.chunk_layout, self.slots))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole memory."""
        return self.tree_offset + SumTree.required_bytes(self.slots * self.chunk)


class ReplayCore:
    """The replay server's side: it accepts and evicts slots, draws keys and sets priorities.

    Thread-safe. PrioritizedReplay describes the arguments.
    """

    _SETTINGS: tuple[str, ...] = ("alpha", "eps", "floor", "recency", "shard", "min_size_to_sample")
    _COUNTERS = ("inserted", "sampled", "updates_applied", "updates_stale")

    def __init__(
        self,
        layout: ReplayLayout,
        alpha: float = 0.6,
        eps: float = 1e-6,
        seed: int | None = None,
        min_size_to_sample: int = 1,
        shard: int = 0,
        buffer: NDArray[np.uint8] | None = None,
        *,
        floor: float = 0.0,
        recency: float = 0.0,
    ) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"alpha must be in 0..1, got {alpha}")
        for name, value in {"eps": eps, "floor": floor}.items():
            if not (value >= 0.0 and np.isfinite(value)):
                raise ConfigError(f"{name} must be finite and not negative, got {value}")
        if not 0.0 <= recency <= MOST_RECENCY:
            raise ConfigError(f"recency must be in 0..{MOST_RECENCY:g}, got {recency}")
        if not 1 <= min_size_to_sample <= layout.capacity:
            raise ConfigError(
                f"min_size_to_sample must be 1 to the capacity of {layout.capacity}, "
                f"got {min_size_to_sample}"
            )
        if not 0 <= shard < 1 << 7:  # a key's sign bit is not used
            raise ConfigError(f"shard must be 0 to 127, got {shard}")
        self.layout = layout
        self._owns_memory = buffer is None
        memory = private_bytes(layout.nbytes) if buffer is None else buffer
        self.memory = memory
        self.store = ChunkStore(memory, layout.chunk_layout, layout.slots)
        tree_buffer = memory[layout.tree_offset : layout.nbytes]
        self.tree = SumTree.attach(self.store.num_indices, tree_buffer.data)
        self.ledger = SlotLedger(self.store)
        self.alpha, self.eps, self.shard = float(alpha), float(eps), shard
        self.floor, self.recency = float(floor), float(recency)
        self.min_size_to_sample = min_size_to_sample
        self.rng = np.random.default_rng(seed)
        self.inserted = self.sampled = self.updates_applied = self.updates_stale = 0
        self.evicted = 0  # transitions, by this process
        self.lock = threading.RLock()
        # Gets the warning about a capacity that is not reached, once.
        self.warn: Callable[[str], object] = warnings.warn
        self._may_warn = True
        # The weight of the next transition's age, and its growth with each transition.
        self._weight, self._growth = LEAST_WEIGHT, float(np.exp(self.recency / layout.capacity))
        largest = self._find_ages() or max(1.0 + self.eps, self.floor) ** self.alpha
        self._recent: RecentLargest = largest, 0.0, 0
        self._slots = self.store.headers, layout.chunk, shard  # for keys of indices

    def _find_ages(self) -> float:
        """Continue the ages' weights in the memory. Returns its largest leaf without them, or 0."""
        leaves = self.tree.leaves
        if self.recency:
            rows = self.store.header_rows
            held = (rows[:, STATE] == LIVE) & (rows[:, COUNT] > 0)
            weights = rows[held, AGE_WEIGHT].view(np.float64)
            leaves = leaves.reshape(len(rows), -1)[held] / weights[:, None]
            after = weights * self._growth ** rows[held, COUNT]
            self._weight = float(after.max(initial=LEAST_WEIGHT))
        return float(leaves.max(initial=0.0))

    @property
    def total(self) -> float:
        """The sum of all leaves; with recency, a new transition's is its priority's."""
        return self.tree.total * self._scale

    @property
    def smallest(self) -> float:
        """The smallest positive leaf, as for `total`; inf if there is none."""
        return self.tree.min_positive * self._scale

    @property
    def _scale(self) -> float:
        return 1.0 / self._weight if self.recency else 1.0

    def facts(self) -> dict[str, Any]:
        """The JSON values in a snapshot, besides the memory and the random state."""
        return {
            "schema": self.layout.schema.describe(),
            **{name: getattr(self.layout, name) for name in ("capacity", "streams", "chunk")},
            **{name: getattr(self, name) for name in self._SETTINGS},
            "largest_leaf": self._recent[0],
            "largest_since": self._recent[1],
            "rows_since": self._recent[2],
            "age_weight": self._weight,
            "counters": {name: getattr(self, name) for name in self._COUNTERS},
        }

    def take_over(self, leaves: NDArray[np.float64], facts: dict[str, Any]) -> None:
        """Continue from a snapshot: its leaves. Its headers are already in the memory."""
        self.tree.update(np.arange(self.tree.capacity), leaves)
        self.ledger = SlotLedger(self.store)
        largest, since = float(facts["largest_leaf"]), float(facts.get("largest_since", 0.0))
        weight = float(facts.get("age_weight", LEAST_WEIGHT))
        if not (0.0 < largest < np.inf and 0.0 <= since < np.inf and 0.0 < weight <= 1.0):
            raise InvalidPriority(
                f"the largest leaves must be positive and finite, got {largest} and {since}, and "
                f"the weight of an age in 0..1, got {weight}"
            )
        self._recent, self._weight = (largest, since, int(facts.get("rows_since", 0))), weight
        for name in self._COUNTERS:
            setattr(self, name, int(facts["counters"][name]))

    def count_anew(self) -> None:
        """Set the counters to 0."""
        for name in self._COUNTERS:
            setattr(self, name, 0)

    def __len__(self) -> int:
        return self.ledger.live_transitions

    def accept(self, slot: int) -> int:
        """Make a committed slot live: its transitions can be drawn. Returns their number."""
        with self.lock:
            state = self.store.state(slot)
            assert state == COMMITTED, f"slot {slot} is in state {state}"
            indices = self.store.indices(slot)
            magnitudes = self.store.column(slot, "priority")[: len(indices)].astype(np.float64)
            self._set_leaves(indices, magnitudes)
            # STEP leaves-set
            self.inserted += len(indices)
            return self.ledger.accept(slot)

    def _set_leaves(self, indices: NDArray[np.int64], magnitudes: NDArray[np.float64]) -> None:
        """Set leaves of new transitions; without a |priority| (< 0) the largest recent leaf."""
        if self.recency:
            self._fade(len(indices))
        self._recent = prioritise_kernel(
            indices,
            magnitudes,
            self.alpha,
            self.eps,
            self.floor,
            self.layout.capacity,
            self._recent,
            self.tree.arrays,
        )
        if self.recency:
            self._weight = weigh_ages_kernel(
                indices, self._growth, self._weight, self._slots, self.tree.arrays
            )

    def _fade(self, rows: int) -> None:
        """Make all weights of ages smaller if they would reach 1 with so many transitions."""
        if self._weight * self._growth**rows >= 1.0:
            scale = 2.0 ** round(np.log2(LEAST_WEIGHT / self._weight))
            fade_kernel(scale, self.store.headers, self.tree.arrays)
            self._weight *= scale

    def make_room(self, issued: int = 0) -> None:
        """Evict the oldest chunks (FIFO) until the capacity is not exceeded."""
        with self.lock:
            while (
                self.ledger.live_transitions > self.layout.capacity
                or self.ledger.counts["live"] > self.layout.live_slots
            ):
                self.evict_oldest(issued)

    def evict_oldest(self, issued: int = 0) -> None:
        """Evict the oldest chunk. The caller holds the lock. issued: see `SlotLedger.evict`."""
        slot = self.ledger.oldest
        assert slot is not None
        if self.ledger.live_transitions < _WELL_BELOW * self.layout.capacity and self._may_warn:
            self._may_warn = False
            self.warn(self._full_early())
        # Clear the leaves first: after a crash here, no evicted transition can be drawn.
        chunk = self.layout.chunk
        forget_kernel(slot * chunk, chunk, self.tree.arrays)
        # STEP leaves-cleared
        self.evicted += self.ledger.evict(issued)[1]

    def _full_early(self) -> str:
        """That the memory is full with fewer transitions than its capacity, and what helps."""
        size, capacity, chunk = len(self), self.layout.capacity, self.layout.chunk
        chunks = -(-(capacity - size) * self.ledger.counts["live"] // size)  # more like these
        never = f", and min_size_to_sample={self.min_size_to_sample} is not reached"
        return (
            f"the replay is full with {size} transitions, and its capacity is {capacity}"
            f"{never if self.min_size_to_sample > size else ''}: transitions that share few "
            "frames, such as those of short episodes, take more room. To keep so many like these, "
            f"set the capacity to {capacity + chunks * chunk}"
        )

    def draw(
        self, batch_size: int, method: Method = "stratified", *, with_smallest: bool = True
    ) -> Draw:
        """Sample keys by priority.

        Args:
            batch_size: how many, B.
            method: see `SumTree.sample`.
            with_smallest: the draw needs the smallest leaf, for weights by the memory's largest.

        Raises:
            NotEnoughData: there are fewer than `min_size_to_sample` transitions, or too few with a
                priority > 0. Then the random state does not change.
            ConfigError: batch_size is below 1.
        """
        with self.lock:
            size = self.demand(self.min_size_to_sample)
            if batch_size < 1:
                raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
            tree, total = self.tree, self.tree.total
            if not total > 0.0:
                raise NotEnoughData("every priority is 0: there is nothing to draw")
            distinct = method == "without_replacement"
            before = self.rng.bit_generator.state if distinct else {}
            leaves = self.rng.random(batch_size)
            keys, indices = np.empty(batch_size, np.int64), np.empty(batch_size, np.int64)
            drawn = draw_kernel(
                METHODS.index(method), tree.arrays, self._slots, leaves, indices, keys
            )
            if drawn < batch_size:
                self.rng.bit_generator.state = before
                raise NotEnoughData(
                    f"{batch_size} different transitions were asked for, only {drawn} have a "
                    "priority > 0"
                )
            if self.recency:
                leaves *= self._scale
                total = self.total
            return Draw(keys, indices, leaves, total, size, self.smallest if with_smallest else 0.0)

    def demand(self, transitions: int) -> int:
        """How many transitions there are. Raises NotEnoughData if they are fewer."""
        size = self.ledger.live_transitions
        if size < transitions:
            full = self.evicted and size < _WELL_BELOW * self.layout.capacity
            raise NotEnoughData(
                f"the replay holds {size} transitions and {transitions} are needed to sample: "
                f"{self._full_early() if full else 'add more first'}"
            )
        return size

    def reprioritise(
        self, keys: NDArray[np.int64], priorities: NDArray[np.float64]
    ) -> tuple[int, int]:
        """Set new priorities (B,) of the transitions of `keys` (B,). Of equal keys the last counts.

        The sign of a priority is ignored. Returns how many were applied and how many were stale.
        Raises InvalidPriority for NaN or infinity; then nothing has changed.
        """
        with self.lock:
            applied, stale, largest = reprioritise_kernel(
                keys,
                priorities,
                self.alpha,
                self.eps,
                self.floor,
                self.recency > 0.0,
                self._slots,
                self.tree.arrays,
            )
            if applied == REFUSED:
                raise InvalidPriority(
                    "a priority must be finite (and its sum over the memory, too), got "
                    f"{priorities[stale]} in row {stale}: has the loss diverged? Nothing was "
                    "updated"
                )
            if applied == NOT_A_KEY:
                raise ConfigError(
                    f"update_priorities takes keys (batch.keys), got {keys[stale]} in row {stale}, "
                    "which is an index: it would name another transition once its place is used "
                    "again. Nothing was updated"
                )
            before, since, rows = self._recent
            self._recent = before, max(since, largest), rows
            self.updates_applied += applied
            self.updates_stale += stale
            return applied, stale
