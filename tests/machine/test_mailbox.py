"""The mailbox: whole values only, the newest one wins, a dead writer leaves a whole one."""

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.naive import NaiveMailbox
from tests.test_shm_ring import aligned
from zapex.errors import ConfigError, SharedMemoryError
from zapex.machine.atomics import copy_bytes
from zapex.machine.jit import kernel
from zapex.machine.mailbox import Mailbox, publish_kernel, read_kernel

SIZE = 1000
LATEST, STAMPS = 16, 32  # words, as docs/ring_protocol.md lays them out


def make_memory(value_bytes: int = SIZE) -> np.ndarray:
    memory = aligned(Mailbox.required_bytes(value_bytes))
    Mailbox(memory, value_bytes, create=True)
    return memory


def value_of(version: int, size: int = SIZE) -> np.ndarray:
    return np.full(size, version % 251, np.uint8)


def test_there_is_nothing_before_the_first_publish() -> None:
    mailbox = Mailbox(make_memory(), SIZE)
    out = np.full(SIZE, 7, np.uint8)
    assert mailbox.version == 0
    assert mailbox.newer_than(0, out) == 0
    assert (out == 7).all()


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.integers(1, 200), st.lists(st.one_of(st.none(), st.integers(1, 5)), max_size=30))
def test_a_reader_gets_what_was_published_last(size: int, steps: list[int | None]) -> None:
    memory = make_memory(size)
    writer, reader, naive = Mailbox(memory, size), Mailbox(memory, size), NaiveMailbox()
    seen, rng = 0, np.random.default_rng(size)
    for step in steps:
        if step is None:
            out = np.zeros(size, np.uint8)
            version, value = naive.newer_than(seen)
            assert reader.newer_than(seen, out) == version
            if version:
                np.testing.assert_array_equal(out, value)
                seen = version
        else:
            value = rng.integers(0, 256, size, np.uint8)
            writer.publish(writer.version + step, value)
            naive.publish(naive.version + step, value)
        assert reader.version == naive.version


@pytest.mark.parametrize("version", [-1, 0, 4, 5])
def test_a_version_that_does_not_grow_is_refused(version: int) -> None:
    mailbox = Mailbox(make_memory(), SIZE)
    mailbox.publish(5, value_of(5))
    with pytest.raises(ConfigError, match=f"above the newest, 5, got {version}"):
        mailbox.publish(version, value_of(version))


@kernel
def _publish_half_kernel(words: Any, cells: Any, cell_bytes: int, value: Any) -> None:
    """What a writer has done when it is killed in the middle of its copy."""
    cell = (words[LATEST] % 4 + 1) % 3
    words[STAMPS + cell * 16] = 0
    copy_bytes(cells, cell * cell_bytes, value, 0, value.size // 2)


def test_value_survives_a_writer_that_dies_while_writing() -> None:
    memory = make_memory()
    writer, reader = Mailbox(memory, SIZE), Mailbox(memory, SIZE)
    out = np.zeros(SIZE, np.uint8)
    for version in range(1, 20, 2):
        writer.publish(version, value_of(version))
        _publish_half_kernel(*writer.arrays, value_of(99))
        assert reader.newer_than(version - 1, out) == version
        np.testing.assert_array_equal(out, value_of(version))
        writer = Mailbox(memory, SIZE)  # its next life
        writer.publish(writer.version + 1, value_of(version + 1))
        assert reader.newer_than(version, out) == version + 1
        np.testing.assert_array_equal(out, value_of(version + 1))


def test_unpublished_value_of_a_dead_writer_is_not_read() -> None:
    memory = make_memory()
    writer, reader = Mailbox(memory, SIZE), Mailbox(memory, SIZE)
    writer.publish(3, value_of(3))
    words = memory.view(np.int64)
    before = int(words[LATEST])
    writer.publish(4, value_of(4))
    words[LATEST] = before  # all but the last store
    out = np.zeros(SIZE, np.uint8)
    assert reader.newer_than(0, out) == 3
    np.testing.assert_array_equal(out, value_of(3))
    Mailbox(memory, SIZE).publish(4, value_of(40))
    assert reader.newer_than(3, out) == 4
    np.testing.assert_array_equal(out, value_of(40))


def test_overtaken_read_is_torn() -> None:
    memory = make_memory()
    mailbox = Mailbox(memory, SIZE)
    mailbox.publish(1, value_of(1))
    words = memory.view(np.int64)
    words[STAMPS + 16 * (words[LATEST] % 4)] = 0  # the writer came round to this cell
    assert mailbox.newer_than(0, np.zeros(SIZE, np.uint8), timeout_s=0.01) == 0
    assert mailbox.torn_reads > 0


@kernel
def _publish_many_kernel(words: Any, cells: Any, cell_bytes: int, value: Any, n: int) -> None:
    for version in range(1, n + 1):
        value[:] = version % 251
        publish_kernel(words, cells, cell_bytes, version, value)


@kernel
def _read_many_kernel(
    words: Any, cells: Any, cell_bytes: int, out: Any, n: int, facts: Any
) -> None:
    """Read until version n; facts: whole reads, torn ones taken for whole, versions that fell."""
    seen = 0
    while seen < n:
        version = read_kernel(words, cells, cell_bytes, seen, out)
        if version <= 0:
            continue
        facts[0] += 1
        facts[1] += np.any(out != version % 251)
        facts[2] += version <= seen
        seen = version


def test_threads_read_no_torn_value_from_a_busy_writer() -> None:
    size, n = 16384, 20_000
    mailbox = Mailbox(make_memory(size), size)
    shared = mailbox.arrays
    _publish_many_kernel(*shared, value_of(0, size), 0)
    _read_many_kernel(*shared, value_of(0, size), 0, np.zeros(3, np.int64))
    facts = [np.zeros(3, np.int64) for _ in range(2)]
    readers = [
        threading.Thread(target=_read_many_kernel, args=(*shared, value_of(0, size), n, f))
        for f in facts
    ]
    for reader in readers:
        reader.start()
    _publish_many_kernel(*shared, value_of(0, size), n)
    for reader in readers:
        reader.join(60)
    for whole, torn, fell in facts:
        assert whole > 0
        assert (torn, fell) == (0, 0)


def test_values_of_another_shape_are_refused() -> None:
    mailbox = Mailbox(make_memory(), SIZE)
    with pytest.raises(ConfigError, match=r"shape \(1000,\), got uint8 of shape \(999,\)"):
        mailbox.publish(1, value_of(1)[1:])
    with pytest.raises(ConfigError, match="got float32"):
        mailbox.newer_than(0, np.zeros(SIZE, np.float32))


def test_attaching_names_what_was_found_and_what_was_expected() -> None:
    memory = make_memory()
    with pytest.raises(SharedMemoryError, match="values of 1000 bytes, expected 999"):
        Mailbox(memory, 999)
    with pytest.raises(SharedMemoryError, match="holds no mailbox"):
        Mailbox(aligned(memory.size), SIZE)
    memory.view(np.int64)[16] = 7
    with pytest.raises(SharedMemoryError, match="damaged: latest is 7"):
        Mailbox(memory, SIZE)
