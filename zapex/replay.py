"""Prioritized replay: chunk store, sum tree, keys and importance weights in one memory."""

import threading
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zapex.batch import Batch, aligned_zeros
from zapex.chunk_store import NO_KEY, ChunkStore, SlotLedger, chunk_length, slots_needed
from zapex.errors import ConfigError, InvalidPriority, NotEnoughData
from zapex.schema import (
    COMMITTED,
    COUNT,
    MAX_CHUNK,
    BatchLayout,
    ChunkLayout,
    Schema,
    align,
)
from zapex.sumtree_numba import SumTree


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
            chosen = chunk_length(self.capacity, self.streams, self.schema.n_step)
            object.__setattr__(self, "chunk", chosen)
        if not self.schema.n_step <= self.chunk <= MAX_CHUNK:
            raise ConfigError(
                f"chunk must be n_step ({self.schema.n_step}) to {MAX_CHUNK}, got {self.chunk}"
            )

    @property
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
    leaves: NDArray[np.float64], total: float, count: int, smallest: float, beta: float,
    normalise: str = "batch",
) -> NDArray[np.float64]:  # fmt: skip
    """(N q)^-beta over the largest of the batch or of the memory (Schaul et al. 2016, sec. 3.4).

    leaves (B,): leaf values; q = leaf / total is the probability that was really used.
    """
    largest = leaves.min() if normalise == "batch" else smallest
    # The factor (N / total)^-beta is in every weight and in the largest: it cancels.
    del total, count
    weights: NDArray[np.float64] = (leaves / largest) ** -beta
    return weights


