"""shm://: the links of one host, in one shared block of rings, a mailbox and metrics words.

The experience is in another block (ReplayLayout in replay/core.py). The links carry only slot
numbers, keys and parameters. Each ring has one producer and one consumer, so a dead role does not
block another role:

    commits[i]    actor i -> replay     committed slots
    grants[i]     replay -> actor i     free slots, each with its actor's incarnation
    episodes[i]   actor i -> parent     finished episodes
    requests      learner -> replay     requests for batches
    answers       replay -> learner     keys and leaf values; its head is the learner's release
    updates       learner -> replay     keys and priorities
    evaluations   evaluator -> parent   mean returns
    episodes      relay, replay, learner -> parent   finished episodes of all known hosts
    notices       relay, replay, learner -> parent   messages about the network for the user
    exchange      actors <-> inference  observations, and their Q values
    parameters    learner -> all roles  the newest, in a mailbox; on an actor host its relay writes
    incarnations  parent -> all roles   one for each role, 0 while it has no process
    sleeping      a word for each role  1 while it waits on its eventfd
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.chunks.store import ChunkStore
from zapex.errors import PeerError
from zapex.host.metrics import Role, RoleMetrics
from zapex.host.plan import GRANT, STRIDE_WORDS, HostPlan
from zapex.machine.atomics import find_changed_kernel, load_kernel, store_kernel
from zapex.machine.exchange import Exchange
from zapex.machine.mailbox import Mailbox
from zapex.machine.segment import map_ahead
from zapex.machine.waiting import Waker
from zapex.replay.draw import REQUEST, Draw, Gatherer
from zapex.shm_ring import RingsWithRecords, ShmRing
from zapex.transport import Incarnation, Sampled
from zapex.wire.messages import Request

_UNKNOWN = -1  # not an incarnation, and not 0 (dead)


@dataclass(frozen=True)
class HostMemory:
    """The two mapped blocks of a host. It makes all ends of all links.

    Args:
        plan: the processes, and the layout of the memory.
        control: uint8 block of rings, mailbox and metrics words, `plan.nbytes` long.
        experience: uint8 block of chunk slots and leaf priorities.
        create: make new rings, mailbox and metrics; otherwise attach to them.
    """

    plan: HostPlan
    control: NDArray[np.uint8]
    experience: NDArray[np.uint8]
    eventfds: Sequence[int]  # one for each of plan.roles
    create: bool = False
    _rings: dict[str, ShmRing] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.create:
            for name in self.plan.rings:
                self.ring(name)
            for name, role in self.plan.roles + self.plan.elsewhere:
                RoleMetrics(self.plan.place(self.control, f"metrics {name}"), role, create=True)
            self.mailbox(create=True)
            if self.plan.exchange is not None:
                Exchange(self.part_of("exchange"), self.plan.exchange, create=True)

    def ring(self, name: str) -> ShmRing:
        """The ring of this name."""
        if name not in self._rings:
            capacity, dtype = self.plan.rings[name]
            place = self.plan.place(self.control, f"ring {name}")
            self._rings[name] = ShmRing(place, capacity, dtype, create=self.create)
        return self._rings[name]

    def calls(self) -> "Calls":
        """The rings of the learner's link."""
        return self.ring("requests"), self.ring("answers"), self.ring("updates")

    def used_rings(self, names: Iterable[str]) -> RingsWithRecords:
        """Says which of these rings have records."""
        sections = self.plan.sections
        return RingsWithRecords(self.control, [sections[f"ring {n}"].offset for n in names])

    def mailbox(self, create: bool = False) -> Mailbox:
        """The mailbox of the parameters, to read or to publish."""
        place = self.plan.place(self.control, "parameters")
        return Mailbox(place, self.plan.parameter_bytes, create=create)

    def metrics(self, name: str) -> RoleMetrics:
        """The metrics words of a process."""
        role = cast(Role, name.partition(" ")[0])
        return RoleMetrics(self.plan.place(self.control, f"metrics {name}"), role, create=False)

    @property
    def _incarnations(self) -> NDArray[np.int64]:
        return self.plan.place(self.control, "incarnations").view(np.int64)

    def incarnation(self, name: str) -> int:
        """The incarnation of a process, 0 while it is dead."""
        return load_kernel(self._incarnations, self.plan.role_index(name) * STRIDE_WORDS)

    def set_incarnation(self, name: str, incarnation: int) -> None:
        """Record that a process has started, or is certainly dead. Only the parent calls this.

        incarnation: 0 once it is dead.
        """
        index = self.plan.role_index(name)
        store_kernel(self._incarnations, index * STRIDE_WORDS, incarnation)
        if self.plan.part.intake:
            self.waker(self.plan.part.intake).wake()

    def part_of(self, name: str) -> NDArray[np.uint8]:
        """A part of the control block that this class does not use."""
        return self.plan.place(self.control, name)

    @property
    def sleeping(self) -> NDArray[np.int64]:
        """The words that say which processes wait on their eventfd."""
        return self.plan.place(self.control, "sleeping").view(np.int64)

    def sleeping_word(self, name: str) -> int:
        """The index of a process's word in `sleeping`."""
        return self.plan.role_index(name) * STRIDE_WORDS

    def waker(self, name: str) -> Waker:
        """An object that wakes a process."""
        eventfd = self.eventfds[self.plan.role_index(name)]
        return Waker(self.sleeping, self.sleeping_word(name), eventfd)

    def store(self) -> ChunkStore:
        """The chunk slots."""
        layout = self.plan.replay
        return ChunkStore(self.experience, layout.chunk_layout, layout.slots)

    def experience_sink(self, actor: int, incarnation: int) -> "ShmExperienceSink":
        """An actor's end of its link to the replay or relay."""
        return ShmExperienceSink(self, actor, incarnation)

    def experience_source(self) -> "ShmExperienceSource":
        """The replay's or relay's end of the links of all actors."""
        return ShmExperienceSource(self)

    def sample_source(self, *how: Any) -> "ShmSampleSource":
        """The learner's end of its link to the replay. how: as of ShmSampleSource."""
        return ShmSampleSource(self, *how)

    def sample_sink(self) -> "ShmSampleSink":
        """The replay's end of the learner's link."""
        return ShmSampleSink(self)


