"""CALL and REPLY: what a library's client asks of a served replay, and the answers.

Every call has an answer with the same sequence: a Reply, or a batch for SAMPLE. A client that has
waited too long sends the call again with the same sequence. It drops an answer that comes twice.
"""

import struct
from dataclasses import field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import MAX_CHUNK, NO_FRAME
from zapex.chunks.schema import Schema
from zapex.errors import TELLABLE, BadMessage
from zapex.wire.header import MAX_ACTORS, Buffer, Form, Kind, RawMessage
from zapex.wire.message import (
    Body,
    Message,
    one_buffer,
    printable,
    priorities_body,
    read_nothing,
    word,
)


class Request(IntEnum):
    """What clients ask of a replay, of this host (library/handle.py) or over a network."""

    SAMPLE = 0  # `rows` by `option`, the method's number
    UPDATE = 1  # keys and priorities
    STATS = 2  # JSON, and how many transitions there are
    CAN_SAMPLE = 3  # of `rows`
    # Over a network only; the requests below it only on this host.
    KEYS = 4  # of the chunk (actor `rows`, incarnation, `option`)
    RESERVE = 5  # `rows` more streams
    RELEASE = 6  # `rows` streams
    ADMIT = 7  # wait until `rows` transitions may come in
    SLOT = 8
    GIVE_BACK = 9  # slot `rows`


PRESENT = struct.Struct("<dqd")
"""In the answers to UPDATE and CAN_SAMPLE: the sum of all leaves, how many transitions there are,
and the smallest positive leaf."""
MAX_REPLY_BYTES = max(4096, 8 * MAX_CHUNK)
_MOST_ROWS = 4096


def most_rows(schema: Schema) -> int:
    """The most rows of a batch or an update; both ends know it from the schema."""
    return min(_MOST_ROWS, (NO_FRAME - 1) // (2 * schema.stack))


_PRIORITIES = priorities_body("<f8")


def _read_call(raw: RawMessage, form: Form) -> tuple[Any, ...]:
    if raw.number == Request.UPDATE:
        return _PRIORITIES.decode(raw, form)
    most = MAX_ACTORS - 1 if raw.number == Request.KEYS else form.batch_size
    if raw.rows > most:
        raise BadMessage(f"a call has at most {most} rows, got {raw.rows}")
    return read_nothing(raw, form)


_CALL = Body(lambda m: _PRIORITIES.encode(m) if m.what == Request.UPDATE else (), _read_call)


class Call(Message, kind=Kind.CALL, body=_CALL):
    """A request of a library's client. keys (B,) int64, priorities (B,) float64: for UPDATE.

    compressed: the batch that it asks for is to be compressed.
    """

    sequence: int = word("sequence")
    what: int = word("number", 0, Request.KEYS)
    rows: int = word("rows", default=0)
    option: int = word("value", default=0)
    incarnation: int = word("incarnation", default=0)
    compressed: bool = word("frames", 0, 1, to=bool, default=False)
    keys: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    priorities: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))


# One field, `body`: its buffer is left out if it is empty.
_REPLY = Body(
    lambda m: (m.body,) if m.body.nbytes else (),
    lambda raw, form: (one_buffer(raw, at_most=MAX_REPLY_BYTES),) if raw.body else (),
)


class Reply(Message, kind=Kind.REPLY, body=_REPLY):
    """The answer to a Call that asked for no batch, or that failed.

    error: 0, or 1 + its index in TELLABLE; then `body` is its text. a, b: two counts.
    """

    sequence: int = word("sequence")
    error: int = word("number", 0, len(TELLABLE), default=0)
    a: int = word("value", default=0)
    b: int = word("rows", default=0)
    body: Buffer = field(default=memoryview(b""), repr=False)

    @property
    def text(self) -> str:
        """The body as text; unprintable characters are replaced."""
        return printable(self.body)