class PrioritizedReplay:
    """Prioritized experience replay over chunks (Schaul et al. 2016; Horgan et al. 2018).

    capacity: transitions. schema: their columns. alpha: how much priorities matter. eps: added to
    each |priority|. buffer: memory to live in (uint8, cache-line aligned, `layout.nbytes`; zero
    when new); what it holds is taken over. Public methods are thread-safe.
    """

    def __init__(
        self,
        capacity: int,
        schema: Schema,
        alpha: float = 0.6,
        eps: float = 1e-6,
        seed: int | None = None,
        *,
        streams: int = 1,
        chunk: int = 0,
        min_size_to_sample: int = 1,
        shard: int = 0,
        buffer: NDArray[np.uint8] | None = None,
    ) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"alpha must be in 0..1, got {alpha}")
        if not (eps >= 0.0 and np.isfinite(eps)):
            raise ConfigError(f"eps must be finite and not negative, got {eps}")
        self.layout = ReplayLayout(schema, capacity, streams, chunk)
        memory = aligned_zeros(self.layout.nbytes) if buffer is None else buffer
        self.store = ChunkStore(memory, self.layout.chunk_layout, self.layout.slots)
        tree_buffer = memory[self.layout.tree_offset : self.layout.nbytes]
        self.tree = SumTree.attach(self.store.num_indices, tree_buffer.data)
        self.ledger = SlotLedger(self.store)
        self.alpha, self.eps, self.shard = alpha, eps, shard
        self.min_size_to_sample = min_size_to_sample
        self.rng = np.random.default_rng(seed)
        self.updates_applied = self.updates_stale = 0
        self._lock = threading.RLock()
        # The largest leaf so far: what a transition without a priority gets.
        leaves = self.tree[np.arange(self.tree.capacity)]
        self._largest_leaf = float(leaves.max(initial=0.0)) or self._leaf_value(1.0)
        self._rows = np.arange(self.layout.chunk)

    def _leaf_value(self, priority: float) -> float:
        return float((abs(priority) + self.eps) ** self.alpha)

    def _leaf_values(self, priorities: NDArray[Any]) -> NDArray[np.float64]:
        """(|priority| + eps)^alpha; refuses NaN and infinities."""
        magnitudes: NDArray[np.float64] = np.abs(priorities, dtype=np.float64)
        if not np.isfinite(magnitudes).all():
            raise InvalidPriority("priorities must be finite; got NaN or infinity: is the loss?")
        leaves: NDArray[np.float64] = (magnitudes + self.eps) ** self.alpha
        return leaves

    def __len__(self) -> int:
        return self.ledger.live_transitions

    # The server's side: slots come and go.

    def accept(self, slot: int) -> int:
        """A committed slot becomes live: its transitions can be drawn. Returns their number."""
        with self._lock:
            state = self.store.state(slot)
            assert state == COMMITTED, f"slot {slot} is in state {state}"
            count = int(self.store.header_rows[slot, COUNT])
            priorities = self.store.column(slot, "priority")[:count]
            magnitudes = priorities.astype(np.float64)
            # An actor's bad number must not stop the server: it counts as not given.
            unknown = ~(magnitudes >= 0.0) | ~np.isfinite(magnitudes)
            leaves = (np.where(unknown, 0.0, magnitudes) + self.eps) ** self.alpha
            leaves[unknown] = self._largest_leaf
            self.tree.update(slot * self.layout.chunk + self._rows[:count], leaves)
            if count:
                self._largest_leaf = max(self._largest_leaf, float(leaves.max()))
            return self.ledger.accept(slot)

    def evict_excess(self, issued: int = 0) -> int:
        """FIFO: evict chunks until capacity holds; returns how many transitions went."""
        evicted = 0
        with self._lock:
            while (
                self.ledger.live_transitions > self.layout.capacity
                or self.ledger.counts["live"] > self.layout.live_slots
            ):
                slot, count = self.ledger.evict(issued)
                index = slot * self.layout.chunk + self._rows
                self.tree.update(index, np.zeros(len(index)))
                evicted += count
        return evicted

    def draw(self, batch_size: int, method: Method = "stratified") -> Draw:
        """Sample keys by priority. Raises NotEnoughData before `min_size_to_sample`."""
        with self._lock:
            if len(self) < max(1, self.min_size_to_sample):
                raise NotEnoughData(
                    f"the replay holds {len(self)} transitions and samples from "
                    f"{max(1, self.min_size_to_sample)} on: add more first"
                )
            indices, probabilities = self.tree.sample(batch_size, self.rng, method)
            total = self.tree.total
            return Draw(
                self.store.keys_of(indices, self.shard),
                indices,
                probabilities * total,
                total,
                len(self),
                self.tree.min_positive,
            )

    def update_priorities(
        self, keys: NDArray[np.int64], priorities: NDArray[Any]
    ) -> tuple[int, int]:
        """New priorities for the transitions of `keys`; of equal keys the last wins.

        keys (B,) int64 as sampled (-1: none); priorities (B,): TD errors, their sign is ignored.
        Returns how many were applied and how many were stale: their transition is gone.
        Raises InvalidPriority for NaN or infinity and changes nothing.
        """
        leaves = self._leaf_values(priorities)
        with self._lock:
            indices, fit = self.store.indices_of(keys, self.shard)
            if fit < len(keys):
                there = indices >= 0
                indices, leaves = indices[there], leaves[there]
            self.tree.update(indices, leaves)
            if fit:
                self._largest_leaf = max(self._largest_leaf, float(leaves.max()))
            stale = int((keys != NO_KEY).sum()) - fit
            self.updates_applied += fit
            self.updates_stale += stale
            return fit, stale

    # The library's side: a whole batch in one call.

    def empty_batch(
        self, batch_size: int, layout: str = "channels_first", pin_memory: bool = False
    ) -> Batch:
        """Memory for `sample(out=...)`."""
        if layout not in ("channels_first", "channels_last"):
            raise ConfigError(f'layout must be "channels_first" or "channels_last", got "{layout}"')
        batch_layout = BatchLayout(self.layout.schema, batch_size, layout == "channels_last")
        return Batch.empty(batch_layout, pin_memory)

    def sample(
        self,
        batch_size: int,
        beta: float = 0.4,
        out: Batch | None = None,
        *,
        method: Method = "stratified",
        normalise: str = "batch",
    ) -> Batch:
        """`batch_size` transitions by priority, with importance weights, in `out` if given."""
        batch = self.empty_batch(batch_size) if out is None else out
        if batch.layout.batch_size != batch_size or batch.layout.schema != self.layout.schema:
            raise ConfigError(f"out holds {batch.layout.batch_size} rows, not {batch_size} of ours")
        with self._lock:
            draw = self.draw(batch_size, method)
            self.store.gather(draw.keys, batch.layout, batch.memory, batch.keys)
        batch.indices[:] = draw.indices
        batch.weights[:] = importance_weights(
            draw.leaves, draw.total, draw.count, draw.smallest, beta, normalise
        )
        return batch

    def stats(self) -> dict[str, float]:
        """Counters, by name."""
        with self._lock:
            return {
                "size": len(self),
                "capacity": self.layout.capacity,
                "total_priority": self.tree.total,
                "updates_applied": self.updates_applied,
                "updates_stale": self.updates_stale,
                "bytes": self.layout.nbytes,
                **{f"slots_{name}": count for name, count in self.ledger.counts.items()},
            }
