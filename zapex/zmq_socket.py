"""Sockets of a run: their limits, who may connect, and what a network that is not ours demands."""

import ctypes
import os
import resource
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from zapex import addresses, curve_keys
from zapex.curve_keys import RoleKeys
from zapex.errors import ConfigError, PeerError
from zapex.message_header import MAX_PARTS

_DOMAIN = b"zapex"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_HANDSHAKE_S = 10.0
# A smaller part is copied: what pyzmq does to say that a shared one is free again takes longer.
# That is so up to 1 MiB, but a server's guard sees only what is shared wait for a peer.
_COPIED_BYTES, CLIENT_COPIED_BYTES = 1 << 16, 1 << 20
_ENVELOPE_BYTES = 64  # what CURVE adds to a part, and libzmq counts as part of it
# M_MMAP_THRESHOLD (its largest value), M_TRIM_THRESHOLD, M_ARENA_MAX: of malloc.h, mallopt(3)
_MALLOC = {-3: 32 << 20, -1: 256 << 20, -8: 1}
_MESSAGES_PER_PEER = 64  # messages that may wait, in and out, for each connection
# Of a connection, in the kernel (docs/decisions/0012-send-buffers.md); from this far on it is the
# kernel's business again.
SEND_BUFFER_BYTES, _FAR_US = 160 << 10, 200
_SO_BUF_LOCK, _SNDBUF_LOCKED = 72, 1  # of Linux, from 5.15 on
_MIN_RTT_AT = 148  # tcpi_min_rtt, microseconds, in Linux's struct tcp_info
_OPTIONS: dict[int, int] = {
    zmq.LINGER: 0,
    # libzmq's own heartbeats abort the process when a peer is lost whose messages wait to be read
    # (docs/decisions/0010-heartbeats.md); ours is the hello, the kernel's is this:
    zmq.HEARTBEAT_IVL: 0,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 10_000,
    zmq.HANDSHAKE_IVL: int(1000 * _HANDSHAKE_S),
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2000,
    zmq.CONNECT_TIMEOUT: 5000,
    zmq.SNDHWM: _MESSAGES_PER_PEER,
    zmq.RCVHWM: _MESSAGES_PER_PEER,
    zmq.SNDBUF: SEND_BUFFER_BYTES,
}


@dataclass(frozen=True)
class Security:
    """How far the network is trusted.

    keys: this role's and the others' public ones; None: no encryption, no authentication.
    insecure_network: the user says that an address beyond this machine may do without keys.
    """

    keys: RoleKeys | None = None
    insecure_network: bool = False

    @classmethod
    def load(cls, keys_directory: str, role: str, insecure_network: bool) -> "Security":
        """From a directory of `zapex keygen`, "" for none. Raises ConfigError."""
        keys = curve_keys.load(Path(keys_directory), role) if keys_directory else None
        return cls(keys, insecure_network)

    def check(self, url: str, flag: str) -> None:
        """Raises ConfigError for a URL that is none, or that is not safe without keys."""
        if addresses.parse(url, flag).is_loopback or self.keys or self.insecure_network:
            return
        raise ConfigError(
            f"{flag} {url} is reached from other machines, and there are no keys: make them "
            "with `zapex keygen DIR` and give --keys DIR; or say --insecure-network where "
            "everybody who can reach it may read and change everything"
        )


class Gatekeeper:
    """The ZAP handler of one context, as a piece of a duty cycle: who may connect, and as whom.

    libzmq asks it before a peer's first message is read. With keys a peer is the role whose key it
    has; without, anybody who speaks ZMTP 3 (garbage does not, and never gets further).
    """

    def __init__(self, context: "zmq.Context[Any]", keys: RoleKeys | None) -> None:
        self._keys = keys
        self.admitted = self.refused = 0
        self.socket: Any = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)

    def do_work(self, at_most: int = 64) -> int:
        """Answer what is asked."""
        for done in range(at_most):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return done
            self.socket.send_multipart(self._answer(request))
        return at_most

    def _answer(self, request: list[bytes]) -> list[bytes]:
        number = request[1] if len(request) > 1 else b""
        role = self._role(request)
        if role is None:
            self.refused += 1
            return [b"1.0", number, b"400", b"not admitted", b"", b""]
        self.admitted += 1
        return [b"1.0", number, b"200", b"OK", role.encode(), b""]

    def _role(self, request: list[bytes]) -> str | None:
        """The role of a peer, "any" without keys, or None where it has no business here."""
        if len(request) < 6 or request[0] != b"1.0" or request[2] != _DOMAIN:
            return None
        mechanism, credentials = request[5], request[6:]
        if self._keys is None:
            return "any" if mechanism == b"NULL" else None
        if mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
            return None
        from zmq.utils import z85

        return self._keys.role_of(z85.encode(credentials[0]).decode())

    def close(self) -> None:
        """Give the endpoint back."""
        self.socket.close()


