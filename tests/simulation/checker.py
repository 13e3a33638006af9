"""What must be true of a simulated run: looked for in the memories, whatever the roles say.

The contents are those of tests/stress/chaos_content.py: a frame names its writer, and all that is
made of it can be computed again. A transition's name is its life (actor, incarnation, stream) and
its number in it.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simulation.truth import Life, Longs, Truth
from tests.stress.chaos_content import Violation, chunk_rows
from tests.stress.chaos_updates import STEPS, floor, fraction, is_of
from zapex.chunks.batch import Batch
from zapex.chunks.keys import GENERATION_MASK, GENERATION_SHIFT, slots_and_rows
from zapex.chunks.layout import (
    ACTOR,
    COMMIT_SEQUENCE,
    COMMITTED,
    COUNT,
    GENERATION,
    GRANTED,
    HOST,
    INCARNATION,
    LIVE,
    SEQUENCE,
    STATE,
    STREAM,
)
from zapex.chunks.store import ChunkStore
from zapex.replay.core import ReplayCore
from zapex.roles.intake import Intake


@dataclass
class Memory:
    """What is known of one memory of a replay; it outlives the server's processes."""

    name: str
    sharded: bool
    networked: bool
    newest: int = 0  # commit sequence
    next: dict[Life, int] = field(default_factory=dict)
    seen: set[tuple[int, ...]] = field(default_factory=set)
    hosts: dict[int, list[int]] = field(default_factory=dict)  # of an actor's number
    rows: Longs = field(default_factory=lambda: np.empty((0, 0), np.int64))
    """Of the truth, by slot and row."""
    limiter: Any = None  # of the server's process


