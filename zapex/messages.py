"""Messages between hosts: values to bytes and back, everything checked; knows no socket.

A message is a header (message_header.py) and the parts of its body, each a frame of the transport.
What a length, shape or dtype must be is known beforehand, from the local config (`Form`): a
message can only agree. Every way in which bytes can be wrong is a BadMessage, raised before
anything of their size is allocated. docs/wire_protocol.md has them byte by byte.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from zapex.errors import BadMessage
from zapex.experience_messages import BatchMessage, Push
from zapex.library_messages import Call, Reply
from zapex.message_header import (
    MAX_ACTORS,
    MAX_COUNT,
    Form,
    Kind,
    Message,
    Part,
    as_part,
    check_actor,
    decode_header,
    no_body,
    one_part,
)

MAX_CONFIG_BYTES = 1 << 16
# JSON takes many times its text's length once it is read: what makes objects is counted before.
MAX_CONFIG_ITEMS, MAX_CONFIG_TABLES = 4096, 256
MAX_TEXT_BYTES = 1 << 12
MAX_EPISODES = 1024  # in one message
ROLES = ("relay", "learner", "reader", "client")
SMALL, BULK = 0, 1  # the two connections of a client
LEARNER, REPLAY = -1, -2  # whose statistics, where they are no actor's

ACTOR_STATE = np.dtype(
    [("actor", "<i8"), ("incarnation", "<i8"), ("sequence", "<i8"), ("credit_bytes", "<i8")]
)
"""What the replay says of an actor: everything before `sequence` of that incarnation is committed,
and chunks of `credit_bytes`, at a slot's size each, may follow before the next acknowledgement."""


class Fault(IntEnum):
    """Why the replay answers with an Error; each tells the peer what to do."""

    HELLO_FIRST = 1  # this connection is not known: say hello
    REFUSED = 2  # another version, schema, config or role: nothing will help
    FENCED = 3  # a newer incarnation has your place: exit
    FULL = 4  # no actor number is free: ask again later
    BAD = 5  # a message that breaks the rules
    OVER = 6  # the run has ended, and why: exit


def _records(part: Part, dtype: np.dtype[Any], at_most: int) -> NDArray[Any]:
    if part.nbytes % dtype.itemsize or part.nbytes // dtype.itemsize > at_most:
        raise BadMessage(f"at most {at_most} records of {dtype.itemsize} bytes, got {part.nbytes}")
    return np.frombuffer(part, dtype)


@dataclass(frozen=True)
class Hello:
    """A client's first message on each of its connections, and its sign of life on both.

    host: one number for one life of a client host's parent. actors: how many numbers it wants.
    config: shared settings by name, for comparison.
    """

    kind: ClassVar[Kind] = Kind.HELLO
    role: str
    host: int
    incarnation: int
    channel: int
    schema: int
    actors: int
    config: Mapping[str, Any]

    def message(self) -> Message:
        """As a message."""
        text = json.dumps(self.config, sort_keys=True).encode()
        return Message(
            self.kind, self.schema, self.incarnation, 0, self.host, ROLES.index(self.role),
            self.actors, self.channel, (as_part(text),),
        )  # fmt: skip

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "Hello":
        """Checked."""
        text = one_part(message, at_most=MAX_CONFIG_BYTES)
        if not 0 <= message.number < len(ROLES):
            raise BadMessage(f"roles are 0 to {len(ROLES) - 1}, got {message.number}")
        if message.rows > MAX_ACTORS or message.frames not in (SMALL, BULK):
            raise BadMessage("at most 4096 actors, on connection 0 or 1")
        if message.value < 1:
            raise BadMessage(f"hosts are numbered from 1, got {message.value}")
        config_bytes = bytes(text)
        items, tables = (
            sum(map(config_bytes.count, marks)) for marks in ((b",", b":"), (b"[", b"{"))
        )
        if items > MAX_CONFIG_ITEMS or tables > MAX_CONFIG_TABLES:
            raise BadMessage(f"settings of {items} items in {tables} tables are none")
        try:
            config = json.loads(config_bytes)
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"the settings are no JSON: {error}") from None
        if not isinstance(config, dict):
            raise BadMessage("the settings are no table")
        return cls(
            ROLES[message.number], message.value, message.incarnation, message.frames,
            message.schema, message.rows, config,
        )  # fmt: skip


