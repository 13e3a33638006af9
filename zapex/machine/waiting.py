"""Wait: spin for a short time if there are spare cores, then sleep on an eventfd.

Before a waiter sleeps, it stores 1 in a word of shared memory. A process that has data for it
publishes first and then loads that word. Each side stores, and then loads the other side's word, so
both need a full fence between the two (Dekker). Then at least one side sees the other's store.

    SYNC sleep: sleeping = 1; full fence; ready()      -> Waker: publish; full fence; load sleeping

A waker that dies after it published does not wake the waiter, so no sleep is longer than
MAX_SLEEP_S.
"""

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

from zapex.machine.atomics import Words, fence_full, load_relaxed, store_relaxed
from zapex.machine.jit import kernel
from zapex.machine.resources import Machine

MAX_SLEEP_S = 0.1
_SPIN_S = 20e-6


def spin_seconds(roles: int, most_s: float = _SPIN_S) -> float:
    """How long a role may spin before it sleeps; 0 if that would take a core from another role.

    roles: how many busy threads share the cores of this process (within a container's limit).
    """
    return most_s if Machine.look().cores > roles else 0.0


@kernel
def _declare_kernel(words: Any, i: int, sleeping: int) -> None:
    store_relaxed(words, i, sleeping)
    fence_full()  # SYNC sleep: the store comes before ready()


@kernel
def _sleeps_kernel(words: Any, i: int) -> bool:
    fence_full()  # SYNC sleep: the publish comes before the load of the other side's word
    return load_relaxed(words, i) != 0


class Waker:
    """Wakes the waiter of one (words, index, eventfd); each producer has its own."""

    def __init__(self, words: Words, index: int, fd: int) -> None:
        self._words, self._index, self._fd = words, index, fd

    def wake(self) -> None:
        """Call this after a publish. It makes a system call only if the waiter sleeps."""
        if _sleeps_kernel(self._words, self._index):
            os.eventfd_write(self._fd, 1)


class Waiter:
    """Waits until a process that has a waker for it publishes.

    words[index]: 1 while it sleeps or is about to sleep; only the waiter writes it.
    fd: a non-blocking eventfd, `os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)`, owned by the
    caller.
    also: descriptors that wake it too when they are readable; `ready` must drain them.
    """

    def __init__(
        self, words: Words, index: int, fd: int, spin_s: float = 0.0, also: Sequence[int] = ()
    ) -> None:
        self._words, self._index, self._fd = words, index, fd
        self._spin_s = spin_s
        self._poll = select.poll()
        for each in (fd, *also):
            self._poll.register(each, select.POLLIN)
        _declare_kernel(words, index, 0)  # a former incarnation may have died in its sleep

    def wait(self, ready: Callable[[], object], timeout_s: float) -> bool:
        """Return True as soon as `ready()` is true, False when it was not within `timeout_s`.

        `ready` must use acquire loads (`ring.tail`, `mailbox.version`).
        """
        deadline = time.monotonic() + timeout_s
        spin_until = time.monotonic() + min(self._spin_s, timeout_s)
        while time.monotonic() < spin_until:
            if ready():
                return True
            os.sched_yield()
        return rest_until(ready, deadline - time.monotonic(), lambda s: self.sleep(ready, s))

    def watch(self, fd: int) -> None:
        """From now on `sleep` also ends when this descriptor is readable or its peer closed it."""
        self._poll.register(fd, select.POLLIN)

    def forget(self, fd: int) -> None:
        """From now on `sleep` ignores this descriptor."""
        self._poll.unregister(fd)

    def sleep(self, ready: Callable[[], object], timeout_s: float) -> list[int]:
        """Sleep once, unless `ready()`, at most MAX_SLEEP_S; return the descriptors that woke it.

        With a timeout of 0 it only checks these.
        """
        _declare_kernel(self._words, self._index, 1)
        try:
            timeout_s = 0.0 if ready() else max(0.0, min(timeout_s, MAX_SLEEP_S))
            found = [fd for fd, _ in self._poll.poll(1000 * timeout_s)]
        finally:
            _declare_kernel(self._words, self._index, 0)
        if self._fd in found:
            with contextlib.suppress(BlockingIOError):  # a stale event: another reader took it
                os.eventfd_read(self._fd)
        return [fd for fd in found if fd != self._fd]


def rest_until(
    ready: Callable[[], object], timeout_s: float, rest: Callable[[float], object]
) -> bool:
    """Return True as soon as `ready()` is true, False when it was not within `timeout_s`.

    rest: called with the seconds that are left, before each further call of `ready`.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        rest(left_s)
    return True
