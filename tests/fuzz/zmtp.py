"""What a server does with the bytes of a ZMTP peer, with and without keys.

what must hold   it takes whole messages within its limits, or ends the connection;
                 bytes that come in pieces mean the same as bytes that come at once
"""

import copy
import random
from collections.abc import Callable
from functools import lru_cache

from nacl import bindings

from tests.fuzz import mutation
from tests.fuzz.mutation import Blind
from tests.support.zmtp_peers import (
    DEALER,
    converse,
    curve_ends,
    drain,
    feed,
    null_ends,
)  # fmt: skip
from zapex.fstack import zmtp
from zapex.fstack.zmtp import Connection, Limits

LIMITS = Limits(frame_bytes=1024, frames=4)
MESSAGES = [[b"one"], [b"", b"x" * 300, b"y"]]
_FLAGS = (0, 0, zmtp.MORE, zmtp.COMMAND)


def _judge(make_server: Callable[[], Connection], data: bytes, in_pieces: bool = True) -> bool:
    """Whether a server takes these bytes as a handshake and messages."""
    whole = make_server()
    messages = feed(whole, data)
    if in_pieces:
        cut = make_server()
        assert feed(cut, data, [1 + byte % 40 for byte in data[-64:]]) == messages
        assert (cut.ended, drain(cut)) == (whole.ended, drain(whole))
    for message in messages:
        assert 0 < len(message) <= LIMITS.frames
        assert max(map(len, message)) <= LIMITS.frame_bytes
    return bool(messages) and not whole.ended


def _frame(flags: int, body: bytes) -> bytes:
    return zmtp.frame_header(flags, len(body)) + body


def _changed(part: bytes, draw: random.Random, blind: Blind) -> bytes:
    """Flags and body of a frame with one change."""
    body = [b"", part[1:]]
    if draw.random() < 0.2:
        return bytes((draw.choice(_FLAGS),)) + part[1:]
    mutation.change_body(body, draw, blind)
    return part[:1] + (body[1] if len(body) > 1 else b"")


class NullBytes:
    """The bytes of a peer without keys, as they are."""

    def __init__(self) -> None:
        said = [zmtp.greeting(b"NULL", False)]
        said.append(_frame(zmtp.COMMAND, zmtp.command(b"READY", zmtp.own_properties(DEALER))))
        said.append(_frame(zmtp.COMMAND, zmtp.command(b"PING", b"\0\1context")))
        for message in MESSAGES:
            *first, last = message
            said += [_frame(zmtp.MORE, body) for body in first]
            said.append(_frame(0, last))
        self.seed = b"".join(said)

    def run(self, data: bytes) -> bool:
        """Whether these bytes are taken."""
        return _judge(lambda: null_ends(LIMITS)[0], data)

    def mutate(self, data: bytes, draw: random.Random, blind: Blind) -> bytes:
        """Any bytes changed, or those of one frame, its length made right again."""
        if draw.random() < 0.4:
            return blind(data)
        start, rest = data[: zmtp.GREETING_BYTES], memoryview(data)[zmtp.GREETING_BYTES :]
        parts = []
        try:
            while found := zmtp.parse_header(rest):
                flags, nbytes, at = found
                parts.append(bytes((flags & ~zmtp.LONG,)) + bytes(rest[at : at + nbytes]))
                rest = rest[at + nbytes :]
        except ValueError:
            return blind(data)
        if parts:
            i = draw.randrange(len(parts))
            parts[i] = _changed(parts[i], draw, blind)
        return start + b"".join([_frame(part[0], part[1:]) for part in parts])


def _remember_keys() -> None:
    """Compute with the same keys once: Curve25519 would take most of the time otherwise."""
    for name in ("crypto_scalarmult_base", "crypto_box_beforenm", "crypto_box_open"):
        pure = getattr(bindings, name)
        if not hasattr(pure, "cache_info"):
            setattr(bindings, name, lru_cache(64)(pure))


class CurveBytes:
    """A peer with a key that is admitted: its handshake, then flags and bodies to be encrypted."""

    def __init__(self) -> None:
        _remember_keys()
        said: list[bytes] = []
        server, client = curve_ends(LIMITS)
        converse(server, client, lambda to, data: said.append(data) if to is server else None)
        self._ready = client.mechanism
        parts = [bytes((zmtp.COMMAND,)) + zmtp.command(b"PING", b"\0\1context")]
        for message in MESSAGES:
            *first, last = message
            parts += [bytes((zmtp.MORE,)) + body for body in first]
            parts.append(b"\0" + last)
        self._handshakes = len(said)
        self.seed = mutation.joined([*said, *parts])

    def run(self, data: bytes) -> bool:
        """Whether these parts are taken, after encryption."""
        parts = mutation.split(data)
        client = copy.copy(self._ready)  # its next nonces are the same each time
        said = parts[: self._handshakes]
        for part in parts[self._handshakes :]:
            said.append(_frame(*client.seal(part[0] if part else 0, memoryview(part[1:]))))
        whole = b"".join(said)
        # The pieces take more time than all the rest: they are tried with a quarter.
        return _judge(lambda: curve_ends(LIMITS)[0], whole, in_pieces=sum(data) % 4 == 0)

    def mutate(self, data: bytes, draw: random.Random, blind: Blind) -> bytes:
        """One part changed: rarely one of the handshake, as any change of it is found."""
        parts = mutation.split(data) or [b""]
        first = min(self._handshakes, len(parts) - 1)
        i = draw.randrange(first + 1) if draw.random() < 0.1 else draw.randrange(first, len(parts))
        if i < self._handshakes:
            parts[i] = blind(parts[i])
        else:
            parts[i] = _changed(parts[i], draw, blind)
        return mutation.joined(parts)
