"""Hostile peers, each a process.

    python -m tests.support.hostile_peers BEHAVIOUR URL SECONDS

    garbage     connections that send random bytes, and are made again as soon as they are ended
    noise       whole ZeroMQ messages that are none of ours
    endless     a message whose parts never end
    pushes      a relay's chunks, as fast as they go, whatever its credit
    deaf        a learner that asks and asks, and reads no answer
    half-open   connections that begin a greeting and say no more

They know the schema and settings of transport_rigs.py.
"""

import os
import random
import selectors
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import zmq

from tests.support.transport_rigs import CONFIG, SCHEMA, form_of, layout_of
from zapex.errors import ZapexError
from zapex.wire import messages as m
from zapex.wire.protocol import Kind, RawMessage

_CONNECTIONS = 200
_FORM = form_of(layout_of(400))


def _hello(role: str, channel: int) -> m.Hello:
    return m.Hello(role, 1000 + os.getpid(), 1, channel, SCHEMA.hash, 1, CONFIG)


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 0)


def _dealer(url: str, **options: int) -> Any:
    dealer: Any = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    dealer.reconnect_ivl = 20
    for name, value in options.items():
        setattr(dealer, name, value)
    dealer.connect(url)
    return dealer


def garbage(url: str, over: Callable[[], bool]) -> int:
    """Random bytes on many raw connections. Returns how many were sent."""
    selector, sent = selectors.DefaultSelector(), 0
    data = memoryview(random.Random(1).randbytes(1 << 20))
    while not over():
        while len(selector.get_map()) < _CONNECTIONS:
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(_address(url))
            selector.register(sock, selectors.EVENT_WRITE)
        for key, _ in selector.select(0.05):
            at = random.randrange(1 << 19)
            try:
                sent += key.fileobj.send(data[at : at + (1 << 17)])  # type: ignore[union-attr]
            except BlockingIOError:
                continue
            except OSError:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    return sent


def half_open(url: str, over: Callable[[], bool]) -> int:
    """The first bytes of a greeting, and silence."""
    held: list[socket.socket] = []
    while not over():
        with suppress(OSError):
            sock = socket.create_connection(_address(url), 1)
            sock.send(b"\xff\0\0\0\0\0\0\0\1\x7f\3")
            held.append(sock)
        if len(held) > _CONNECTIONS:
            time.sleep(0.05)
            held.pop(0).close()
    return len(held)


def noise(url: str, over: Callable[[], bool]) -> int:
    """Messages that are none, some with a header that looks right."""
    dealer, sent = _dealer(url), 0
    data = random.Random(2).randbytes(1 << 16)
    head = bytes(RawMessage(Kind.PUSH).encode()[0])
    while not over():
        with suppress(zmq.Again):
            dealer.send_multipart([head, data[: random.randrange(1 << 16)]], zmq.NOBLOCK)
            sent += 1
            continue
        time.sleep(0.001)
    return sent


def _greeted(url: str) -> socket.socket:
    """A connection past ZMTP 3's NULL handshake: libzmq's own sockets send whole messages only."""
    sock = socket.create_connection(_address(url), 5)
    sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    sock.sendall(b"\x04" + bytes([len(ready)]) + ready)
    sock.settimeout(5)
    sock.recv(64, socket.MSG_WAITALL)
    return sock


def endless(url: str, over: Callable[[], bool]) -> int:
    """One message after another that has no last part."""
    size, sent = 1 << 17, 0
    frame = b"\x03" + size.to_bytes(8, "big") + bytes(size)
    while not over():
        with suppress(OSError), _greeted(url) as sock:
            while not over():
                sock.sendall(frame)
                sent += 1
    return sent


def pushes(url: str, over: Callable[[], bool]) -> int:
    """The next chunks in order, whatever the credit. Host and actor are what the hello gets.

    It goes on from where the replay says it is, so that what is refused lacks credit and nothing
    else: a chunk out of order would be refused whoever had sent it.
    """
    dealer, sent = _dealer(url), 0
    actor, sequence, said_s = 0, 0, 0.0
    layout = _FORM.layout
    zeros = np.zeros(layout.body_bytes, np.uint8)
    layout.column("obs_frames", zeros, 0)[0] = layout.frames - 1  # so that all frames are sent
    chunk = m.Push.of_chunks(
        layout, zeros, [(0, 0, layout.chunk)], actor=0, incarnation=1, sequence=0
    )
    while not over():
        if time.monotonic() - said_s > 0.5:
            said_s = time.monotonic()
            with suppress(zmq.Again):
                dealer.send_multipart(m.encode(_hello("relay", m.BULK)), zmq.NOBLOCK)
        with suppress(zmq.Again, ZapexError):
            answer = m.decode(dealer.recv_multipart(zmq.NOBLOCK), _FORM)
            if isinstance(answer, m.Welcome | m.Ack) and len(answer.actors):
                actor = int(answer.actors["actor"][0])
                sequence = int(answer.actors["sequence"][0])
        push = replace(chunk, actor=actor, sequence=sequence)
        try:
            dealer.send_multipart(m.encode(push), zmq.NOBLOCK, copy=False)
            sequence, sent = sequence + 1, sent + 1
        except zmq.Again:
            time.sleep(0.001)
    return sent


def deaf(url: str, over: Callable[[], bool]) -> int:
    """Requests without end, from connections that are never read."""
    sent, said_s = 0, 0.0
    options = {"rcvhwm": 1, "rcvbuf": 4096}
    both = [_dealer(url, **options) for _ in (m.SMALL, m.BULK)]
    while not over():
        if time.monotonic() - said_s > 0.5:
            said_s = time.monotonic()
            for channel, dealer in enumerate(both):
                with suppress(zmq.Again):
                    dealer.send_multipart(m.encode(_hello("learner", channel)), zmq.NOBLOCK)
        for message in (m.Sample(sent, _FORM.batch_size), m.Pull(0, 0)):
            with suppress(zmq.Again):
                both[m.SMALL].send_multipart(m.encode(message), zmq.NOBLOCK)
        sent += 1
        time.sleep(0.002)
    return sent


def main() -> None:
    """One behaviour for so long, or until the parent is gone."""
    behaviour, url, end_s = sys.argv[1], sys.argv[2], time.monotonic() + float(sys.argv[3])
    parent = os.getppid()
    print("begins", flush=True)
    globals()[behaviour.replace("-", "_")](
        url, lambda: time.monotonic() > end_s or os.getppid() != parent
    )


if __name__ == "__main__":
    main()
