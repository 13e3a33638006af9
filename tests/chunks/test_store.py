"""Slots change owners in one order, keys fit only their own transition, rows come back whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.keys import indices_of
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.columns import Column
from zapex.chunks.keys import GENERATION_BITS, MAX_SLOTS, NO_KEY, OFFSET_BITS, SLOT_BITS
from zapex.chunks.layout import (
    ACTOR,
    COMMIT_SEQUENCE,
    COMMITTED,
    COUNT,
    EVICTED,
    FREE,
    GENERATION,
    GRANT_SEQUENCE,
    GRANTED,
    INCARNATION,
    LIVE,
    STATE,
    BatchLayout,
    ChunkLayout,
)
from zapex.chunks.ledger import SlotLedger
from zapex.chunks.schema import Schema
from zapex.chunks.sizes import chunk_length, slots_needed
from zapex.chunks.store import ChunkStore
from zapex.errors import ConfigError, SharedMemoryError

SCHEMA = Schema({"obs": Column((2,), np.float32), "action": Column((), np.int64)}, n_step=1)
CHUNK = 4
GENERATION_SHIFT, SLOT_SHIFT = OFFSET_BITS + SLOT_BITS, OFFSET_BITS


def new_store(slots=8):
    layout = ChunkLayout(SCHEMA, CHUNK)
    return ChunkStore(aligned_zeros(ChunkStore.required_bytes(layout, slots)), layout, slots)


def commit(store, slot, count=CHUNK, number=0.0):
    """As an actor does it: rows of `number`, then the state."""
    store.column(slot, "obs")[:] = number
    store.column(slot, "obs_frames")[:] = np.arange(CHUNK)[:, None]
    store.column(slot, "next_obs_frames")[:] = 1 + np.arange(CHUNK)[:, None]
    store.column(slot, "reward")[:] = number
    store.header_rows[slot, COUNT] = count
    store.header_rows[slot, STATE] = COMMITTED


def make_live(store, ledger, count=CHUNK, number=0.0):
    (slot,) = ledger.grant(1, 0, 1).tolist()
    commit(store, slot, count, number)
    ledger.accept(slot)
    return slot


def rewards_of(store, keys):
    batch = Batch.empty(BatchLayout(SCHEMA, len(keys)))
    torn = store.gather(keys, batch.layout, batch.memory, batch.keys)
    return batch.reward.copy(), batch.keys.copy(), torn


def test_the_first_chunk_in_is_the_first_evicted():
    store = new_store()
    ledger = SlotLedger(store)
    slots = [make_live(store, ledger) for _ in range(5)]
    assert ledger.oldest == slots[0]
    assert [ledger.evict(0)[0] for _ in range(5)] == slots
    assert ledger.oldest is None


def test_an_evicted_slot_waits_until_the_answers_from_before_it_are_released():
    store = new_store()
    ledger = SlotLedger(store)
    for _ in range(3):
        make_live(store, ledger)
    for issued in (3, 3, 7):
        ledger.evict(issued)
    free = ledger.free
    assert ledger.release(2) == 0
    assert ledger.release(3) == 2
    assert ledger.free == free + 2
    assert ledger.counts["quarantined"] == 1
    assert ledger.release(7) == 1


def test_eviction_makes_a_new_generation_and_the_old_keys_fit_no_more():
    store = new_store()
    ledger = SlotLedger(store)
    slot = make_live(store, ledger)
    keys = store.keys_of(slot * CHUNK + np.arange(CHUNK))
    assert indices_of(store, keys)[1] == CHUNK
    ledger.evict(0)
    assert store.header_rows[slot, GENERATION] == 2
    indices, fit = indices_of(store, keys)
    assert fit == 0
    assert (indices == -1).all()
    ledger.release(0)
    while make_live(store, ledger) != slot:
        pass
    assert indices_of(store, keys)[1] == 0
    assert indices_of(store, store.keys_of(slot * CHUNK + np.arange(CHUNK)))[1] == CHUNK


def test_the_generation_wraps_within_its_bits_and_keys_stay_positive():
    store = new_store()
    ledger = SlotLedger(store)
    slot = make_live(store, ledger)
    store.header_rows[slot, GENERATION] = (1 << GENERATION_BITS) - 1
    key = store.keys_of(np.array([slot * CHUNK]), shard=127)
    assert key[0] > 0
    assert indices_of(store, key, shard=127)[1] == 1
    ledger.evict(0)
    assert store.header_rows[slot, GENERATION] == 1
    assert indices_of(store, key, shard=127)[1] == 0


def test_keys_of_nobody_of_others_and_of_nonsense_are_not_found():
    store = new_store()
    ledger = SlotLedger(store)
    slot = make_live(store, ledger, count=2)
    (key,) = store.keys_of(np.array([slot * CHUNK]), shard=3)
    foreign = np.array(
        [
            NO_KEY,
            key ^ (1 << (GENERATION_SHIFT + GENERATION_BITS)),  # another shard
            key + (1 << GENERATION_SHIFT),  # a generation that never was
            key + 2,  # an offset past the count
            key + (7 << SLOT_SHIFT),  # a slot that is not live
            key + (500 << SLOT_SHIFT),  # a slot that is not there
            np.iinfo(np.int64).max,
            np.iinfo(np.int64).min,
        ]
    )
    indices, fit = indices_of(store, foreign, shard=3)
    assert fit == 0
    assert (indices == -1).all()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    shard=st.integers(0, 127), generation=st.integers(1, (1 << GENERATION_BITS) - 1),
    slot=st.integers(0, 7), offset=st.integers(0, CHUNK - 1),
)  # fmt: skip
def test_a_key_is_made_of_its_four_fields(shard, generation, slot, offset):
    store = new_store()
    store.header_rows[slot, GENERATION] = generation
    (key,) = store.keys_of(np.array([slot * CHUNK + offset]), shard)
    expected = ((shard << 28 | generation) << 19 | slot) << 8 | offset
    assert key == expected
    store.header_rows[slot, [STATE, COUNT]] = LIVE, CHUNK
    assert indices_of(store, np.array([key]), shard)[0][0] == slot * CHUNK + offset


def test_a_gather_copies_each_row_from_its_own_chunk():
    store = new_store()
    ledger = SlotLedger(store)
    first = make_live(store, ledger, number=1.5)
    second = make_live(store, ledger, number=2.5)
    keys = store.keys_of(np.array([second * CHUNK, first * CHUNK + 3, second * CHUNK + 1]))
    rewards, out_keys, torn = rewards_of(store, keys)
    np.testing.assert_array_equal(rewards, [2.5, 1.5, 2.5])
    np.testing.assert_array_equal(out_keys, keys)
    assert torn == 0


def test_a_row_whose_slot_has_moved_on_is_torn():
    store = new_store()
    ledger = SlotLedger(store)
    slots = [make_live(store, ledger, number=float(i)) for i in range(3)]
    keys = store.keys_of(np.array(slots) * CHUNK)
    ledger.evict(0)
    _, out_keys, torn = rewards_of(store, keys)
    assert torn == 1
    np.testing.assert_array_equal(out_keys, [NO_KEY, keys[1], keys[2]])


@pytest.mark.parametrize(
    "key", [NO_KEY, 8 << SLOT_SHIFT, CHUNK, np.iinfo(np.int64).max, np.iinfo(np.int64).min]
)
def test_a_gather_follows_no_key_out_of_the_store(key):
    store = new_store()
    batch = Batch.empty(BatchLayout(SCHEMA, 2))
    with pytest.raises(IndexError, match="outside of the store"):
        store.gather(np.array([0, key]), batch.layout, batch.memory, batch.keys)


def test_a_ledger_that_attaches_finds_everything_as_it_was():
    store = new_store()
    ledger = SlotLedger(store)
    slots = [make_live(store, ledger, count=1 + i % CHUNK) for i in range(5)]
    ledger.evict(0)
    held = ledger.grant(1, actor=4, incarnation=9).tolist()
    again = SlotLedger(store)
    assert again.live_transitions == ledger.live_transitions == 2 + 3 + 4 + 1
    assert again.counts == {"free": 3, "granted": 1, "live": 4, "quarantined": 0}
    assert (store.header_rows[held, STATE] == GRANTED).all()
    assert [again.evict(0)[0] for _ in range(4)] == slots[1:]
    # What is accepted from now on is younger than all that was there.
    assert store.header_rows[make_live(store, again), COMMIT_SEQUENCE] > 5


def test_a_grant_says_whose_it_is_and_which_place_it_has_in_its_link():
    store = new_store()
    ledger = SlotLedger(store)
    slots = ledger.grant(3, actor=2, incarnation=5, sequence=40).tolist()
    rows = store.header_rows[slots]
    assert (rows[:, [STATE, ACTOR, INCARNATION, COUNT]] == [GRANTED, 2, 5, 0]).all()
    assert rows[:, GRANT_SEQUENCE].tolist() == [40, 41, 42]
    assert ledger.reclaim(slots[:2]) == 2
    assert (store.header_rows[slots[:2], STATE] == FREE).all()
    assert ledger.counts == {"free": 7, "granted": 1, "live": 0, "quarantined": 0}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from("geardn"), max_size=60))
def test_a_slot_is_in_exactly_one_place_whatever_happens(operations):
    store = new_store(6)
    ledger = SlotLedger(store)
    granted, live, quarantine, issued = [], [], [], 0
    for operation in operations:
        if operation == "g" and ledger.free:
            granted += ledger.grant(1, 0, 1).tolist()
        elif operation == "a" and granted:
            slot = granted.pop(0)
            commit(store, slot)
            ledger.accept(slot)
            live.append(slot)
        elif operation == "e" and live:
            issued += 1
            assert ledger.evict(issued)[0] == live[0]
            quarantine.append((issued, live.pop(0)))
        elif operation == "r":
            ledger.release(issued - 1)
            quarantine = [pair for pair in quarantine if pair[0] > issued - 1]
        elif operation == "d" and granted:
            ledger.reclaim([granted.pop()])
        elif operation == "n":  # the replay died and attaches anew
            ledger, quarantine = SlotLedger(store), []
        states = store.header_rows[:, STATE]
        assert set(np.flatnonzero(states == LIVE)) == set(live)
        assert set(np.flatnonzero(states == GRANTED)) == set(granted)
        assert set(np.flatnonzero(states == EVICTED)) == {slot for _, slot in quarantine}
        assert ledger.free == (states == FREE).sum()
        assert ledger.live_transitions == CHUNK * len(live)


def test_too_many_slots_or_too_small_a_buffer_are_refused_with_the_numbers():
    layout = ChunkLayout(SCHEMA, CHUNK)
    with pytest.raises(ConfigError, match=f"1 to {MAX_SLOTS} slots, got {MAX_SLOTS + 1}"):
        ChunkStore(np.zeros(64, np.uint8), layout, MAX_SLOTS + 1)
    with pytest.raises(SharedMemoryError, match="the buffer has 64"):
        ChunkStore(np.zeros(64, np.uint8), layout, 2)


def test_chunks_are_short_where_the_memory_is_small_and_never_below_n_step():
    assert chunk_length(1_000_000, 8, 3) == 64
    assert chunk_length(3200, 10, 3) == 20
    assert chunk_length(10, 10, 3) == 3
    assert slots_needed(1000, 64, 5) == 16 + 10 + 8
