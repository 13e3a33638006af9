"""Segments: reserved or refused, sealed, passed to our own user only, freed with their holders."""

import contextlib
import errno
import json
import mmap
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from zapex.errors import PeerDied, SharedMemoryError
from zapex.machine import segment as shm_segment
from zapex.machine.resources import Machine, memory_fact
from zapex.machine.segment import (
    Populator,
    Segment,
    connect_unix,
    map_ahead,
    peer_of,
    receive_offer,
    send_offer,
)

MIB = 1 << 20


def test_segment_is_zeroed_and_shared() -> None:
    with Segment.create("test", MIB) as first:
        assert first.buffer.shape == (MIB,)
        assert not first.buffer.any()
        with Segment.attach(os.dup(first.fd), MIB) as second:
            second.buffer[MIB - 1] = 9
            assert first.buffer[MIB - 1] == 9


def test_segment_is_sealed_against_resizing() -> None:
    with Segment.create("test", 8192) as segment:
        for size in (4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size)


def test_closing_leaves_no_descriptor_and_no_name() -> None:
    before, names = os.listdir("/proc/self/fd"), os.listdir("/dev/shm")
    segment = Segment.create("test", 4096)
    assert os.listdir("/dev/shm") == names
    segment.close()
    assert os.listdir("/proc/self/fd") == before


def test_too_much_is_refused_with_what_is_needed_and_what_is_free() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(SharedMemoryError, match=r"needs .* MiB, .* MiB are free; ask for less"):
        Segment.create("test", Machine.look().memory_bytes * 2)
    assert os.listdir("/proc/self/fd") == before


def test_memory_that_runs_out_while_it_is_reserved_is_an_error_and_no_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_space(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shm_segment.os, "posix_fallocate", no_space)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(SharedMemoryError, match="No space left on device") as caught:
        Segment.create("test", MIB)
    assert caught.value.errno == 28
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.skipif(memory_fact("HugePages_Free") == 0, reason="no huge pages are reserved here")
def test_segment_of_huge_pages_is_rounded_up() -> None:
    with Segment.create("test", 5, huge_pages=True) as segment:
        assert segment.size_bytes == memory_fact("Hugepagesize")
        segment.populate()
        segment.buffer[4] = 7
        with Segment.attach(os.dup(segment.fd), 5) as other:
            shm_segment.map_ahead(other.buffer[3:5])
            assert other.buffer[4] == 7
        with pytest.raises(SharedMemoryError, match="were expected"):
            Segment.attach(segment.fd, memory_fact("Hugepagesize") + 1)