@dataclass(frozen=True)
class Welcome:
    """The replay's answer to a Hello: everything that the client must know to go on.

    incarnation: the server's. total_actors: of the run. chunk: transitions a chunk. fresh: this
    connection was not known, so what was under way on it is lost. actors: ACTOR_STATE records of
    the numbers that are the client's.
    """

    kind: ClassVar[Kind] = Kind.WELCOME
    incarnation: int
    schema: int
    epoch: int
    params_version: int
    total_actors: int
    chunk: int
    fresh: bool
    actors: NDArray[np.void]

    def message(self) -> Message:
        """As a message."""
        return Message(
            self.kind, self.schema, self.incarnation, self.params_version, self.epoch, self.chunk,
            int(self.fresh), self.total_actors, (as_part(self.actors.tobytes()),),
        )  # fmt: skip

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "Welcome":
        """Checked."""
        part = one_part(message, at_most=MAX_ACTORS * ACTOR_STATE.itemsize)
        actors = _actor_states(part)
        if not 1 <= message.frames <= MAX_ACTORS or not 1 <= message.number <= 256:
            raise BadMessage("a run has 1 to 4096 actors, a chunk 1 to 256 transitions")
        return cls(
            message.incarnation, message.schema, message.value, message.sequence, message.frames,
            message.number, bool(message.rows), actors,
        )  # fmt: skip


def _actor_states(part: Part) -> NDArray[np.void]:
    states = _records(part, ACTOR_STATE, MAX_ACTORS)
    if states.size and (states.view("<i8").min() < 0 or states["actor"].max() >= MAX_ACTORS):
        raise BadMessage("an actor's state has a number out of range")
    return states


@dataclass(frozen=True)
class Ack:
    """Acknowledgement and credit, cumulative, of any number of actors: ACTOR_STATE records."""

    kind: ClassVar[Kind] = Kind.ACK
    actors: NDArray[np.void]

    def message(self) -> Message:
        """As a message."""
        return Message(self.kind, body=(as_part(self.actors.tobytes()),))

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "Ack":
        """Checked."""
        return cls(_actor_states(one_part(message, at_most=MAX_ACTORS * ACTOR_STATE.itemsize)))


@dataclass(frozen=True)
class Sample:
    """A request for one batch; `sequence` is its number, which the answer bears."""

    kind: ClassVar[Kind] = Kind.SAMPLE
    sequence: int
    rows: int

    def message(self) -> Message:
        """As a message."""
        return Message(self.kind, sequence=self.sequence, rows=self.rows)

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "Sample":
        """Checked."""
        no_body(message)
        if form is None or message.rows != form.batch_size:
            raise BadMessage(f"this run's batches have another size than {message.rows}")
        return cls(message.sequence, message.rows)


@dataclass(frozen=True)
class Update:
    """New priorities (signed TD errors) of one batch, for the memory of `epoch`."""

    kind: ClassVar[Kind] = Kind.UPDATE
    epoch: int
    sequence: int
    keys: NDArray[np.int64]
    priorities: NDArray[np.float32]

    def message(self) -> Message:
        """As a message."""
        body = self.keys.astype("<i8").tobytes() + self.priorities.astype("<f4").tobytes()
        return Message(
            self.kind, sequence=self.sequence, value=self.epoch, rows=len(self.keys),
            body=(as_part(body),),
        )  # fmt: skip

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "Update":
        """Checked; a priority that is not finite breaks the rules."""
        rows = message.rows
        if form is None or rows > form.batch_size:
            raise BadMessage(f"an update has at most a batch's rows, got {rows}")
        part = one_part(message, nbytes=12 * rows)
        keys = np.frombuffer(part[: 8 * rows], "<i8")
        priorities = np.frombuffer(part[8 * rows :], "<f4")
        if not np.isfinite(priorities).all():
            raise BadMessage("priorities must be finite")
        return cls(message.value, message.sequence, keys, priorities)


@dataclass(frozen=True)
class _Bare:
    """A message of two numbers and no body."""

    kind: ClassVar[Kind]
    sequence: int = 0
    value: int = 0

    def message(self) -> Message:
        """As a message."""
        return Message(self.kind, sequence=self.sequence, value=self.value)

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "_Bare":
        """Checked."""
        no_body(message)
        return cls(message.sequence, message.value)


class UpdateAck(_Bare):
    """Updates before `sequence` have arrived; `value`: how many rows were stale so far."""

    kind = Kind.UPDATE_ACK


class Pull(_Bare):
    """Parameters newer than version `value` are wanted, as soon as there are any."""

    kind = Kind.PULL


