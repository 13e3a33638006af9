"""Credit, eviction and dead actors' slots: a slot never has two owners."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from zapex.chunks.batch import aligned_zeros
from zapex.chunks.layout import COMMITTED, COUNT, FREE, GRANTED, INCARNATION, LIVE, SEQUENCE, STATE
from zapex.chunks.schema import Column, Schema
from zapex.replay.core import ReplayCore, ReplayLayout
from zapex.replay.limiter import LimiterConfig
from zapex.roles.intake import Intake
from zapex.transport import Incarnation

STREAMS, CHUNK, CAPACITY = 2, 4, 32
SCHEMA = Schema({"obs": Column((2,), np.float32), "action": Column((), np.int64)}, n_step=1)


class FakeSource:
    """Actors as lists: what they were granted, and what they hand over next."""

    def __init__(self, actors: int, sent: list[int]) -> None:
        self.grants: list[list[tuple[int, list[int]]]] = [[] for _ in range(actors)]
        self.sent = sent  # slots that each link has carried: outlives the replay
        self.handed_over: list[list[int]] = [[] for _ in range(actors)]
        self.changes: list[Incarnation] = []
        self.full = False

    def ready(self) -> bool:
        return True

    def take_in(self) -> Sequence[Incarnation]:
        changes, self.changes = self.changes, []
        return changes

    def committers(self) -> list[int]:
        return [actor for actor, slots in enumerate(self.handed_over) if slots]

    def committed(self, actor: int) -> NDArray[np.int64]:
        slots, self.handed_over[actor] = self.handed_over[actor], []
        return np.array(slots, np.int64)

    def has_room(self, actor: int, count: int) -> bool:
        return not self.full

    def next_grant(self, actor: int) -> int:
        return self.sent[actor]

    def grant(self, actor: int, incarnation: int, slots: NDArray[np.int64]) -> None:
        self.sent[actor] += len(slots)
        self.grants[actor].append((incarnation, slots.tolist()))


class Rig:
    """An intake, its replay and its source."""

    def __init__(
        self, actors: int = 1, samples_per_insert: float = 0.0, tolerance: int = 0
    ) -> None:
        self.actors = actors
        self.limits = LimiterConfig(
            samples_per_insert=samples_per_insert, min_size_to_sample=1, tolerance=tolerance,
            grant=STREAMS * CHUNK, batch=1, capacity=CAPACITY,
        )  # fmt: skip
        self.memory: NDArray[np.uint8] | None = None
        self.sent = [0] * actors
        self.attach()

    def attach(self) -> None:
        """A new life of the replay, on the same memory if there is some."""
        streams = self.actors * STREAMS
        layout = ReplayLayout(SCHEMA, CAPACITY, streams, CHUNK)
        if self.memory is None:
            self.memory = aligned_zeros(layout.nbytes)
        self.source = FakeSource(self.actors, self.sent)
        self.replay = ReplayCore(layout, buffer=self.memory)
        self.intake = Intake(self.source, self.replay, self.limits, streams_per_actor=STREAMS)

    @property
    def rows(self) -> NDArray[np.int64]:
        return self.replay.store.header_rows

    def live(self, actor: int, incarnation: int) -> None:
        """The actor has a new life, or with 0 none; one look at it."""
        self.source.changes.append(Incarnation(actor, incarnation))
        self.intake.do_work(0, 0)

    def write(self, slot: int, count: int = CHUNK, sequence: int = 0) -> None:
        """What an actor does to a slot before it hands it over."""
        self.rows[slot, [COUNT, SEQUENCE, INCARNATION, STATE]] = count, sequence, 1, COMMITTED

    def hand_over(self, *slots: int, actor: int = 0, issued: int = 0, released: int = 0) -> int:
        self.source.handed_over[actor].extend(slots)
        return self.intake.do_work(issued, released)


def test_dead_actor_gets_no_slots() -> None:
    rig = Rig()
    assert rig.intake.do_work(0, 0) == 0
    assert rig.source.grants == [[]]


def test_grant_has_a_slot_per_stream_and_the_incarnation() -> None:
    rig = Rig()
    rig.live(0, 17)
    ((incarnation, slots),) = rig.source.grants[0]
    assert incarnation == 17
    assert len(set(slots)) == STREAMS
    assert (rig.rows[slots, STATE] == GRANTED).all()


def test_more_slots_are_granted_below_a_full_credit() -> None:
    rig = Rig()
    rig.live(0, 1)
    (_, slots) = rig.source.grants[0][0]
    assert rig.intake.do_work(0, 0) == 0
    rig.write(slots[0])
    rig.hand_over(slots[0])
    assert len(rig.source.grants[0]) == 2
    rig.write(slots[1])
    rig.hand_over(slots[1])
    assert len(rig.source.grants[0]) == 2, "two are still out"


@pytest.mark.parametrize("slot", ["another's", 9, -1, 10**6, -(2**62)])
def test_slot_not_granted_to_the_actor_is_refused(slot: str | int) -> None:
    rig = Rig(actors=2)
    rig.live(0, 1)
    rig.live(1, 2)
    theirs = rig.source.grants[1][0][1]
    rig.write(theirs[0])
    rig.hand_over(theirs[0] if isinstance(slot, str) else slot, actor=0)
    assert rig.intake.refused == 1
    assert len(rig.replay) == 0


def test_uncommitted_slot_is_refused_and_stays_granted() -> None:
    rig = Rig()
    rig.live(0, 1)
    slots = rig.source.grants[0][0][1]
    rig.hand_over(slots[0])
    assert rig.intake.refused == 1
    assert rig.replay.ledger.counts["granted"] == STREAMS


def test_slot_committed_twice_counts_once() -> None:
    rig = Rig()
    rig.live(0, 1)
    slot = rig.source.grants[0][0][1][0]
    rig.write(slot)
    rig.hand_over(slot, slot)
    assert (rig.intake.inserted, rig.intake.refused) == (CHUNK, 1)


@pytest.mark.parametrize("count", [0, -3, CHUNK + 1, 2**40])
def test_impossible_count_is_refused_and_frees_the_slot(count: int) -> None:
    rig = Rig()
    rig.live(0, 1)
    slot = rig.source.grants[0][0][1][0]
    rig.write(slot, count)
    free = rig.replay.ledger.free
    rig.hand_over(slot)
    assert rig.intake.refused == 1
    assert len(rig.replay) == 0
    # One came back, and as fewer than a credit were out, two went.
    assert rig.replay.ledger.free == free + 1 - STREAMS


def test_full_link_gets_no_grant() -> None:
    rig = Rig()
    rig.source.full = True
    rig.live(0, 1)
    assert rig.source.grants == [[]]
    assert rig.replay.ledger.counts["granted"] == 0
    rig.source.full = False
    rig.intake.do_work(0, 0)
    assert len(rig.source.grants[0]) == 1


def test_evicted_slots_stay_quarantined_until_release() -> None:
    rig = Rig()
    rig.live(0, 1)
    written = []
    while len(written) <= CAPACITY // CHUNK:
        _, slots = rig.source.grants[0][-1]
        for slot in slots:
            rig.write(slot, sequence=len(written))
            written.append(slot)
        rig.hand_over(*slots, issued=3, released=2)
    assert len(rig.replay) == CAPACITY
    evicted = written[: len(written) - CAPACITY // CHUNK]
    assert rig.replay.evicted == CHUNK * len(evicted)
    assert rig.replay.ledger.quarantined == evicted
    rig.intake.do_work(3, 3)
    assert rig.replay.ledger.counts["quarantined"] == 0


def test_restarted_replay_grants_only_to_living_actors() -> None:
    rig = Rig()
    rig.live(0, 1)
    slot = rig.source.grants[0][0][1][0]
    rig.attach()
    rig.write(slot)
    rig.hand_over(slot)
    assert (rig.intake.inserted, rig.source.grants) == (CHUNK, [[]])
    rig.live(0, 1)
    assert len(rig.source.grants[0]) == 1


def test_slots_come_back_if_actor_and_replay_both_died() -> None:
    rig = Rig()
    rig.live(0, 1)
    rig.attach()
    assert rig.replay.ledger.counts["granted"] == STREAMS
    rig.live(0, 0)  # the first look says who is dead, too
    assert rig.replay.ledger.counts["granted"] == 0


@pytest.mark.parametrize("count", [0, -3, CHUNK + 1, 2**40])
def test_restarted_replay_refuses_impossible_counts(count: int) -> None:
    rig = Rig()
    rig.live(0, 1)
    slots = rig.source.grants[0][0][1]
    rig.write(slots[0], count)
    rig.write(slots[1])
    rig.attach()
    assert (rig.intake.refused, len(rig.replay)) == (1, CHUNK)
    assert rig.rows[slots, STATE].tolist() == [FREE, LIVE]
    assert rig.intake.limiter.outstanding == 0


def test_fast_actor_gets_no_more_grants_than_others() -> None:
    rig = Rig(actors=3, samples_per_insert=1.0, tolerance=STREAMS * CHUNK + 1)
    for actor in range(3):
        rig.live(actor, 1)
    for _ in range(30):
        for actor in range(3):  # whatever was granted is full at once
            for slot in [s for _, slots in rig.source.grants[actor] for s in slots]:
                if slot in rig.intake.granted[actor]:
                    rig.write(slot)
                    rig.hand_over(slot, actor=actor)
        while rig.intake.limiter.can_sample(1):
            rig.intake.limiter.sample(1)
        rig.intake.do_work(0, 0)
    grants = [len(of_actor) for of_actor in rig.source.grants]
    assert max(grants) - min(grants) <= 1
    assert min(grants) > 5
