"""The header that every message between hosts starts with, and the checks that all share.

Little-endian, 64 bytes (docs/wire_protocol.md says what each kind makes of the fields):

    0   magic "ZAPX"      4  version u16      6  kind u16      8  schema hash u64
    16  incarnation i64   24 sequence i64     32 value i64     40 body bytes u64
    48  number i32        52 rows u32         56 frames u32    60 crc32 u32

The crc32 is of the 60 bytes before it and of the body's parts.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from zapex.errors import BadMessage, OtherVersion
from zapex.schema import ChunkLayout, Schema

try:  # the same polynomial, with the processor's carry-less multiplication
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

MAGIC = b"ZAPX"
VERSION = 2
HEADER = struct.Struct("<4sHHQqqqQiIII")
MAX_PARTS = 18  # a header, sixteen observation columns, and the rest
MAX_ACTORS = 4096
PUSH_BYTES = 1 << 17  # small chunks go together up to so many slots' bodies
MAX_COUNT = 1 << 60  # sequences and versions stay below: whoever counts on has room to

Part = memoryview
"""A contiguous run of bytes."""


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1
    WELCOME = 2
    PUSH = 3
    ACK = 4
    SAMPLE = 5
    BATCH = 6
    UPDATE = 7
    UPDATE_ACK = 8
    PULL = 9
    PARAMS = 10
    PUBLISH = 11
    PUBLISH_ACK = 12
    STATS = 13
    BYE = 14
    ERROR = 15
    CALL = 16
    REPLY = 17


@dataclass(frozen=True)
class Form:
    """What both ends know beforehand, each from its own config.

    parameter_bytes: of one version of the parameters. metrics_bytes, episode_bytes: of a role's
    metrics block and of one finished episode. any_rows: a library's clients choose the sizes of
    their batches, up to batch_size.
    """

    layout: ChunkLayout
    batch_size: int
    parameter_bytes: int
    metrics_bytes: int = 0
    episode_bytes: int = 1
    any_rows: bool = False

    @property
    def schema(self) -> Schema:
        """The columns."""
        return self.layout.schema

    @property
    def most_pushed(self) -> int:
        """Chunks in one message: as many as have bodies of PUSH_BYTES, at least one.

        A chunk sends only what it holds: with room for 128 KiB a message has 64 KiB also where they
        are half full.
        """
        return -(-PUSH_BYTES // self.layout.body_bytes)

    @property
    def largest_request_bytes(self) -> int:
        """No part of a message to the replay is larger: for the transport's own limit."""
        pushed = self.most_pushed * (self.layout.body_bytes + 16)  # with their records
        return max(pushed, self.parameter_bytes, 16 * self.batch_size, 1 << 18)

    @property
    def largest_answer_bytes(self) -> int:
        """No part of a message from the replay is larger."""
        items = [column.item_bytes for column in self.schema.columns.values()]
        frames = 2 * self.batch_size * self.schema.stack * max(items)
        rows = self.batch_size * (sum(items) + 4 * self.schema.stack + 64)
        return max(frames, rows, self.parameter_bytes, 1 << 18)


def as_part(part: Any) -> Part:
    return memoryview(part).cast("B")


@dataclass(frozen=True)
class Message:
    """The header's fields and the body's parts; what they mean is the kind's own business."""

    kind: Kind
    schema: int = 0
    incarnation: int = 0
    sequence: int = 0
    value: int = 0
    number: int = 0
    rows: int = 0
    frames: int = 0
    body: tuple[Part, ...] = field(default=(), repr=False)

    def encode(self) -> list[Part]:
        """The parts to send: the header and the body, which is not copied."""
        body_bytes = sum(part.nbytes for part in self.body)
        # fmt: off
        head = HEADER.pack(
            MAGIC, VERSION, self.kind, self.schema, self.incarnation, self.sequence, self.value,
            body_bytes, self.number, self.rows, self.frames, 0,
        )[:-4]
        # fmt: on
        crc = _crc(head, self.body)
        return [memoryview(head + crc.to_bytes(4, "little")), *self.body]


def _crc(head: bytes | Part, body: Sequence[Part]) -> int:
    crc: int = crc32(head)
    for part in body:
        crc = crc32(part, crc)
    return crc


def kind_of(parts: Sequence[Any]) -> Kind | None:
    """What a message says that it is, before anything of it is checked; None: nothing we know."""
    head = as_part(parts[0])
    kind = int.from_bytes(head[6:8], "little")
    return Kind(kind) if head.nbytes == HEADER.size and 1 <= kind <= len(Kind) else None


def decode_header(parts: Sequence[Any]) -> Message:
    """A message whose header, lengths and checksum are right. Raises BadMessage."""
    if not 1 <= len(parts) <= MAX_PARTS:
        raise BadMessage(f"a message has 1 to {MAX_PARTS} parts, got {len(parts)}")
    head, *body = [as_part(part) for part in parts]
    if head.nbytes != HEADER.size:
        raise BadMessage(f"a header has {HEADER.size} bytes, got {head.nbytes}")
    # fmt: off
    (magic, version, kind, schema, incarnation, sequence, value, body_bytes, number, rows,
     frames, crc) = HEADER.unpack(head)
    # fmt: on
    if magic != MAGIC:
        raise BadMessage(f"a header starts with {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise OtherVersion(f"this end speaks version {VERSION}, the peer version {version}")
    if not 1 <= kind <= len(Kind):
        raise BadMessage(f"kinds are 1 to {len(Kind)}, got {kind}")
    have = sum(part.nbytes for part in body)
    if have != body_bytes:
        raise BadMessage(f"the header says {body_bytes} bytes of body, got {have}")
    if incarnation < 0 or sequence < 0 or value < 0:
        raise BadMessage("incarnation, sequence and value are never negative")
    if sequence >= MAX_COUNT:
        raise BadMessage(f"sequences stay below 2^60, got {sequence}")
    if _crc(head[:-4], body) != crc:
        raise BadMessage("the checksum is wrong")
    return Message(
        Kind(kind), schema, incarnation, sequence, value, number, rows, frames, tuple(body)
    )


def one_part(message: Message, nbytes: int | None = None, at_most: int = 0) -> Part:
    """The only part of a body, of exactly `nbytes` or of at most `at_most`."""
    if len(message.body) != 1:
        raise BadMessage(f"{message.kind.name} has one part of body, got {len(message.body)}")
    (part,) = message.body
    if nbytes is not None and part.nbytes != nbytes:
        raise BadMessage(f"{message.kind.name} has {nbytes} bytes of body, got {part.nbytes}")
    if nbytes is None and part.nbytes > at_most:
        raise BadMessage(f"{message.kind.name} has at most {at_most} bytes, got {part.nbytes}")
    return part


def no_body(message: Message) -> None:
    if message.body:
        raise BadMessage(f"{message.kind.name} has no body, got {len(message.body)} parts")


def check_actor(number: int) -> int:
    if not 0 <= number < MAX_ACTORS:
        raise BadMessage(f"actors are 0 to {MAX_ACTORS - 1}, got {number}")
    return number


def formed(message: Message, form: Form | None) -> Form:
    if form is None:
        raise BadMessage(f"{message.kind.name} before a welcome")
    if message.schema != form.schema.hash:
        raise BadMessage(
            f"the peer's schema is {message.schema:#018x}, this end's {form.schema.hash:#018x}: "
            "start both from the same config"
        )
    return form
