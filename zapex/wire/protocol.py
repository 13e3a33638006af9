"""What both ends of a link agree on: the kinds of messages, who may send them, their header.

Little-endian, 64 bytes (docs/wire_protocol.md says what the fields mean in each kind):

    0   magic "ZAPX"      4  version u16      6  kind u16      8  schema hash u64
    16  incarnation i64   24 sequence i64     32 value i64     40 body bytes u64
    48  number i32        52 rows u32         56 frames u32    60 crc32 u32

The crc32 is of the 60 bytes before it and of the body's buffers. A kind with the bit
COMPRESSED has a compressed body (compression.py); length and crc32 are of what is sent.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Protocol

from zapex.chunks.layout import ChunkLayout
from zapex.chunks.limits import Limits
from zapex.chunks.schema import Schema
from zapex.errors import BadMessage, OtherVersion
from zapex.wire.compression import compress

try:  # the same polynomial, computed with the processor's carry-less multiplication
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

MAGIC = b"ZAPX"
VERSION = 4
HEADER = struct.Struct("<4sHHQqqqQiIII")
MAX_BUFFERS = 18  # a header, sixteen observation columns, and the rest
COMPRESSED = 0x8000  # of the kind: each buffer of the body is compressed
MAX_ACTORS = 4096
PUSH_BYTES = 1 << 17  # small chunks share a message up to this many bytes of slots
MAX_COUNT = 1 << 60  # sequences and versions stay below this, so counters do not overflow

Buffer = memoryview
"""Contiguous bytes: one frame of a multipart message."""


class Kind(IntEnum):
    """The kind of a message."""

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
    NO_BATCH = 18


ROLES = ("relay", "learner", "reader", "client")
MAY_SEND = {
    "relay": {Kind.HELLO, Kind.PUSH, Kind.PULL, Kind.STATS, Kind.BYE},
    "learner": {
        Kind.HELLO,
        Kind.SAMPLE,
        Kind.UPDATE,
        Kind.PUBLISH,
        Kind.PULL,
        Kind.STATS,
        Kind.BYE,
    },
    "reader": {Kind.HELLO, Kind.PULL, Kind.BYE},
    "client": {Kind.HELLO, Kind.PUSH, Kind.SAMPLE, Kind.CALL, Kind.BYE},
}
"""What a client may send to a replay, by its role."""


@dataclass(frozen=True)
class Form:
    """What both ends know before any message, each from its own config.

    batch_size: the most rows of a batch. parameter_bytes: of one version of the parameters.
    metrics_bytes, episode_bytes: of a role's metrics block and of one finished episode. limits: the
    largest values of a chunk.
    """

    layout: ChunkLayout
    batch_size: int
    parameter_bytes: int
    metrics_bytes: int = 0
    episode_bytes: int = 1
    limits: Limits = field(default_factory=Limits)

    @property
    def schema(self) -> Schema:
        """The columns."""
        return self.layout.schema

    @property
    def most_pushed(self) -> int:
        """Chunks in one message: as many bodies as reach PUSH_BYTES, at least one.

        Only the contents of a chunk are sent. So with room for 128 KiB, a message still has 64 KiB
        if all chunks are half full.
        """
        return -(-PUSH_BYTES // self.layout.body_bytes)

    @property
    def largest_request_bytes(self) -> int:
        """The largest buffer of a message to the replay; the transport's limit."""
        pushed = self.most_pushed * (self.layout.body_bytes + 16)  # with their records
        return max(pushed, self.parameter_bytes, 16 * self.batch_size, 1 << 18)

    @property
    def largest_answer_bytes(self) -> int:
        """The largest buffer of a message from the replay."""
        items = [column.item_bytes for column in self.schema.columns.values()]
        frames = 2 * self.batch_size * self.schema.stack * max(items)
        rows = self.batch_size * (sum(items) + 4 * self.schema.stack + 64)
        return max(frames, rows, self.parameter_bytes, 1 << 18)


