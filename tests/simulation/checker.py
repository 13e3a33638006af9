"""What must be true of a simulated run: looked for in the memories, whatever the roles say.

A transition's name is its life (actor, incarnation, stream) and its number in it. A priority is
what the row's actor said, and a fraction that says which of the newest updates it is of.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simulation.truth import STACK, Life, Longs, Truth, Violation
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
    NO_FRAME,
    SEQUENCE,
    STATE,
    STREAM,
)
from zapex.chunks.store import ChunkStore
from zapex.replay.core import ReplayCore
from zapex.roles.intake import Intake

_UPDATES = 1 << 10  # fractions of 1/4 that float32 tells apart: priorities are below 2^12


def _rows_of(store: ChunkStore, slot: int) -> dict[str, NDArray[Any]]:
    """The naive twin of the gather kernel: a chunk's rows, column by column."""
    count = int(store.header_rows[slot, COUNT])
    held = store.column(slot, "obs")
    names = ("action", "reward", "discount", "priority")
    rows = {name: store.column(slot, name)[:count].copy() for name in names}
    for name in ("obs", "next_obs"):
        which = store.column(slot, f"{name}_frames")[:count].astype(np.int64)
        seen = held[np.where(which == NO_FRAME, 0, which)].copy()
        seen[which == NO_FRAME] = 0
        rows[name] = seen
    return rows


@dataclass
class Memory:
    """What is known of one memory of a replay; it outlives the server's processes."""

    name: str
    sharded: bool
    networked: bool
    with_learner: bool  # whose updates wait in this memory
    served: bool = False  # to programs: numbers are a link's, and an update may come twice
    taken: Longs | None = None  # of an owner's ledger: rows can be drawn as they come
    newest: int = 0  # commit sequence
    next: dict[Life, int] = field(default_factory=dict)
    seen: set[tuple[int, ...]] = field(default_factory=set)
    hosts: dict[int, list[int]] = field(default_factory=dict)  # of an actor's number
    rows: Longs = field(default_factory=lambda: np.empty((0, 0), np.int64))
    """Of the truth, by slot and row."""
    leaves: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    """What each row is drawn by, after all updates."""
    counted: Longs = field(default_factory=lambda: np.empty(0, np.int64))
    """Rows of each slot that grows."""
    total: int = 0  # transitions that came
    told: dict[int, float] = field(default_factory=dict)  # chunks of an actor, by the statistics
    # Of the server's process.
    limiter: Any = None
    began: int = 0  # with so many transitions
    opened: int | None = None  # committed, when the limiter let the first batch through
    drawn: int = 0
    restarted: bool = False  # and no update has come since
    updates: dict[int, int] = field(default_factory=dict)  # the last one, by learner's life
    place: int = 0  # the host whose learner has it


