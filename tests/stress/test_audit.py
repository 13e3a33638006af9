"""The audit of a run's memory: silent on sound memory, and it reports every kind of fault."""

import pytest

from tests.support.audit import ChunkAudit
from tests.support.fake_system import System, spec
from zapex.chunks.layout import (
    ACTOR,
    COMMIT_SEQUENCE,
    COUNT,
    FREE,
    INCARNATION,
    LIVE,
    SEQUENCE,
    STATE,
)
from zapex.config.settings import Config


def system() -> System:
    config = Config().replace(
        actors=2, envs_per_actor=2, capacity=256, learning_starts=16, batch_size=8, hidden=8
    )
    one = System(config, spec(1))
    one.goes_on(batches=5, chunks=20)
    return one


def faults(audit: ChunkAudit) -> tuple[int, int, int]:
    audit.look()
    return audit.lost, audit.torn, audit.doubled


def test_eviction_and_deaths_are_no_faults() -> None:
    one = system()
    audit = ChunkAudit(one.host.store())
    seen = 0
    for turn in range(40):
        one.goes_on(batches=2, chunks=1 + turn % 7)
        assert audit.look()
        assert audit.chunks > seen
        seen = audit.chunks
        if turn % 5 == 0:
            one.roles.pop("actor 1", None)  # killed between two of its steps
            one.host.set_incarnation("actor 1", 0)
            one.goes_on(batches=2, chunks=3)
            one.start_actor(1)
        if turn % 7 == 0:
            one.start_replay()
    assert audit.transitions > len(one.replay), "more than the memory holds"


def test_a_byte_that_changed_is_found() -> None:
    one = system()
    audit = ChunkAudit(one.host.store())
    assert faults(audit) == (0, 0, 0)
    store = one.replay.store
    slot = one.replay.ledger.live[3]
    store.mem[store.body(slot) + 70] ^= 1
    assert faults(audit) == (0, 1, 0)


@pytest.mark.parametrize("place", [1, -2])
def test_a_chunk_that_went_before_older_ones_is_found(place: int) -> None:
    one = system()
    audit = ChunkAudit(one.host.store())
    assert faults(audit) == (0, 0, 0)
    one.replay.store.header_rows[one.replay.ledger.live[place], STATE] = FREE
    assert faults(audit)[0] >= 1


def test_the_oldest_chunk_may_go() -> None:
    one = system()
    audit = ChunkAudit(one.host.store())
    assert faults(audit) == (0, 0, 0)
    one.replay.store.header_rows[one.replay.ledger.live[0], STATE] = FREE
    assert faults(audit) == (0, 0, 0)


def test_a_gap_is_found_even_where_nobody_saw_the_chunk() -> None:
    one = system()
    rows = one.replay.store.header_rows
    # From the middle of one life's chunks.
    mine = [
        s
        for s in one.replay.ledger.live
        if rows[s, ACTOR] == rows[one.replay.ledger.live[0], ACTOR]
    ]
    rows[mine[len(mine) // 2], STATE] = FREE
    assert faults(ChunkAudit(one.host.store())) == (1, 0, 0)


def test_a_chunk_that_is_there_twice_is_found() -> None:
    one = system()
    audit = ChunkAudit(one.host.store())
    assert faults(audit) == (0, 0, 0)
    rows = one.replay.store.header_rows
    original, copy = one.replay.ledger.live[-1], one.replay.ledger.free_slots[0]
    for word in (ACTOR, INCARNATION, SEQUENCE, COUNT):
        rows[copy, word] = rows[original, word]
    rows[copy, COMMIT_SEQUENCE] = rows[original, COMMIT_SEQUENCE] + 1
    rows[copy, STATE] = LIVE
    assert faults(audit) == (0, 0, 1)


def test_slots_of_one_life_are_counted() -> None:
    one = system()
    audit = ChunkAudit(one.host.store())
    life = one.host.incarnation("actor 0")
    held = one.intake.granted[0]
    assert audit.granted(0, life) == len(held) > 0
    assert audit.granted(0, life - 1) == audit.granted(2, life) == 0
