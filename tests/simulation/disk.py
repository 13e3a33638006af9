"""A disk whose power may be cut: what may be in a directory afterwards, by POSIX's promises alone.

What a file held at its last fsync is there. A name that was made, replaced or removed before the
directory's last fsync is so. Everything later may be there or not, each for itself; of a file's
later content any part may be there.
"""

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Killed(BaseException):
    """The process that writes is gone; what it wrote is still in the machine's memory."""


@dataclass(eq=False)
class File:
    """What it holds, and what of it is on the disk for certain."""

    now: bytes = b""
    synced: bytes | None = None


class Disk:
    """Watches one directory while it is entered.

    look: called before each operation that matters, and at the end.
    """

    def __init__(self, folder: Path, look: Callable[[], object]) -> None:
        self._folder, self._look = folder, look
        self._stops: tuple[int, type] | None = None
        self._now: dict[str, File] = {}
        self._durable: dict[str, File] = {}
        self._pending: list[tuple[str, File | None]] = []  # a name, and its file or None
        self.operations = 0
        self._real = {name: getattr(os, name) for name in ("fsync", "replace", "unlink")}

    def __enter__(self) -> Self:
        for name in self._real:
            setattr(os, name, getattr(self, f"_{name}"))
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, call in self._real.items():
            setattr(os, name, call)
        self._see()
        self._look()

    def process(self, stops: tuple[int, type] | None) -> Self:
        """For the next process. At its operation of this number this is raised; None: at none."""
        self._stops, self.operations = stops, 0
        return self

    def cut(self, into: Path, rng: random.Random) -> None:
        """What may be on the disk now, in a new directory."""
        names, share = dict(self._durable), rng.choice((0.0, 0.5, 0.5, 1.0))
        for name, file in self._pending:
            if rng.random() < share:
                names.pop(name, None)
                if file is not None:
                    names[name] = file
        into.mkdir()
        for name, file in names.items():
            (into / name).write_bytes(self._content(file, rng))

    @staticmethod
    def _content(file: File, rng: random.Random) -> bytes:
        if file.synced == file.now:
            return file.now
        some = rng.randint(0, len(file.now))
        torn = (file.now[:some], bytes(some) + file.now[some:], file.now, file.synced or b"")
        return rng.choice(torn)

    def _see(self) -> None:
        """New names, new content."""
        for path in self._folder.iterdir():
            file = self._now.get(path.name)
            if file is None:
                file = self._now[path.name] = File()
                self._pending.append((path.name, file))
            file.now = path.read_bytes()

    def _before(self) -> None:
        self._see()
        self._look()
        self.operations += 1
        if self._stops is not None and self.operations == self._stops[0]:
            raise OSError(errno.EIO, "EIO") if self._stops[1] is OSError else self._stops[1]

    def _ours(self, path: Any) -> bool:
        return Path(path).parent == self._folder

    def _fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path == self._folder or self._ours(path):
            self._before()
        self._real["fsync"](descriptor)
        if path == self._folder:
            self._durable, self._pending = dict(self._now), []
        elif self._ours(path):
            self._now[path.name].synced = self._now[path.name].now

    def _replace(self, source: Any, target: Any) -> None:
        if self._ours(target):
            self._before()
            file = self._now.pop(Path(source).name)
            self._now[Path(target).name] = file
            self._pending += [(Path(target).name, file), (Path(source).name, None)]
        self._real["replace"](source, target)

    def _unlink(self, path: Any) -> None:
        if self._ours(path) and Path(path).exists():
            self._before()
            self._now.pop(Path(path).name)
            self._pending.append((Path(path).name, None))
        self._real["unlink"](path)
