"""Segments: reserved or refused, sealed, handed to our own user only, gone with their holders."""

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
from pathlib import Path

import numpy as np
import pytest

from zapex import shm_segment
from zapex.errors import PeerDied, PeerTimeout, SharedMemoryError
from zapex.machine import Machine, memory_fact
from zapex.shm_segment import DescriptorServer, Populator, Segment, map_ahead, receive_descriptors

MIB = 1 << 20


def test_a_segment_is_zeroed_and_shared_by_whoever_attaches() -> None:
    with Segment.create("test", MIB) as first:
        assert first.buffer.shape == (MIB,)
        assert not first.buffer.any()
        with Segment.attach(os.dup(first.fd), MIB) as second:
            second.buffer[MIB - 1] = 9
            assert first.buffer[MIB - 1] == 9


def test_a_child_that_inherits_the_descriptor_sees_the_same_memory() -> None:
    code = (
        "import sys\nfrom zapex.shm_segment import Segment\n"
        "assert 'numba' not in sys.modules\n"
        "Segment.attach(int(sys.argv[1]), 4096).buffer[:3] = 1, 2, 3\n"
    )
    with Segment.create("test", 4096) as segment:
        command = [sys.executable, "-c", code, str(segment.fd)]
        subprocess.run(command, pass_fds=[segment.fd], check=True, timeout=60)
        assert segment.buffer[:4].tolist() == [1, 2, 3, 0]


def test_a_segment_cannot_be_resized() -> None:
    with Segment.create("test", 8192) as segment:
        for size in (4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size)


def test_arrays_outlive_the_segment_that_they_came_from() -> None:
    segment = Segment.create("test", 4096)
    view = segment.buffer[:8].view(np.int64)
    segment.close()
    segment.close()
    view[0] = 5
    assert view[0] == 5


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


def test_too_few_huge_pages_are_refused_with_the_command_that_reserves_them() -> None:
    pages = memory_fact("HugePages_Free") + 3
    size = pages * (memory_fact("Hugepagesize") or 2 * MIB)
    with pytest.raises(SharedMemoryError, match=r"sysctl vm.nr_hugepages=\d+"):
        Segment.create("test", size, huge_pages=True)


@pytest.mark.skipif(memory_fact("HugePages_Free") == 0, reason="no huge pages are reserved here")
def test_a_segment_of_huge_pages_is_rounded_up_to_whole_ones_and_attached() -> None:
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


def test_too_few_descriptors_are_said_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(shm_segment.os, "memfd_create", no_descriptor)
    with pytest.raises(SharedMemoryError, match=r"Too many open files; .*ulimit -n") as caught:
        Segment.create("test", MIB)
    assert "ask for less" not in str(caught.value)


def test_what_is_no_sealed_segment_is_not_attached(tmp_path: Path) -> None:
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(SharedMemoryError, match="not sealed against resizing"):
        Segment.attach(unsealed)
    os.close(unsealed)
    read_end, write_end = os.pipe()
    with pytest.raises(SharedMemoryError, match="no shared memory"):
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
        assert populator.failure is None
    assert priorities == [19] * 4
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19


def test_the_populator_keeps_what_made_it_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(start: int, stop: int) -> None:
        raise SharedMemoryError(12, "cannot allocate")

    with Segment.create("test", 4096) as segment:
        monkeypatch.setattr(segment, "populate", fail)
        populator = Populator(segment)
        populator.start()
        populator.join(60)
        assert populator.failure is not None
        assert populator.populated_bytes == 0


def test_the_populator_stops_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with Segment.create("test", 64 * MIB) as segment:
        monkeypatch.setattr(segment, "populate", lambda start, stop: time.sleep(0.01))
        populator = Populator(segment, step_bytes=4096)
        populator.start()
        populator.stop()
        assert not populator.is_alive()
        assert populator.populated_bytes < 64 * MIB


def ask(path: Path) -> subprocess.Popen[str]:
    """A foreign process that asks for what is at `path` and writes into the segment."""
    code = (
        "import sys, json\nfrom pathlib import Path\n"
        "from zapex.shm_segment import Segment, receive_descriptors\n"
        "facts, fds = receive_descriptors(Path(sys.argv[1]), 30)\n"
        "segment = Segment.attach(fds['memory'], facts['bytes'])\n"
        "segment.buffer[0] = 77\n"
        "print(json.dumps([facts, sorted(fds)]))\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_foreign_process_is_handed_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "run" / "socket"
    asked: list[int] = []
    with Segment.create("test", 4096) as segment:
        event = os.eventfd(0)

        def offer(pid: int) -> shm_segment.Offer:
            asked.append(pid)
            return {"bytes": 4096}, {"memory": segment.fd, "event": event}

        server = DescriptorServer(path, offer)
        assert server.serve_once() == 0
        peer = ask(path)
        deadline = time.monotonic() + 60
        while not server.serve_once():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        answer, _ = peer.communicate(timeout=60)
        assert json.loads(answer) == [{"bytes": 4096}, ["event", "memory"]]
        assert asked == [peer.pid]
        assert segment.buffer[0] == 77
        server.close()
        assert not path.exists()
        os.close(event)


def test_another_user_is_handed_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run" / "socket"
    server = DescriptorServer(path, lambda pid: pytest.fail("offered"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(path))
        monkeypatch.setattr(shm_segment, "peer_of", lambda connection: (1, os.getuid() + 1))
        assert server.serve_once() == 0
        assert server.refused == 1
        assert stranger.recv(100) == b""
        with pytest.raises(SharedMemoryError, match="served by another user"):
            receive_descriptors(path, 1)
    server.close()


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir(mode=0o755)
    with pytest.raises(SharedMemoryError, match=r"mode 0700 .* it has mode 0755"):
        DescriptorServer(directory / "socket", lambda pid: ({}, {}))


def test_asking_has_a_deadline_and_says_who_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "run" / "socket"
    with pytest.raises(PeerDied, match="nobody serves"):
        receive_descriptors(path, 1)
    server = DescriptorServer(path, lambda pid: ({}, {}))
    with pytest.raises(PeerTimeout, match=r"did not answer in 0.05 s"):
        receive_descriptors(path, 0.05)
    server.serve_once()  # it is gone by now: served or refused, nobody is hurt
    assert server.serve_once() == 0
    server.close()


def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run" / "socket"
    first = DescriptorServer(path, lambda pid: ({}, {}))
    first._listener.close()  # died: the file stays
    second = DescriptorServer(path, lambda pid: ({}, {}))
    second.close()


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
