"""How kernels are compiled: no GIL, cached under a key made of all their sources.

Numba's own cache looks only at the file of the outermost function, so a kernel that inlines one
from another file would go on running the old code after an edit. Here the cache directory's name
holds a hash of every source file with kernels in it: an edit of any is a new directory.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_MAX_CACHES = 8


def _sources_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source = path.read_bytes()
        if b"zapex.jit" in source or b"llvmlite" in source:
            digest.update(path.name.encode())
            digest.update(source)
    return digest.hexdigest()[:16]


def _own_directory(path: Path) -> bool:
    """Make `path` if need be; true when it is ours alone to write (a cache is executable code)."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError:
        return False
    ours = not path.is_symlink() and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return ours and os.access(path, os.W_OK)


def _cache_directory() -> Path | None:
    """Where compiled kernels go, or None when no directory can be trusted and written."""
    home_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    fallback = Path(tempfile.gettempdir()) / f"zapex-{os.getuid()}"
    for root in (Path(home_cache) / "zapex", fallback):
        if _own_directory(root):
            _forget_old_caches(root)
            return root / f"kernels-{_sources_hash()}"
    return None


def _forget_old_caches(root: Path) -> None:
    """Keep the newest few: each edit of a source leaves a directory behind."""
    caches = sorted(root.glob("kernels-*"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in caches[_MAX_CACHES:]:
        for file in old.rglob("*"):
            if file.is_file():
                file.unlink(missing_ok=True)


CACHE_DIRECTORY = _cache_directory()


def kernel(function: F) -> F:
    """Compile `function` with Numba: releases the GIL, cached on disk where that is possible."""
    import numba  # here, so that the parent of a run can look at CACHE_DIRECTORY without it

    # CACHE_DIR is read once, when the decorator runs; a user's own kernels keep their own place.
    before = numba.config.CACHE_DIR
    if CACHE_DIRECTORY is not None:
        numba.config.CACHE_DIR = str(CACHE_DIRECTORY)
    try:
        compiled = numba.njit(nogil=True, cache=CACHE_DIRECTORY is not None)(function)
    finally:
        numba.config.CACHE_DIR = before
    return cast(F, compiled)
