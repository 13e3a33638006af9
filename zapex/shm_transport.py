"""shm://: all roles of one host over one shared block of rings, a mailbox and metrics words.

The experience itself lies in a block of its own (replay.ReplayLayout); what travels here is slot
numbers, keys and parameters. Each ring has one producer and one consumer, so a dead role blocks
nobody:

    commits[i]    actor i -> replay     slots handed over
    grants[i]     replay -> actor i     free slots, stamped with the incarnation they are for
    episodes[i]   actor i -> parent     finished episodes
    requests      learner -> replay     batches asked for
    answers       replay -> learner     keys and leaf values; its head is the learner's release
    updates       learner -> replay     keys and priorities
    evaluations   evaluator -> parent   mean returns
    episodes      relay, replay, learner -> parent   finished episodes, of all hosts as far as known
    notices       relay, replay, learner -> parent   what a user should know of the network
    parameters    learner -> everyone   the newest, in a mailbox; of an actor host, from its relay
    lives         parent -> everyone    the incarnation of each role, 0 while it is dead
    sleeping      a word for each role  1 while it waits on its eventfd
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from zapex.atomics import load_acquire, store_release
from zapex.batch import Batch
from zapex.chunk_store import NO_KEY, ChunkStore
from zapex.errors import PeerError
from zapex.host_plan import GRANT, STRIDE_WORDS, HostPlan
from zapex.idle import Waker
from zapex.jit import kernel
from zapex.metrics import Role, RoleMetrics
from zapex.replay import Draw, importance_weights
from zapex.shm_mailbox import Mailbox
from zapex.shm_ring import ShmRing
from zapex.shm_segment import map_ahead
from zapex.transport import Life, Sampled

_UNKNOWN = -1  # no incarnation, and not "dead"


@kernel
def _load_word_kernel(words: Any, i: int) -> int:
    return load_acquire(words, i)


@kernel
def _store_word_kernel(words: Any, i: int, value: int) -> None:
    store_release(words, i, value)


@dataclass(frozen=True)
class Host:
    """The two blocks of a host, mapped; every end of every link is made from here."""

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
            self._mailbox(create=True)

    def ring(self, name: str) -> ShmRing:
        """A ring by name."""
        if name not in self._rings:
            capacity, dtype = self.plan.rings[name]
            place = self.plan.place(self.control, f"ring {name}")
            self._rings[name] = ShmRing(place, capacity, dtype, create=self.create)
        return self._rings[name]

    def _mailbox(self, create: bool = False) -> Mailbox:
        place = self.plan.place(self.control, "parameters")
        return Mailbox(place, self.plan.parameter_bytes, create=create)

    def metrics(self, name: str) -> RoleMetrics:
        """The metrics words of a process."""
        role: Role = dict(self.plan.roles + self.plan.elsewhere)[name]
        assert role in get_args(Role)
        return RoleMetrics(self.plan.place(self.control, f"metrics {name}"), role, create=False)

    @property
    def _lives(self) -> NDArray[np.int64]:
        return self.plan.place(self.control, "lives").view(np.int64)

    def life(self, name: str) -> int:
        """The incarnation of a process, 0 while it is dead."""
        return _load_word_kernel(self._lives, self.plan.role_index(name) * STRIDE_WORDS)

    def set_life(self, name: str, incarnation: int) -> None:
        """The parent's: a process began (its incarnation) or is dead for sure (0)."""
        index = self.plan.role_index(name)
        _store_word_kernel(self._lives, index * STRIDE_WORDS, incarnation)
        if self.plan.intake:
            self.waker(self.plan.intake).wake()

    def part_of(self, name: str) -> NDArray[np.uint8]:
        """A place of the control block that this class knows nothing about, by its name."""
        return self.plan.place(self.control, name)

    @property
    def sleeping(self) -> NDArray[np.int64]:
        """The words that say who waits on its eventfd."""
        return self.plan.place(self.control, "sleeping").view(np.int64)

    def sleeping_word(self, name: str) -> int:
        """The index of a process's word in `sleeping`."""
        return self.plan.role_index(name) * STRIDE_WORDS

    def waker(self, name: str) -> Waker:
        """Wakes a process."""
        index = self.plan.role_index(name)
        return Waker(self.sleeping, self.sleeping_word(name), self.eventfds[index])

    def store(self) -> ChunkStore:
        """The slots."""
        layout = self.plan.replay
        return ChunkStore(self.experience, layout.chunk_layout, layout.slots)

    def experience_sink(self, actor: int, incarnation: int) -> "ShmExperienceSink":
        """The actor's end."""
        return ShmExperienceSink(self, actor, incarnation)

    def experience_source(self) -> "ShmExperienceSource":
        """The replay's end of all actors."""
        return ShmExperienceSource(self)

    def sample_source(self) -> "ShmSampleSource":
        """The learner's end."""
        return ShmSampleSource(self)

    def sample_sink(self) -> "ShmSampleSink":
        """The replay's end of the learner."""
        return ShmSampleSink(self)

    def parameter_source(self) -> "ShmParameters":
        """Any reader's end."""
        return ShmParameters(self._mailbox())

    def parameter_sink(self) -> "ShmParameters":
        """The learner's end."""
        return ShmParameters(self._mailbox())


