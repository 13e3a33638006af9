"""Memory that processes share: create, attach, hand over, populate, free.

A segment is a memfd: it has no name to leak, dies with its last holder, is reserved with
posix_fallocate (too little memory is an error here and no SIGBUS later) and sealed against
resizing. Children inherit the descriptor; foreign processes are handed it over a Unix socket.
Imports no Numba: the parent of a run uses this file.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zapex.errors import PeerDied, PeerTimeout, SharedMemoryError
from zapex.machine import Machine, memory_fact

Bytes = npt.NDArray[np.uint8]

ALIGNMENT_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not know them
_MADV_POPULATE_WRITE = 23
_MAX_DESCRIPTORS = 253  # SCM_MAX_FD
_libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, releases the GIL
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.mmap.restype = ctypes.c_void_p
_MAP_FIXED = 0x10  # on every architecture that Python runs on under Linux


def view_bytes(buffer: Any, required_bytes: int, what: str) -> Bytes:
    """The first `required_bytes` of a writable, 64-byte aligned buffer, as a uint8 array.

    Raises SharedMemoryError where the buffer is too small, read-only or not aligned.
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
    """Enter the pages of a part of a segment into this process's page table in one go.

    A process that writes to pages which another has populated still takes a fault for each; this is
    several times cheaper. A kernel that cannot do it is left to take the faults.
    """
    start = memory.ctypes.data
    first = start - start % mmap.PAGESIZE
    _libc.madvise(first, start + memory.nbytes - first, _MADV_POPULATE_READ)


