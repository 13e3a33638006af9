"""The ring: nothing lost, doubled or torn; a new process can take over an end that died."""

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.naive import NaiveRing
from zapex.errors import ConfigError, SharedMemoryError
from zapex.machine.jit import kernel
from zapex.machine.memory import align
from zapex.shm_ring import (
    FULL,
    RingConsumer,
    RingProducer,
    RingsWithRecords,
    ShmRing,
    offer_kernel,
    take_kernel,
)

TAIL, HEAD = 16, 32  # words, as the module's docstring and docs/ring_protocol.md lay them out
RECORD = np.dtype([("slot", np.int64), ("count", np.int32), ("flag", np.uint8)])


def aligned(size: int) -> np.ndarray:
    """Zeroed bytes that start on a cache line."""
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def make_ring(capacity: int = 8, dtype: object = np.int64) -> ShmRing:
    buffer = aligned(ShmRing.required_bytes(capacity, dtype))
    return ShmRing(buffer, capacity, dtype, create=True)


def ends(ring: ShmRing) -> tuple[RingProducer, RingConsumer]:
    return ring.producer(), ring.consumer()


def test_what_is_offered_is_taken_in_order() -> None:
    producer, consumer = ends(make_ring(8, RECORD))
    rows = np.zeros(5, RECORD)
    rows["slot"], rows["count"], rows["flag"] = np.arange(5), np.arange(5) * 10, 3
    assert producer.try_offer(rows)
    np.testing.assert_array_equal(consumer.take(8), rows)
    assert consumer.take(8).size == 0


def test_an_offer_is_all_or_nothing() -> None:
    producer, consumer = ends(make_ring(4))
    assert producer.try_offer(np.arange(3))
    assert not producer.try_offer(np.arange(2))
    assert consumer.take(4).tolist() == [0, 1, 2]


def test_claim_is_refused_when_the_consumer_is_a_lap_behind() -> None:
    ring = make_ring(4)
    producer, consumer = ends(ring)
    assert producer.try_claim(4) == 0
    producer.commit(4)
    assert producer.try_claim() == FULL
    assert consumer.poll(4) == (0, 4)
    consumer.release(1)
    assert producer.try_claim() == 4
    assert producer.try_claim(2) == FULL


def test_nothing_is_seen_before_the_commit() -> None:
    ring = make_ring(4)
    producer, consumer = ends(ring)
    ring.records[producer.try_claim(2) & 3] = 7
    assert consumer.poll(4) == (0, 0)
    producer.commit(1)
    assert consumer.poll(4) == (0, 1)
    assert ring.records[0] == 7


def test_polled_records_come_again_until_they_are_released() -> None:
    producer, consumer = ends(make_ring(4))
    producer.try_offer(np.arange(3))
    assert consumer.poll(2) == (0, 2)
    assert consumer.poll(4) == (0, 3)
    consumer.release(2)
    assert consumer.poll(4) == (2, 1)


@pytest.mark.parametrize("n", [-1, 3])
def test_more_than_was_polled_cannot_be_released(n: int) -> None:
    producer, consumer = ends(make_ring(4))
    producer.try_offer(np.arange(3))
    consumer.poll(2)
    with pytest.raises(ConfigError, match=f"0 to 2 records, got {n}"):
        consumer.release(n)


def test_more_than_was_claimed_cannot_be_committed() -> None:
    producer = make_ring(4).producer()
    producer.try_claim(2)
    with pytest.raises(ConfigError, match="0 to 2 records, got 3"):
        producer.commit(3)


def test_take_copies_into_the_memory_it_is_given() -> None:
    producer, consumer = ends(make_ring(4))
    producer.try_offer(np.arange(3))
    out = np.zeros(4, np.int64)
    taken = consumer.take(2, out)
    assert taken.base is out
    assert taken.tolist() == [0, 1]
    with pytest.raises(ConfigError, match="max_n must be 1 to 4"):
        consumer.take(5, out)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.sampled_from([1, 2, 8]),
    st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.integers(0, 8)), max_size=60),
)
def test_the_ring_does_what_a_list_would(capacity: int, steps: list[tuple[bool, int, int]]) -> None:
    ring, naive = make_ring(capacity), NaiveRing(capacity)
    producer, consumer = ends(ring)
    value = 0
    for offers, n, released in steps:
        if offers:
            rows = np.arange(value, value + min(n, capacity))
            accepted = producer.try_offer(rows)
            assert accepted == naive.offer(rows.tolist())
            value += rows.size * accepted
        else:
            first, count = consumer.poll(n)
            polled = [int(ring.records[s & (capacity - 1)]) for s in range(first, first + count)]
            assert polled == naive.poll(n)
            consumer.release(min(released, count))
            naive.release(min(released, count))
        assert (ring.tail, ring.head) == (len(naive.committed), naive.released)
        assert 0 <= ring.used <= capacity


def test_either_end_can_be_taken_up_again_by_another_life() -> None:
    memory = aligned(ShmRing.required_bytes(4, np.int64))
    ring = ShmRing(memory, 4, np.int64, create=True)
    producer, consumer = ends(ring)
    producer.try_offer(np.arange(3))
    producer.try_claim(1)  # and dies
    consumer.poll(2)
    consumer.release(1)  # and dies, with one record polled and not released
    second = ShmRing(memory, 4, np.int64)
    producer, consumer = ends(second)
    assert producer.try_claim(2) == 3
    assert producer.try_offer(np.arange(3, 5))
    assert consumer.take(4).tolist() == [1, 2, 3, 4]
    assert (ring.head, ring.tail) == (5, 5)