class ShmExperienceSink:
    """An actor's chunks are already where they belong: only slot numbers travel."""

    def __init__(self, host: Host, actor: int, incarnation: int) -> None:
        self.store = host.store()
        self._incarnation = incarnation
        self._mapped = np.zeros(self.store.slots, np.bool_)
        self._streams = host.plan.envs_per_actor
        self._grants = host.ring(f"grants {actor}").consumer()
        self._commits = host.ring(f"commits {actor}").producer()
        self._intake = host.waker(host.plan.intake)

    def ready(self) -> bool:
        """There may be slots to claim."""
        ring = self._grants.ring
        return ring.tail > ring.head

    def try_claim(self) -> NDArray[np.int64] | None:
        """Free slots, one for each stream; None while there is no credit."""
        while True:
            _, count = self._grants.poll(self._streams)
            if count == 0:
                return None
            grants = self._grants.take(count)
            # STEP grants-taken
            mine = grants["slot"][grants["incarnation"] == self._incarnation]
            if len(mine):  # the rest were for a former life; the replay has taken them back
                self._map(mine)
                return np.ascontiguousarray(mine)

    def _map(self, slots: NDArray[np.int64]) -> None:
        for slot in slots[~self._mapped[slots]].tolist():
            body = self.store.body(slot)
            map_ahead(self.store.mem[body : body + self.store.layout.body_bytes])
        self._mapped[slots] = True

    def commit(self, slots: NDArray[np.int64]) -> None:
        """Hand over chunks that are whole, in their order."""
        if len(slots):
            if not self._commits.try_offer(slots):
                raise PeerError("the ring of commits is full: it is larger than all credit")
            # STEP chunks-announced
            self._intake.wake()


class ShmExperienceSource:
    """All actors' slots, as the replay sees them."""

    def __init__(self, host: Host) -> None:
        plan = host.plan
        self._host = host
        self._known = dict.fromkeys(range(plan.actors), _UNKNOWN)
        self._commits = [host.ring(f"commits {i}").consumer() for i in range(plan.actors)]
        self._grants = [host.ring(f"grants {i}").producer() for i in range(plan.actors)]
        self._wakers = [host.waker(f"actor {i}") for i in range(plan.actors)]
        self._words = [plan.role_index(f"actor {i}") * STRIDE_WORDS for i in range(plan.actors)]
        self._lives = host._lives

    def ready(self) -> bool:
        """Something was committed, or somebody came or went."""
        return any(c.ring.tail > c.ring.head for c in self._commits) or any(
            _load_word_kernel(self._lives, word) != self._known[i]
            for i, word in enumerate(self._words)
        )

    def lives(self) -> list[Life]:
        """Actors that came, went or were replaced since the last call; the first call says all."""
        changed = []
        for i, word in enumerate(self._words):
            incarnation = _load_word_kernel(self._lives, word)
            if incarnation != self._known[i]:
                self._known[i] = incarnation
                changed.append(Life(i, incarnation))
        return changed

    def committed(self, actor: int) -> NDArray[np.int64]:
        """Slots that `actor` handed over since the last call, in order."""
        consumer = self._commits[actor]
        slots = consumer.take(consumer.ring.capacity)
        # STEP commits-taken
        return slots

    def has_room(self, actor: int, count: int) -> bool:
        """The ring takes `count` grants; a dead life's stay in it until the next life looks."""
        ring = self._grants[actor].ring
        return ring.tail - ring.head + count <= ring.capacity

    def next_grant(self, actor: int) -> int:
        """The ring's tail: what lies behind it was published."""
        return self._grants[actor].ring.tail

    def grant(self, actor: int, incarnation: int, slots: NDArray[np.int64]) -> None:
        """Give free slots to that life of the actor."""
        records = np.empty(len(slots), GRANT)
        records["slot"], records["incarnation"] = slots, incarnation
        if not self._grants[actor].try_offer(records):
            raise PeerError(f"actor {actor} does not take its grants: the ring is full")
        # STEP grants-sent
        self._wakers[actor].wake()


