"""Messages between hosts: values to bytes and back, all checked; no socket.

A message is a header (protocol.py) and the buffers of its body, each a frame of the transport.
Every length, shape and dtype is known from the local config (`Form`), and a message must agree with
it. Otherwise BadMessage is raised before memory of the message's size is allocated.
docs/wire_protocol.md has all messages byte by byte.

`raw` of a message gives its header's words and its body, `read` is the inverse and checks all of
them. Chunks and batches are in experience.py.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import NO_FRAME
from zapex.chunks.schema import Schema
from zapex.errors import TELLABLE, BadMessage
from zapex.replay.draw import METHODS, STRATIFIED
from zapex.replay.sequences import Sequences
from zapex.wire.compression import decompress
from zapex.wire.experience import BatchMessage, Push, batch_bytes, push_bytes
from zapex.wire.protocol import (
    MAX_ACTORS,
    MAX_COUNT,
    ROLES,
    Buffer,
    Form,
    Kind,
    Message,
    RawMessage,
    as_buffer,
    decode_header,
)

MAX_CONFIG_BYTES = 1 << 16
# Parsed JSON takes many times the memory of its text, so objects are counted first.
MAX_CONFIG_ITEMS, MAX_CONFIG_TABLES = 4096, 256
MAX_EPISODES = 1024  # in one message
MAX_TEXT_BYTES = 1 << 12
MOST_PIECES = 64  # of one batch
SMALL, BULK = 0, 1  # the two connections of a client
LEARNER, REPLAY = -1, -2  # in place of an actor's number in statistics
_MOST = (1 << 63) - 1  # of a number that only must not be negative

ACTOR_STATE = np.dtype(
    [("actor", "<i8"), ("incarnation", "<i8"), ("sequence", "<i8"), ("credit_bytes", "<i8")]
)
"""What the replay says about an actor: all chunks of that incarnation before `sequence` are
committed, and chunks of `credit_bytes` (a slot's size each) may follow before the next ack."""


class Fault(IntEnum):
    """Why the replay answers with an Error; each value tells the peer what to do."""

    HELLO_FIRST = 1  # this connection is not known: say hello
    REFUSED = 2  # another version, schema, config or role: give up
    FENCED = 3  # a newer incarnation has replaced this client: exit
    FULL = 4  # no actor number is free: ask again later
    BAD = 5  # a message that breaks the rules
    OVER = 6  # the run has ended; the text says why: exit


# What bodies have in common.


def _no_body(raw: RawMessage) -> None:
    if raw.body:
        raise BadMessage(f"{raw.kind.name} has no body, got {len(raw.body)} parts")


def _one_buffer(raw: RawMessage, nbytes: int | None = None, at_most: int = 0) -> Buffer:
    """The only buffer of a body, of exactly `nbytes` or of at most `at_most`."""
    if len(raw.body) != 1:
        raise BadMessage(f"{raw.kind.name} has one part of body, got {len(raw.body)}")
    (buffer,) = raw.body
    if nbytes is not None and buffer.nbytes != nbytes:
        raise BadMessage(f"{raw.kind.name} has {nbytes} bytes of body, got {buffer.nbytes}")
    if nbytes is None and buffer.nbytes > at_most:
        raise BadMessage(f"{raw.kind.name} has at most {at_most} bytes, got {buffer.nbytes}")
    return buffer


def _printable(buffer: Buffer) -> str:
    """A peer's text; bytes that are not UTF-8 or cannot be printed are replaced."""
    text = bytes(buffer).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def _text(text: str) -> Buffer:
    # It may quote a peer's JSON, which can hold half a character (a lone surrogate).
    return as_buffer(text.encode(errors="replace")[:MAX_TEXT_BYTES])


def _read_text(raw: RawMessage) -> str:
    return _printable(_one_buffer(raw, at_most=MAX_TEXT_BYTES))


def _priorities(keys: NDArray[np.int64], priorities: NDArray[Any], dtype: str) -> Buffer:
    return as_buffer(keys.astype("<i8").tobytes() + priorities.astype(dtype).tobytes())


def _read_priorities(
    raw: RawMessage, form: Form, dtype: str
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Keys (rows,) int64 and priorities (rows,), finite (clients check this first)."""
    rows = raw.rows
    if rows > form.batch_size:
        raise BadMessage(
            f"{raw.kind.name} has at most a batch's rows, {form.batch_size}, got {rows}"
        )
    buffer = _one_buffer(raw, nbytes=(8 + np.dtype(dtype).itemsize) * rows)
    keys = np.frombuffer(buffer[: 8 * rows], "<i8")
    priorities = np.frombuffer(buffer[8 * rows :], dtype)
    if not np.isfinite(priorities).all():
        raise BadMessage("priorities must be finite")
    return keys, priorities


def _read_config(raw: RawMessage) -> dict[str, Any]:
    text = bytes(_one_buffer(raw, at_most=MAX_CONFIG_BYTES))
    items, tables = (sum(map(text.count, marks)) for marks in ((b",", b":"), (b"[", b"{")))
    if items > MAX_CONFIG_ITEMS or tables > MAX_CONFIG_TABLES:
        raise BadMessage(f"settings have too many items ({items}) or tables ({tables})")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"the settings are not JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadMessage("the settings are not a table")
    return config


def _read_actor_states(raw: RawMessage) -> NDArray[np.void]:
    buffer = _one_buffer(raw, at_most=MAX_ACTORS * ACTOR_STATE.itemsize)
    if buffer.nbytes % ACTOR_STATE.itemsize:
        raise BadMessage(
            f"{raw.kind.name} has records of {ACTOR_STATE.itemsize} bytes, got {buffer.nbytes}"
        )
    states = np.frombuffer(buffer, ACTOR_STATE)
    if states.size and (states.view("<i8").min() < 0 or states["actor"].max() >= MAX_ACTORS):
        raise BadMessage("an actor's state has a number out of range")
    return states


# Sessions.


@dataclass(frozen=True)
class Hello:
    """A client's first message on each of its connections, and its heartbeat on both.

    host: one number for one incarnation of a client host's parent. actors: how many numbers it
    wants; of a learner: 1 to replace one of another host that is connected. config: shared settings
    by name, for comparison. epoch: of the memory at which the host has numbers already; 0: none.
    """

    kind: ClassVar = Kind.HELLO
    role: str
    host: int
    incarnation: int
    channel: int
    schema: int
    actors: int
    config: Mapping[str, Any]
    epoch: int = 0

    def raw(self) -> RawMessage:
        return RawMessage(
            self.kind,
            self.schema,
            self.incarnation,
            self.epoch,
            self.host,
            number=ROLES.index(self.role),
            rows=self.actors,
            frames=self.channel,
            body=(as_buffer(json.dumps(self.config, sort_keys=True).encode()),),
        )

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        return cls(
            ROLES[raw.within("number", 0, len(ROLES) - 1)],
            raw.within("value", 1, _MOST),
            raw.incarnation,
            raw.within("frames", SMALL, BULK),
            raw.schema,
            raw.within("rows", 0, MAX_ACTORS),
            _read_config(raw),
            raw.sequence,
        )


@dataclass(frozen=True)
class Welcome:
    """The replay's answer to a Hello: all facts that the client needs to continue.

    incarnation: the server's. total_actors: of the run. chunk: transitions per chunk. fresh: this
    connection is new to the replay, so messages in flight are lost. actors: ACTOR_STATE records of
    the client's actor numbers.
    """

    kind: ClassVar = Kind.WELCOME
    incarnation: int
    schema: int
    epoch: int
    params_version: int
    total_actors: int
    chunk: int
    fresh: bool
    actors: NDArray[np.void]

    def raw(self) -> RawMessage:
        return RawMessage(
            self.kind,
            self.schema,
            self.incarnation,
            self.params_version,
            self.epoch,
            number=self.chunk,
            rows=self.fresh,
            frames=self.total_actors,
            body=(as_buffer(self.actors.tobytes()),),
        )

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        total_actors, chunk = raw.within("frames", 1, MAX_ACTORS), raw.within("number", 1, 256)
        words = raw.incarnation, raw.schema, raw.value, raw.sequence, total_actors, chunk
        return cls(*words, bool(raw.rows), _read_actor_states(raw))


@dataclass(frozen=True)
class Ack:
    """Acknowledgement and credit, cumulative, of any number of actors: ACTOR_STATE records."""

    kind: ClassVar = Kind.ACK
    actors: NDArray[np.void]

    def raw(self) -> RawMessage:
        return RawMessage(self.kind, body=(as_buffer(self.actors.tobytes()),))

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        return cls(_read_actor_states(raw))


@dataclass(frozen=True)
class Bye:
    """The client leaves: its actor numbers are free again.

    over: from the learner, why the run has ended for all; "" if only this client leaves.
    """

    kind: ClassVar = Kind.BYE
    over: str = ""

    def raw(self) -> RawMessage:
        return RawMessage(self.kind, body=(_text(self.over),) if self.over else ())

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        return cls(_read_text(raw) if raw.body else "")


@dataclass(frozen=True)
class Error:
    """Why a message was refused, as text for the user."""

    kind: ClassVar = Kind.ERROR
    fault: Fault
    text: str

    def raw(self) -> RawMessage:
        return RawMessage(self.kind, number=self.fault, body=(_text(self.text),))

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        return cls(Fault(raw.within("number", 1, len(Fault))), _read_text(raw))


# Batches, priorities, parameters and statistics.


@dataclass(frozen=True)
class Sample:
    """A request for one batch.

    sequence: its number, which the answers repeat. rows: at most the run's batch size.
    compressed: the batch is to be compressed. piece_rows: it is drawn whole and comes in pieces of
    so many rows; 0: in one. method: its index in METHODS; a run draws by its own. part: of a batch
    that several replays draw together, so the replay may hold fewer transitions.
    came_s: when it came, by the receiver's clock.
    """

    kind: ClassVar = Kind.SAMPLE
    sequence: int
    rows: int
    compressed: bool = False
    piece_rows: int = 0
    method: int = STRATIFIED
    part: bool = False
    came_s: float = field(default=0.0, compare=False)

    def raw(self) -> RawMessage:
        return RawMessage(
            self.kind,
            sequence=self.sequence,
            value=self.method,
            number=self.compressed + 2 * self.part,
            rows=self.rows,
            frames=self.piece_rows,
        )

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        rows, piece_rows = raw.within("rows", 1, form.batch_size), raw.frames
        if piece_rows and rows > MOST_PIECES * piece_rows:
            raise BadMessage(f"{rows} rows in pieces of {piece_rows} are above {MOST_PIECES}")
        _no_body(raw)
        part, compressed = divmod(raw.within("number", 0, 3), 2)
        method = raw.within("value", 0, len(METHODS) - 1)
        return cls(raw.sequence, rows, bool(compressed), piece_rows, method, bool(part))


@dataclass(frozen=True)
class NoBatch:
    """The answer to a Sample of a library's client that cannot be drawn.

    error: 1 + its index in TELLABLE; text: for the user.
    """

    kind: ClassVar = Kind.NO_BATCH
    sequence: int
    error: int
    text: str

    def raw(self) -> RawMessage:
        return RawMessage(
            self.kind, sequence=self.sequence, number=self.error, body=(_text(self.text),)
        )

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        return cls(raw.sequence, raw.within("number", 1, len(TELLABLE)), _read_text(raw))


@dataclass(frozen=True)
class Update:
    """New priorities (signed TD errors) of one batch, for the memory of `epoch`."""

    kind: ClassVar = Kind.UPDATE
    epoch: int
    sequence: int
    keys: NDArray[np.int64]
    priorities: NDArray[np.float32]

    def raw(self) -> RawMessage:
        return RawMessage(
            self.kind,
            sequence=self.sequence,
            value=self.epoch,
            rows=len(self.keys),
            body=(_priorities(self.keys, self.priorities, "<f4"),),
        )

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        return cls(raw.value, raw.sequence, *_read_priorities(raw, form, "<f4"))


@dataclass(frozen=True)
class _Numbers:
    """A message of a sequence and a value, without a body."""

    kind: ClassVar[Kind]
    sequence: int = 0
    value: int = 0

    def raw(self) -> RawMessage:
        return RawMessage(self.kind, sequence=self.sequence, value=self.value)

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        _no_body(raw)
        return cls(raw.sequence, raw.value)


class UpdateAck(_Numbers):
    """Updates before `sequence` have arrived; `value`: how many rows were stale so far."""

    kind = Kind.UPDATE_ACK


class Pull(_Numbers):
    """A request for parameters newer than version `value`, as soon as there are any."""

    kind = Kind.PULL


class PublishAck(_Numbers):
    """Version `value` is the newest now."""

    kind = Kind.PUBLISH_ACK


@dataclass(frozen=True)
class _Parameters:
    """One version of all parameters, which are not copied."""

    kind: ClassVar[Kind]
    version: int
    parameters: Buffer = field(repr=False)

    def raw(self) -> RawMessage:
        return RawMessage(self.kind, value=self.version, body=(self.parameters,))

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        version = raw.within("value", 1, MAX_COUNT - 1)
        return cls(version, _one_buffer(raw, nbytes=form.parameter_bytes))


class Params(_Parameters):
    """The answer to a Pull: one version of the parameters."""

    kind = Kind.PARAMS


class Publish(_Parameters):
    """A learner's new parameters."""

    kind = Kind.PUBLISH


@dataclass(frozen=True)
class Stats:
    """A role's metrics block as it is now, and the episodes that its actor finished.

    number: the actor's, or LEARNER or REPLAY. time_ns: the sender's clock.
    """

    kind: ClassVar = Kind.STATS
    number: int
    time_ns: int
    metrics: Buffer = field(repr=False)
    episodes: Buffer = field(repr=False)

    def raw(self) -> RawMessage:
        return RawMessage(
            self.kind, value=self.time_ns, number=self.number, body=(self.metrics, self.episodes)
        )

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        number = raw.within("number", REPLAY, MAX_ACTORS - 1)
        if len(raw.body) != 2:
            raise BadMessage(f"statistics have two parts, got {len(raw.body)}")
        metrics, episodes = raw.body
        if metrics.nbytes != form.metrics_bytes:
            raise BadMessage(f"metrics have {form.metrics_bytes} bytes, got {metrics.nbytes}")
        count, rest = divmod(episodes.nbytes, form.episode_bytes)
        if rest or count > MAX_EPISODES:
            raise BadMessage(f"{episodes.nbytes} bytes are not a whole number of episodes")
        return cls(number, raw.value, metrics, episodes)


# Calls of a library's clients, besides requests for batches. A Reply with the same sequence answers
# a call. A client that has waited too long sends the call again with the same sequence. It drops a
# reply that comes twice.


class Request(IntEnum):
    """What clients ask of a replay, of this host (library/handle.py) or over a network."""

    SAMPLE = 0  # only on this host: `rows` by `option`, the method's number
    UPDATE = 1  # keys and priorities
    STATS = 2  # JSON, and how many transitions there are
    CAN_SAMPLE = 3  # of `rows`
    KEYS = 4  # of the chunk (actor `rows`, `option`); over a network only
    SEQUENCES = 5  # `rows` of them, like `option` (replay/sequences.py)
    # The requests below only on this host.
    STREAMS = 6  # the link has `rows` streams now; 0: all its slots are taken back
    ADMIT = 7  # wait until `rows` transitions may come in
    SLOT = 8


PRESENT = struct.Struct("<dqd")
"""In the answers to UPDATE and CAN_SAMPLE: the sum of all leaves, how many transitions there are,
and the smallest positive leaf."""
_MOST_ROWS = 4096


def most_rows(schema: Schema) -> int:
    """The most rows of a batch or an update; both ends know it from the schema."""
    return min(_MOST_ROWS, (NO_FRAME - 1) // (2 * schema.stack))


@dataclass(frozen=True)
class Call:
    """A request of a library's client.

    For UPDATE: epoch, of the memory that the keys are of; keys (B,) int64, priorities (B,) float64.
    """

    kind: ClassVar = Kind.CALL
    sequence: int
    what: int
    rows: int = 0
    option: int = 0
    epoch: int = 0
    keys: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    priorities: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def raw(self) -> RawMessage:
        is_update = self.what == Request.UPDATE
        return RawMessage(
            self.kind,
            incarnation=self.epoch,
            sequence=self.sequence,
            value=self.option,
            number=self.what,
            rows=self.rows,
            body=(_priorities(self.keys, self.priorities, "<f8"),) if is_update else (),
        )

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        what = raw.within("number", Request.UPDATE, Request.SEQUENCES)
        words = raw.sequence, what, raw.rows, raw.value, raw.incarnation
        if what == Request.UPDATE:
            return cls(*words, *_read_priorities(raw, form, "<f8"))
        if what == Request.SEQUENCES:
            Sequences.of_option(raw.value)
        raw.within("rows", 0, MAX_ACTORS - 1 if what == Request.KEYS else form.batch_size)
        _no_body(raw)
        return cls(*words)


@dataclass(frozen=True)
class Reply:
    """The answer to a Call.

    error: 0, or 1 + its index in TELLABLE; then `body` is its text. a, b: two counts.
    """

    kind: ClassVar = Kind.REPLY
    sequence: int
    error: int = 0
    a: int = 0
    b: int = 0
    body: Buffer = field(default=memoryview(b""), repr=False)

    def raw(self) -> RawMessage:
        return RawMessage(
            self.kind,
            sequence=self.sequence,
            value=self.a,
            number=self.error,
            rows=self.b,
            body=(self.body,) if self.body.nbytes else (),
        )

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        error = raw.within("number", 0, len(TELLABLE))
        body = (_one_buffer(raw, at_most=form.largest_answer_bytes),) if raw.body else ()
        return cls(raw.sequence, error, raw.value, raw.rows, *body)

    @property
    def text(self) -> str:
        """The body as text; unprintable characters are replaced."""
        return _printable(self.body)


_MESSAGES: tuple[type[Message], ...] = (
    *(Hello, Welcome, Bye, Error, Push, Ack, Sample, BatchMessage, Update, UpdateAck),
    *(Pull, Params, Publish, PublishAck, Stats, Call, Reply, NoBatch),
)
_READ = {message.kind: message.read for message in _MESSAGES}
_COMPRESSIBLE = {Kind.PUSH: push_bytes, Kind.BATCH: batch_bytes}
"""What may be compressed, and the bytes that its buffers may have, by the header."""
_NEED_NO_FORM = {
    Kind.HELLO,
    Kind.WELCOME,
    Kind.ACK,
    Kind.UPDATE_ACK,
    Kind.PULL,
    Kind.PUBLISH_ACK,
    Kind.BYE,
    Kind.ERROR,
}


def decode(buffers: Sequence[Any], form: Form | None) -> Any:
    """The message in these buffers: `read` of `decode_header`."""
    return read(decode_header(buffers), form)


def read(raw: RawMessage, form: Form | None) -> Any:
    """The message with this header, fully checked against `form`; bodies are views.

    form: None before a welcome; then only messages that need no form are valid. Raises BadMessage.
    """
    if form is None and raw.kind not in _NEED_NO_FORM:
        raise BadMessage(f"{raw.kind.name} came before the welcome")
    if raw.compressed:
        if raw.kind not in _COMPRESSIBLE:
            raise BadMessage(f"{raw.kind.name} is never compressed")
        raw.body = decompress(raw.body, _COMPRESSIBLE[raw.kind](raw, cast(Form, form)))
    return _READ[raw.kind](raw, cast(Form, form))


def encode(message: Message, compressed: bool = False) -> list[Buffer]:
    """The buffers to send. compressed: if it is of a kind that can be."""
    return message.raw().encode(compressed and message.kind in _COMPRESSIBLE)
