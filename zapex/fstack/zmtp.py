"""ZMTP 3 without sockets: bytes in, messages out, and the reverse (ZeroMQ's RFC 37).

    connection = Connection(Null(b"ROUTER"), Limits(frame_bytes=1 << 20, frames=20))
    while not connection.ended:
        nbytes = socket.recv_into(connection.room())
        messages = connection.received(nbytes)
        sent = socket.sendmsg(connection.outgoing())
        connection.sent(sent)

`room` is where the next bytes belong. For the headers of frames this is a small buffer of the
connection's. Once the header of a frame is known, it is the rest of the frame's body, so a large
body is received where it stays. `place` chooses that memory.

greeting   0xFF, 8 bytes, 0x7F, version (2), mechanism (20), as-server (1), 31 zero bytes
frame      flags (1), length (1, or 8 if LONG), body
command    the body of a frame with the flag COMMAND: length of its name (1), name, data
property   length of its name (1), name, length of its value (4), value
"""

import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from zapex.errors import BadMessage, OtherVersion, Refused

Buffer = memoryview
"""Contiguous bytes."""
Message = list[Buffer]
Place = Callable[[Sequence[Buffer], int], Buffer | None]
"""Writable memory for the next frame: the message's earlier frames, bytes. None: new memory.

Not asked for encrypted frames."""

GREETING_BYTES = 64
_UNTOUCHED_BYTES = 1 << 16  # from this size on new memory is not set to zero first
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame; no others are defined
_FLAGS = MORE | LONG | COMMAND
_MAJOR, _MINOR = 3, 1
_GREETING = struct.Struct(">B8xBBB20sB31x")
_VERSION_AT = 10
_LONG_HEADER = struct.Struct(">BQ")
_VALUE_BYTES = struct.Struct(">I")
_SHORT = 255  # the longest body with a length of one byte


def new_memory(nbytes: int) -> Buffer:
    """New memory; its bytes may be anything."""
    if nbytes < _UNTOUCHED_BYTES:
        return memoryview(bytearray(nbytes))
    return np.empty(nbytes, np.uint8).data


def greeting(mechanism: bytes, as_server: bool) -> bytes:
    """The first bytes that this end sends."""
    return _GREETING.pack(0xFF, 0x7F, _MAJOR, _MINOR, mechanism, as_server)


def check_greeting(start: Buffer) -> None:
    """Check as many bytes of a peer's greeting as have come. Raises BadMessage.

    An older peer sends no whole greeting before it has this end's next bytes.
    """
    if (len(start) > 0 and start[0] != 0xFF) or (len(start) > 9 and not start[9] & 1):
        raise BadMessage("the first bytes are not a greeting of ZMTP 3")
    if len(start) > _VERSION_AT and start[_VERSION_AT] < _MAJOR:
        raise OtherVersion(f"the peer speaks ZMTP {start[_VERSION_AT] + 1}.0, not 3.0 or later")


def mechanism_of(whole: Buffer) -> bytes:
    """The mechanism in a whole greeting.

    Its as-server byte is of no use: libzmq sends 0 from both ends.
    """
    return bytes(_GREETING.unpack(whole)[4]).rstrip(b"\0")


def frame_header(flags: int, nbytes: int) -> bytes:
    """The bytes before a frame's body."""
    if nbytes <= _SHORT:
        return bytes((flags, nbytes))
    return _LONG_HEADER.pack(flags | LONG, nbytes)


def parse_header(data: Buffer, at: int = 0) -> tuple[int, int, int] | None:
    """Flags, bytes of the body, where the body begins; None: more bytes are needed.

    at: where the header begins.
    """
    left = len(data) - at
    if not left:
        return None
    flags = data[at]
    if flags & ~_FLAGS or flags & (MORE | COMMAND) == MORE | COMMAND:
        raise BadMessage(f"a frame has the flags {flags:#04x}, which no frame may have")
    if not flags & LONG:
        return (flags, data[at + 1], at + 2) if left > 1 else None
    if left < _LONG_HEADER.size:
        return None
    return flags, _LONG_HEADER.unpack_from(data, at)[1], at + _LONG_HEADER.size


def command(name: bytes, data: bytes = b"") -> bytes:
    """The body of a command."""
    return bytes((len(name),)) + name + data


def split_command(body: Buffer) -> tuple[bytes, bytes]:
    """Name and data of a command. Raises BadMessage."""
    if not body or len(body) <= body[0]:
        raise BadMessage("a command is shorter than its name")
    return bytes(body[1 : 1 + body[0]]), bytes(body[1 + body[0] :])


def properties(values: Mapping[bytes, bytes]) -> bytes:
    """Named values, for a command."""
    return b"".join(
        command(name, _VALUE_BYTES.pack(len(value)) + value) for name, value in values.items()
    )