class ShmExperienceSink:
    """An actor's end. Chunks are already in their slots, so it sends only slot numbers."""

    def __init__(self, host: HostMemory, actor: int, incarnation: int) -> None:
        self.store = host.store()
        self._incarnation = incarnation
        self._mapped = np.zeros(self.store.slots, np.bool_)
        self._streams = host.plan.envs_per_actor
        self._grants = host.ring(f"grants {actor}").consumer()
        self._commits = host.ring(f"commits {actor}").producer()
        self._intake = host.waker(host.plan.part.intake)

    def ready(self) -> bool:
        """Whether there may be slots to claim."""
        return self._grants.ring.used > 0

    def try_claim(self) -> NDArray[np.int64] | None:
        """Claim one free slot for each stream; None while there is no credit."""
        while True:
            _, count = self._grants.poll(self._streams)
            if count == 0:
                return None
            grants = self._grants.take(count)
            # STEP grants-taken
            mine = grants["slot"][grants["incarnation"] == self._incarnation]
            if len(mine):  # the others were for a former incarnation; the replay reclaimed them
                self._map(mine)
                return np.ascontiguousarray(mine)

    def _map(self, slots: NDArray[np.int64]) -> None:
        for slot in slots[~self._mapped[slots]].tolist():
            body = self.store.body(slot)
            map_ahead(self.store.mem[body : body + self.store.layout.body_bytes])
        self._mapped[slots] = True

    def commit(self, slots: NDArray[np.int64]) -> None:
        """Send whole chunks, in their order."""
        if len(slots):
            if not self._commits.try_offer(slots):
                raise PeerError("the ring of commits is full, although it has room for all credit")
            # STEP chunks-announced
            self._intake.wake()


class ShmExperienceSource:
    """The replay's end of all actors' links."""

    def __init__(self, host: HostMemory) -> None:
        plan = host.plan
        actors = range(plan.actors)
        self._commits = [host.ring(f"commits {i}").consumer() for i in actors]
        self._grants = [host.ring(f"grants {i}").producer() for i in actors]
        self._wakers = [host.waker(f"actor {i}") for i in actors]
        self._used = host.used_rings(f"commits {i}" for i in actors)
        self._incarnations = host._incarnations
        self._places = np.array([host.sleeping_word(f"actor {i}") for i in actors], np.int64)
        self._known = np.full(plan.actors, _UNKNOWN)
        self._changed = np.empty(plan.actors, np.int64)

    def ready(self) -> bool:
        """Whether chunks were committed, or an actor started or died."""
        return self._used.any() or bool(self._look_for_changes())

    def _look_for_changes(self) -> int:
        return find_changed_kernel(self._incarnations, self._places, self._known, self._changed)

    def take_in(self) -> list[Incarnation]:
        """Actors that started, died or restarted since the last call. Commits stay in the rings."""
        changed: list[int] = self._changed[: self._look_for_changes()].tolist()
        for actor in changed:
            self._known[actor] = load_kernel(self._incarnations, self._places[actor])
        return [Incarnation(actor, int(self._known[actor])) for actor in changed]

    def committers(self) -> list[int]:
        """Actors with slots committed since the last `committed`."""
        return self._used.find()

    def committed(self, actor: int) -> NDArray[np.int64]:
        """Slots that `actor` committed since the last call, in order."""
        consumer = self._commits[actor]
        slots = consumer.take(consumer.ring.capacity)
        # STEP commits-taken
        return slots

    def has_room(self, actor: int, count: int) -> bool:
        """Whether the ring has room for `count` grants.

        A dead incarnation's grants stay in the ring until the next incarnation takes them.
        """
        ring = self._grants[actor].ring
        return ring.used + count <= ring.capacity

    def next_grant(self, actor: int) -> int:
        """The ring's tail: grants before it were published."""
        return self._grants[actor].ring.tail

    def grant(self, actor: int, incarnation: int, slots: NDArray[np.int64]) -> None:
        """Give free slots to that incarnation of the actor."""
        records = np.empty(len(slots), GRANT)
        records["slot"], records["incarnation"] = slots, incarnation
        if not self._grants[actor].try_offer(records):
            raise PeerError(f"actor {actor} does not take its grants: the ring is full")
        # STEP grants-sent
        self._wakers[actor].wake()


