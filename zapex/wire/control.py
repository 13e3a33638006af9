"""Messages between hosts: values to bytes and back, all checked; no socket.

A message is a header (header.py) and the buffers of its body, each a frame of the transport. Every
length, shape and dtype is known from the local config (`Form`), and a message must agree with it.
Otherwise BadMessage is raised before memory of the message's size is allocated.
docs/wire_protocol.md has all messages byte by byte.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import IntEnum
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from zapex.errors import BadMessage
from zapex.wire.calls import Call, Reply
from zapex.wire.compression import decompress
from zapex.wire.experience import BatchMessage, Push
from zapex.wire.header import (
    MAX_ACTORS,
    MAX_COUNT,
    Buffer,
    Form,
    Kind,
    RawMessage,
    as_buffer,
    decode_header,
)
from zapex.wire.message import (
    Body,
    Message,
    one_buffer,
    priorities_body,
    read_nothing,
    text_body,
    word,
)

MAX_CONFIG_BYTES = 1 << 16
# Parsed JSON takes many times the memory of its text, so objects are counted first.
MAX_CONFIG_ITEMS, MAX_CONFIG_TABLES = 4096, 256
MAX_EPISODES = 1024  # in one message
MOST_PIECES = 64  # of one batch
ROLES = ("relay", "learner", "reader", "client")
SMALL, BULK = 0, 1  # the two connections of a client
LEARNER, REPLAY = -1, -2  # in place of an actor's number in statistics

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


def _read_config(raw: RawMessage, form: Form) -> tuple[dict[str, Any]]:
    text = bytes(one_buffer(raw, at_most=MAX_CONFIG_BYTES))
    items, tables = (sum(map(text.count, marks)) for marks in ((b",", b":"), (b"[", b"{")))
    if items > MAX_CONFIG_ITEMS or tables > MAX_CONFIG_TABLES:
        raise BadMessage(f"settings have too many items ({items}) or tables ({tables})")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"the settings are not JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadMessage("the settings are not a table")
    return (config,)


_CONFIG = Body(lambda m: (as_buffer(json.dumps(m.config, sort_keys=True).encode()),), _read_config)


class Hello(Message, kind=Kind.HELLO, body=_CONFIG, number=lambda m: ROLES.index(m.role)):
    """A client's first message on each of its connections, and its heartbeat on both.

    host: one number for one incarnation of a client host's parent. actors: how many numbers it
    wants; of a learner: 1 to replace one of another host that is connected. config: shared settings
    by name, for comparison.
    """

    role: str = word("number", 0, len(ROLES) - 1, to=ROLES.__getitem__)
    host: int = word("value", 1)
    incarnation: int = word("incarnation")
    channel: int = word("frames", SMALL, BULK)
    schema: int = word("schema")
    actors: int = word("rows", 0, MAX_ACTORS)
    config: Mapping[str, Any]


def _read_actor_states(raw: RawMessage, form: Form) -> tuple[NDArray[np.void]]:
    buffer = one_buffer(raw, at_most=MAX_ACTORS * ACTOR_STATE.itemsize)
    if buffer.nbytes % ACTOR_STATE.itemsize:
        raise BadMessage(
            f"{raw.kind.name} has records of {ACTOR_STATE.itemsize} bytes, got {buffer.nbytes}"
        )
    states = np.frombuffer(buffer, ACTOR_STATE)
    if states.size and (states.view("<i8").min() < 0 or states["actor"].max() >= MAX_ACTORS):
        raise BadMessage("an actor's state has a number out of range")
    return (states,)


_ACTOR_STATES = Body(lambda m: (as_buffer(m.actors.tobytes()),), _read_actor_states)


class Welcome(Message, kind=Kind.WELCOME, body=_ACTOR_STATES):
    """The replay's answer to a Hello: all facts that the client needs to continue.

    incarnation: the server's. total_actors: of the run. chunk: transitions per chunk. fresh: this
    connection is new to the replay, so messages in flight are lost. actors: ACTOR_STATE records of
    the client's actor numbers.
    """

    incarnation: int = word("incarnation")
    schema: int = word("schema")
    epoch: int = word("value")
    params_version: int = word("sequence")
    total_actors: int = word("frames", 1, MAX_ACTORS)
    chunk: int = word("number", 1, 256)
    fresh: bool = word("rows", to=bool)
    actors: NDArray[np.void]


class Ack(Message, kind=Kind.ACK, body=_ACTOR_STATES):
    """Acknowledgement and credit, cumulative, of any number of actors: ACTOR_STATE records."""

    actors: NDArray[np.void]


def _check_sample(raw: RawMessage, form: Form) -> tuple[()]:
    if not 1 <= raw.rows <= form.batch_size:
        raise BadMessage(f"this run's batches have 1 to {form.batch_size} rows, not {raw.rows}")
    if raw.frames and raw.rows > MOST_PIECES * raw.frames:
        raise BadMessage(f"{raw.rows} rows in pieces of {raw.frames} are above {MOST_PIECES}")
    return read_nothing(raw, form)


class Sample(Message, kind=Kind.SAMPLE, body=Body(lambda m: (), _check_sample)):
    """A request for one batch, or for a part of one that several replays draw together.

    sequence: its number, which the answers repeat. rows: at most the run's batch size.
    compressed: the batch is to be compressed. piece_rows: it is drawn whole and comes in pieces of
    so many rows; 0: in one.
    """

    sequence: int = word("sequence")
    rows: int = word("rows")
    compressed: bool = word("number", 0, 1, to=bool, default=False)
    piece_rows: int = word("frames", default=0)


class Update(Message, kind=Kind.UPDATE, body=priorities_body("<f4"), rows=lambda m: len(m.keys)):
    """New priorities (signed TD errors) of one batch, for the memory of `epoch`."""

    epoch: int = word("value")
    sequence: int = word("sequence")
    keys: NDArray[np.int64]
    priorities: NDArray[np.float32]


class UpdateAck(Message, kind=Kind.UPDATE_ACK):
    """Updates before `sequence` have arrived; `value`: how many rows were stale so far."""

    sequence: int = word("sequence", default=0)
    value: int = word("value", default=0)


class Pull(Message, kind=Kind.PULL):
    """A request for parameters newer than version `value`, as soon as there are any."""

    sequence: int = word("sequence", default=0)
    value: int = word("value", default=0)


class PublishAck(Message, kind=Kind.PUBLISH_ACK):
    """Version `value` is the newest now."""

    sequence: int = word("sequence", default=0)
    value: int = word("value", default=0)


class Bye(Message, kind=Kind.BYE, body=text_body("over", may_be_empty=True)):
    """The client leaves: its actor numbers are free again.

    over: from the learner, why the run has ended for all; "" if only this client leaves.
    """

    over: str = ""


# One field, all parameters; they are not copied.
_PARAMETERS = Body(
    lambda m: (m.parameters,), lambda raw, form: (one_buffer(raw, nbytes=form.parameter_bytes),)
)


class Params(Message, kind=Kind.PARAMS, body=_PARAMETERS):
    """The answer to a Pull: one version of the parameters."""

    version: int = word("value", 1, MAX_COUNT - 1)
    parameters: Buffer = field(repr=False)


class Publish(Message, kind=Kind.PUBLISH, body=_PARAMETERS):
    """A learner's new parameters."""

    version: int = word("value", 1, MAX_COUNT - 1)
    parameters: Buffer = field(repr=False)