def private_bytes(size_bytes: int) -> Bytes:
    """Zeroed memory of this process alone, in huge pages where there are; see `share_in_place`."""
    try:
        mapping = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise SharedMemoryError(
            error.errno, f"cannot reserve {size_bytes} bytes ({error.strerror}); see ulimit -v"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def share_in_place(memory: Bytes, used: Iterable[tuple[int, int]]) -> "Segment":
    """Turn memory of `private_bytes` into a segment, at the same addresses.

    used: (start, stop) of the bytes that matter; the rest becomes zeros. Every array over `memory`
    stays good. Nobody may write to it meanwhile. Raises SharedMemoryError, nothing changed then.
    """
    segment = Segment.create("zapex replay", memory.nbytes)
    for start, stop in used:
        segment.buffer[start:stop] = memory[start:stop]
    # Over the old pages, which go; the mmap object that owns the range unmaps the new ones.
    address = _libc.mmap(
        memory.ctypes.data, memory.nbytes, mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | _MAP_FIXED, segment.fd, 0,
    )  # fmt: skip
    if address != memory.ctypes.data:
        code = ctypes.get_errno()
        segment.close()
        raise SharedMemoryError(code, f"cannot map the segment in place: {os.strerror(code)}")
    return segment


class Segment:
    """One mapped memfd. `buffer` is its uint8 array of shape (size_bytes,), zeroed at creation.

    `name` is only what /proc shows. A segment owns its descriptor `fd`; the mapping itself lives
    until the last array over it is gone.
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
    def create(cls, name: str, size_bytes: int, *, huge_pages: bool = False) -> "Segment":
        """Reserve `size_bytes` of zeroed memory, sealed against resizing.

        With `huge_pages` the size is rounded up to whole ones, and there being too few is an
        error. Raises SharedMemoryError: what was needed, what is free, and what to do.
        """
        if size_bytes <= 0:
            raise SharedMemoryError(f"a segment must have at least 1 byte, got {size_bytes}")
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if huge_pages:
            page_bytes = memory_fact("Hugepagesize") or mmap.PAGESIZE
            size_bytes = -(-size_bytes // page_bytes) * page_bytes
            free_bytes = page_bytes * memory_fact("HugePages_Free")
            mend = f"reserve them: sysctl vm.nr_hugepages={size_bytes // page_bytes}"
            flags |= os.MFD_HUGETLB
        else:
            free_bytes = Machine.look().memory_bytes
            mend = "ask for less (a smaller capacity) or free some memory"
        needed = f"segment {name!r} needs {size_bytes / 2**20:.1f} MiB"
        # A memfd has no file system to fill: past this the kernel would kill, not refuse.
        if size_bytes > free_bytes:
            raise SharedMemoryError(
                errno.ENOSPC, f"{needed}, {free_bytes / 2**20:.1f} MiB are free; {mend}"
            )
        fd = -1
        try:
            fd = os.memfd_create(name, flags)
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size_bytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                mend = "close what is open, or raise the limit: ulimit -n shows and sets it"
            raise SharedMemoryError(
                error.errno,
                f"{needed}: {error.strerror}; {free_bytes / 2**20:.1f} MiB free; {mend}",
            ) from error

    @classmethod
    def attach(cls, fd: int, expected_bytes: int | None = None) -> "Segment":
        """Map a segment that another process created; the descriptor is this segment's from now on.

        Raises SharedMemoryError where `fd` is no memfd sealed against resizing (it could be
        shrunk under us: SIGBUS), or not of `expected_bytes`.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            status = os.fstat(fd)
            size_bytes, page_bytes = status.st_size, status.st_blksize
        except OSError as error:
            raise SharedMemoryError(
                error.errno, f"descriptor {fd} is no shared memory ({error.strerror})"
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

    def populate(self, start: int = 0, stop: int | None = None) -> None:
        """Have the pages of bytes [start, stop) zeroed and mapped; changes no content.

        The first touch of a page costs far more than a write to it; this pays it beforehand.
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
        # A kernel before 5.14. Reading is enough for shared memory, and cannot undo a write that
        # another process makes meanwhile.
        self.buffer[start : stop : mmap.PAGESIZE].max()

    def close(self) -> None:
        """Give the descriptor back and drop this object's view. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.buffer = np.empty(0, np.uint8)

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Populator(threading.Thread):
    """Populates a segment from its start, ahead of the writers, at the lowest priority.

    `populated_bytes` grows; `stop()` ends it within one step; `failure` is what ended it early.
    """

    def __init__(self, segment: Segment, step_bytes: int = 16 << 20) -> None:
        super().__init__(name="populate", daemon=True)
        self.populated_bytes = 0
        self.failure: SharedMemoryError | None = None
        self._segment = segment
        self._step_bytes = step_bytes
        self._stopping = threading.Event()

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while self.populated_bytes < self._segment.size_bytes and not self._stopping.is_set():
            stop = min(self.populated_bytes + self._step_bytes, self._segment.size_bytes)
            try:
                self._segment.populate(self.populated_bytes, stop)
            except SharedMemoryError as error:
                self.failure = error
                return
            self.populated_bytes = stop

    def stop(self, timeout_s: float = 5.0) -> None:
        """End it; call this before the segment is closed."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout_s)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket, as the kernel says."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def _check_private(directory: Path) -> None:
    status = directory.lstat()
    private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700
    if not private or status.st_uid != os.getuid():
        raise SharedMemoryError(
            f"{directory} must be a directory of mode 0700 that belongs to user {os.getuid()}; "
            f"it has mode {stat.S_IMODE(status.st_mode):04o} and belongs to {status.st_uid}"
        )


# What a process is handed: facts (JSON), and descriptors by name.
Offer = tuple[Mapping[str, Any], Mapping[str, int]]


def send_offer(connection: socket.socket, offer: Offer) -> bool:
    """Hand an offer over, never waiting; False where the peer does not listen.

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
    except OSError:  # it went away, or its buffer is full already: not an honest peer
        return False
    return True


def receive_offer(connection: socket.socket, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """(facts, descriptors by name) that the server `name` sends; the descriptors are the caller's.

    Raises TimeoutError, PeerDied where it hung up, SharedMemoryError where it is another user's.
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
        raise PeerDied(f"the owner of {name} hung up without a whole answer: {error}") from error
    return answer["facts"], dict(zip(names, fds, strict=True))


class DescriptorServer:
    """Hands descriptors to processes of the same user that connect to `path`.

    The directory is made with mode 0700 where it is missing and must be private. A stale socket
    file is replaced. `serve_once` is a piece of a duty cycle: it never waits.
    """

    def __init__(self, path: Path, offer: Callable[[int], Offer]) -> None:
        """`offer(pid)` says what the process `pid` is given."""
        self.path = path
        self._offer = offer
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(path.parent)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(str(path))
        except OSError as error:
            self._listener.close()
            raise SharedMemoryError(error.errno, f"cannot listen at {path}: {error}") from error
        self._listener.listen(64)
        self.refused = 0

    def fileno(self) -> int:
        """For poll: readable when somebody wants to be served."""
        return self._listener.fileno()

    def serve_once(self) -> int:
        """Serve one process if one waits; returns how many were served. Other users get nothing."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return 0
        with connection:
            connection.setblocking(False)
            pid, uid = peer_of(connection)
            if uid != os.getuid():
                self.refused += 1
                return 0
            if not send_offer(connection, self._offer(pid)):
                self.refused += 1
                return 0
        return 1

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        self._listener.close()
        self.path.unlink(missing_ok=True)


def receive_descriptors(path: Path, timeout_s: float) -> tuple[dict[str, Any], dict[str, int]]:
    """Ask the server at `path` for (facts, descriptors by name); the descriptors are the caller's.

    Raises PeerTimeout, PeerDied where nobody listens or it hung up, and SharedMemoryError where
    the socket belongs to another user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            return receive_offer(connection, str(path))
        except TimeoutError as error:
            raise PeerTimeout(f"the owner of {path} did not answer in {timeout_s} s") from error
        except (ConnectionError, FileNotFoundError) as error:
            raise PeerDied(f"nobody serves {path}: {error}") from error