def as_buffer(data: Any) -> Buffer:
    """Contiguous data as bytes, without a copy."""
    return memoryview(data).cast("B")


@dataclass(slots=True)
class RawMessage:
    """The header's words and the body's buffers; their meaning depends on the kind."""

    kind: Kind
    schema: int = 0
    incarnation: int = 0
    sequence: int = 0
    value: int = 0
    number: int = 0
    rows: int = 0
    frames: int = 0
    body: tuple[Buffer, ...] = field(default=(), repr=False)
    compressed: bool = False

    def within(self, word: str, least: int, most: int) -> int:
        """A word of the header. Raises BadMessage if it is not `least` to `most`."""
        value: int = getattr(self, word)
        if not least <= value <= most:
            raise BadMessage(f"{word} of {self.kind.name} must be {least} to {most}, got {value}")
        return value

    def encode(self, compressed: bool = False) -> list[Buffer]:
        """The buffers to send: the header, and the body as it is, or a compressed copy."""
        body = compress(self.body) if compressed else self.body
        kind = self.kind | COMPRESSED if compressed else self.kind
        body_bytes = sum(buffer.nbytes for buffer in body)
        words = self.schema, self.incarnation, self.sequence, self.value, body_bytes
        head = HEADER.pack(MAGIC, VERSION, kind, *words, self.number, self.rows, self.frames, 0)
        head = head[:-4]
        crc = _crc(head, body)
        return [memoryview(head + crc.to_bytes(4, "little")), *body]


def _crc(head: bytes | Buffer, body: Sequence[Buffer]) -> int:
    crc: int = crc32(head)
    for buffer in body:
        crc = crc32(buffer, crc)
    return crc


def kind_of(buffers: Sequence[Any]) -> int:
    """The kind that a message claims, before any check."""
    return int.from_bytes(as_buffer(buffers[0])[6:8], "little") & ~COMPRESSED


def decode_header(buffers: Sequence[Any]) -> RawMessage:
    """A message whose header, lengths and checksum are valid. Raises BadMessage."""
    if not 1 <= len(buffers) <= MAX_BUFFERS:
        raise BadMessage(f"a message has 1 to {MAX_BUFFERS} parts, got {len(buffers)}")
    head, *body = [as_buffer(buffer) for buffer in buffers]
    if head.nbytes != HEADER.size:
        raise BadMessage(f"a header has {HEADER.size} bytes, got {head.nbytes}")
    magic, version, kind, schema, *words, crc = HEADER.unpack(head)
    incarnation, sequence, value, body_bytes, number, rows, frames = words
    if magic != MAGIC:
        raise BadMessage(f"a header starts with {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise OtherVersion(f"this end speaks version {VERSION}, the peer version {version}")
    compressed, kind = bool(kind & COMPRESSED), kind & ~COMPRESSED
    if not 1 <= kind <= len(Kind):
        raise BadMessage(f"kinds are 1 to {len(Kind)}, got {kind}")
    have = sum(buffer.nbytes for buffer in body)
    if have != body_bytes:
        raise BadMessage(f"the header says {body_bytes} bytes of body, got {have}")
    if incarnation < 0 or sequence < 0 or value < 0:
        raise BadMessage("incarnation, sequence and value must not be negative")
    if sequence >= MAX_COUNT:
        raise BadMessage(f"a sequence must be below 2^60, got {sequence}")
    if _crc(head[:-4], body) != crc:
        raise BadMessage("the checksum is wrong")
    return RawMessage(
        Kind(kind),
        schema,
        incarnation,
        sequence,
        value,
        number,
        rows,
        frames,
        tuple(body),
        compressed,
    )


class Message(Protocol):
    """A message of one kind, as its class in messages.py or experience.py."""

    kind: ClassVar[Kind]

    def raw(self) -> RawMessage:
        """The header's words and the body's buffers."""

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> "Message":
        """The message, fully checked. Raises BadMessage."""
