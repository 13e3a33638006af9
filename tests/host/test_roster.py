"""The roster: numbers stay with their hosts, and what a dead server committed is found."""

import numpy as np
import pytest

from zapex.chunks.batch import aligned_zeros
from zapex.chunks.layout import (
    ACTOR,
    COMMITTED,
    GRANTED,
    HEADER_WORDS,
    HOST,
    INCARNATION,
    LIVE,
    SEQUENCE,
    STATE,
)
from zapex.errors import SharedMemoryError
from zapex.host.roster import NO_HOST, Roster


def make(actors: int = 4, slots: int = 6):
    buffer = aligned_zeros(Roster.required_bytes(actors))
    headers = np.zeros((slots, HEADER_WORDS), np.int64)
    return Roster(buffer, actors, headers), buffer, headers


def header(headers, slot, state, actor, host, incarnation, sequence):
    headers[slot, [STATE, ACTOR, HOST, INCARNATION, SEQUENCE]] = (
        state, actor, host, incarnation, sequence,
    )  # fmt: skip


def test_host_keeps_its_numbers_and_gets_more() -> None:
    roster, _, _ = make()
    assert roster.assign(7, 2) == [0, 1]
    assert roster.assign(8, 1) == [2]
    assert roster.assign(7, 2) == [0, 1]
    assert roster.assign(7, 3) == [0, 1, 3]
    assert roster.assign(9, 1) is None
    assert roster.assign(7, 1) == [0]
    assert roster.assign(9, 2) == [1, 3]
    roster.release(8)
    assert roster.host(2) == NO_HOST


def test_numbers_of_gone_hosts_are_reassigned_last() -> None:
    roster, _, _ = make()
    roster.assign(7, 2)
    roster.advance(0, 50, 9)
    assert roster.assign(8, 3) is None
    assert roster.assign(8, 3, gone=[7]) == [0, 2, 3]
    assert roster.state(0) == (0, 0)
    assert roster.actors_of(7) == [1]


def test_epoch_stays_with_the_memory() -> None:
    roster, buffer, headers = make()
    again = Roster(buffer, 4, headers)
    assert again.epoch == roster.epoch > 0
    assert make()[0].epoch != roster.epoch
    with pytest.raises(SharedMemoryError, match="no roster of 5"):
        Roster(np.concatenate([buffer, buffer]), 5, headers)


def test_unrecorded_commits_are_found_in_the_slots() -> None:
    roster, buffer, headers = make()
    roster.assign(7, 2)
    roster.advance(0, 50, 3)
    header(headers, 0, COMMITTED, 0, 7, 50, 3)  # the newest: not noted
    header(headers, 1, LIVE, 0, 7, 50, 2)
    header(headers, 2, LIVE, 1, 7, 60, 4)  # a newer life of actor 1
    header(headers, 3, LIVE, 1, 7, 59, 80)
    header(headers, 4, GRANTED, 0, 7, 99, 99)  # half written
    header(headers, 5, LIVE, 1, 6, 99, 99)  # the host before: another clock
    again = Roster(buffer, 4, headers)
    assert again.state(0) == (50, 4)
    assert again.state(1) == (60, 5)


def test_evicted_chunks_are_remembered() -> None:
    roster, buffer, headers = make()
    roster.assign(7, 1)
    roster.advance(0, 50, 30)
    header(headers, 0, LIVE, 0, 7, 50, 12)
    assert Roster(buffer, 4, headers).state(0) == (50, 30)


def test_no_number_is_assigned_twice() -> None:
    roster, _, _ = make()
    assert roster.assign(7, 3) == [0, 1, 2]
    assert roster.assign(8, 2, gone=[NO_HOST]) is None
