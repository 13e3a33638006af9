"""Files that are whole on the disk before anything names them, and locks."""

import errno
import fcntl
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_whole(path: Path, parts: Iterable[Any]) -> int:
    """Write the parts one after another and sync the file. Returns their crc32."""
    crc = 0
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            crc = zlib.crc32(part, crc)
        file.flush()
        os.fsync(file.fileno())
    return crc


def replace_whole(path: Path, parts: Iterable[Any], temporary: Path | None = None) -> None:
    """Write the parts into a file that replaces `path` once it is on the disk.

    If this fails or the process is killed, the old file is still there.
    """
    temporary = temporary or path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        write_whole(temporary, parts)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def open_to_append(path: Path) -> int:
    """A descriptor of a file, new or not. Raises OSError for a link or a FIFO without a reader."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o666)


def append_whole(path: Path, content: bytes) -> None:
    """Append all of it; if that fails, the file is as it was before."""
    descriptor = open_to_append(path)
    try:
        before, left = os.fstat(descriptor).st_size, memoryview(content)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def free_bytes(directory: Path) -> int:
    """What this user may still write to the disk of a directory."""
    return shutil.disk_usage(directory).free


def is_locked(path: Path) -> bool:
    """Whether a process holds the file's exclusive lock (flock); False where there is no file.

    It holds a shared lock for a moment, so a process that takes the exclusive one must try again.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def why_not_written(code: int, directory: Path | None) -> str:
    """An error number of a write in words, with what the user can do."""
    full = code in (errno.ENOSPC, errno.EDQUOT)
    hint = f"; free space on the disk of {directory}, of older runs for example" if full else ""
    return os.strerror(code) + hint


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