class Checker:
    """All memories, all batches, all parameters of a run."""

    def __init__(self) -> None:
        self.truth = Truth()
        self.arrived: set[tuple[Life, int]] = set()
        self.owed: dict[tuple[Life, int], str] = {}
        self.lost_memories: set[str] = set()
        self.one_learner = True
        self.reached: defaultdict[Life, int] = defaultdict(int)  # the end of what has arrived
        self.lives: Counter[tuple[int, int]] = Counter()  # chunks by actor and incarnation
        self.rows = self.batches = self.published = self.updates = 0
        self.made: Counter[int] = Counter()  # chunks that an actor's number has committed
        self.learners: dict[int, int] = {}  # batches of each learner's life
        self._spells: list[int] = []  # which lives learned in turn, each more than 20 batches
        self._outside: Counter[int] = Counter()  # batches of the others in the last spell
        self._numbers: dict[int, tuple[int, int]] = {}  # who learned a batch of this number
        # Sums over all draws: what was drawn, less what was to be expected, and its variance; of
        # the leaves, and of their places.
        self._far, self._variance = np.zeros(2), np.zeros(2)
        self.loaded: dict[str, int] = {}
        # How often something came to a sleeping role, and whether the role knew that it had work.
        self.woken: Counter[tuple[str, bool]] = Counter()

    # The replay's side.

    def watch(self, replay: ReplayCore, memory: Memory, dead: Any) -> None:
        """Look at what this process of a replay does. dead: whether it is dead by now."""
        watched: Any = replay
        if not dead():
            self.take(replay.store, memory)
            memory.leaves = self._leaves(replay).copy()
        memory.drawn, memory.opened, memory.restarted = 0, None, True
        if not memory.with_learner:  # those that were acknowledged and not applied are gone
            memory.updates.clear()
        reprioritise, draw = replay.reprioritise, replay.draw

        def on_evict(slot: int) -> None:
            if not dead():
                self.take(replay.store, memory)
                ages = replay.store.header_rows[[slot, *replay.ledger.live], COMMIT_SEQUENCE]
                if ages[0] > ages.min():
                    raise Violation(f"lost: {memory.name} evicts {slot}, which is not the oldest")
                if memory.taken is not None:
                    memory.counted[slot] = 0

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

        def sequences_drawn(rows: int, asked: Any) -> Any:
            found = draw_sequences(rows, asked)
            if not dead():
                memory.drawn += rows * (asked.length - 1)  # `draw` has counted one step of each
            return found

        watched.reprioritise, watched.draw = reprioritised, drawn
        if memory.served:
            draw_sequences, watched.draw_sequences = watched.draw_sequences, sequences_drawn
        watched.ledger.on_evict = on_evict

    def leaves_of(self, store: ChunkStore, memory: Memory) -> dict[tuple[Life, int], Any]:
        """By what each live row is drawn, chunk by chunk."""
        self.take(store, memory)
        found = {}
        for slot in np.flatnonzero(store.header_rows[:, STATE] == LIVE).tolist():
            life, first, table = self.look_at(store, slot)
            found[life, first] = memory.leaves[slot, : len(table)].tolist()
        return found

    def restored(
        self, replay: ReplayCore, memory: Memory, saved: dict[tuple[Life, int], Any]
    ) -> None:
        """A new memory begins with what an older one had when it was saved."""
        rows, shape = replay.store.header_rows, (replay.store.slots, replay.layout.chunk)
        memory.rows, memory.leaves = np.zeros(shape, np.int64), self._leaves(replay).copy()
        memory.counted, memory.total = np.zeros(shape[0], np.int64), len(replay)
        for slot in np.flatnonzero(rows[:, STATE] == LIVE).tolist():
            life, first, table = self.look_at(replay.store, slot)
            memory.rows[slot, : len(table)] = table
            memory.next[life] = max(memory.next.get(life, 0), first + len(table))
        memory.newest = int(rows[:, COMMIT_SEQUENCE].max())
        if self.leaves_of(replay.store, memory) != saved:
            raise Violation(f"lost: {memory.name} does not begin with what was saved")

    def look_at(self, store: ChunkStore, slot: int) -> tuple[Life, int, Longs]:
        """A chunk that is whole: its life, its first number, its rows of the truth."""
        count = int(store.header_rows[slot, COUNT])
        if not 1 <= count <= store.layout.chunk:
            raise Violation(f"torn: slot {slot} has {count} rows")
        rows = _rows_of(store, slot)
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
            memory.leaves = np.zeros(memory.rows.shape)
            memory.counted = np.zeros(store.slots, np.int64)
        if memory.taken is not None:
            self._take_rows(store, memory)
            return
        new = np.flatnonzero((rows[:, COMMIT_SEQUENCE] > memory.newest) & (rows[:, STATE] == LIVE))
        for slot in new[np.argsort(rows[new, COMMIT_SEQUENCE])].tolist() if len(new) else ():
            header = rows[slot]
            memory.newest = int(header[COMMIT_SEQUENCE])
            life, first, table = self.look_at(store, slot)
            told = header[[ACTOR, INCARNATION, STREAM]].tolist()
            if not (memory.sharded or memory.served) and told != list(life):
                raise Violation(f"foreign: {memory.name}: {told} holds rows of {life}")
            wanted = memory.next.get(life, 0)
            if memory.served and life not in memory.next:  # it may go on from a former memory
                wanted = min(first, self.reached[life])
            # A chunk that moves to another shard and back is another chunk there (host/roster.py).
            name = (*header[[ACTOR, INCARNATION, SEQUENCE]].tolist(), memory.served * header[HOST])
            if name in memory.seen or (first < wanted and not memory.sharded):
                raise Violation(f"doubled: {memory.name}: {life} from {first}, {wanted} is next")
            if first > wanted and not memory.sharded:
                raise Violation(f"lost: {memory.name}: {life} goes on at {first}, not {wanted}")
            memory.next[life] = max(wanted, first + len(table))
            memory.seen.add(name)
            memory.rows[slot, : len(table)] = table
            memory.leaves[slot, : len(table)] = self.truth.columns["priority"][table]
            memory.total += len(table)
            self.arrived.add((life, first))
            self.reached[life] = max(self.reached[life], first + len(table))
            self.lives[life[:2]] += 1
            if memory.networked:
                self._check_host(memory, int(header[ACTOR]), int(header[HOST]))

    @staticmethod
    def _counts(store: ChunkStore, memory: Memory) -> Longs:
        """How many rows of each slot can be drawn."""
        rows, taken = store.header_rows, memory.taken
        counts = rows[:, COUNT] if taken is None else np.where(taken < 0, rows[:, COUNT], taken)
        return np.where(rows[:, STATE] == LIVE, counts, 0)

    def _take_rows(self, store: ChunkStore, memory: Memory) -> None:
        """Account for rows of slots that grow."""
        counts = self._counts(store, memory)
        grown = np.flatnonzero(counts > memory.counted).tolist()
        for (life, first, table), slot in sorted(
            ((self.look_at(store, slot), slot) for slot in grown), key=lambda one: one[0][:2]
        ):
            at, end = int(memory.counted[slot]), int(counts[slot])
            if first + at != memory.next.get(life, 0):
                wanted = memory.next.get(life, 0)
                what = "doubled" if first + at < wanted else "lost"
                raise Violation(f"{what}: {memory.name}: {life} from {first + at}, not {wanted}")
            memory.rows[slot, at:end] = table[at:end]
            memory.leaves[slot, at:end] = self.truth.columns["priority"][table[at:end]]
            memory.total += end - at
            memory.next[life] = self.reached[life] = first + end
            self.arrived.add((life, first))
        memory.counted = counts

    @staticmethod
    def _check_host(memory: Memory, actor: int, host: int) -> None:
        hosts = memory.hosts.setdefault(actor, [])
        if host in hosts[:-1]:
            raise Violation(f"foreign: {memory.name}: {host} writes as {actor}, which it lost")
        if host not in hosts:
            hosts.append(host)

    @staticmethod
    def _live(store: ChunkStore, keys: Longs) -> NDArray[np.bool_]:
        """The naive twin of what the kernels ask of a key."""
        slots = np.where(keys >= 0, slots_and_rows(keys)[0], 0)
        header = store.header_rows[slots]
        live = (keys >> GENERATION_SHIFT) & GENERATION_MASK == header[:, GENERATION]
        found: NDArray[np.bool_] = (keys >= 0) & live & (header[:, STATE] == LIVE)
        return found

    def _check_draw(self, replay: ReplayCore, memory: Memory, draw: Any) -> None:
        self.take(replay.store, memory)
        limiter = memory.limiter
        if limiter is not None and limiter.config.samples_per_insert and limiter.owed < 0:
            raise Violation(f"limiter: {memory.name} drew more than is owed: {limiter.owed}")
        least = replay.min_size_to_sample if limiter is None else limiter.config.min_size_to_sample
        if memory.total < least:
            raise Violation(f"limiter: {memory.name} draws when {memory.total} have come")
        memory.drawn += len(draw.keys)
        if not self._live(replay.store, draw.keys).all():
            raise Violation(f"foreign: {memory.name} draws {draw.keys}, not all of them live")
        wanted = memory.leaves[slots_and_rows(draw.keys)]
        if (draw.leaves != wanted).any():
            raise Violation(f"foreign: {memory.name} draws {draw.leaves} of rows of {wanted}")
        leaves = replay.tree.leaves
        share = leaves / leaves.sum()
        for i, values in enumerate((leaves, np.arange(len(leaves)))):
            mean = share @ values
            self._far[i] += (values[draw.indices] - mean).sum()
            self._variance[i] += len(draw.keys) * (share @ (values - mean) ** 2)

    def _check_update(
        self, replay: ReplayCore, memory: Memory, keys: Longs, values: NDArray[np.float64]
    ) -> None:
        if not len(keys):
            return
        live = self._live(replay.store, keys)
        rows = slots_and_rows(keys[live])
        given = self.truth.columns["priority"][memory.rows[rows]]  # by the actors
        if (np.floor(4 * values[live]) / 4 != given).any():
            raise Violation(f"foreign: {memory.name}: {values[live]} for rows of {given}")
        memory.leaves[rows] = values[live]
        (number,) = set((values % 0.25 * 4 * _UPDATES).tolist())
        who, at = self._numbers[int(number)]
        before, memory.updates[who] = memory.updates.get(who), at
        again, memory.restarted = memory.restarted, False
        self.updates += 1
        if before is None or memory.taken is not None:  # a dead link may be read after a new one
            return
        follows = at > before if memory.sharded else at == before + 1
        if not (follows or (again and at == before) or (memory.served and at >= before)):
            raise Violation(f"lost: {memory.name}: update {at} of {who} follows {before}")

    def check_keys(
        self, store: ChunkStore, memory: Memory, keys: Longs, table: Longs, there: bool
    ) -> None:
        """These keys name these rows of the truth. there: and none of them is gone."""
        self.take(store, memory)
        live = self._live(store, keys)
        named = memory.rows[slots_and_rows(keys[live])]
        if (named != table[live]).any() or (there and not live.all()):
            raise Violation(f"foreign: {memory.name}: keys {keys} are of {named}, not {table}")

    def check_leaves(self, replay: ReplayCore, memory: Memory) -> None:
        """Every live row can be drawn by its own priority, and no other one."""
        self.take(replay.store, memory)
        chunk, leaves = replay.layout.chunk, self._leaves(replay)
        counts = self._counts(replay.store, memory)
        there = np.arange(chunk) < counts[:, None]
        if (leaves[~there] != 0.0).any():
            raise Violation(f"foreign: {memory.name} can draw a row that is not live")
        if (leaves[there] != memory.leaves[there]).any():
            wanted = memory.leaves[there]
            raise Violation(f"foreign: {memory.name}: leaves {leaves[there]}, not {wanted}")
        size = len(replay)
        if size != counts.sum() or size > replay.layout.capacity:
            raise Violation(f"lost: {memory.name} says it has {size} of {counts.sum()}")
        self._check_limiter(memory)
        if not np.isclose(replay.tree.total, leaves.sum()):
            raise Violation(f"lost: {memory.name}: the total {replay.tree.total}, {leaves.sum()}")

    @staticmethod
    def _leaves(replay: ReplayCore) -> NDArray[np.float64]:
        leaves: NDArray[np.float64] = replay.tree.leaves[: replay.store.num_indices]
        return leaves.reshape(-1, replay.layout.chunk)

    @staticmethod
    def _check_limiter(memory: Memory) -> None:
        """What is charged is what came since the limiter opened, and what may come yet."""
        limiter = memory.limiter
        if limiter is None or not limiter.open:
            return
        opened = limiter.outstanding + limiter._committed - limiter._charged
        known = opened if memory.opened is None else memory.opened
        memory.opened = opened
        first = max(limiter.config.min_size_to_sample, memory.began)
        one_more = memory.rows.shape[1] if memory.taken is None else np.inf  # a program adds many
        fits = first <= opened < first + one_more
        if opened != known or not fits or limiter._sampled != memory.drawn:
            raise Violation(
                f"limiter: {memory.name} opened with {opened}, once {known}, and counts "
                f"{limiter._sampled} samples of {memory.drawn}"
            )

    def check_statistics(self, memory: Memory, chunks: dict[int, float]) -> None:
        """The counts of an actor's number never step back, and are of what it did."""
        for number, count in chunks.items():
            if not memory.told.get(number, 0) <= count <= self.made[number]:
                raise Violation(
                    f"foreign: {memory.name} counts {count} chunks of actor {number}, once "
                    f"{memory.told.get(number, 0)}; it made {self.made[number]}"
                )
        memory.told = chunks

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
        if max(map(len, intake.granted.values()), default=0) > 2 * intake._streams:
            raise Violation(f"foreign: {name} grants too much: {intake.granted}")
        states = replay.store.header_rows[held, STATE].tolist()
        if not {GRANTED, COMMITTED}.issuperset(states):
            raise Violation(f"foreign: {name}: slots that are granted are in states {states}")
        limiter = intake.limiter
        if limiter.outstanding != len(held) * replay.layout.chunk:
            raise Violation(f"lost: {name}: {limiter.outstanding} granted, {len(held)} slots held")
        if limiter.config.samples_per_insert and not (limiter.owed <= limiter.config.tolerance):
            raise Violation(f"limiter: {name}: {limiter.owed} samples are owed")

    @staticmethod
    def check_owner(name: str, replay: Any) -> None:
        """As check_slots, where links fill slots while they are live."""
        ledger, server = replay.ledger, replay.server
        granted = {link: slots for link, slots in server._reclaimer.granted.items() if slots}
        if not server._links.keys() >= granted.keys():
            raise Violation(f"lost: {name}: {granted} are held, {server._links.keys()} are there")
        held = [slot for slots in granted.values() for slot in slots]
        owned = ledger.free_slots + ledger.live + ledger.quarantined + held
        if sorted(owned) != list(range(replay.store.slots)):
            raise Violation(f"lost: {name} has the slots {sorted(owned)}")
        if sorted(held) != np.flatnonzero(ledger.taken >= 0).tolist():
            raise Violation(f"foreign: {name} grants {held}, and others fill {ledger.taken}")

    @staticmethod
    def demand(memory: Memory, life: Life, end: int) -> None:
        """Rows of a life were announced up to here: they can be drawn."""
        if memory.next.get(life, 0) < end:
            raise Violation(f"lost: {memory.name}: {life} has announced {end} rows")

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

    def batch(self, batch: Batch, who: int, beta: float) -> NDArray[np.float32]:
        """A batch of a learner's life is whole; the priorities that it sends back."""
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
        errors = np.ones(len(batch.keys), np.float32)
        errors[whole] = given = self.truth.columns["priority"][table]
        if beta and len(given):  # of one replay: a leaf is what the actor said, or 1/4 more at most
            weights = batch.weights[whole].astype(np.float64)
            most = np.argmax(weights)
            ratio = (weights / weights[most]) ** (-1 / beta)
            low, high = 0.999 * given[most] * ratio, 1.001 * (given[most] + 0.25) * ratio
            if (low > given + 0.25).any() or (high < given).any():
                raise Violation(f"foreign: weights {weights} of rows of {given}")
        self.rows += len(table)
        return errors + self.next_number(who)

    def sequences(self, batch: Any) -> None:
        """Each is of consecutive steps of one stream, and nothing follows them."""
        columns = self.truth.columns
        for i in range(len(batch.keys)):
            steps = int(batch.valid[i].sum())
            if (batch.keys[i] < 0) != (steps == 0) or not batch.valid[i, :steps].all():
                raise Violation(f"torn: a sequence of key {batch.keys[i]} has {batch.valid[i]}")
            if not steps:
                continue
            frames = batch.obs[i]
            seen = np.lib.stride_tricks.sliding_window_view(frames, STACK, axis=0)
            seen = np.moveaxis(seen, -1, 1)  # (observations, STACK, FRAME_WORDS)
            rows = {name: batch[name][i, :steps] for name in ("action", "reward", "discount")}
            table = self.truth.check({"obs": seen[:steps], **rows}, "a sequence")
            stamps = seen[:steps, -1, :4]
            follows = stamps[0] + np.arange(steps)[:, None] * np.array([0, 0, 0, 1])
            if (stamps != follows).any() or batch.reset[i] != (columns["step"][table[0]] == 0):
                raise Violation(f"torn: a sequence of {stamps.tolist()}, reset {batch.reset[i]}")
            goes_on = rows["discount"] > 0
            after = seen[batch.bootstrap[i, :steps]]
            if (after != columns["next_obs"][table])[goes_on].any():
                raise Violation(f"torn: a sequence of {stamps.tolist()} goes on with {after}")
            self.rows += steps

    def next_number(self, who: int) -> np.float32:
        """A learner's life learns once more: what the priorities carry, so that they tell when."""
        self.batches += 1
        at = self.learners[who] = self.learners.get(who, -1) + 1
        if [who] != self._spells[-1:]:
            self._outside[who] += 1
            if self._outside[who] > 20:
                self._spells.append(who)
                self._outside.clear()
        # One may lose its place and get it back, once the other has left.
        if self.one_learner and len(self._spells) > 3 and self._spells[-4:-2] == self._spells[-2:]:
            raise Violation("foreign: two learners learn")
        number = 1 + self.batches % (_UPDATES - 1)  # 0 is the actor's own
        self._numbers[number] = who, at
        return np.float32(number / _UPDATES / 4)

    def load(self, process: str, words: Longs) -> None:
        """Parameters that somebody loads are whole, and not older than its last."""
        version = int(words[0])
        if (words != version).any():
            raise Violation(f"torn: {process} loads parameters of {sorted(set(words.tolist()))}")
        if not 0 < version <= self.published:
            raise Violation(f"foreign: {process} loads {version}, {self.published} are published")
        if version < self.loaded.get(process, 0):
            raise Violation(f"back: {process} loads {version} after {self.loaded[process]}")
        self.loaded[process] = version

    def settle(self) -> None:
        """The run is over, and nothing is under way."""
        missing = sorted(
            (who, *what) for what, who in self.owed.items() if what not in self.arrived
        )
        if missing:
            raise Violation(f"lost: acknowledged and never there: {missing[:4]}")
        for role, _ in list(self.woken):
            knew, did_not = self.woken[role, True], self.woken[role, False]
            if did_not > 10 + knew // 10:  # some things are due by the clock alone
                raise Violation(
                    f"stuck: {role} would sleep on: {did_not} of {knew + did_not} times"
                )
        if (np.abs(self._far) > 6 * np.sqrt(self._variance) + 1e-3).any():
            raise Violation(f"foreign: draws are {self._far} away from {np.sqrt(self._variance)}")
