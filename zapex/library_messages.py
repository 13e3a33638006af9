"""What a library's client asks of a served replay, and the answers: two messages more.

Every call has an answer that bears its sequence: a Reply, or a batch for SAMPLE. Whoever has waited
for too long calls again with the same one; an answer that comes twice is dropped.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from zapex.errors import TELLABLE, BadMessage
from zapex.message_header import (
    MAX_ACTORS,
    Form,
    Kind,
    Message,
    Part,
    as_part,
    no_body,
    one_part,
)
from zapex.schema import MAX_CHUNK, NO_FRAME, Schema

# What is asked. SAMPLE: `rows` by `option` = index of the method. UPDATE: keys and priorities.
# STATS: JSON. CAN_SAMPLE: of `rows`. KEYS: of the chunk (actor `rows`, incarnation, `option`).
WHATS = SAMPLE, UPDATE, STATS, CAN_SAMPLE, KEYS = range(5)
MAX_REPLY_BYTES = max(4096, 8 * MAX_CHUNK)
_MOST_ROWS = 4096


def most_rows(schema: Schema) -> int:
    """Of a batch or an update; both ends know it from the schema."""
    return min(_MOST_ROWS, (NO_FRAME - 1) // (2 * schema.stack))


@dataclass(frozen=True)
class Call:
    """A request of a library's client. keys (B,) int64, priorities (B,) float64: of UPDATE."""

    kind: ClassVar[Kind] = Kind.CALL
    sequence: int
    what: int
    rows: int = 0
    option: int = 0
    incarnation: int = 0
    keys: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    priorities: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def message(self) -> Message:
        """As a message."""
        body: tuple[Part, ...] = ()
        if self.what == UPDATE:
            columns = self.keys.astype("<i8").tobytes() + self.priorities.astype("<f8").tobytes()
            body = (as_part(columns),)
        return Message(
            self.kind, incarnation=self.incarnation, sequence=self.sequence, value=self.option,
            number=self.what, rows=self.rows, body=body,
        )  # fmt: skip

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "Call":
        """Checked; a priority that is not finite breaks the rules: clients look before."""
        if form is None or message.number not in WHATS:
            raise BadMessage(f"calls are 0 to {len(WHATS) - 1}, got {message.number}")
        rows, most = message.rows, MAX_ACTORS - 1 if message.number == KEYS else form.batch_size
        if rows > most:
            raise BadMessage(f"a call has at most {most} rows, got {rows}")
        facts = message.sequence, message.number, rows, message.value, message.incarnation
        if message.number != UPDATE:
            no_body(message)
            return cls(*facts)
        part = one_part(message, nbytes=16 * rows)
        keys = np.frombuffer(part[: 8 * rows], "<i8")
        priorities = np.frombuffer(part[8 * rows :], "<f8")
        if not np.isfinite(priorities).all():
            raise BadMessage("priorities must be finite")
        return cls(*facts, keys, priorities)


@dataclass(frozen=True)
class Reply:
    """The answer to a Call that asked for no batch, or that failed.

    error: 0, or 1 + its place in TELLABLE, and `body` is its text. a, b: two counts.
    """

    kind: ClassVar[Kind] = Kind.REPLY
    sequence: int
    error: int = 0
    a: int = 0
    b: int = 0
    body: Part = field(default=memoryview(b""), repr=False)

    def message(self) -> Message:
        """As a message."""
        return Message(
            self.kind, sequence=self.sequence, value=self.a, number=self.error, rows=self.b,
            body=(self.body,) if self.body.nbytes else (),
        )  # fmt: skip

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "Reply":
        """Checked."""
        if form is None or not 0 <= message.number <= len(TELLABLE):
            raise BadMessage(f"errors are 1 to {len(TELLABLE)}, got {message.number}")
        body = one_part(message, at_most=MAX_REPLY_BYTES) if message.body else memoryview(b"")
        return cls(message.sequence, message.number, message.value, message.rows, body)

    @property
    def text(self) -> str:
        """The body as text; what cannot be printed is escaped."""
        text = bytes(self.body).decode("utf-8", "replace")
        return "".join(c if c.isprintable() else "?" for c in text)
