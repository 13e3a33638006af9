"""Memory that processes share: create, attach, send, populate, free.

A segment is a memfd. It leaves no name behind, and the kernel frees it when no process uses it. It
is reserved with posix_fallocate (too little memory is an error, not a SIGBUS) and sealed against
resizing. Children inherit the descriptor; other processes get it over a Unix socket.
This file imports no Numba, because the parent of a run uses it.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zapex.errors import PeerDied, SharedMemoryError
from zapex.machine.resources import Machine, memory_fact, numa_nodes

Bytes = npt.NDArray[np.uint8]

ALIGNMENT_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not know them
_MADV_POPULATE_WRITE = 23
_AGAIN_S = 1e-3  # between two tries to connect
_MAX_DESCRIPTORS = 253  # SCM_MAX_FD
_libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, releases the GIL
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mmap.restype = ctypes.c_void_p
_MAP_FIXED = 0x10  # on every architecture that Python runs on under Linux
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}.get(platform.machine())
_DEFAULT, _INTERLEAVE = 0, 3  # linux/mempolicy.h
_MASK_BITS = 1024  # the most nodes of a kernel

Set = Callable[[int, Collection[int]], None]
"""Sets this thread's policy: a mode, and the nodes that it is for. Raises OSError."""


def view_bytes(buffer: Any, required_bytes: int, what: str) -> Bytes:
    """The first `required_bytes` of a writable, 64-byte aligned buffer, as a uint8 array.

    Raises SharedMemoryError if the buffer is too small, read-only or not aligned.
    """
    view = np.frombuffer(buffer, np.uint8)
    if view.size < required_bytes:
        raise SharedMemoryError(f"{what} needs {required_bytes} bytes, the buffer has {view.size}")
    if not view.flags.writeable:
        raise SharedMemoryError(f"{what} needs a writable buffer, this one is read-only")
    if view.ctypes.data % ALIGNMENT_BYTES:
        raise SharedMemoryError(
            f"{what} needs a buffer aligned to {ALIGNMENT_BYTES} bytes, "
            f"this one starts at address {view.ctypes.data:#x}"
        )
    return view[:required_bytes]


def map_ahead(memory: Bytes) -> None:
    """Map the pages of a part of a segment into this process in one call.

    A process still has one page fault for each page that another process populated. This call is
    several times cheaper. On a kernel without it, the faults happen as usual.
    """
    start = memory.ctypes.data
    first = start - start % mmap.PAGESIZE
    _libc.madvise(first, start + memory.nbytes - first, _MADV_POPULATE_READ)


