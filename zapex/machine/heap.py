"""What malloc keeps of the memory that this process frees (mallopt(3)); only glibc can be told."""

import ctypes

# Of malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8
_LARGEST_THRESHOLD = 32 << 20


def set_option(option: int, value: int) -> None:
    """Set an option of glibc's malloc; elsewhere nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)


def keep_memory() -> None:
    """From now on this process keeps the memory of large messages for later ones.

    By default glibc returns a freed message's memory to the system. Then the next message has a
    page fault for every page.
    """
    set_option(M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
    set_option(M_TRIM_THRESHOLD, 256 << 20)
    set_option(M_ARENA_MAX, 1)