@pytest.mark.parametrize("pages", [1 << 12, 1 << 21])
def test_the_expected_size_is_counted_in_the_pages_that_the_segment_has(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the test above, where no huge pages are reserved: 2 MiB is one of them or many others."""
    segment = Segment.create("test", 2 * MIB)
    facts = os.fstat(segment.fd)
    status = types.SimpleNamespace(st_size=facts.st_size, st_blksize=pages)
    monkeypatch.setattr(shm_segment.os, "fstat", lambda fd: status)
    if pages == 1 << 21:
        Segment.attach(os.dup(segment.fd), 5).close()
    else:
        with pytest.raises(SharedMemoryError, match="2097152 bytes, 5 were expected"):
            Segment.attach(segment.fd, 5)
    segment.close()


def test_too_few_descriptors_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(shm_segment.os, "memfd_create", no_descriptor)
    with pytest.raises(SharedMemoryError, match=r"Too many open files; .*ulimit -n") as caught:
        Segment.create("test", MIB)
    assert "ask for less" not in str(caught.value)


def test_only_sealed_segments_are_attached(tmp_path: Path) -> None:
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(SharedMemoryError, match="not sealed against resizing"):
        Segment.attach(unsealed)
    os.close(unsealed)
    read_end, write_end = os.pipe()
    with pytest.raises(SharedMemoryError, match="not shared memory"):
        Segment.attach(read_end)
    os.close(read_end)
    os.close(write_end)


def test_a_segment_of_another_size_is_not_attached() -> None:
    segment = Segment.create("test", 4096)
    with pytest.raises(SharedMemoryError, match="has 4096 bytes, 8192 were expected"):
        Segment.attach(segment.fd, 8192)
    segment.close()


@pytest.mark.parametrize("old_kernel", [False, True])
def test_populating_changes_nothing_and_maps_the_pages(
    old_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old_kernel:
        monkeypatch.setattr(shm_segment, "_MADV_POPULATE_WRITE", 9999)  # EINVAL
    with Segment.create("test", 4 * MIB) as segment:
        segment.buffer[MIB + 5] = 3
        segment.populate(MIB + 1, 2 * MIB)
        segment.populate(5 * MIB, 6 * MIB)  # past the end: nothing
        segment.populate()
        assert segment.buffer[MIB + 5] == 3
        assert segment.buffer.sum() == 3
        resident_kib = 0
        for line in Path("/proc/self/smaps").read_text().split("memfd:test")[1].splitlines():
            if line.startswith("Rss:"):
                resident_kib = int(line.split()[1])
                break
        assert resident_kib == 4096


def test_the_populator_reaches_the_end_at_the_lowest_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priorities: list[int] = []
    with Segment.create("test", 4 * MIB) as segment:
        populate = segment.populate

        def watched(start: int, stop: int) -> None:
            priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            populate(start, stop)

        monkeypatch.setattr(segment, "populate", watched)
        populator = Populator(segment, step_bytes=MIB)
        populator.start()
        populator.join(60)
        assert populator.populated_bytes == 4 * MIB
    assert priorities == [19] * 4
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19


def test_populator_ends_at_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(start: int, stop: int) -> None:
        raise SharedMemoryError(12, "cannot allocate")

    with Segment.create("test", 4096) as segment:
        monkeypatch.setattr(segment, "populate", fail)
        populator = Populator(segment)
        populator.start()
        populator.join(60)
        assert not populator.is_alive()
        assert populator.populated_bytes == 0


def test_the_populator_reserves_what_was_not_reserved_at_the_start() -> None:
    with Segment.create("test", 4 * MIB, reserve=False) as segment:
        assert os.fstat(segment.fd).st_blocks == 0
        populator = Populator(segment, step_bytes=MIB)
        populator.start()
        populator.join(60)
        assert os.fstat(segment.fd).st_blocks * 512 == 4 * MIB
        assert (populator.populated_bytes, populator.error) == (4 * MIB, None)


def test_unreservable_memory_is_the_populators_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.posix_fallocate

    def full(fd: int, start: int, size_bytes: int) -> None:
        if start >= 2 * MIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, start, size_bytes)

    with Segment.create("test", 4 * MIB, reserve=False) as segment:
        monkeypatch.setattr(os, "posix_fallocate", full)
        populator = Populator(segment, step_bytes=MIB)
        populator.start()
        populator.join(60)
        assert populator.populated_bytes == 2 * MIB
        assert "No space left on device after 0.0 of 0.0 GiB; lower --capacity" in str(
            populator.error
        )


def test_the_populator_stops_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with Segment.create("test", 64 * MIB) as segment:
        monkeypatch.setattr(segment, "populate", lambda start, stop: time.sleep(0.01))
        populator = Populator(segment, step_bytes=4096)
        populator.start()
        populator.stop()
        assert not populator.is_alive()
        assert populator.populated_bytes < 64 * MIB


@contextlib.contextmanager
def listening(name: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + name)
        listener.listen()
        listener.settimeout(60)
        yield listener


def test_memory_is_sent_to_a_foreign_process(tmp_path: Path) -> None:
    code = (
        "import sys, json, socket\n"
        "from zapex.machine.segment import Segment, receive_offer\n"
        "connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "connection.connect(chr(0) + sys.argv[1])\n"
        "facts, fds = receive_offer(connection, sys.argv[1])\n"
        "segment = Segment.attach(fds['memory'], facts['bytes'])\n"
        "segment.buffer[0] = 77\n"
        "print(json.dumps([facts, sorted(fds)]))\n"
    )
    with Segment.create("test", 4096) as segment, listening(str(tmp_path)) as listener:
        event = os.eventfd(0)
        command = [sys.executable, "-c", code, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
            connection, _ = listener.accept()
            with connection:
                assert peer_of(connection) == (peer.pid, os.getuid())
                offer = {"bytes": 4096}, {"memory": segment.fd, "event": event}
                assert send_offer(connection, offer)
                answer, _ = peer.communicate(timeout=60)
        assert json.loads(answer) == [{"bytes": 4096}, ["event", "memory"]]
        assert segment.buffer[0] == 77
        os.close(event)


def test_offer_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        monkeypatch.setattr(shm_segment, "peer_of", lambda connection: (1, os.getuid() + 1))
        assert send_offer(theirs, ({}, {}))
        with pytest.raises(SharedMemoryError, match="served by another user"):
            receive_offer(mine, "them")


def test_offer_without_listener_and_cut_answer() -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        theirs.send(b"{")
        with pytest.raises(PeerDied, match="closed the connection too early"):
            receive_offer(mine, "them")
        mine.close()
        assert not send_offer(theirs, ({}, {}))


def test_mapping_ahead_changes_nothing_and_spares_the_faults() -> None:
    pages = 256
    with Segment.create("test", pages * mmap.PAGESIZE) as segment:
        segment.populate()
        segment.buffer[:] = 7
        with Segment.attach(os.dup(segment.fd)) as other:
            middle = other.buffer[10 : pages * mmap.PAGESIZE - 10]
            map_ahead(middle)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            middle[:: mmap.PAGESIZE] = 8
            assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages // 2
            assert (segment.buffer[10 :: mmap.PAGESIZE] == 8).all()
            assert (segment.buffer == 7).sum() == (pages * mmap.PAGESIZE) - pages


def test_a_connection_waits_while_very_many_others_connect() -> None:
    address = f"\0zapex-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(1)

        def connected(timeout_s: float) -> socket.socket:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            made.settimeout(timeout_s)
            connect_unix(made, address, timeout_s)
            return made

        with contextlib.ExitStack() as opened:
            for _ in range(2):  # as many as may wait
                opened.enter_context(connected(5))
            with pytest.raises(TimeoutError, match="too many others"):
                connected(0.01)

            def answer() -> None:
                listener.accept()[0].close()

            timer = threading.Timer(0.05, answer)
            timer.start()
            opened.enter_context(connected(5))
            timer.join()
