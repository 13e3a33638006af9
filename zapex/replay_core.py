"""Slots, priorities and keys in one memory: a replay without the calls of its users."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zapex.arguments import FLOAT64, INT64, column
from zapex.chunk_store import ChunkStore, chunk_length, slots_needed
from zapex.errors import ConfigError, InvalidPriority, NotEnoughData
from zapex.sampling import REFUSED, forget_kernel, prioritise_kernel, reprioritise_kernel
from zapex.schema import COMMITTED, COUNT, MAX_CHUNK, ChunkLayout, Schema, align
from zapex.shm_segment import private_bytes
from zapex.slot_ledger import SlotLedger
from zapex.sumtree_numba import SumTree

if TYPE_CHECKING:
    from zapex.snapshot import SavedChunks

Method = Literal["stratified", "independent", "without_replacement"]


@dataclass(frozen=True)
class ReplayLayout:
    """How a replay of `capacity` transitions of `streams` streams lies in memory."""

    schema: Schema
    capacity: int
    streams: int = 1
    chunk: int = 0  # transitions a chunk; 0: chosen

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ConfigError(f"capacity must be at least 1 transition, got {self.capacity}")
        if not self.chunk:
            shortest = max(self.schema.n_step, self.schema.stack)
            chosen = chunk_length(self.capacity, self.streams, shortest)
            object.__setattr__(self, "chunk", chosen)
        if not self.schema.n_step <= self.chunk <= MAX_CHUNK:
            raise ConfigError(
                f"chunk must be n_step ({self.schema.n_step}) to {MAX_CHUNK}, got {self.chunk}"
            )

    @cached_property
    def chunk_layout(self) -> ChunkLayout:
        """Where everything lies in a chunk."""
        return ChunkLayout(self.schema, self.chunk)

    @property
    def live_slots(self) -> int:
        """Full chunks that hold `capacity` transitions."""
        return -(-self.capacity // self.chunk)

    @property
    def slots(self) -> int:
        """Slots, those on their way to and from the actors included."""
        return slots_needed(self.capacity, self.chunk, self.streams)

    @property
    def store_bytes(self) -> int:
        """Bytes of the slots alone."""
        return ChunkStore.required_bytes(self.chunk_layout, self.slots)

    @property
    def tree_offset(self) -> int:
        """Where the sum tree starts."""
        return align(self.store_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole memory."""
        return self.tree_offset + SumTree.required_bytes(self.slots * self.chunk)


@dataclass(frozen=True)
class Draw:
    """What was sampled, before any experience is copied.

    keys (B,) int64; leaves (B,) float64: the leaf values drawn; total: their sum over the memory;
    count: transitions in the memory; smallest: the smallest positive leaf.
    """

    keys: NDArray[np.int64]
    indices: NDArray[np.int64]
    leaves: NDArray[np.float64]
    total: float
    count: int
    smallest: float


def importance_weights(
    leaves: NDArray[np.float64], beta: float, smallest: float | None = None
) -> NDArray[np.float64]:
    """(N q)^-beta over the largest of the batch or of the memory (Schaul et al. 2016, sec. 3.4).

    leaves (B,): leaf values; q = leaf / total is the probability that was really used. N and the
    total are in every weight and in the largest: they cancel. smallest: the memory's smallest
    positive leaf, to divide by its largest weight instead of the batch's.
    """
    weights: NDArray[np.float64] = (
        leaves / (leaves.min() if smallest is None else smallest)
    ) ** -beta
    return weights