class _Context(zmq.Context[Any]):
    """One that can be forgotten.

    pyzmq's own knows its sockets by weak references. Collected in one cycle with them it finds
    none, leaves them open, and waits for them for ever.
    """

    _made: tuple[Any, ...] = ()

    def socket(self, *args: Any, **more: Any) -> Any:
        """A socket that is closed with its context, whoever is collected first."""
        made = super().socket(*args, **more)
        self._made += (made,)
        return made

    def __del__(self) -> None:
        for made in self._made:
            made.close(linger=0)
        super().__del__()


def make_context() -> "zmq.Context[Any]":
    """A context of sockets; the process keeps what large messages took for those that follow.

    glibc gives a freed message's memory back to the system, and every page of the next is faulted
    in anew, in libzmq's threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _MALLOC.items():
            mallopt(option, value)
    return _Context()


def listen(
    context: "zmq.Context[Any]", url: str, security: Security, largest_part_bytes: int
) -> Any:
    """A bound ROUTER, after the check and the Gatekeeper. Raises ConfigError if it is taken."""
    _allow_descriptors()
    router = context.socket(zmq.ROUTER)
    _set(
        router,
        {**_OPTIONS, zmq.MAXMSGSIZE: largest_part_bytes + _ENVELOPE_BYTES, zmq.ROUTER_MANDATORY: 1},
    )
    router.zap_domain = _DOMAIN
    # Without it a peer is let in where no handler answers.
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    if security.keys is not None:
        router.curve_server = True
        router.curve_publickey = security.keys.public.encode()
        router.curve_secretkey = security.keys.secret.encode()
    try:
        router.ipv6 = addresses.parse(url, "--listen").is_ipv6
        router.bind(url)
    except zmq.ZMQError as error:
        router.close()
        raise ConfigError(f"--listen {url} cannot be had: {error.strerror}") from None
    return router


def _allow_descriptors() -> None:
    """As many connections as this user may have: whoever opens many shall not keep others out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def connect(
    context: "zmq.Context[Any]", url: str, security: Security, largest_part_bytes: int
) -> Any:
    """A DEALER that connects, and connects again, by itself; the URL is checked."""
    dealer = context.socket(zmq.DEALER)
    # IMMEDIATE: what is sent while nobody is there is not kept to arrive late and twice.
    _set(
        dealer, {**_OPTIONS, zmq.MAXMSGSIZE: largest_part_bytes + _ENVELOPE_BYTES, zmq.IMMEDIATE: 1}
    )
    if security.keys is not None:
        dealer.curve_serverkey = security.keys.publics[curve_keys.SERVER].encode()
        dealer.curve_publickey = security.keys.public.encode()
        dealer.curve_secretkey = security.keys.secret.encode()
    dealer.ipv6 = addresses.parse(url, "--replay").is_ipv6
    dealer.connect(url)
    return dealer


def _set(socket: Any, options: dict[int, int]) -> None:
    for option, value in options.items():
        socket.setsockopt(option, value)


def let_grow_if_far(frame: Any) -> None:
    """The send buffer of the connection that `frame` came over grows again, where that pays.

    To a peer beyond this machine's own links a small buffer would be the limit: what is under way
    fits into it. Ask after a connection has lived for a while: the kernel remembers the
    shortest round trip.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(frame.get(zmq.SRCFD))) as link:
        if link.family not in (socket.AF_INET, socket.AF_INET6):
            return
        facts = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
        (min_rtt_us,) = struct.unpack_from("=I", facts, _MIN_RTT_AT)
        if min_rtt_us >= _FAR_US:
            locked = link.getsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK)
            link.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, locked & ~_SNDBUF_LOCKED)


def receive(socket: Any) -> list[Any] | None:
    """The parts (zmq.Frame) of the next message, at most two more than any may have; or None.

    What comes behind those is thrown away as it comes: a peer cannot make a list of a million.
    """
    try:
        parts = [socket.recv(zmq.NOBLOCK, copy=False)]
    except zmq.Again:
        return None
    more = parts[0].more
    while more:
        part = socket.recv(zmq.NOBLOCK, copy=False)
        more = part.more
        if len(parts) < MAX_PARTS + 2:
            parts.append(part)
    return parts


def send(socket: Any, parts: Sequence[Any], copied_bytes: int = _COPIED_BYTES) -> Any | None:
    """Send without waiting and without copying parts of `copied_bytes` or more.

    Returns a tracker whose `done` says that libzmq has let go of all parts; None where the message
    could not go. Raises PeerError where the peer is not there.
    """
    last = len(parts) - 1
    shared = []  # send_multipart would return the last part's tracker alone
    try:
        for i, part in enumerate(parts):
            flags = zmq.NOBLOCK | (zmq.SNDMORE if i < last else 0)
            if len(part) < copied_bytes:
                socket.send(part, flags)
            else:
                shared.append(socket.send(part, flags, copy=False, track=True))
    except zmq.Again:
        return None
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            raise PeerError("the peer is gone") from None
        raise
    return zmq.MessageTracker(*shared)
