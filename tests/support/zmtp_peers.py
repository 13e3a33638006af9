"""Ends of ZMTP connections without sockets: made, fed with bytes, and joined to each other.

A client is of this file: zapex has only the server's end.
"""

import os
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from zapex.errors import BadMessage
from zapex.fstack.curve import KEY_BYTES, CurveServer, Random, fields
from zapex.fstack.zmtp import (
    Connection,
    Limits,
    Message,
    Null,
    check_peer,
    command,
    own_properties,
)

LIMITS = Limits(frame_bytes=1 << 24, frames=20)
ROUTER, DEALER = b"ROUTER", b"DEALER"


class CurveClient(CurveServer):
    """A client of CurveServer: the end that knows the server's public key."""

    sent_as, heard_as = b"CurveZMQMESSAGEC", b"CurveZMQMESSAGES"

    def __init__(
        self, socket_type: bytes, public: bytes, secret: bytes, server: bytes,
        random: Random = os.urandom,
    ) -> None:  # fmt: skip
        super().__init__(socket_type, public, secret, lambda key: None, random)
        self._server = server
        self._next = b"WELCOME"

    def start(self) -> list[bytes]:
        """HELLO."""
        nonce = self._next_nonce()
        box = self._sodium.crypto_box(
            bytes(64), b"CurveZMQHELLO---" + nonce, self._server, self._own_secret
        )
        return [command(b"HELLO", b"\1\0" + bytes(72) + self._own_public + nonce + box)]

    def take(self, name: bytes, data: bytes) -> list[bytes]:
        """WELCOME, then READY."""
        if name != self._next:
            raise BadMessage(f"the peer sent {name[:32]!r}, not {self._next.decode()}")
        if name == b"WELCOME":
            self._next = b"READY"
            return [self._initiate(data)]
        nonce, box = fields("READY", data, 8)
        plain = self._unbox(b"CurveZMQREADY---", nonce, box, "READY")
        check_peer(self._socket_type, plain)
        self.done = True
        return []

    def _initiate(self, data: bytes) -> bytes:
        nonce, box = fields("WELCOME", data, 16)
        sodium = self._sodium
        plain = self._opened(
            "WELCOME", sodium.crypto_box_open, bytes(box), b"WELCOME-" + nonce, self._server,
            self._own_secret,
        )  # fmt: skip
        peer, cookie, rest = fields("WELCOME", plain, KEY_BYTES, 96)
        if rest:
            raise BadMessage("WELCOME is too long")
        self._shared = self._opened(
            "WELCOME", sodium.crypto_box_beforenm, bytes(peer), self._own_secret
        )
        vouch_nonce = self._random(16)
        vouch = sodium.crypto_box(
            self._own_public + self._server, b"VOUCH---" + vouch_nonce, bytes(peer), self._secret
        )
        own, sealed = self._box(
            b"CurveZMQINITIATE",
            self._public + vouch_nonce + vouch + own_properties(self._socket_type),
        )
        return command(b"INITIATE", bytes(cookie) + own + sealed)


@cache
def pair_of_keys(number: int) -> tuple[bytes, bytes]:
    """A public and a secret key, always the same ones for a number."""
    from nacl.bindings import crypto_scalarmult_base

    secret = random.Random(number).randbytes(32)
    return crypto_scalarmult_base(secret), secret


def null_ends(limits: Limits = LIMITS, **options: Any) -> tuple[Connection, Connection]:
    """A server and a client without keys."""
    return Connection(Null(ROUTER), limits, **options), Connection(Null(DEALER), LIMITS)


def curve_ends(
    limits: Limits = LIMITS, *, seed: int = 1, server_key: int = 1, **options: Any
) -> tuple[Connection, Connection]:
    """A server and a client with keys; every random byte comes from the seed."""
    draw = random.Random(seed)
    server, client = pair_of_keys(1), pair_of_keys(2)
    users = {client[0]: "learner"}
    return (
        Connection(CurveServer(ROUTER, *server, users.get, draw.randbytes), limits, **options),
        Connection(
            CurveClient(DEALER, *client, pair_of_keys(server_key)[0], draw.randbytes), LIMITS
        ),
    )


def feed(connection: Connection, data: bytes, sizes: Sequence[int] = ()) -> list[list[bytes]]:
    """Give a connection these bytes, in pieces of these sizes and then as large as they fit."""
    messages: list[Message] = []
    at, sizes = 0, list(sizes)
    while at < len(data) and not connection.ended:
        room = connection.room()
        size = min(len(room), len(data) - at, sizes.pop(0) if sizes else len(room))
        room[:size] = data[at : at + size]
        messages += connection.received(size)
        at += size
    return [[bytes(frame) for frame in message] for message in messages]


def drain(connection: Connection) -> bytes:
    """Everything that a connection has to send."""
    sent = bytearray()
    while buffers := connection.outgoing():
        piece = b"".join(buffers)
        connection.sent(len(piece))
        sent += piece
    return bytes(sent)


def converse(
    one: Connection, other: Connection, heard: Callable[[Connection, bytes], None] | None = None
) -> dict[Connection, list[list[bytes]]]:
    """Carry bytes both ways until both are silent: the messages that each has received.

    heard: is told which bytes a connection received.
    """
    messages: dict[Connection, list[list[bytes]]] = {one: [], other: []}
    silent = 0
    while silent < 2:
        data = drain(one)
        silent = 0 if data else silent + 1
        if heard is not None and data:
            heard(other, data)
        messages[other] += feed(other, data)
        one, other = other, one
    return messages
