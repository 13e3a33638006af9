"""Ends of ZMTP connections without sockets: made, fed with bytes, and joined to each other."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from zapex.zmtp.connection import Connection, Limits, Message
from zapex.zmtp.curve import CurveClient, CurveServer
from zapex.zmtp.handshake import Local, Null

LIMITS = Limits(frame_bytes=1 << 24, frames=20)
ROUTER, DEALER = Local(b"ROUTER"), Local(b"DEALER", b"me")


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
