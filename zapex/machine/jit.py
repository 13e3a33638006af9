"""Compile kernels: without the GIL, and cached under a hash of all their sources.

Numba's own cache checks only the file of the outermost function, so after an edit a kernel that
inlines one from another file would still run the old code. Here the cache directory's name has a
hash of all source files with kernels, so an edit of one of them makes a new directory.
"""

import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_MAX_CACHES = 8


def _sources_hash() -> str:
    digest = hashlib.sha256()
    package = Path(__file__).parent.parent
    for path in sorted(package.rglob("*.py")):
        source = path.read_bytes()
        if b"zapex.machine.jit" in source or b"llvmlite" in source:
            digest.update(str(path.relative_to(package)).encode())
            digest.update(source)
    return digest.hexdigest()[:16]


def _own_directory(path: Path) -> bool:
    """Create `path` if missing. True if only this user may write to it: it holds code."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError:
        return False
    ours = not path.is_symlink() and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return ours and os.access(path, os.W_OK)


def _cache_directory() -> Path | None:
    """The directory of compiled kernels, or None if none can be trusted and written."""
    home_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    fallback = Path(tempfile.gettempdir()) / f"zapex-{os.getuid()}"
    for root in (Path(home_cache) / "zapex", fallback):
        if _own_directory(root):
            _forget_old_caches(root)
            return root / f"kernels-{_sources_hash()}"
    return None


def _forget_old_caches(root: Path) -> None:
    """Keep the newest directories: each edit of a source makes another one."""
    caches = sorted(root.glob("kernels-*"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in caches[_MAX_CACHES:]:
        for file in old.rglob("*"):
            if file.is_file():
                file.unlink(missing_ok=True)


CACHE_DIRECTORY = _cache_directory()
_FORK_HOOKS: list[Any] = []  # one, once a kernel is made


def _prepare_numba() -> None:
    """Let a fork wait for Numba's lock: a child would never get one that was held.

    And say when the first kernel of all is compiled.
    """
    from numba.core import event
    from numba.core.compiler_lock import global_compiler_lock as lock

    if not _FORK_HOOKS:
        _FORK_HOOKS.append(lock)
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )

        class FirstCompilation(event.Listener):  # type: ignore[misc]
            def on_start(self, event: Any) -> None:
                if event.data["dispatcher"].py_func.__module__.startswith("zapex."):
                    _say_that_it_compiles()

            def on_end(self, event: Any) -> None:
                pass

        event.register("numba:compile", FirstCompilation())


@functools.cache
def _say_that_it_compiles() -> None:
    """Print a line; with a cache, only in the first process that uses it."""
    try:
        if CACHE_DIRECTORY is not None:
            CACHE_DIRECTORY.mkdir(exist_ok=True)
            (CACHE_DIRECTORY / "first").touch(exist_ok=False)
    except OSError:
        return
    text = "zapex: compiling kernels, about 12 s; later processes load them from a cache"
    print(text, file=sys.stderr, flush=True)


def kernel(function: F) -> F:
    """Compile `function` with Numba: releases the GIL, cached on disk if possible."""
    import numba  # here, so that the parent of a run can read CACHE_DIRECTORY without it

    _prepare_numba()
    # CACHE_DIR is read once, when the decorator runs; users' kernels keep their directory.
    before = numba.config.CACHE_DIR
    if CACHE_DIRECTORY is not None:
        numba.config.CACHE_DIR = str(CACHE_DIRECTORY)
    try:
        compiled = numba.njit(nogil=True, cache=CACHE_DIRECTORY is not None)(function)
    finally:
        numba.config.CACHE_DIR = before
    return cast(F, compiled)