class Checker:
    """All memories, all batches, all parameters of a run."""

    def __init__(self) -> None:
        self.truth = Truth()
        self.arrived: set[tuple[Life, int]] = set()
        self.owed: dict[tuple[Life, int], str] = {}
        self.lost_memories: set[str] = set()
        self.reached: defaultdict[Life, int] = defaultdict(int)  # the end of what has arrived
        self.lives: Counter[tuple[int, int]] = Counter()  # chunks by actor and incarnation
        self.rows = self.batches = self.published = 0
        self.loaded: dict[str, int] = {}

    # The replay's side.

    def watch(self, replay: ReplayCore, memory: Memory, dead: Any) -> None:
        """Look at what this process of a replay does. dead: whether it is dead by now."""
        watched: Any = replay
        reprioritise, draw = replay.reprioritise, replay.draw

        def on_evict(slot: int) -> None:
            if not dead():
                self.take(replay.store, memory)

        def reprioritised(keys: Longs, values: NDArray[np.float64]) -> Any:
            if not dead():
                self.take(replay.store, memory)
                self._check_update(replay, memory, keys, values)
            return reprioritise(keys, values)

        def drawn(*args: Any, **more: Any) -> Any:
            found = draw(*args, **more)
            if not dead():
                self._check_draw(replay, memory, found)
            return found

        watched.reprioritise, watched.draw = reprioritised, drawn
        watched.ledger.on_evict = on_evict

    def look_at(self, store: ChunkStore, slot: int) -> tuple[Life, int, Longs]:
        """A chunk that is whole: its life, its first number, its rows of the truth."""
        count = int(store.header_rows[slot, COUNT])
        if not 1 <= count <= store.layout.chunk:
            raise Violation(f"torn: slot {slot} has {count} rows")
        rows = chunk_rows(store, slot)
        stamps = rows["obs"][:, -1, :4]
        table = self.truth.check(rows, f"slot {slot}")
        numbers = self.truth.columns["number"][table]
        if (stamps[:, :3] != stamps[0, :3]).any() or (np.diff(numbers) != 1).any():
            raise Violation(f"torn: slot {slot} has rows of {stamps.tolist()}")
        actor, incarnation, stream = stamps[0, :3].tolist()
        return (actor, incarnation, stream), int(numbers[0]), table

    def take(self, store: ChunkStore, memory: Memory) -> None:
        """Account for chunks that are live since the last look."""
        rows = store.header_rows
        if not len(memory.rows):
            memory.rows = np.zeros((store.slots, store.layout.chunk), np.int64)
        new = np.flatnonzero((rows[:, COMMIT_SEQUENCE] > memory.newest) & (rows[:, STATE] == LIVE))
        for slot in new[np.argsort(rows[new, COMMIT_SEQUENCE])].tolist() if len(new) else ():
            header = rows[slot]
            memory.newest = int(header[COMMIT_SEQUENCE])
            life, first, table = self.look_at(store, slot)
            told = header[[ACTOR, INCARNATION, STREAM]].tolist()
            if not memory.sharded and told != list(life):
                raise Violation(f"foreign: {memory.name}: {told} holds rows of {life}")
            wanted = memory.next.get(life, 0)
            # A chunk that moves to another shard and back is another chunk there (host/roster.py).
            name = (*header[[ACTOR, INCARNATION, SEQUENCE]].tolist(),)
            if name in memory.seen or (first < wanted and not memory.sharded):
                raise Violation(f"doubled: {memory.name}: {life} from {first}, {wanted} is next")
            if first > wanted and not memory.sharded:
                raise Violation(f"lost: {memory.name}: {life} goes on at {first}, not {wanted}")
            memory.next[life] = max(wanted, first + len(table))
            memory.seen.add(name)
            memory.rows[slot, : len(table)] = table
            self.arrived.add((life, first))
            self.reached[life] = max(self.reached[life], first + len(table))
            self.lives[life[:2]] += 1
            if memory.networked:
                self._check_host(memory, int(header[ACTOR]), int(header[HOST]))

    @staticmethod
    def _check_host(memory: Memory, actor: int, host: int) -> None:
        hosts = memory.hosts.setdefault(actor, [])
        if host in hosts[:-1]:
            raise Violation(f"foreign: {memory.name}: {host} writes as {actor}, which it lost")
        if host not in hosts:
            hosts.append(host)

    def _live(self, replay: ReplayCore, keys: Longs) -> NDArray[np.bool_]:
        """The naive twin of what the kernels ask of a key."""
        slots = np.where(keys >= 0, slots_and_rows(keys)[0], 0)
        header = replay.store.header_rows[slots]
        live = (keys >> GENERATION_SHIFT) & GENERATION_MASK == header[:, GENERATION]
        found: NDArray[np.bool_] = (keys >= 0) & live & (header[:, STATE] == LIVE)
        return found

    def _priorities(self, memory: Memory, keys: Longs) -> NDArray[np.float64]:
        """What the actors said of the rows of live keys."""
        found: NDArray[np.float64] = self.truth.columns["priority"][
            memory.rows[slots_and_rows(keys)]
        ]
        return found

    def _check_draw(self, replay: ReplayCore, memory: Memory, draw: Any) -> None:
        self.take(replay.store, memory)
        if memory.limiter.config.samples_per_insert and memory.limiter.owed < 0:
            raise Violation(f"limiter: {memory.name} drew more than is owed: {memory.limiter.owed}")
        if not self._live(replay, draw.keys).all():
            raise Violation(f"foreign: {memory.name} draws {draw.keys}, not all of them live")
        given = self._priorities(memory, draw.keys)
        if not is_of(draw.leaves, given).all():
            raise Violation(f"foreign: {memory.name} draws {draw.leaves} of rows of {given}")

    def _check_update(
        self, replay: ReplayCore, memory: Memory, keys: Longs, values: NDArray[np.float64]
    ) -> None:
        live = self._live(replay, keys)
        given = self._priorities(memory, keys[live])
        if (floor(values[live]) != given).any():
            raise Violation(f"foreign: {memory.name}: {values[live]} for rows of {given}")

    def check_leaves(self, replay: ReplayCore, memory: Memory) -> None:
        """Every live row can be drawn by its own priority, and no other one."""
        self.take(replay.store, memory)
        chunk, rows = replay.layout.chunk, replay.store.header_rows
        leaves = replay.tree[np.arange(replay.store.slots * chunk)].reshape(-1, chunk)
        counts = np.where(rows[:, STATE] == LIVE, rows[:, COUNT], 0)
        there = np.arange(chunk) < counts[:, None]
        if (leaves[~there] != 0.0).any():
            raise Violation(f"foreign: {memory.name} can draw a row that is not live")
        given = self.truth.columns["priority"][memory.rows[there]] if there.any() else leaves[there]
        if not is_of(leaves[there], given).all():
            raise Violation(f"foreign: {memory.name}: leaves {leaves[there]} for {given}")
        if not np.isclose(replay.tree.total, leaves.sum()):
            raise Violation(f"lost: {memory.name}: the total {replay.tree.total}, {leaves.sum()}")

    @staticmethod
    def check_slots(name: str, intake: Intake, replay: Any, under_way: int = 0) -> None:
        """Every slot has one owner, and the limiter has counted what is granted."""
        ledger = replay.ledger
        held = [slot for slots in intake.granted.values() for slot in slots]
        owned = ledger.free_slots + ledger.live + ledger.quarantined + held
        if len(set(owned)) < len(owned) or len(owned) + under_way != replay.store.slots:
            twice = sorted(slot for slot, n in Counter(owned).items() if n > 1)
            raise Violation(
                f"lost: {name} has {len(owned)} slots of {replay.store.slots} and {under_way} "
                f"under way, and twice {twice}"
            )
        states = replay.store.header_rows[held, STATE].tolist()
        if not {GRANTED, COMMITTED}.issuperset(states):
            raise Violation(f"foreign: {name}: slots that are granted are in states {states}")
        limiter = intake.limiter
        if limiter.outstanding != len(held) * replay.layout.chunk:
            raise Violation(f"lost: {name}: {limiter.outstanding} granted, {len(held)} slots held")
        if limiter.config.samples_per_insert and not (limiter.owed <= limiter.config.tolerance):
            raise Violation(f"limiter: {name}: {limiter.owed} samples are owed")

    # The other sides.

    def owe(self, store: ChunkStore, slots: Any, who: str) -> None:
        """These chunks were acknowledged: they must arrive, if they have not."""
        for slot in slots:
            life, first, _ = self.look_at(store, int(slot))
            self.owed[life, first] = who

    def lose(self, store: ChunkStore, memory: Memory) -> None:
        """This memory is lost with its machine: what had come to it had arrived."""
        self.take(store, memory)
        for slot in np.flatnonzero(store.header_rows[:, STATE] == COMMITTED).tolist():
            life, first, _ = self.look_at(store, slot)
            self.arrived.add((life, first))

    def batch(self, batch: Batch, number: int) -> NDArray[np.float32]:
        """A learner's batch is whole; the priorities that it sends back."""
        whole = batch.keys >= 0
        if (batch.weights[~whole] != 0.0).any() or (batch.weights[whole] <= 0.0).any():
            raise Violation(f"torn: weights {batch.weights} of keys {batch.keys}")
        names = ("action", "obs", "next_obs", "reward", "discount")
        rows = {name: batch[name][whole] for name in names}
        table = self.truth.check(rows, "a batch")
        numbers = self.truth.columns["number"][table].tolist()
        for stamp, at in zip(rows["obs"][:, -1, :3].tolist(), numbers, strict=True):
            if at >= self.reached[tuple(stamp)]:
                raise Violation(f"foreign: {stamp} {at} was drawn and never came in")
        self.rows += len(table)
        self.batches += 1
        errors = np.ones(len(batch.keys), np.float32)
        errors[whole] = self.truth.columns["priority"][table]
        return errors + np.float32(fraction(number % STEPS))

    def load(self, process: str, words: Longs) -> int:
        """Parameters that somebody loads are whole, and not older than its last."""
        version = int(words[0])
        if (words != version).any():
            raise Violation(f"torn: {process} loads parameters of {sorted(set(words.tolist()))}")
        if not 0 < version <= self.published:
            raise Violation(f"foreign: {process} loads {version}, {self.published} are published")
        if version < self.loaded.get(process, 0):
            raise Violation(f"back: {process} loads {version} after {self.loaded[process]}")
        self.loaded[process] = version
        return version

    def settle(self) -> None:
        """The run is over, and nothing is under way."""
        missing = sorted(
            (who, *what) for what, who in self.owed.items() if what not in self.arrived
        )
        if missing:
            raise Violation(f"lost: acknowledged and never there: {missing[:4]}")
