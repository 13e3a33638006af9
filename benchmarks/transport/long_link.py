"""A long link in user space: a TCP relay with delay, a line rate, losses, and compression.

    python -m benchmarks.transport.long_link TARGET_PORT [TARGET_PORT ...]

It prints its port for each target, then reads one link a line as JSON, and answers what has passed
since the line before. All connections of a direction, to all targets, share its line rate, in
turns of at most 64 KiB.

What is not modelled: TCP's window on the long way. Its ends are here, so a connection has what the
line gives at once; and a loss costs one round trip (TCP sends again), but no smaller window after
it.
"""

import asyncio
import contextlib
import json
import random
import select
import selectors
import socket
import subprocess
import sys
import time
import zlib
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

from benchmarks.support.machine import ROOT

_TURN = 1 << 16
_PACKET = 1448
_QUEUE_S = 0.02  # of the line's rate; beyond that its sender waits
_UNDER_WAY_BYTES = 64 << 20  # of a connection at a time: more than lines of these rates hold
_DEADLINE_S, _START_S = 30.0, 300.0


@dataclass(frozen=True)
class Line:
    """A link. rtt_ms: of both directions together. mbit: of each; 0: no limit. loss: of a packet.

    compressed: as in a tunnel that compresses each connection's stream (zlib, level 1), as ssh -C.
    """

    rtt_ms: float = 0.0
    mbit: float = 0.0
    loss: float = 0.0
    compressed: bool = False

    def __str__(self) -> str:
        rate = f"{self.mbit:g} Mbit/s" if self.mbit else "no limit"
        more = (", tunnel compresses" if self.compressed else "") + (
            f", loss {self.loss:.2%}" if self.loss else ""
        )
        return f"{self.rtt_ms:g} ms, {rate}{more}"


class _Direction:
    """What all connections share in one direction."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.passed = self.on_the_line = 0
        self.turn = asyncio.Lock()

    async def take_turn(self, nbytes: int, line: Line) -> float:
        """Wait for the line, and put bytes on it. Returns when they are at its end."""
        async with self.turn:
            while (wait_s := self.free_at - time.monotonic() - _QUEUE_S) > 0:
                await asyncio.sleep(wait_s)
            now_s = time.monotonic()
            if line.mbit:
                self.free_at = max(now_s, self.free_at) + nbytes * 8e-6 / line.mbit
            else:
                self.free_at = now_s
            self.on_the_line += nbytes
        late_s = 0.0
        if line.loss and random.random() > (1 - line.loss) ** (1 + nbytes // _PACKET):
            late_s = line.rtt_ms / 1e3
        return self.free_at + line.rtt_ms / 2e3 + late_s


class _UnderWay:
    """What is between the ends of a connection, in its order: parts, and when each is due."""

    def __init__(self) -> None:
        self._parts: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._nbytes = 0
        self._changed = asyncio.Condition()

    async def put(self, due_s: float, data: bytes) -> None:
        """Wait for room. The bytes count, not the parts: of a fast sender these are small."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._nbytes < _UNDER_WAY_BYTES)
            self._nbytes += len(data)
        self._parts.put_nowait((due_s, data))

    async def get(self) -> tuple[float, bytes]:
        """The next part."""
        due_s, data = await self._parts.get()
        async with self._changed:
            self._nbytes -= len(data)
            self._changed.notify()
        return due_s, data


class _Relay:
    def __init__(self) -> None:
        self.line = Line()
        self.directions = (_Direction(), _Direction())

    async def connected(
        self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Both directions of one connection, until either ends."""
        try:
            there = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        up, down = self.directions
        tasks = [
            asyncio.create_task(self._pump(reader, there[1], up)),
            asyncio.create_task(self._pump(there[0], writer, down)),
        ]
        with contextlib.suppress(asyncio.CancelledError):  # this process ends
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for end in (writer, there[1]):
            end.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: _Direction
    ) -> None:
        under_way = _UnderWay()
        delivery = asyncio.create_task(self._deliver(under_way, writer))
        packer = zlib.compressobj(1)
        due_s = 0.0
        try:
            while data := await reader.read(_TURN):
                line, nbytes = self.line, len(data)
                if line.compressed:
                    packed = packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)
                    nbytes = min(nbytes, len(packed))
                direction.passed += len(data)
                # TCP delivers in order: what follows a loss waits for it.
                due_s = max(due_s, await direction.take_turn(nbytes, line))
                await under_way.put(due_s, data)
        except OSError:
            pass
        finally:
            delivery.cancel()

    @staticmethod
    async def _deliver(under_way: _UnderWay, writer: asyncio.StreamWriter) -> None:
        while True:
            due_s, data = await under_way.get()
            if (wait_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            writer.write(data)
            await writer.drain()

    def counts(self) -> dict[str, int]:
        """Bytes since the last call: as they are, and as they were on the line."""
        found = {}
        for name, one in zip(("up", "down"), self.directions, strict=True):
            found |= {name: one.passed, f"{name}_on_the_line": one.on_the_line}
            one.passed = one.on_the_line = 0
        return found


async def _serve(targets: list[int]) -> None:
    relay = _Relay()
    servers = [
        await asyncio.start_server(partial(relay.connected, target), "127.0.0.1", 0)
        for target in targets
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    while order := await orders.readline():  # its parent's end closes the pipe
        relay.line = Line(**json.loads(order))
        print(json.dumps(relay.counts()), flush=True)


def wait_until_it_listens(port: int) -> None:
    """Raises RuntimeError after five minutes."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.2)
    raise RuntimeError(f"nothing listened at port {port} within {_START_S:g} s")


class LongLink:
    """A relay in a process of its own, to each port of `targets` here.

    `ports`: where it listens for each of them; `port`: for the first.
    """

    def __init__(self, *targets: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transport.long_link", *map(str, targets)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self.ports = [int(port) for port in self._line().split()]
        self.port = self.ports[0]

    def set(self, line: Line) -> dict[str, int]:
        """Make it this line. Returns the bytes since the last call, by direction."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(line)) + "\n")
        self._process.stdin.flush()
        found: dict[str, int] = json.loads(self._line())
        return found

    def _line(self) -> str:
        out: Any = self._process.stdout
        if not select.select([out], [], [], _DEADLINE_S)[0]:
            raise TimeoutError("the relay does not answer")
        return str(out.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("", timeout=_DEADLINE_S)


if __name__ == "__main__":
    # select() waits to the microsecond, epoll to the millisecond: a fibre's delay is a tenth of it.
    with asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())
    ) as runner:
        runner.run(_serve([int(port) for port in sys.argv[1:]]))
