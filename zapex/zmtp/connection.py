"""One ZMTP connection as a state machine: bytes in, messages out, and the reverse. No socket.

    connection = Connection(Null(Local(b"ROUTER")), Limits(frame_bytes=1 << 20, frames=20))
    while not connection.ended:
        nbytes = socket.recv_into(connection.room())
        messages = connection.received(nbytes)
        sent = socket.sendmsg(connection.outgoing())
        connection.sent(sent)

`room` is where the next bytes belong. For the headers of frames this is a small buffer of the
connection's. Once the header of a frame is known, it is the rest of the frame's body, so a large
body is received where it stays. `place` names that memory, if the caller wants it elsewhere.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from zapex.errors import BadMessage, Refused
from zapex.zmtp import frames
from zapex.zmtp.frames import COMMAND, MORE, Buffer
from zapex.zmtp.handshake import Mechanism

Message = list[Buffer]
Place = Callable[[Sequence[Buffer], int], Buffer | None]
"""Writable memory for the next frame: the message's earlier frames, bytes. None: new memory."""

_STAGE_BYTES = 8192
_COMMAND_BYTES = 4096  # of the longest command that is taken
_COPIED_BYTES = 1 << 16  # a smaller body is copied behind its header when it is queued
_CONTEXT_BYTES = 16  # of the longest context in a PING
_TTL_PER_S = 10
_AT_ONCE = 64  # buffers in one call of sendmsg


@dataclass(frozen=True)
class Limits:
    """Of what a peer may send: the bytes of a frame, the frames of a message."""

    frame_bytes: int
    frames: int