def private_bytes(size_bytes: int) -> Bytes:
    """Zeroed private memory, in huge pages if there are any; see `share_in_place`."""
    try:
        mapping = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise SharedMemoryError(
            error.errno, f"cannot reserve {size_bytes} bytes ({error.strerror}); see ulimit -v"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def set_policy(mode: int, nodes: Collection[int]) -> None:
    """The system call, which needs no libnuma. Raises OSError."""
    if _SET_MEMPOLICY is None:
        raise OSError(f"no set_mempolicy is known for {platform.machine()}")
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    # The kernel reads one bit less than this number.
    if call(_SET_MEMPOLICY, mode, ctypes.byref(mask) if nodes else None, _MASK_BITS + 1) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def interleaved(wanted: bool, root: Path = Path("/"), setter: Set = set_policy) -> Iterator[None]:
    """Within this context the pages that this thread reserves come from all nodes in turn.

    wanted: otherwise nothing changes, nor on a machine with one node. root: the directory of /sys.
    Raises SharedMemoryError if the kernel refuses.
    """
    nodes = sorted(numa_nodes(root)) if wanted else []
    if len(nodes) < 2:
        yield
        return
    try:
        setter(_INTERLEAVE, nodes)
    except OSError as error:
        raise SharedMemoryError(
            error.errno,
            f"the memory cannot be interleaved over {len(nodes)} NUMA nodes ({error}): leave "
            "--numa out; in a container: docker run --cap-add SYS_NICE",
        ) from error
    try:
        yield
    finally:
        setter(_DEFAULT, ())


def share_in_place(memory: Bytes, used: Iterable[tuple[int, int]]) -> "Segment":
    """Turn memory of `private_bytes` into a segment, at the same addresses.

    used: (start, stop) of the bytes to keep; the rest becomes zeros. Every array over `memory`
    stays valid. No thread may write to it during the call. If it raises
    SharedMemoryError, nothing has changed.
    """
    segment = Segment.create("zapex replay", memory.nbytes)
    for start, stop in used:
        segment.buffer[start:stop] = memory[start:stop]
    # This replaces the old pages; the mmap object that owns the range unmaps the new ones.
    address = _libc.mmap(
        memory.ctypes.data,
        memory.nbytes,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | _MAP_FIXED,
        segment.fd,
        0,
    )
    if address != memory.ctypes.data:
        code = ctypes.get_errno()
        segment.close()
        raise SharedMemoryError(code, f"cannot map the segment in place: {os.strerror(code)}")
    return segment


class Segment:
    """One mapped memfd. `buffer` is its uint8 array of shape (size_bytes,), zeroed at creation.

    `name` is only shown in /proc. A segment owns its descriptor `fd`. The mapping exists until the
    last array over it is deleted.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        try:
            mapping = mmap.mmap(fd, size_bytes)
        except OSError as error:
            raise SharedMemoryError(
                error.errno, f"cannot map {size_bytes} bytes ({error.strerror}); see ulimit -v"
            ) from error
        self.fd = fd
        self.size_bytes = size_bytes
        self.buffer: Bytes = np.frombuffer(mapping, np.uint8)

    @classmethod
    def create(
        cls, name: str, size_bytes: int, *, huge_pages: bool = False, reserve: bool = True
    ) -> "Segment":
        """Make `size_bytes` of zeroed memory, sealed against resizing.

        With `huge_pages` the size is rounded up to whole huge pages; too few of them is an error.
        reserve: False leaves it to `reserve`, because it takes a second for some GiB; huge pages
        are reserved at once in every case.
        Raises SharedMemoryError; its text has the needed and the free memory, and a remedy.
        """
        if size_bytes <= 0:
            raise SharedMemoryError(f"a segment must have at least 1 byte, got {size_bytes}")
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if huge_pages:
            page_bytes = memory_fact("Hugepagesize") or mmap.PAGESIZE
            size_bytes = -(-size_bytes // page_bytes) * page_bytes
            free_bytes = page_bytes * memory_fact("HugePages_Free")
            hint = f"reserve them: sysctl vm.nr_hugepages={size_bytes // page_bytes}"
            flags |= os.MFD_HUGETLB
        else:
            free_bytes = Machine.look().memory_bytes
            hint = "ask for less (a smaller capacity) or free some memory"
        needed = f"segment {name!r} needs {size_bytes / 2**20:.1f} MiB"
        # A memfd has no file system limit: above this, the kernel kills and does not refuse.
        if size_bytes > free_bytes:
            raise SharedMemoryError(
                errno.ENOSPC, f"{needed}, {free_bytes / 2**20:.1f} MiB are free; {hint}"
            )
        fd = -1
        try:
            fd = os.memfd_create(name, flags)
            os.ftruncate(fd, size_bytes)
            if reserve or huge_pages:
                os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size_bytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                hint = "close what is open, or raise the limit: ulimit -n shows and sets it"
            raise SharedMemoryError(
                error.errno,
                f"{needed}: {error.strerror}; {free_bytes / 2**20:.1f} MiB free; {hint}",
            ) from error

    @classmethod
    def attach(cls, fd: int, expected_bytes: int | None = None) -> "Segment":
        """Map a segment that another process created; the segment now owns the descriptor.

        Raises SharedMemoryError if `fd` is not a memfd sealed against resizing (another process
        could shrink it: SIGBUS), or is not of `expected_bytes`.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            status = os.fstat(fd)
            size_bytes, page_bytes = status.st_size, status.st_blksize
        except OSError as error:
            raise SharedMemoryError(
                error.errno, f"descriptor {fd} is not shared memory ({error.strerror})"
            ) from error
        wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if seals & wanted != wanted:
            raise SharedMemoryError(f"descriptor {fd} is not sealed against resizing: not ours")
        if expected_bytes is not None and page_bytes > mmap.PAGESIZE:  # whole huge pages
            expected_bytes = -(-expected_bytes // page_bytes) * page_bytes
        if expected_bytes is not None and size_bytes != expected_bytes:
            raise SharedMemoryError(
                f"descriptor {fd} has {size_bytes} bytes, {expected_bytes} were expected: "
                "both ends must be started from the same config"
            )
        return cls(fd, size_bytes)

    def reserve(self, start: int, stop: int) -> None:
        """Reserve the memory of bytes [start, stop). Raises SharedMemoryError if there is none."""
        try:
            os.posix_fallocate(self.fd, start, stop - start)
        except OSError as error:
            raise SharedMemoryError(
                error.errno,
                f"the replay's memory cannot be reserved: {error.strerror} after "
                f"{start / 2**30:.1f} of {self.size_bytes / 2**30:.1f} GiB; lower --capacity",
            ) from error

    def populate(self, start: int = 0, stop: int | None = None) -> None:
        """Populate the pages of bytes [start, stop); their content does not change.

        The first access to a page takes much longer than later ones. This call does it in advance.
        """
        stop = self.size_bytes if stop is None else min(stop, self.size_bytes)
        start -= start % mmap.PAGESIZE
        if start >= stop:
            return
        address = self.buffer.ctypes.data + start
        if _libc.madvise(address, stop - start, _MADV_POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise SharedMemoryError(code, f"cannot populate the segment: {os.strerror(code)}")
        # A kernel before 5.14. For shared memory a read is enough, and it cannot undo a write of
        # another process.
        self.buffer[start : stop : mmap.PAGESIZE].max()

    def close(self) -> None:
        """Close the descriptor and delete this object's view. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.buffer = np.empty(0, np.uint8)

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Populator(threading.Thread):
    """Reserves and populates a segment from its start, ahead of the writers, at low priority.

    `populated_bytes` grows; `stop()` ends it within one step. Memory that cannot be reserved is the
    `error`, and ends it. If pages cannot be populated, the writers touch them. interleave: pages
    come from all NUMA nodes in turn.
    """

    def __init__(
        self, segment: Segment, step_bytes: int = 16 << 20, *, interleave: bool = False
    ) -> None:
        super().__init__(name="populate", daemon=True)
        self.populated_bytes = 0
        self.error: SharedMemoryError | None = None
        self._segment, self._interleave = segment, interleave
        self._step_bytes = step_bytes
        self._stopping = threading.Event()

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        size_bytes, start, populates = self._segment.size_bytes, 0, True
        try:
            with interleaved(self._interleave):
                while start < size_bytes and not self._stopping.is_set():
                    stop = min(start + self._step_bytes, size_bytes)
                    self._segment.reserve(start, stop)
                    populates = populates and self._populate(start, stop)
                    start = stop
        except SharedMemoryError as error:
            self.error = error

    def _populate(self, start: int, stop: int) -> bool:
        try:
            self._segment.populate(start, stop)
        except SharedMemoryError:
            return False
        self.populated_bytes = stop
        return True

    def stop(self, timeout_s: float = 5.0) -> None:
        """End it; call this before the segment is closed."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout_s)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end of a Unix socket, from the kernel."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def connect_unix(connection: socket.socket, address: str, timeout_s: float) -> None:
    """Connect, and wait while many others do so at this moment. Raises TimeoutError, OSError.

    A Unix socket with a timeout does not wait itself: it raises BlockingIOError.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            connection.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"too many others connect to {address!r}") from None
            time.sleep(_AGAIN_S)


# What a process receives: facts (JSON), and descriptors by name.
Offer = tuple[Mapping[str, Any], Mapping[str, int]]


def send_offer(connection: socket.socket, offer: Offer) -> bool:
    """Send an offer without waiting; False if the peer does not listen.

    Raises SharedMemoryError for too many descriptors.
    """
    facts, descriptors = offer
    if len(descriptors) > _MAX_DESCRIPTORS:
        raise SharedMemoryError(
            f"at most {_MAX_DESCRIPTORS} descriptors fit a message, got {len(descriptors)}"
        )
    message = json.dumps({"facts": facts, "names": list(descriptors)}).encode()
    try:
        socket.send_fds(connection, [message], list(descriptors.values()))
    except OSError:  # the peer is gone, or its buffer is full, which is not normal
        return False
    return True


def receive_offer(connection: socket.socket, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """(facts, descriptors by name) from the server `name`; the caller owns the descriptors.

    Raises TimeoutError, PeerDied if the server closed the connection, SharedMemoryError if the
    server runs as another user.
    """
    if peer_of(connection)[1] != os.getuid():
        raise SharedMemoryError(f"the socket {name} is served by another user")
    message, fds, _, _ = socket.recv_fds(
        connection, 1 << 16, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    try:
        answer = json.loads(message)
        names = answer["names"]
        if len(names) != len(fds):
            raise ValueError(f"{len(names)} names, {len(fds)} descriptors")
    except (ValueError, KeyError, TypeError) as error:
        for fd in fds:
            os.close(fd)
        raise PeerDied(f"the owner of {name} closed the connection too early: {error}") from error
    return answer["facts"], dict(zip(names, fds, strict=True))
