"""Limits a server's memory and its peers' invalid messages: it disconnects the worst peers.

A connection is judged by the bytes that the transport holds for it, in and out (Listener.held),
and by how often its peer broke the rules.
"""

import ctypes
import os
import threading
import weakref
from contextlib import suppress

from zapex.net.sockets import Listener

_LOOK_S = 0.01
_REST_S = 0.05  # no connection to close: the process itself uses the memory
_ALARM, _CALM = 0.5, 0.25  # shares of the bound: act above the first, until below the second
_STRIKES = 3.0  # invalid messages until a peer is disconnected


def own_bytes(statm: int | None = None) -> int:
    """Resident memory of this process that is not shared; statm: an open /proc/self/statm."""
    if statm is None:
        with open("/proc/self/statm", "rb") as file:
            return own_bytes(file.fileno())
    _, resident, shared, *_ = os.pread(statm, 256, 0).split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


class Guard:
    """Watches the connections of one listener, from a thread of its own.

    bound_bytes: for messages in flight, in addition to the process's memory at the start.
    """

    def __init__(self, listener: Listener, bound_bytes: int) -> None:
        self.bound_bytes = bound_bytes
        self._listener = listener
        # It stays open: a peer that uses up all descriptors must not stop the guard.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._base_bytes = own_bytes(self._statm)
        self._used_before = 0
        self._strikes: dict[bytes, float] = {}
        self.hung_up = 0  # connections that were closed here
        self._libc = ctypes.CDLL(None)
        self._stop = threading.Event()
        args = weakref.ref(self), self._stop
        self._thread = threading.Thread(target=_watch, args=args, name="guard", daemon=True)
        self._thread.start()

    def strike(self, peer: bytes, weight: float = 1.0) -> None:
        """A peer broke the rules. At the third time it is disconnected.

        weight: below 0 for a valid message.
        """
        strikes = self._strikes.pop(peer, 0.0) + weight
        if strikes >= _STRIKES:
            self.hang_up(peer)
        elif strikes > 0:
            self._strikes[peer] = strikes

    def hang_up(self, connection: bytes | int) -> None:
        """Close a connection, and forget its peer's strikes."""
        self._listener.hang_up(connection)
        self.hung_up += 1
        if isinstance(connection, bytes):
            self.forget(connection)

    def forget(self, peer: bytes) -> None:
        """A connection has ended."""
        self._strikes.pop(peer, None)

    def close(self) -> None:
        """Stop watching."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join(5)
            os.close(self._statm)

    def look(self) -> float:
        """Disconnect peers if memory runs out. Returns how long to sleep after it, in seconds."""
        used = own_bytes(self._statm) - self._base_bytes
        # Before the next check has an effect, it may grow by twice the growth since the last one.
        expected = used + 2 * max(0, used - self._used_before)
        self._used_before = used
        if expected > _ALARM * self.bound_bytes:
            with suppress(OSError):  # no descriptor is free now; a later check has one
                return self._make_room()
        return _LOOK_S

    def _make_room(self) -> float:
        """Close the connections that hold the most bytes, until the rest is below _CALM."""
        held = sorted(self._listener.held(), key=lambda one: one[0], reverse=True)
        excess = sum(nbytes for nbytes, _ in held) - int(_CALM * self.bound_bytes)
        acted = excess > 0
        for nbytes, connection in held:
            if excess <= 0:
                break
            self.hang_up(connection)
            excess -= nbytes
        self._libc.malloc_trim(0)
        return _LOOK_S if acted else _REST_S


def _watch(guard: "weakref.ref[Guard]", stop: threading.Event) -> None:
    """Check as long as the guard exists; the thread does not keep an unused guard alive."""
    rest_s = _LOOK_S
    while not stop.wait(rest_s):
        alive = guard()
        if alive is None:
            return
        rest_s = alive.look()
        del alive