class ReplayCore:
    """The server's side: slots come and go, keys are drawn, priorities change. Thread-safe.

    See PrioritizedReplay for the arguments.
    """

    _COUNTERS = ("inserted", "sampled", "updates_applied", "updates_stale")

    def __init__(
        self,
        layout: ReplayLayout,
        alpha: float,
        eps: float,
        seed: int | None,
        min_size_to_sample: int,
        shard: int,
        buffer: NDArray[np.uint8] | None,
    ) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"alpha must be in 0..1, got {alpha}")
        if not (eps >= 0.0 and np.isfinite(eps)):
            raise ConfigError(f"eps must be finite and not negative, got {eps}")
        if not 1 <= min_size_to_sample <= layout.capacity:
            raise ConfigError(
                f"min_size_to_sample must be 1 to the capacity of {layout.capacity}, "
                f"got {min_size_to_sample}"
            )
        if not 0 <= shard < 1 << 7:  # the sign bit of a key is taken
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
        self.min_size_to_sample = min_size_to_sample
        self.rng = np.random.default_rng(seed)
        self.inserted = self.sampled = self.updates_applied = self.updates_stale = 0
        # Answers given to readers that gather by themselves, and those of them that are gathered.
        self.issued = 0
        self.released: Callable[[], int] = lambda: 0
        self.lock = threading.RLock()
        self.saving = threading.Lock()
        self.saved: SavedChunks | None = None
        # What a transition without a priority gets.
        self._largest_leaf = float(self.tree.leaves.max()) or (1.0 + self.eps) ** self.alpha
        self._rows = np.arange(layout.chunk)

    def facts(self) -> dict[str, Any]:
        """What a snapshot holds of it besides memory and random state; JSON."""
        return {
            "schema": self.layout.schema.describe(),
            "capacity": self.layout.capacity,
            "streams": self.layout.streams,
            "chunk": self.layout.chunk,
            "alpha": self.alpha,
            "eps": self.eps,
            "shard": self.shard,
            "min_size_to_sample": self.min_size_to_sample,
            "largest_leaf": self._largest_leaf,
            "counters": {name: getattr(self, name) for name in self._COUNTERS},
        }

    def take_over(self, leaves: NDArray[np.float64], facts: dict[str, Any]) -> None:
        """Go on from a snapshot: its leaves, and headers that are in the memory already."""
        self.tree.update(np.arange(self.tree.capacity), leaves)
        self.ledger = SlotLedger(self.store)
        largest = float(facts["largest_leaf"])
        if not 0.0 < largest < np.inf:
            raise InvalidPriority(f"the largest leaf must be positive and finite, got {largest}")
        self._largest_leaf = largest
        for name in self._COUNTERS:
            setattr(self, name, int(facts["counters"][name]))

    def __len__(self) -> int:
        return self.ledger.live_transitions

    def catch_up(self) -> None:
        """Take in what other processes have told us, with the lock held."""

    def accept(self, slot: int) -> int:
        """A committed slot becomes live: its transitions can be drawn. Returns their number."""
        with self.lock:
            state = self.store.state(slot)
            assert state == COMMITTED, f"slot {slot} is in state {state}"
            count = int(self.store.header_rows[slot, COUNT])
            magnitudes = self.store.column(slot, "priority")[:count].astype(np.float64)
            self._set_leaves(slot * self.layout.chunk + self._rows[:count], magnitudes)
            # STEP leaves-set
            self.inserted += count
            return self.ledger.accept(slot)

    def _set_leaves(self, indices: NDArray[np.int64], magnitudes: NDArray[np.float64]) -> None:
        """Leaves of new transitions; the largest so far where |priority| is not given (< 0)."""
        self._largest_leaf = prioritise_kernel(
            indices, magnitudes, self.alpha, self.eps, self._largest_leaf, self.tree._nodes,
            self.tree._offsets, self.tree.capacity,
        )  # fmt: skip

    def evict_excess(self, issued: int = 0) -> int:
        """FIFO: evict chunks until capacity holds; returns how many transitions went."""
        evicted = 0
        with self.lock:
            while (
                self.ledger.live_transitions > self.layout.capacity
                or self.ledger.counts["live"] > self.layout.live_slots
            ):
                evicted += self._evict_oldest(issued)
        return evicted

    def _evict_oldest(self, issued: int = 0) -> int:
        slot = self.ledger.oldest
        assert slot is not None
        # First: whoever attaches after a crash in between finds nothing drawable that is gone.
        chunk, tree = self.layout.chunk, self.tree
        forget_kernel(slot * chunk, chunk, tree._nodes, tree._offsets, tree.capacity)
        # STEP leaves-cleared
        return self.ledger.evict(issued)[1]

    def draw(self, batch_size: int, method: Method = "stratified") -> Draw:
        """Sample keys by priority. Raises NotEnoughData before `min_size_to_sample`."""
        with self.lock:
            self.demand(self.min_size_to_sample)
            indices, probabilities = self.draw_indices(batch_size, method)
            total = self.tree.total
            return Draw(
                self.store.keys_of(indices, self.shard),
                indices,
                probabilities * total,
                total,
                len(self),
                self.tree.min_positive,
            )

    def draw_indices(
        self, batch_size: int, method: Method
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Indices and probabilities, the lock held. Raises NotEnoughData, the random state kept."""
        before = self.rng.bit_generator.state
        try:
            return self.tree.sample(batch_size, self.rng, method)
        except NotEnoughData:
            self.rng.bit_generator.state = before
            raise

    def demand(self, transitions: int) -> None:
        """Raises NotEnoughData where there are fewer."""
        if len(self) < transitions:
            raise NotEnoughData(
                f"the replay holds {len(self)} transitions and {transitions} are needed to sample: "
                "add more first"
            )

    def update_priorities(self, keys: ArrayLike, priorities: ArrayLike) -> tuple[int, int]:
        """New priorities for the transitions of `keys`; of equal keys the last wins.

        keys (B,) int64 as sampled (-1: none); priorities (B,): TD errors, their sign is ignored.
        Returns how many were applied and how many were stale: their transition is gone.
        Raises InvalidPriority for NaN or infinity, SchemaError, and changes nothing then.
        """
        keys = np.asarray(keys)
        keys = column(keys, INT64, (keys.size,), "keys")
        given = column(priorities, FLOAT64, keys.shape, "priorities")
        with self.lock:
            self.catch_up()
            applied, stale, largest = reprioritise_kernel(
                keys, given, self.alpha, self.eps, self.shard, self.layout.chunk,
                self.store.headers, self.tree._nodes, self.tree._offsets, self.tree.capacity,
            )  # fmt: skip
            if applied == REFUSED:
                raise InvalidPriority(
                    f"a priority must be finite (and its sum over the memory, too), got "
                    f"{given[stale]} in row {stale}: has the loss diverged? Nothing was updated"
                )
            self._largest_leaf = max(self._largest_leaf, largest)
            self.updates_applied += applied
            self.updates_stale += stale
            return applied, stale
