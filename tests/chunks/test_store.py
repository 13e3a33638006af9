"""Slots change owners in one order, keys fit only their own transition, rows come back whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chunks.test_builder import play
from tests.support.keys import indices_of
from zapex.chunks.batch import Batch, aligned_zeros
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
    chunk_length,
    slots_needed,
)
from zapex.chunks.ledger import SlotLedger
from zapex.chunks.schema import Column, Schema
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
    assert ledger.counts == {"free": free + 2, "granted": 0, "live": 0, "quarantined": 1}
    assert ledger.release(7) == 1


def test_eviction_makes_a_new_generation_and_the_old_keys_fit_no_more():
    store = new_store()
    ledger = SlotLedger(store)
    slot = make_live(store, ledger)
    keys = store.keys_of(slot * CHUNK + np.arange(CHUNK))
    assert indices_of(store, keys)[1] == CHUNK
    assert all(store.holds(key) for key in keys.tolist())
    ledger.evict(0)
    assert not any(store.holds(key) for key in keys.tolist())
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
    assert store.holds(int(key[0]))
    ledger.evict(0)
    assert store.header_rows[slot, GENERATION] == 1
    assert not store.holds(int(key[0]))
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


@settings(max_examples=25, deadline=None, derandomize=True)
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


def gathered(store, keys, layout, first=0):
    """A batch of these rows, from row `first` on; the others keep the byte 7."""
    batch = Batch.empty(layout)
    batch.memory[:] = 7
    out_keys = np.empty(len(keys), np.int64)
    assert store.gather(keys, layout, batch.memory, out_keys, first) == 0
    np.testing.assert_array_equal(out_keys, keys)
    return batch


def columns_of(batch):
    """Every column that a gather writes, as arrays of the same shape in each layout."""
    nested = {**batch.columns}
    for side in ("obs", "next_obs"):
        value = nested.pop(side)
        parts = value.items() if isinstance(value, dict) else [("", value)]
        nested |= {f"{side}/{name}": array for name, array in parts}
    return {name: nested[name] for name in nested if name not in ("weights", "keys", "indices")}


@pytest.mark.parametrize(("stack", "level"), [(1, 0), (4, 0), (3, 2), (4, 4), (2, 5)])
def test_a_gather_gives_the_same_rows_in_every_layout_and_in_every_place(stack, level):
    rng = np.random.default_rng(stack)
    store, closed, *_ = play(
        rng, streams=3, stack=stack, n=2, chunk=8, steps=40, level=level, padding="zero"
    )
    schema = store.layout.schema
    every = np.concatenate([store.indices(slot) for slot in closed])
    assert len(every) == sum(store.header_rows[closed, COUNT])
    keys = store.keys_of(rng.permutation(every))
    alone = [columns_of(gathered(store, keys[i : i + 1], BatchLayout(schema, 1)))
             for i in range(len(keys))]  # fmt: skip
    for channels_last in (False, True):
        layout = BatchLayout(schema, len(keys) + 5, channels_last)
        found = columns_of(gathered(store, keys, layout, first=3))
        for name, column in found.items():
            expected = np.concatenate([one[name] for one in alone])
            np.testing.assert_array_equal(column[3:-2], expected)
            assert set(column[:3].tobytes() + column[-2:].tobytes()) == {7}


def test_a_batch_that_no_cache_holds_has_the_same_rows():
    rng = np.random.default_rng(0)
    store, closed, *_ = play(rng, streams=2, stack=4, n=1, chunk=8, steps=30, padding="zero")
    keys = store.keys_of(np.concatenate([store.indices(slot) for slot in closed]))
    rows, more = len(keys), rng.integers(0, len(keys), 80_000)
    schema = store.layout.schema
    few = columns_of(gathered(store, keys, BatchLayout(schema, rows)))
    layout = BatchLayout(schema, len(more))
    assert layout.nbytes > 4 << 20
    for name, column in columns_of(gathered(store, keys[more], layout)).items():
        np.testing.assert_array_equal(column, few[name][more])


def test_numbers_of_frames_are_those_of_the_chunk():
    rng = np.random.default_rng(0)
    store, closed, *_ = play(rng, streams=2, stack=3, n=2, chunk=8, steps=30)
    slot, other = closed[2], closed[4]
    keys = store.keys_of(np.append(store.indices(slot)[::-1], store.indices(other)[:2]))
    layout = BatchLayout(store.layout.schema, len(keys), frames_apart=True)
    memory, out_keys = aligned_zeros(layout.nbytes), np.empty(len(keys), np.int64)
    torn, numbers = store.gather_numbers(keys, layout, memory, out_keys)
    count = len(store.indices(slot))
    for side, name in enumerate(("obs_frames", "next_obs_frames")):
        expected = [*store.column(slot, name)[:count][::-1], *store.column(other, name)[:2]]
        np.testing.assert_array_equal(numbers[:, side], expected)
    assert torn == 0
    keys[1] += 1 << GENERATION_SHIFT
    assert store.gather_numbers(keys, layout, memory, out_keys)[0] == 1
    assert out_keys.tolist() == [keys[0], NO_KEY, *keys[2:]]
    outside = np.append(keys[1:], store.slots << SLOT_SHIFT)
    with pytest.raises(IndexError, match="outside of the store"):
        store.gather_numbers(outside, layout, memory, out_keys)


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


def test_free_slots_are_granted_in_their_order_and_those_that_are_put_first_before_them():
    store = new_store()
    ledger = SlotLedger(store)
    assert ledger.free_slots == list(range(8))
    (taken,) = ledger.grant(1, 0, 1).tolist()
    ledger.free_in_order([5, 3, taken, 5, 99])
    assert ledger.free_slots == [5, 3, 1, 2, 4, 6, 7]
    assert ledger.grant(3, 0, 1).tolist() == [5, 3, 1]


def test_an_open_slot_is_live_empty_and_never_the_oldest_until_it_is_closed():
    store = new_store()
    ledger = SlotLedger(store)
    store.header_rows[:, [ACTOR, INCARNATION, COUNT, GRANT_SEQUENCE]] = 9
    first, second = ledger.open(), ledger.open()
    words = [STATE, ACTOR, INCARNATION, COUNT, GRANT_SEQUENCE]
    assert store.header_rows[[first, second]][:, words].tolist() == [[LIVE, 0, 0, 0, 0]] * 2
    assert store.header_rows[[first, second], COMMIT_SEQUENCE].tolist() == [1, 2]
    assert (ledger.oldest, ledger.live) == (None, [])
    assert ledger.counts == {"free": 6, "granted": 2, "live": 0, "quarantined": 0}
    ledger.close(second)
    ledger.close(first)
    assert (ledger.oldest, ledger.live) == (second, [second, first])
    assert store.header_rows[[second, first], COMMIT_SEQUENCE].tolist() == [3, 4]
    assert ledger.next_commit == 5


def test_rows_that_another_process_writes_are_found_once_and_nonsense_is_not():
    store = new_store()
    ledger = SlotLedger(store)
    here, there, other = ledger.open(), ledger.open(elsewhere=True), ledger.open(elsewhere=True)
    counts = store.header_rows[:, COUNT]
    counts[[here, there, other]] = 1, 2, 1
    first, second = there * CHUNK, other * CHUNK
    assert ledger.new_rows().tolist() == [first, first + 1, second]
    assert ledger.new_rows().tolist() == []
    for count in (CHUNK + 1, -5, 0, 1 << 60):
        counts[there] = count
        assert ledger.new_rows().tolist() == []
        assert counts[there] == 2
    counts[[there, other]] = 3, 1
    assert ledger.new_rows().tolist() == [first + 2]
    ledger.close(there)
    counts[there] = 4
    assert ledger.new_rows().tolist() == []
    ledger.reclaim([other])
    assert ledger.open(elsewhere=True) not in (there, other)
    assert ledger.new_rows().tolist() == []


def test_who_keeps_a_copy_is_told_before_a_slot_is_evicted():
    store = new_store()
    ledger = SlotLedger(store)
    slots = [make_live(store, ledger) for _ in range(3)]
    told = []
    ledger.on_evict = lambda slot: told.append((slot, int(store.header_rows[slot, STATE])))
    assert [ledger.evict(i) for i in (4, 5)] == [(slots[0], CHUNK), (slots[1], CHUNK)]
    assert told == [(slots[0], LIVE), (slots[1], LIVE)]
    assert ledger.quarantined == slots[:2]
    ledger.release_oldest()
    assert (ledger.quarantined, ledger.free_slots[-1]) == ([slots[1]], slots[0])
    assert [ledger.release(released) for released in (4, 5, 5)] == [0, 1, 0]
    assert store.header_rows[slots, STATE].tolist() == [FREE, FREE, LIVE]


@settings(max_examples=20, deadline=None, derandomize=True)
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