def parse_properties(data: bytes) -> dict[bytes, bytes]:
    """The inverse; names in lower case, as their case has no meaning. Raises BadMessage."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        value_at = at + 1 + data[at] + _VALUE_BYTES.size
        name = data[at + 1 : value_at - _VALUE_BYTES.size].lower()
        if not name or name in found or value_at > len(data):
            raise BadMessage("a property has no name, has it twice, or is cut off")
        at = value_at + _VALUE_BYTES.unpack_from(data, value_at - _VALUE_BYTES.size)[0]
        if at > len(data):
            raise BadMessage(f"the value of a property is cut off: {name!r}")
        found[name] = data[value_at:at]
    return found


_MEETS = {  # a socket's type: the types that may connect to it
    b"ROUTER": (b"REQ", b"DEALER", b"ROUTER"),
    b"DEALER": (b"REP", b"DEALER", b"ROUTER"),
}


def own_properties(socket_type: bytes) -> bytes:
    """The properties that an end with a socket of this type sends."""
    return properties({b"Socket-Type": socket_type, b"Identity": b""})


def check_peer(socket_type: bytes, data: bytes) -> None:
    """Raise BadMessage if a peer with these properties may not connect to a socket of this type."""
    theirs = parse_properties(data).get(b"socket-type", b"")
    if theirs not in _MEETS[socket_type]:
        raise BadMessage(f"a {_text(socket_type)} cannot talk to a {_text(theirs)}")


def _text(name: bytes) -> str:
    return name[:32].decode("ascii", "replace") or "socket of no type"


class Mechanism(Protocol):
    """One connection's handshake, and what becomes of its frames afterwards.

    added_bytes: what it adds to each frame. done: the handshake is over. refused: why this end
    refuses the peer; an ERROR is the last command then. user: that the peer's key stands for.
    """

    name: bytes
    as_server: bool
    added_bytes: int
    done: bool
    refused: str
    user: str | None

    def start(self) -> list[bytes]:
        """The commands to send after the greetings."""

    def take(self, name: bytes, data: bytes) -> list[bytes]:
        """A command of the peer came: the commands to send. Raises BadMessage."""

    def seal(self, flags: int, body: Buffer) -> tuple[int, Buffer]:
        """Flags and body of a frame as they are sent."""

    def open(self, flags: int, body: Buffer) -> tuple[int, Buffer]:
        """The inverse. Raises BadMessage."""


class Null:
    """No keys: every peer with a fitting socket type is admitted, and frames stay as they are."""

    name, as_server, added_bytes = b"NULL", False, 0

    def __init__(self, socket_type: bytes) -> None:
        self._socket_type = socket_type
        self.done, self.refused = False, ""
        self.user: str | None = None

    def start(self) -> list[bytes]:
        """READY, from both ends at once."""
        return [command(b"READY", own_properties(self._socket_type))]

    def take(self, name: bytes, data: bytes) -> list[bytes]:
        """The peer's READY."""
        if name != b"READY":
            raise BadMessage(f"the peer sent the command {_text(name)}, not READY")
        check_peer(self._socket_type, data)
        self.done = True
        return []

    def seal(self, flags: int, body: Buffer) -> tuple[int, Buffer]:
        """As they are."""
        return flags, body

    def open(self, flags: int, body: Buffer) -> tuple[int, Buffer]:
        """As they are."""
        return flags, body


_STAGE_BYTES = 8192
_COMMAND_BYTES = 4096  # of the longest command that is taken
_COPIED_BYTES = 1 << 16  # a smaller body is copied behind its header when it is queued
_AT_ONCE = 64  # buffers in one call of sendmsg


@dataclass(frozen=True)
class Limits:
    """Of what a peer may send: the bytes of a frame, the frames of a message."""

    frame_bytes: int
    frames: int


class Connection:
    """One end of one connection.

    ready: the handshake is over. ended: why the connection must be closed, "" if it must not.
    """

    def __init__(self, mechanism: Mechanism, limits: Limits, place: Place | None = None) -> None:
        self.mechanism = mechanism
        self.ready, self.ended = False, ""
        self.sent_bytes = self.queued_bytes = 0  # since the start
        self._limits, self._place = limits, place
        self._stage, self._staged = memoryview(bytearray(_STAGE_BYTES)), 0
        self._greeted = False
        self._flags = self._filled = 0
        self._body: Buffer | None = None
        self._message: Message = []
        self._outgoing: deque[Buffer] = deque()
        self._queue(greeting(mechanism.name, mechanism.as_server))

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
            small += frame_header(flags, nbytes)
            if nbytes < _COPIED_BYTES:
                small += body
            else:
                self._queue(small, body)
                small = b""
        if small:
            self._queue(small)
        return self.queued_bytes

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

    def _send_handshake(self, commands: Sequence[bytes]) -> None:
        for command in commands:
            self._queue(frame_header(COMMAND, len(command)) + command)

    def _take_staged(self, messages: list[Message]) -> None:
        """Take frames out of the stage. A body that is not complete leaves the stage, too."""
        # One copy for all frames that are complete: they are slices of it.
        staged = memoryview(bytearray(self._stage[: self._staged]))
        at, end = 0, self._staged
        if not self._greeted:
            check_greeting(staged)
            if end < GREETING_BYTES:
                return
            at = GREETING_BYTES
            self._take_greeting(staged[:at])
        while (found := parse_header(staged, at)) is not None:
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
        theirs = mechanism_of(greeting)
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
            placed = new_memory(nbytes)
        self._flags, self._body, self._filled = flags, placed, len(here)
        placed[: len(here)] = here

    def _take_body(self, flags: int, body: Buffer, messages: list[Message]) -> None:
        """Take a body that is complete."""
        if not self.ready:
            self._take_handshake(body)
            return
        flags, body = self.mechanism.open(flags, body)
        if flags & COMMAND:
            self._take_command(*split_command(body))
            return
        self._message.append(body)
        if not flags & MORE:
            messages.append(self._message)
            self._message = []

    def _take_handshake(self, body: Buffer) -> None:
        name, data = split_command(body)
        if name == b"ERROR":
            raise Refused(f"the peer refuses this connection: {data[1:65]!r}")
        self._send_handshake(self.mechanism.take(name, data))
        if self.mechanism.refused:
            raise BadMessage(self.mechanism.refused)
        self.ready = self.mechanism.done

    def _take_command(self, name: bytes, data: bytes) -> None:
        """A command after the handshake. Others have no effect: zapex's clients send no PINGs."""
        if name == b"ERROR":
            raise Refused(f"the peer ends this connection: {data[1:65]!r}")