def _read_statistics(raw: RawMessage, form: Form) -> tuple[Buffer, Buffer]:
    if len(raw.body) != 2:
        raise BadMessage(f"statistics have two parts, got {len(raw.body)}")
    metrics, episodes = raw.body
    if metrics.nbytes != form.metrics_bytes:
        raise BadMessage(f"metrics have {form.metrics_bytes} bytes, got {metrics.nbytes}")
    count, rest = divmod(episodes.nbytes, form.episode_bytes)
    if rest or count > MAX_EPISODES:
        raise BadMessage(f"{episodes.nbytes} bytes are not a whole number of episodes")
    return metrics, episodes


class Stats(
    Message, kind=Kind.STATS, body=Body(lambda m: (m.metrics, m.episodes), _read_statistics)
):
    """A role's metrics block as it is now, and the episodes that its actor finished.

    number: the actor's, or LEARNER or REPLAY. time_ns: the sender's clock.
    """

    number: int = word("number", REPLAY, MAX_ACTORS - 1)
    time_ns: int = word("value")
    metrics: Buffer = field(repr=False)
    episodes: Buffer = field(repr=False)


class Error(Message, kind=Kind.ERROR, body=text_body("text")):
    """Why a message was refused, as text for the user."""

    fault: Fault = word("number", 1, len(Fault), to=Fault)
    text: str


_MESSAGES: dict[Kind, type[Message]] = {
    message.kind: message
    for message in (
        Hello, Welcome, Push, Ack, Sample, BatchMessage, Update, UpdateAck, Pull, Params, Publish,
        PublishAck, Stats, Bye, Error, Call, Reply,
    )
}  # fmt: skip
COMPRESSIBLE = {Kind.PUSH, Kind.BATCH}
_NEED_NO_FORM = {
    Kind.HELLO, Kind.WELCOME, Kind.ACK, Kind.UPDATE_ACK, Kind.PULL, Kind.PUBLISH_ACK, Kind.BYE,
    Kind.ERROR,
}  # fmt: skip


def decode(buffers: Sequence[Any], form: Form | None, *, of_client: bool = False) -> Any:
    """The message in these buffers, fully checked against `form`; bodies are views of them.

    form: None before a welcome; then only messages that need no form are valid. of_client: it came
    to a replay; then nothing larger than a request is decompressed. Raises BadMessage.
    """
    raw = decode_header(buffers)
    if form is None and raw.kind not in _NEED_NO_FORM:
        raise BadMessage(f"{raw.kind.name} came before the welcome")
    if raw.compressed:
        if form is None or raw.kind not in COMPRESSIBLE or (of_client and raw.kind != Kind.PUSH):
            raise BadMessage(f"{raw.kind.name} is never compressed")
        is_request = raw.kind == Kind.PUSH
        most = form.largest_request_bytes if is_request else form.largest_answer_bytes
        raw.body = decompress(raw.body, most)
    return _MESSAGES[raw.kind].read(raw, cast(Form, form))


def encode(message: Message, compressed: bool = False) -> list[Buffer]:
    """The buffers to send. compressed: if it is of a kind that can be."""
    return message.raw().encode(compressed and message.kind in COMPRESSIBLE)
