"""F-Stack's loop, turned by the code that uses it: packets move only inside `turn`.

`ff_run` calls a function again and again, and moves packets in between. Here that function switches
to the caller, a greenlet, and `turn` switches back. So a duty cycle on F-Stack is the same plain
loop as on the kernel, in the one thread that F-Stack allows, and what it raises is raised there.
"""

import atexit
import ctypes
import time
from dataclasses import dataclass

from zapex.errors import ConfigError
from zapex.fstack import _library
from zapex.fstack._abi import (
    EV_ADD,
    EV_ERROR,
    EV_RECEIPT,
    EVFILT_READ,
    LOOP,
    MOST_ARGUMENTS,
    Kevent,
)

_DRAIN_S = 0.05  # what was sent last, and the ends of connections, still go out
_NO_SOCKETS = (0x7FFF0001, 0x7FFF0002)


@dataclass(frozen=True)
class Setup:
    """What a user names. arguments: more of them for DPDK, separated by spaces."""

    library: str
    config: str
    arguments: str = ""


class NotStarted(ConfigError):
    """F-Stack has refused to start; it prints why."""


class Loop:
    """F-Stack in this process and thread, from its start to its end. There is only one, once.

    Raises ConfigError if the library is not usable. F-Stack ends the process if it cannot start:
    `zapex.fstack.trial` tries it in another process before.
    """

    def __init__(self, setup: Setup) -> None:
        from greenlet import getcurrent, greenlet

        self.calls = _library.load(setup.library)
        self._start(setup)
        self._check_kevent()
        self._users = 0
        self.ended = False
        # Both are C functions: in Python code here a signal's exception would be lost in ctypes.
        self._between_turns = LOOP(getcurrent().switch)  # F-Stack keeps only its address
        self._turning = greenlet(self.calls.ff_run)
        self._turning.switch(self._between_turns, None)
        atexit.register(self.stop)

    def _start(self, setup: Setup) -> None:
        calls = self.calls
        words = [b"zapex", b"-c", setup.config.encode(), b"-t", b"primary", b"-p", b"0"]
        try:
            calls.ff_load_config(len(words), (ctypes.c_char_p * (len(words) + 1))(*words))
            arguments = ctypes.cast(
                ctypes.addressof(calls.dpdk_argv), ctypes.POINTER(ctypes.c_char_p)
            )
            words = [bytes(arguments[i] or b"") for i in range(calls.dpdk_argc.value)]
            words += setup.arguments.encode().split()
            if len(words) > MOST_ARGUMENTS:
                raise ConfigError(f"--fstack-eal: DPDK takes at most {MOST_ARGUMENTS} arguments")
            calls.ff_dpdk_init(len(words), (ctypes.c_char_p * (len(words) + 1))(*words))
            calls.ff_freebsd_init()
            calls.ff_dpdk_if_up()
        except OSError as error:
            raise NotStarted(f"F-Stack cannot start: {error.filename} failed") from None

    def _check_kevent(self) -> None:
        """Two errors come back as two records only if the library's struct has our size."""
        asked = [Kevent(ident=n, filter=EVFILT_READ, flags=EV_ADD | EV_RECEIPT, udata=n)
                 for n in _NO_SOCKETS]  # fmt: skip
        found = (Kevent * 2)()
        queue = self.calls.ff_kqueue()
        self.calls.ff_kevent(queue, (Kevent * 2)(*asked), 2, found, 2, None)
        self.calls.ff_close(queue)
        if [(e.ident, e.udata, e.flags & EV_ERROR) for e in found] != [
            (n, n, EV_ERROR) for n in _NO_SOCKETS
        ]:
            raise ConfigError(
                "--fstack-lib is another version of F-Stack: its struct kevent is not 1.25's"
            )

    def turn(self) -> None:
        """Let packets move once. Only the thread and greenlet that made the loop may call it."""
        self._turning.switch(0)  # what the function that F-Stack calls returns

    def join(self) -> "Loop":
        """One more user."""
        self._users += 1
        return self

    def leave(self) -> None:
        """What this user has sent goes out; the last one ends F-Stack."""
        self._users -= 1
        if self._users:
            self.drain()
        else:
            self.stop()

    def drain(self) -> None:
        """Send out what waits, which takes a moment."""
        until_s = time.monotonic() + _DRAIN_S
        while time.monotonic() < until_s:
            self.turn()

    def stop(self) -> None:
        """Drain, and end F-Stack; nothing of it can be called again in this process."""
        if not self.ended:
            self.drain()
            self.ended = True
            self.calls.ff_stop_run()
            self._turning.switch(0)


_loops: dict[Setup, Loop] = {}


def loop_of(setup: Setup) -> Loop:
    """This process's loop, started once. Raises ConfigError where a second one would be needed."""
    if not _loops:
        _loops[setup] = Loop(setup)
    if setup not in _loops or _loops[setup].ended:
        raise ConfigError("F-Stack was started in this process before; it starts only once")
    return _loops[setup]