Calls = tuple[ShmRing, ShmRing, ShmRing]
"""The rings of requests, answers and updates."""


class _Place(NamedTuple):
    """The arrays of an answer in its ring, with columns of (rows,): to make them takes long."""

    numbers: NDArray[np.int64]
    total: NDArray[np.float64]
    smallest: NDArray[np.float64]
    keys: NDArray[np.int64]
    indices: NDArray[np.int64]
    leaves: NDArray[np.float64]


class _Places:
    """The answers in a ring."""

    def __init__(self, answers: ShmRing) -> None:
        self._answers = answers
        self._known: dict[int, _Place] = {}

    def at(self, sequence: int, rows: int | None = None) -> _Place:
        """The place of an answer, and if `rows` is given for a draw of so many rows."""
        index = sequence & (self._answers.capacity - 1)
        place = self._known.get(index)
        if place is None or (rows is not None and len(place.keys) != rows):
            record = self._answers.records[index : index + 1]
            draw = record["draw"]
            columns = (draw[name][0, :rows] for name in ("keys", "indices", "leaves"))
            place = _Place(record["numbers"][0], draw["total"], draw["smallest"], *columns)
            self._known[index] = place
        return place


class Caller:
    """An end that asks: a learner's, or a client's of a replay's handle.

    It produces requests and updates, and consumes answers, in the order of the requests.
    """

    def __init__(self, calls: Calls, owner: Waker) -> None:
        requests, answers, updates = calls
        self._requests, self._updates = requests.producer(), updates.producer()
        self._answers, self._owner = answers.consumer(), owner
        self._places, self._oldest = _Places(answers), 0
        self._keys, self._priorities = updates.records["keys"], updates.records["priorities"]
        self._request = np.empty(1, REQUEST)

    @property
    def outstanding(self) -> int:
        """Requests whose answer is not released yet, with those of former incarnations.

        Only this end writes the two words, and answer n is for request n. So an unfinished step
        of the replay does not change this number.
        """
        return self._requests.ring.tail - self._answers.ring.head

    def ask(self, kind: int, rows: int = 0, option: int = 0) -> None:
        """Send a request."""
        self._request[0] = kind, rows, option
        if not self._requests.try_offer(self._request):
            raise PeerError("more is asked for than the ring of requests holds")
        # STEP batch-requested
        self._owner.wake()

    def ready(self) -> bool:
        """Whether there is an answer."""
        return self._answers.ring.used > 0

    def answer(self) -> list[int] | None:
        """The numbers of the oldest answer, or None if there is none. It stays until `release`."""
        self._oldest, count = self._answers.poll(1)
        return self._places.at(self._oldest).numbers.tolist() if count else None

    def draw(self, rows: int, count: int = 0) -> Draw:
        """The draw of that answer; its columns are valid until `release`."""
        place = self._places.at(self._oldest, rows)
        total, smallest = place.total.item(), place.smallest.item()
        return Draw(place.keys, place.indices, place.leaves, total, count, smallest)

    def release(self) -> None:
        """Release the oldest answer: the slots of its draw may be filled again."""
        self._answers.release(1)

    def update(self, keys: NDArray[np.int64], priorities: NDArray[Any]) -> bool:
        """Send new priorities; the next request wakes the replay. False while the ring is full."""
        sequence = self._updates.try_claim(1)
        if sequence < 0:
            return False
        index, rows = sequence & (self._updates.ring.capacity - 1), len(keys)
        self._keys[index, :rows], self._priorities[index, :rows] = keys, priorities
        # STEP update-written
        self._updates.commit(1)
        # STEP update-sent
        return True