class PublishAck(_Bare):
    """Version `value` is the newest now."""

    kind = Kind.PUBLISH_ACK


@dataclass(frozen=True)
class Bye:
    """The client leaves: its actor numbers are free again.

    over: from the learner, why the run has ended for everybody; "" where it only leaves.
    """

    kind: ClassVar[Kind] = Kind.BYE
    over: str = ""

    def message(self) -> Message:
        """As a message."""
        text = self.over.encode()[:MAX_TEXT_BYTES]
        return Message(self.kind, body=(as_part(text),) if text else ())

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "Bye":
        """Checked; what cannot be printed is escaped."""
        if not message.body:
            return cls()
        return cls(_printable(one_part(message, at_most=MAX_TEXT_BYTES)))


@dataclass(frozen=True)
class _Parameters:
    """A version of the parameters, whole."""

    kind: ClassVar[Kind]
    version: int
    parameters: Part = field(repr=False)

    def message(self) -> Message:
        """As a message; the parameters are not copied."""
        return Message(self.kind, value=self.version, body=(self.parameters,))

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "_Parameters":
        """Checked."""
        if form is None or not 1 <= message.value < MAX_COUNT:
            raise BadMessage("parameters have a version of 1 to 2^60, and come after a welcome")
        return cls(message.value, one_part(message, nbytes=form.parameter_bytes))


class Params(_Parameters):
    """The answer to a Pull."""

    kind = Kind.PARAMS


class Publish(_Parameters):
    """A learner's new parameters."""

    kind = Kind.PUBLISH


@dataclass(frozen=True)
class Stats:
    """A role's metrics block as it is now, and episodes that its actor finished.

    number: the actor's, or LEARNER or REPLAY. time_ns: the sender's clock.
    """

    kind: ClassVar[Kind] = Kind.STATS
    number: int
    time_ns: int
    metrics: Part = field(repr=False)
    episodes: Part = field(repr=False)

    def message(self) -> Message:
        """As a message."""
        body = (self.metrics, self.episodes)
        return Message(self.kind, value=self.time_ns, number=self.number, body=body)

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "Stats":
        """Checked."""
        if form is None or len(message.body) != 2:
            raise BadMessage("statistics have two parts and come after a welcome")
        metrics, episodes = message.body
        if metrics.nbytes != form.metrics_bytes:
            raise BadMessage(f"metrics have {form.metrics_bytes} bytes, got {metrics.nbytes}")
        if (
            episodes.nbytes % form.episode_bytes
            or episodes.nbytes > MAX_EPISODES * form.episode_bytes
        ):
            raise BadMessage(f"{episodes.nbytes} bytes are no number of episodes")
        if message.number not in (LEARNER, REPLAY):
            check_actor(message.number)
        return cls(message.number, message.value, metrics, episodes)


@dataclass(frozen=True)
class Error:
    """Why a message was not taken, in words for the user."""

    kind: ClassVar[Kind] = Kind.ERROR
    fault: Fault
    text: str

    def message(self) -> Message:
        """As a message."""
        # What a peer sent may be quoted, and JSON can hold half a character.
        text = self.text.encode(errors="replace")[:MAX_TEXT_BYTES]
        return Message(self.kind, number=self.fault, body=(as_part(text),))

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "Error":
        """Checked; what is no UTF-8 is replaced, what cannot be printed is escaped."""
        if not 1 <= message.number <= len(Fault):
            raise BadMessage(f"faults are 1 to {len(Fault)}, got {message.number}")
        return cls(Fault(message.number), _printable(one_part(message, at_most=MAX_TEXT_BYTES)))


def _printable(part: Part) -> str:
    text = bytes(part).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)


_MESSAGES: tuple[Any, ...] = (
    Hello, Welcome, Push, Ack, Sample, BatchMessage, Update, UpdateAck, Pull, Params, Publish,
    PublishAck, Stats, Bye, Error, Call, Reply,
)  # fmt: skip
_READERS: dict[Kind, Callable[[Message, Form | None], Any]] = {m.kind: m.read for m in _MESSAGES}


def decode(parts: Sequence[Any], form: Form | None) -> Any:
    """The message in these parts, checked in full against `form`; bodies are views of the parts.

    form: None before a welcome: then only messages that need none are taken. Raises BadMessage.
    """
    message = decode_header(parts)
    return _READERS[message.kind](message, form)


def encode(message: Any) -> list[Part]:
    """The parts to send."""
    return message.message().encode()  # type: ignore[no-any-return]