class Connection:
    """One end of one connection.

    ready: the handshake is over. ended: why the connection must be closed, "" if it must not.
    A peer with a ttl_s above 0 wants its connection closed if it sends nothing for so long.
    heard_pong: the context of the peer's last PONG.
    """

    def __init__(self, mechanism: Mechanism, limits: Limits, place: Place | None = None) -> None:
        self.mechanism = mechanism
        self.ready, self.ended = False, ""
        self.ttl_s = 0.0
        self.heard_pong: bytes | None = None
        self.sent_bytes = self.queued_bytes = 0  # since the start
        self._limits, self._place = limits, place
        self._stage, self._staged = memoryview(bytearray(_STAGE_BYTES)), 0
        self._greeted = False
        self._flags = self._filled = 0
        self._body: Buffer | None = None
        self._message: Message = []
        self._outgoing: deque[Buffer] = deque()
        self._pong_at = 0  # queued_bytes behind the last PONG
        self._queue(frames.greeting(mechanism.name, mechanism.as_server))

    def room(self) -> Buffer:
        """Where the next bytes belong; it is never empty."""
        if self._body is not None:
            return self._body[self._filled :]
        return self._stage[self._staged :]

    def received(self, nbytes: int) -> list[Message]:
        """So many bytes were received into `room()`: the messages that they complete."""
        messages: list[Message] = []
        if self.ended:
            return messages
        try:
            if self._body is not None:
                self._filled += nbytes
                if self._filled == len(self._body):
                    body, self._body = self._body, None
                    self._take_body(self._flags, body, messages)
            else:
                self._staged += nbytes
                self._take_staged(messages)
        except (BadMessage, Refused) as error:
            self.end(str(error))
        return messages

    @property
    def missing_bytes(self) -> int:
        """What has not come yet of a body that has begun; 0: none has."""
        return 0 if self._body is None else len(self._body) - self._filled

    @property
    def held_bytes(self) -> int:
        """Bytes of a message that is not complete, and of those that are not sent yet."""
        waiting = self.queued_bytes - self.sent_bytes
        partial = self._filled if self._body is not None else 0
        return waiting + partial + sum(map(len, self._message))

    def end(self, why: str) -> None:
        """Take no more bytes. What is not sent yet may still be sent."""
        self.ended = self.ended or why
        self._body, self._message = None, []

    def send(self, message: Sequence[Buffer]) -> int:
        """Queue a message; `sent_bytes` reaches the returned value when all of it was sent.

        Until then large buffers must not change. The connection must be ready.
        """
        assert self.ready
        left, seal = len(message), self.mechanism.seal
        small = b""  # frames that are sent as one buffer
        for plain in message:
            left -= 1
            flags, body = seal(MORE if left else 0, plain)
            nbytes = len(body)
            small += frames.header(flags, nbytes)
            if nbytes < _COPIED_BYTES:
                small += body
            else:
                self._queue(small, body)
                small = b""
        if small:
            self._queue(small)
        return self.queued_bytes

    def ping(self, ttl_s: float, context: bytes = b"") -> None:
        """Ask for a PONG. The peer may close the connection ttl_s after this end's last bytes."""
        assert self.ready
        ttl = round(_TTL_PER_S * ttl_s).to_bytes(2, "big")
        self._send_command(frames.command(b"PING", ttl + context))

    @property
    def is_sending(self) -> bool:
        """Whether there is something to send."""
        return self.sent_bytes != self.queued_bytes

    def outgoing(self) -> list[Buffer]:
        """The next buffers to send."""
        return list(islice(self._outgoing, _AT_ONCE))

    def sent(self, nbytes: int) -> None:
        """So many bytes of `outgoing()` were sent."""
        self.sent_bytes += nbytes
        while nbytes:
            first = self._outgoing[0]
            if nbytes < len(first):
                self._outgoing[0] = first[nbytes:]
                return
            nbytes -= len(first)
            self._outgoing.popleft()

    def _queue(self, *buffers: Buffer | bytes) -> None:
        for buffer in buffers:
            self._outgoing.append(memoryview(buffer))
            self.queued_bytes += len(buffer)

    def _send_command(self, command: bytes) -> None:
        flags, body = self.mechanism.seal(COMMAND, memoryview(command))
        self._queue(frames.header(flags, len(body)) + body)

    def _send_handshake(self, commands: Sequence[bytes]) -> None:
        for command in commands:
            self._queue(frames.header(COMMAND, len(command)) + command)

    def _take_staged(self, messages: list[Message]) -> None:
        """Take frames out of the stage. A body that is not complete leaves the stage, too."""
        # One copy for all frames that are complete: they are slices of it.
        staged = memoryview(bytearray(self._stage[: self._staged]))
        at, end = 0, self._staged
        if not self._greeted:
            frames.check_greeting(staged)
            if end < frames.GREETING_BYTES:
                return
            at = frames.GREETING_BYTES
            self._take_greeting(staged[:at])
        while (found := frames.parse_header(staged, at)) is not None:
            flags, nbytes, start = found
            self._check_header(flags, nbytes)
            at = start + nbytes
            placed = None if self._place is None else self._placed(flags, nbytes)
            if at > end:
                self._begin_body(flags, nbytes, placed, staged[start:])
                at = end
                break
            body = staged[start:at]
            if placed is not None:
                placed[:] = body
                body = placed
            self._take_body(flags, body, messages)
        self._staged = end - at
        if self._staged:
            self._stage[: self._staged] = staged[at:]

    def _take_greeting(self, greeting: Buffer) -> None:
        theirs = frames.mechanism_of(greeting)
        if theirs != self.mechanism.name:
            raise BadMessage(
                f"the peer's mechanism is {theirs!r}, here it is {self.mechanism.name!r}"
            )
        self._greeted = True
        self._send_handshake(self.mechanism.start())

    def _check_header(self, flags: int, nbytes: int) -> None:
        """Check a frame's header, before there is memory for its body. Raises BadMessage."""
        added = self.mechanism.added_bytes
        most = self._limits.frame_bytes + added
        if not self.ready:
            if not flags & COMMAND:
                raise BadMessage("a message came before the end of the handshake")
            most = _COMMAND_BYTES
        elif flags & COMMAND and not added:
            most = _COMMAND_BYTES
        elif len(self._message) >= self._limits.frames:
            raise BadMessage(f"a message has more than {self._limits.frames} frames")
        if nbytes > most:
            raise BadMessage(f"a frame has {nbytes} bytes, at most {most} are allowed")

    def _placed(self, flags: int, nbytes: int) -> Buffer | None:
        """The memory that the caller names for a body, if it comes as it will stay."""
        if flags & COMMAND or self.mechanism.added_bytes or self._place is None:
            return None
        placed = self._place(self._message, nbytes)
        assert placed is None or len(placed) == nbytes
        return placed

    def _begin_body(self, flags: int, nbytes: int, placed: Buffer | None, here: Buffer) -> None:
        """A body of which these first bytes have come."""
        if placed is None:
            placed = frames.memory(nbytes)
        self._flags, self._body, self._filled = flags, placed, len(here)
        placed[: len(here)] = here

    def _take_body(self, flags: int, body: Buffer, messages: list[Message]) -> None:
        """Take a body that is complete."""
        if not self.ready:
            self._take_handshake(body)
            return
        if self.mechanism.added_bytes:
            flags, body = self._opened(flags, body)
        if flags & COMMAND:
            self._take_command(*frames.split_command(body))
            return
        self._message.append(body)
        if not flags & MORE:
            messages.append(self._message)
            self._message = []

    def _opened(self, flags: int, body: Buffer) -> tuple[int, Buffer]:
        """A sealed frame's flags and body. A copy puts the body where the caller wants it."""
        flags, plain = self.mechanism.open(flags, body)
        if flags & COMMAND or self._place is None:
            return flags, plain
        placed = self._place(self._message, len(plain))
        if placed is None:
            return flags, plain
        placed[:] = plain
        return flags, placed

    def _take_handshake(self, body: Buffer) -> None:
        name, data = frames.split_command(body)
        if name == b"ERROR":
            raise Refused(f"the peer refuses this connection: {data[1:65]!r}")
        self._send_handshake(self.mechanism.take(name, data))
        if self.mechanism.refused:
            raise BadMessage(self.mechanism.refused)
        self.ready = self.mechanism.done

    def _take_command(self, name: bytes, data: bytes) -> None:
        """A command after the handshake. Unknown ones have no effect."""
        if name == b"PING":
            if not 2 <= len(data) <= 2 + _CONTEXT_BYTES:
                raise BadMessage(f"a PING has {len(data)} bytes")
            self.ttl_s = int.from_bytes(data[:2], "big") / _TTL_PER_S
            # A peer that sends PINGs and reads nothing gets one PONG, not a queue of them.
            if self._pong_at <= self.sent_bytes:
                self._send_command(frames.command(b"PONG", data[2:]))
                self._pong_at = self.queued_bytes
        elif name == b"PONG":
            self.heard_pong = data
        elif name == b"ERROR":
            raise Refused(f"the peer ends this connection: {data[1:65]!r}")
