"""Credit, eviction and what the dead leave: slots move on, and never into two hands."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from zapex.batch import aligned_zeros
from zapex.chunk_store import set_state_kernel
from zapex.intake import Intake
from zapex.rate_limiter import LimiterConfig
from zapex.replay import PrioritizedReplay
from zapex.schema import (
    COMMITTED,
    COUNT,
    FREE,
    GRANTED,
    INCARNATION,
    LIVE,
    SEQUENCE,
    STATE,
    Column,
    Schema,
)
from zapex.transport import Life

STREAMS, CHUNK, CAPACITY = 2, 4, 32
SCHEMA = Schema({"obs": Column((2,), np.float32), "action": Column((), np.int64)}, n_step=1)


class FakeSource:
    """Actors as lists: what they were granted, and what they hand over next."""

    def __init__(self, actors: int, sent: list[int]) -> None:
        self.grants: list[list[tuple[int, list[int]]]] = [[] for _ in range(actors)]
        self.sent = sent  # slots that each link has carried: outlives the replay
        self.handed_over: list[list[int]] = [[] for _ in range(actors)]
        self.changes: list[Life] = []
        self.full = False

    def ready(self) -> bool:
        return True

    def lives(self) -> Sequence[Life]:
        changes, self.changes = self.changes, []
        return changes

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


class Desk:
    """An intake, its replay and its source."""

    def __init__(
        self, actors: int = 1, samples_per_insert: float = 0.0, tolerance: int = 0
    ) -> None:
        self.actors = actors
        self.limits = LimiterConfig(
            samples_per_insert=samples_per_insert, min_size=1, tolerance=tolerance,
            grant=STREAMS * CHUNK, batch=1, capacity=CAPACITY,
        )  # fmt: skip
        self.memory: NDArray[np.uint8] | None = None
        self.sent = [0] * actors
        self.attach()

    def attach(self) -> None:
        """A new life of the replay, on the same memory if there is some."""
        streams = self.actors * STREAMS
        if self.memory is None:
            layout = PrioritizedReplay(CAPACITY, SCHEMA, streams=streams, chunk=CHUNK).layout
            self.memory = aligned_zeros(layout.nbytes)
        self.source = FakeSource(self.actors, self.sent)
        self.replay = PrioritizedReplay(
            CAPACITY, SCHEMA, streams=streams, chunk=CHUNK, buffer=self.memory
        )
        self.intake = Intake(
            self.source, self.replay, self.limits, actors=self.actors, streams_per_actor=STREAMS
        )

    @property
    def rows(self) -> NDArray[np.int64]:
        return self.replay.store.header_rows

    def live(self, actor: int, incarnation: int) -> None:
        """The actor has a new life, or with 0 none; one look at it."""
        self.source.changes.append(Life(actor, incarnation))
        self.intake.do_work(0, 0)

    def write(self, slot: int, count: int = CHUNK, sequence: int = 0, incarnation: int = 1) -> None:
        """What an actor does to a slot before it hands it over."""
        row = self.rows[slot]
        row[COUNT], row[SEQUENCE], row[INCARNATION], row[STATE] = (
            count, sequence, incarnation, COMMITTED,
        )  # fmt: skip

    def hand_over(self, *slots: int, actor: int = 0, issued: int = 0, released: int = 0) -> int:
        self.source.handed_over[actor].extend(slots)
        return self.intake.do_work(issued, released)


def test_nobody_gets_a_slot_before_it_lives() -> None:
    desk = Desk()
    assert desk.intake.do_work(0, 0) == 0
    assert desk.source.grants == [[]]


def test_a_grant_is_a_slot_for_each_stream_and_bears_the_life_that_it_is_for() -> None:
    desk = Desk()
    desk.live(0, 17)
    ((incarnation, slots),) = desk.source.grants[0]
    assert incarnation == 17
    assert len(set(slots)) == STREAMS
    assert (desk.rows[slots, STATE] == GRANTED).all()


def test_more_slots_come_as_soon_as_fewer_than_a_credit_are_out_and_never_before() -> None:
    desk = Desk()
    desk.live(0, 1)
    (_, slots) = desk.source.grants[0][0]
    assert desk.intake.do_work(0, 0) == 0
    desk.write(slots[0])
    desk.hand_over(slots[0])
    assert len(desk.source.grants[0]) == 2
    desk.write(slots[1])
    desk.hand_over(slots[1])
    assert len(desk.source.grants[0]) == 2, "two are still out"


@pytest.mark.parametrize("whose", ["another's", "nobody's"])
def test_a_slot_that_was_not_granted_to_this_actor_is_refused(whose: str) -> None:
    desk = Desk(actors=2)
    desk.live(0, 1)
    desk.live(1, 2)
    theirs = desk.source.grants[1][0][1]
    desk.write(theirs[0])
    desk.hand_over(theirs[0] if whose == "another's" else 9, actor=0)
    assert desk.intake.refused == 1
    assert len(desk.replay) == 0


@pytest.mark.parametrize("number", [-1, 10**6, -(2**62)])
def test_a_number_that_is_no_slot_is_refused(number: int) -> None:
    desk = Desk()
    desk.live(0, 1)
    desk.hand_over(number)
    assert desk.intake.refused == 1


def test_a_slot_that_is_not_whole_is_refused_and_stays_out() -> None:
    desk = Desk()
    desk.live(0, 1)
    slots = desk.source.grants[0][0][1]
    desk.hand_over(slots[0])
    assert desk.intake.refused == 1
    assert desk.replay.ledger.counts["granted"] == STREAMS


def test_a_slot_that_is_handed_over_twice_counts_once() -> None:
    desk = Desk()
    desk.live(0, 1)
    slot = desk.source.grants[0][0][1][0]
    desk.write(slot)
    desk.hand_over(slot, slot)
    assert (desk.intake.inserted, desk.intake.refused) == (CHUNK, 1)


@pytest.mark.parametrize("count", [0, -3, CHUNK + 1, 2**40])
def test_an_impossible_count_is_refused_and_the_slot_is_free_again(count: int) -> None:
    desk = Desk()
    desk.live(0, 1)
    slot = desk.source.grants[0][0][1][0]
    desk.write(slot, count)
    free = desk.replay.ledger.free
    desk.hand_over(slot)
    assert desk.intake.refused == 1
    assert len(desk.replay) == 0
    # One came back, and as fewer than a credit were out, two went.
    assert desk.replay.ledger.free == free + 1 - STREAMS


def test_a_dead_actors_whole_chunks_are_kept_in_their_order_and_the_rest_is_free() -> None:
    desk = Desk()
    desk.live(0, 1)
    slots = desk.source.grants[0][0][1]
    desk.write(slots[0], sequence=5)
    desk.hand_over(slots[0])  # brings a second grant
    second = desk.source.grants[0][1][1]
    desk.write(second[1], count=2, sequence=6)
    desk.write(slots[1], count=3, sequence=7)  # both whole, neither handed over
    desk.live(0, 0)
    assert len(desk.replay) == CHUNK + 2 + 3
    assert list(desk.replay.ledger._fifo) == [slots[0], second[1], slots[1]]
    assert desk.replay.ledger.counts["granted"] == 0
    assert desk.intake.limiter._outstanding == 0


def test_a_new_life_that_comes_before_the_death_was_seen_inherits_nothing() -> None:
    desk = Desk()
    desk.live(0, 1)
    former = desk.source.grants[0][0][1]
    desk.live(0, 2)
    incarnation, slots = desk.source.grants[0][1]
    assert incarnation == 2
    assert (desk.rows[slots, INCARNATION] == 2).all()
    assert desk.replay.ledger.counts["granted"] == STREAMS
    desk.write(former[0])
    desk.hand_over(*(set(former) - set(slots)))
    assert len(desk.replay) == 0


def test_a_link_without_room_gets_no_grant_until_it_has_some() -> None:
    desk = Desk()
    desk.source.full = True
    desk.live(0, 1)
    assert desk.source.grants == [[]]
    assert desk.replay.ledger.counts["granted"] == 0
    desk.source.full = False
    desk.intake.do_work(0, 0)
    assert len(desk.source.grants[0]) == 1


def test_the_limiter_is_charged_at_the_grant_and_refunded_for_what_did_not_come() -> None:
    desk = Desk(samples_per_insert=1.0, tolerance=STREAMS * CHUNK + 1)
    desk.live(0, 1)
    slots = desk.source.grants[0][0][1]
    desk.write(slots[0], count=1)  # opens the limiter: one slot is still out
    desk.hand_over(slots[0])
    assert desk.intake.limiter.owed == CHUNK, "for the slot that is out"
    assert desk.intake.waiting == [0]
    desk.write(slots[1], count=1)
    desk.hand_over(slots[1])
    assert desk.intake.limiter.owed == 1 + STREAMS * CHUNK, "refunded, so the next grant fits"


def test_the_oldest_chunks_go_and_rest_in_quarantine_until_answers_are_released() -> None:
    desk = Desk()
    desk.live(0, 1)
    written = []
    while len(written) <= CAPACITY // CHUNK:
        _, slots = desk.source.grants[0][-1]
        for slot in slots:
            desk.write(slot, sequence=len(written))
            written.append(slot)
        desk.hand_over(*slots, issued=3, released=2)
    assert len(desk.replay) == CAPACITY
    evicted = written[: len(written) - CAPACITY // CHUNK]
    assert desk.intake.evicted == CHUNK * len(evicted)
    assert [slot for _, slot in desk.replay.ledger._quarantine] == evicted
    desk.intake.do_work(3, 3)
    assert desk.replay.ledger.counts["quarantined"] == 0


def test_a_replay_that_dies_while_it_evicts_leaves_nothing_drawable_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk()
    desk.live(0, 1)
    for sequence in range(CAPACITY // CHUNK):
        slot = desk.source.grants[0][sequence // STREAMS][1][sequence % STREAMS]
        desk.write(slot, sequence=sequence)
        desk.hand_over(slot)
    for where in ("zapex.slot_ledger.SlotLedger.evict", "zapex.replay_core.forget_kernel"):
        with monkeypatch.context() as patch:

            def die(*args: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(where, die)
            with pytest.raises(KeyboardInterrupt):
                desk.replay._evict_oldest()
        desk.attach()
        leaves = desk.replay.tree[np.arange(desk.replay.tree.capacity)]
        drawable = set((np.flatnonzero(leaves) // CHUNK).tolist())
        assert drawable <= set(np.flatnonzero(desk.rows[:, STATE] == LIVE).tolist())


def test_a_new_life_of_the_replay_takes_over_what_is_whole_and_knows_what_is_out() -> None:
    desk = Desk()
    desk.live(0, 1)
    slots = desk.source.grants[0][0][1]
    desk.write(slots[0])
    desk.hand_over(slots[0])
    desk.write(slots[1], count=2)  # whole; the former life never heard of it
    out = desk.source.grants[0][1][1]
    desk.attach()
    assert len(desk.replay) == CHUNK + 2
    assert desk.intake.inserted == 2
    assert (desk.rows[slots, STATE] == LIVE).all()
    assert desk.intake._granted == [set(out)]
    assert desk.intake.limiter._outstanding == CHUNK * STREAMS
    desk.live(0, 1)
    assert desk.source.grants == [[]], "this life has its credit"
    desk.write(out[0])
    desk.hand_over(slots[1], out[0])  # the first was taken over already
    assert desk.intake.refused == 1
    assert len(desk.replay) == 2 * CHUNK + 2


@pytest.mark.parametrize("stored", [1, STREAMS])
def test_slots_that_a_dead_replay_had_granted_and_not_sent_are_granted_again(
    stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(actors=2)
    desk.live(0, 1)
    states: list[int] = []

    def die_at_last(headers: NDArray[np.int64], slot: int, state: int) -> None:
        set_state_kernel(headers, slot, state)
        states.append(state)
        if len(states) == stored:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("zapex.slot_ledger.set_state_kernel", die_at_last)
        with pytest.raises(KeyboardInterrupt):
            desk.live(1, 2)
    assert states == [GRANTED] * stored
    assert desk.source.grants[1] == [], "nobody has heard of them"
    free = CAPACITY // CHUNK + 2 * 2 * STREAMS + 8 - STREAMS
    desk.attach()
    assert desk.replay.ledger.counts == {
        "free": free, "granted": STREAMS, "live": 0, "quarantined": 0,
    }  # fmt: skip
    assert desk.intake.limiter._outstanding == CHUNK * STREAMS
    desk.live(0, 1)
    desk.live(1, 2)
    assert [len(grants) for grants in desk.source.grants] == [0, 1]
    assert desk.replay.ledger.counts["granted"] == 2 * STREAMS


def test_what_an_actor_held_that_died_while_the_replay_was_dead_comes_back() -> None:
    desk = Desk()
    desk.live(0, 1)
    desk.attach()
    assert desk.replay.ledger.counts["granted"] == STREAMS
    desk.live(0, 0)  # the first look says who is dead, too
    assert desk.replay.ledger.counts["granted"] == 0


@pytest.mark.parametrize("count", [0, -3, CHUNK + 1, 2**40])
def test_a_new_life_of_the_replay_refuses_what_no_chunk_can_be(count: int) -> None:
    desk = Desk()
    desk.live(0, 1)
    slots = desk.source.grants[0][0][1]
    desk.write(slots[0], count)
    desk.write(slots[1])
    desk.attach()
    assert (desk.intake.refused, len(desk.replay)) == (1, CHUNK)
    assert desk.rows[slots, STATE].tolist() == [FREE, LIVE]
    assert desk.intake.limiter._outstanding == 0