class ShmSampleSource:
    """The learner gathers by itself: keys come through a ring, rows straight from the slots."""

    def __init__(self, host: Host) -> None:
        self._store = host.store()
        self._beta = host.plan.beta
        self._batch_size = host.plan.batch_size
        self._requests = host.ring("requests").producer()
        self._answers = host.ring("answers").consumer()
        self._updates = host.ring("updates").producer()
        self._replay = host.waker("replay")

    @property
    def outstanding(self) -> int:
        """Requests without an answer polled, a former life's included.

        Both words are the learner's own: request n is answered by answer n, so that no move of the
        replay's can be seen half done.
        """
        return self._requests.ring.tail - self._answers.ring.head

    def request(self) -> None:
        """Ask for one more batch."""
        if not self._requests.try_offer(np.array([self._batch_size])):
            raise PeerError("more batches are asked for than the ring of requests holds")
        # STEP batch-requested
        self._replay.wake()

    def ready(self) -> bool:
        """A batch can be polled."""
        ring = self._answers.ring
        return ring.tail > ring.head

    def poll(self, batch: Batch, following: Batch | None = None) -> Sampled | None:
        """Gather the oldest answered batch into `batch`, weights and keys included; or None."""
        sequence, count = self._answers.poll(1)
        if count == 0:
            return None
        ring = self._answers.ring
        answer = ring.records[sequence & (ring.capacity - 1)]
        live = int(answer["live"])
        batch.indices[:] = answer["indices"]
        batch.weights[:] = importance_weights(answer["leaves"], self._beta)
        torn = self._store.gather(answer["keys"], batch.layout, batch.memory, batch.keys)
        if torn:
            batch.weights[batch.keys == NO_KEY] = 0.0
        # STEP batch-gathered
        self._answers.release(1)  # from here on the replay may hand evicted slots out again
        # STEP batch-released
        return Sampled(torn, live)

    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.float32]) -> bool:
        """Leave new priorities for the replay, which the next request wakes; False while full."""
        sequence = self._updates.try_claim(1)
        if sequence < 0:
            return False
        ring = self._updates.ring
        record = ring.records[sequence & (ring.capacity - 1)]
        record["keys"], record["priorities"] = keys, priorities
        # STEP update-written
        self._updates.commit(1)
        # STEP update-sent
        return True


class ShmSampleSink:
    """The replay's end of the learner."""

    def __init__(self, host: Host) -> None:
        self._requests = host.ring("requests").consumer()
        self._answers = host.ring("answers").producer()
        self._updates = host.ring("updates").consumer()
        self._learner = host.waker("learner")
        self._lives = host._lives
        self._learner_word = host.plan.role_index("learner") * STRIDE_WORDS
        # Answer n is request n's: a former life that died between the two stores of `answer` left
        # a request that is answered. Answered twice, it would be one batch too many under way.
        answered = self.issued - self._requests.ring.head
        if answered > 0:
            self._requests.poll(answered)
            self._requests.release(answered)

    def ready(self) -> bool:
        """There are updates that were not taken yet."""
        return self._updates.ring.tail > self._updates.ring.head

    @property
    def issued(self) -> int:
        """Answers given so far."""
        return self._answers.ring.tail

    @property
    def released(self) -> int:
        """Answers that the learner has gathered; all of them while it is dead, for nobody reads.

        Otherwise no slot would leave quarantine before its next life, and the actors would stop.
        """
        if not _load_word_kernel(self._lives, self._learner_word):
            return self.issued
        return self._answers.ring.head

    def requests(self) -> int:
        """Batches that are asked for; each has room for its answer."""
        return self._requests.poll(self._requests.ring.capacity)[1]

    def answer(self, draw: Draw) -> None:
        """Answer one request."""
        sequence = self._answers.try_claim(1)
        if sequence < 0:
            raise PeerError("more batches were asked for than the ring of answers holds")
        ring = self._answers.ring
        record = ring.records[sequence & (ring.capacity - 1)]
        record["total"], record["live"], record["smallest"] = draw.total, draw.count, draw.smallest
        record["keys"], record["indices"], record["leaves"] = draw.keys, draw.indices, draw.leaves
        # STEP answer-written
        self._answers.commit(1)
        # STEP answer-given
        self._requests.poll(1)
        self._requests.release(1)
        # STEP request-released
        self._learner.wake()

    def updates(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Priority updates since the last call, in place: each good until the next.

        One is released after it was applied. A replay that dies in between applies it again, which
        changes nothing; one that it refuses with an error is not seen again.
        """
        ring = self._updates.ring
        first, count = self._updates.poll(ring.capacity)
        for sequence in range(first, first + count):
            record = ring.records[sequence & (ring.capacity - 1)]
            try:
                yield record["keys"], record["priorities"]
            finally:
                # STEP update-applied
                self._updates.release(1)
                # STEP update-released


class ShmParameters:
    """Newest parameters in a mailbox: source and sink."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    @property
    def version(self) -> int:
        """The newest version; 0: none."""
        return self._mailbox.version

    def newer_than(self, version: int, out: NDArray[np.uint8]) -> int:
        """Copy the newest into `out` if it is newer than `version`; its version, or 0."""
        if self._mailbox.version <= version:
            return 0
        return self._mailbox.read_newer(version, out)

    def publish(self, version: int, parameters: NDArray[np.uint8]) -> None:
        """Make these the newest."""
        self._mailbox.publish(version, parameters)