def test_sequences_go_on_past_32_bits() -> None:
    memory = aligned(ShmRing.required_bytes(4, np.int64))
    ring = ShmRing(memory, 4, np.int64, create=True)
    memory.view(np.int64)[[TAIL, HEAD]] = 2**40 + 3
    producer, consumer = ends(ring)
    assert producer.try_offer(np.array([10, 11, 12]))
    assert consumer.poll(4) == (2**40 + 3, 3)
    assert consumer.take(4).tolist() == [10, 11, 12]


@pytest.mark.parametrize("capacity", [0, -4, 3, 12])
def test_a_capacity_that_is_no_power_of_two_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"power of two, got {capacity}"):
        ShmRing.required_bytes(capacity, np.int64)


def test_records_of_python_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match="plain bytes"):
        ShmRing.required_bytes(4, [("a", object)])


@pytest.mark.parametrize("n", [0, 5])
def test_a_claim_that_could_never_succeed_is_refused(n: int) -> None:
    producer = make_ring(4).producer()
    with pytest.raises(ConfigError, match=f"1 to the capacity, 4, got {n}"):
        producer.try_claim(n)


def test_rows_of_another_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match="dtype int64"):
        make_ring(4).producer().try_offer(np.zeros(2, np.int32))


def test_attaching_names_what_was_found_and_what_was_expected() -> None:
    memory = aligned(ShmRing.required_bytes(8, np.int64))
    ShmRing(memory, 8, np.int64, create=True)
    with pytest.raises(SharedMemoryError, match="8 records of 8 bytes, expected 4 of 8"):
        ShmRing(memory, 4, np.int64)
    with pytest.raises(SharedMemoryError, match="8 records of 8 bytes, expected 8 of 4"):
        ShmRing(memory, 8, np.int32)
    with pytest.raises(SharedMemoryError, match="holds no ring"):
        ShmRing(aligned(memory.nbytes), 8, np.int64)
    memory.view(np.int64)[HEAD] = 5
    with pytest.raises(SharedMemoryError, match="damaged: head 5, tail 0"):
        ShmRing(memory, 8, np.int64)


def test_unfit_memory_is_refused() -> None:
    size = ShmRing.required_bytes(8, np.int64)
    with pytest.raises(SharedMemoryError, match=f"needs {size} bytes, the buffer has {size - 8}"):
        ShmRing(aligned(size - 8), 8, np.int64, create=True)
    with pytest.raises(SharedMemoryError, match="aligned to 64 bytes"):
        ShmRing(aligned(size + 8)[8:], 8, np.int64, create=True)
    with pytest.raises(SharedMemoryError, match="read-only"):
        ShmRing(bytes(size), 8, np.int64, create=True)


@kernel
def _produce_kernel(words: Any, own: Any, ring: Any, sizes: Any, total: int) -> None:
    """Offer 0, 1, 2, ... in batches of `sizes`."""
    rows = np.empty(16, np.int64)
    value = turn = 0
    while value < total:
        n = min(sizes[turn % sizes.size], total - value)
        rows[:n] = np.arange(value, value + n)
        if offer_kernel(words, own, ring, rows.view(np.uint8), n, 8) != FULL:
            value += n
            turn += 1


@kernel
def _consume_kernel(words: Any, own: Any, ring: Any, total: int) -> int:
    """Take `total` records; returns how many were not the next number."""
    rows = np.empty(16, np.int64)
    expected = wrong = 0
    while expected < total:
        n = take_kernel(words, own, ring, rows.view(np.uint8), 16, 8)
        for i in range(n):
            wrong += rows[i] != expected + i
        expected += n
    return wrong


def test_two_threads_on_two_cores_pass_everything_through_a_small_ring() -> None:
    ring = make_ring(256)  # on a busy machine each turn on a core moves one ring's worth
    producer, consumer = ends(ring)
    sizes = np.random.default_rng(1).integers(1, 17, 1000)
    _produce_kernel(*producer.arrays, sizes, 0)
    _consume_kernel(*consumer.arrays, 0)  # both compiled
    total = 100_000
    thread = threading.Thread(
        target=_produce_kernel,
        args=(*producer.arrays, sizes, total),
    )
    thread.start()
    assert _consume_kernel(*consumer.arrays, total) == 0
    thread.join(60)
    assert (ring.head, ring.tail) == (total, total)


def test_one_look_finds_the_rings_of_a_block_that_have_records() -> None:
    """Beside a naive twin that asks each ring."""
    each = align(ShmRing.required_bytes(4, np.int64), 128)
    block = np.zeros(9 * each + 128, np.uint8)
    block = block[-block.ctypes.data % 128 :]
    offsets = [i * each for i in range(9)]
    rings = [ShmRing(block[at : at + each], 4, np.int64, create=True) for at in offsets]
    ends = [(ring.producer(), ring.consumer()) for ring in rings]
    look = RingsWithRecords(block, offsets)
    rng = np.random.default_rng(3)
    seen = set()
    assert (look.any(), look.find()) == (False, [])
    for _ in range(300):
        producer, consumer = ends[rng.integers(9)]
        if rng.random() < 0.4:
            producer.try_offer(np.array([1]))
        else:
            consumer.take(4)
        there = [i for i, ring in enumerate(rings) if ring.used]
        assert look.find() == there
        assert look.any() == bool(there)
        seen.add(len(there))
    assert {2, 3, 4, 5} <= seen
    assert RingsWithRecords(block, []).find() == []
