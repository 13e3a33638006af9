"""ZMTP 3 as bytes: the greeting, the headers of frames, commands and properties (ZeroMQ's RFC 37).

greeting   0xFF, 8 bytes, 0x7F, version (2), mechanism (20), as-server (1), 31 zero bytes
frame      flags (1), length (1, or 8 if LONG), body
command    the body of a frame with the flag COMMAND: length of its name (1), name, data
property   length of its name (1), name, length of its value (4), value
"""

import struct
from collections.abc import Mapping

import numpy as np

from zapex.errors import BadMessage, OtherVersion

Buffer = memoryview
"""Contiguous bytes."""

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


def memory(nbytes: int) -> Buffer:
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


def header(flags: int, nbytes: int) -> bytes:
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
