"""How to wait: spin briefly where there are cores to spare, then sleep on an eventfd.

A waiter that is about to sleep says so in a word of shared memory; whoever has something for it
publishes first and looks at that word afterwards. Each side stores, then loads what the other
stores, so both need a full fence in between (Dekker): then one of them at least sees the other.

    SYNC sleep: sleeping = 1; full fence; ready()      -> Waker: publish; full fence; load sleeping

A waker that dies after publishing wakes nobody, so no sleep is longer than MAX_SLEEP_S.
"""

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

from zapex.atomics import Words, fence_full, load_relaxed, store_relaxed
from zapex.jit import kernel
from zapex.machine import Machine

MAX_SLEEP_S = 0.1
_SPIN_S = 20e-6


def spin_seconds(roles: int) -> float:
    """How long a role may spin before it sleeps; 0 where it would take a core from another role.

    roles: how many busy threads share the cores that we may use, a container's limit included.
    """
    return _SPIN_S if Machine.look().cores > roles else 0.0


@kernel
def _declare_kernel(words: Any, i: int, sleeping: int) -> None:
    store_relaxed(words, i, sleeping)
    fence_full()  # SYNC sleep: the declaration before ready() looks


@kernel
def _sleeps_kernel(words: Any, i: int) -> bool:
    fence_full()  # SYNC sleep: what was published before the other side's word is looked at
    return load_relaxed(words, i) != 0


class Waker:
    """Wakes the waiter of one (words, index, eventfd); as many of these as there are producers."""

    def __init__(self, words: Words, index: int, fd: int) -> None:
        self._words, self._index, self._fd = words, index, fd

    def wake(self) -> None:
        """Call it after publishing. No system call unless the waiter sleeps."""
        if _sleeps_kernel(self._words, self._index):
            os.eventfd_write(self._fd, 1)


class Waiter:
    """Waits for anything that the holders of its wakers publish.

    words[index]: 1 while it sleeps or is about to; nobody else writes it.
    fd: a non-blocking eventfd, `os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)`, which stays the
    caller's.
    also: descriptors that wake it too when they are readable; `ready` must empty them.
    """

    def __init__(
        self, words: Words, index: int, fd: int, spin_s: float = 0.0, also: Sequence[int] = ()
    ) -> None:
        self._words, self._index, self._fd = words, index, fd
        self._spin_s = spin_s
        self._poll = select.poll()
        for each in (fd, *also):
            self._poll.register(each, select.POLLIN)
        _declare_kernel(words, index, 0)  # a former life may have died asleep

    def wait(self, ready: Callable[[], object], timeout_s: float) -> bool:
        """Return True as soon as `ready()` is true, False when it was not within `timeout_s`.

        `ready` must look through acquire loads (`ring.tail`, `mailbox.version`).
        """
        if ready():
            return True
        deadline = time.monotonic() + timeout_s
        spin_until = time.monotonic() + min(self._spin_s, timeout_s)
        while time.monotonic() < spin_until:
            if ready():
                return True
            os.sched_yield()
        _declare_kernel(self._words, self._index, 1)
        try:
            while not ready():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                if self._poll.poll(1000 * min(left_s, MAX_SLEEP_S)):
                    self._drain()
        finally:
            _declare_kernel(self._words, self._index, 0)
        return True

    def watch(self, fd: int) -> None:
        """`sleep` ends when this descriptor becomes readable or is hung up, too."""
        self._poll.register(fd, select.POLLIN)

    def forget(self, fd: int) -> None:
        """No more so."""
        self._poll.unregister(fd)

    def sleep(self, ready: Callable[[], object], timeout_s: float) -> list[int]:
        """Sleep once, unless `ready()`, for at most MAX_SLEEP_S; watched descriptors that woke it.

        With a timeout of 0 it only looks at these.
        """
        _declare_kernel(self._words, self._index, 1)
        try:
            timeout_s = 0.0 if ready() else max(0.0, min(timeout_s, MAX_SLEEP_S))
            found = [fd for fd, _ in self._poll.poll(1000 * timeout_s)]
        finally:
            _declare_kernel(self._words, self._index, 0)
        if self._fd in found:
            self._drain()
        return [fd for fd in found if fd != self._fd]

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a stale event: somebody else read it
            os.eventfd_read(self._fd)


def wait_until(ready: Callable[[], object], timeout_s: float) -> bool:
    """Wait for something that nobody wakes us for: look ever less often, at most 1 ms apart.

    Returns True as soon as `ready()` is true, False when it was not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 20e-6
    while not ready():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, 1e-3)
    return True