class ShmSampleSource(Caller):
    """The learner's end: keys come through a ring, rows are gathered from the slots.

    how: threads and frames, as of Gatherer; threads are used if `poll` gets the next batch.
    """

    def __init__(self, host: HostMemory, *how: Any) -> None:
        super().__init__(host.calls(), host.waker("replay"))
        self._gatherer = Gatherer(host.store(), host.plan.beta, *how)
        self._batch_size = host.plan.batch_size

    def request(self) -> None:
        """Ask for one more batch."""
        self.ask(Request.SAMPLE, self._batch_size)

    def poll(self, batch: Batch, following: Batch | None = None) -> Sampled | None:
        """Gather the oldest answered batch into `batch`, with weights and keys, or None."""
        if not self._gatherer.under_way and not self._begin(batch):
            return None
        torn, live = self._gatherer.finish(batch)
        # STEP batch-gathered
        self.release()  # now the replay may grant evicted slots again
        # STEP batch-released
        if following is not None and self._gatherer.threads:
            self._begin(following)
        return Sampled(torn, live)

    def _begin(self, batch: Batch) -> bool:
        """Begin to gather the oldest answer; False if there is none. It stays in the ring."""
        numbers = self.answer()
        if numbers is not None:
            self._gatherer.begin(self.draw(self._batch_size, count=numbers[1]), batch)
        return numbers is not None


class Answerer:
    """The replay's end of a Caller's rings. client: wakes the caller."""

    def __init__(self, calls: Calls, client: Waker) -> None:
        requests, answers, updates = calls
        self._requests, self._updates = requests.consumer(), updates.consumer()
        self._answers, self._client = answers.producer(), client
        self._places = _Places(answers)
        self._keys, self._priorities = updates.records["keys"], updates.records["priorities"]
        # Answer n is for request n. If a replay died between the two stores of `reply`, it left
        # a request that is already answered. A second answer would be one batch too many.
        answered = self.issued - requests.head
        if answered > 0:
            self._requests.take(answered)

    @property
    def issued(self) -> int:
        """How many answers were given."""
        return self._answers.ring.tail

    @property
    def released(self) -> int:
        """How many answers the caller has released; it does not read them again."""
        return self._answers.ring.head

    def is_asked(self) -> bool:
        """Whether there is a request, and every answer was released."""
        return self._requests.ring.used > 0 and self._answers.ring.used == 0

    def requests(self) -> int:
        """How many requests have no answer. Each has room for one."""
        return self._requests.poll(self._requests.ring.capacity)[1]

    def request(self) -> tuple[int, int, int]:
        """The oldest of them: kind, rows, option."""
        sequence, _ = self._requests.poll(1)
        kind, rows, option = self._requests.ring.record(sequence).item()
        return kind, rows, option

    def reply(self, a: int = 0, b: int = 0, draw: Draw | None = None, error: int = 0) -> None:
        """Answer the oldest request that `request` or `requests` has seen; see `answer_dtype`."""
        sequence = self._answers.try_claim(1)
        if sequence < 0:
            raise PeerError("more was asked for than the ring of answers holds")
        place = self._places.at(sequence, None if draw is None else len(draw.keys))
        place.numbers[:] = error, a, b
        if draw is not None:
            place.total[0], place.smallest[0] = draw.total, draw.smallest
            place.keys[:], place.indices[:] = draw.keys, draw.indices
            place.leaves[:] = draw.leaves
        # STEP answer-written
        self._answers.commit(1)
        # STEP answer-given
        self._requests.release(1)
        # STEP request-released
        self._client.wake()

    def updates(self) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Priority updates since the last call, in place: each is valid until the next.

        An update is released after it was applied. If the replay dies between the two, it applies
        the update again, which changes nothing. An update that raises is released, too.
        """
        ring = self._updates.ring
        first, count = self._updates.poll(ring.capacity)
        for sequence in range(first, first + count):
            index = sequence & (ring.capacity - 1)
            try:
                yield self._keys[index], self._priorities[index]
            finally:
                # STEP update-applied
                self._updates.release(1)
                # STEP update-released


class ShmSampleSink(Answerer):
    """The replay's end of the learner's link."""

    def __init__(self, host: HostMemory) -> None:
        super().__init__(host.calls(), host.waker("learner"))
        self.rows = lambda: host.plan.batch_size
        self._incarnations = host._incarnations
        self._learner_word = host.plan.role_index("learner") * STRIDE_WORDS

    def ready(self) -> bool:
        """Whether there are new updates."""
        return self._updates.ring.used > 0

    @property
    def released(self) -> int:
        """How many answers the learner has gathered. While it is dead: all answers.

        Otherwise no slot would leave quarantine until the learner restarts, and the actors would
        stop.
        """
        if not load_kernel(self._incarnations, self._learner_word):
            return self.issued
        return super().released

    def answer(self, draw: Draw) -> None:
        """Answer one request."""
        self.request()
        self.reply(a=draw.count, draw=draw)
