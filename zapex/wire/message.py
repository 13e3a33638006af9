"""The parts of a message class: fields, their header words, and a codec of the body.

Both directions use the same table, so a class is only its fields and a docstring. The header has
the words schema, incarnation, sequence, value, number, rows and frames (header.py).
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar, Self, dataclass_transform

import numpy as np

from zapex.errors import BadMessage
from zapex.wire.header import Buffer, Form, Kind, RawMessage, as_buffer

MAX_TEXT_BYTES = 1 << 12


def word(
    name: str,
    least: int | None = None,
    most: int | None = None,
    *,
    to: Callable[[int], Any] | None = None,
    default: Any = MISSING,
) -> Any:
    """A field in the header word `name`; a value outside its range is refused.

    to: converts the word to the field's value; the inverse is int().
    """
    return field(default=default, metadata={"word": name, "range": (least, most), "to": to})


@dataclass(frozen=True)
class Body:
    """The codec of a body: it makes the fields that are not words, in their order.

    encode: returns a message's buffers to send. decode: returns the fields' values, checked also
    against the words; raises BadMessage.
    """

    encode: Callable[[Any], tuple[Buffer, ...]]
    decode: Callable[[RawMessage, Form], tuple[Any, ...]]


def read_nothing(raw: RawMessage, form: Form) -> tuple[()]:
    """Decode the body of a message that has none. Raises BadMessage."""
    if raw.body:
        raise BadMessage(f"{raw.kind.name} has no body, got {len(raw.body)} parts")
    return ()


_NO_BODY = Body(lambda message: (), read_nothing)


@dataclass_transform(frozen_default=True, field_specifiers=(word, field))
class Message:
    """The base of all messages. `kind` and `body` are arguments of the class statement.

    Further arguments are words that are computed from the fields: name=function.
    """

    kind: ClassVar[Kind]
    _body: ClassVar[Body]
    _reads: ClassVar[list[Any]]
    _writes: ClassVar[list[Any]]

    def __init_subclass__(
        cls, kind: Kind, body: Body = _NO_BODY, **computed: Callable[[Any], int]
    ) -> None:
        super().__init_subclass__()
        dataclass(frozen=True)(cls)
        cls.kind, cls._body = kind, body
        words = [f for f in fields(cls) if f.metadata]  # type: ignore[arg-type]
        get = {f.metadata["word"]: attrgetter(f.name) for f in words}
        cls._reads = [(f.name, *f.metadata.values()) for f in words]
        cls._writes = list((get | computed).items())

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        """The message, fully checked. Raises BadMessage."""
        values = []
        for name, place, (least, most), to in cls._reads:
            value = getattr(raw, place)
            if least is not None and (value < least or (most is not None and value > most)):
                bounds = f"at least {least}" if most is None else f"{least} to {most}"
                raise BadMessage(f"{name} of {raw.kind.name} must be {bounds}, got {value}")
            values.append(value if to is None else to(value))
        return cls(*values, *cls._body.decode(raw, form))

    def raw(self) -> RawMessage:
        """The header's words and the body's buffers."""
        raw = RawMessage(self.kind, body=self._body.encode(self))
        for name, get in self._writes:
            setattr(raw, name, get(self))
        return raw


def one_buffer(raw: RawMessage, nbytes: int | None = None, at_most: int = 0) -> Buffer:
    """The only buffer of a body, of exactly `nbytes` or of at most `at_most`."""
    if len(raw.body) != 1:
        raise BadMessage(f"{raw.kind.name} has one part of body, got {len(raw.body)}")
    (buffer,) = raw.body
    if nbytes is not None and buffer.nbytes != nbytes:
        raise BadMessage(f"{raw.kind.name} has {nbytes} bytes of body, got {buffer.nbytes}")
    if nbytes is None and buffer.nbytes > at_most:
        raise BadMessage(f"{raw.kind.name} has at most {at_most} bytes, got {buffer.nbytes}")
    return buffer


def printable(buffer: Buffer) -> str:
    """A peer's text; bytes that are not UTF-8 or cannot be printed are replaced."""
    text = bytes(buffer).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def text_body(name: str, *, may_be_empty: bool = False) -> Body:
    """One field, text, cut at MAX_TEXT_BYTES. An empty text has no buffer if `may_be_empty`."""
    get = attrgetter(name)

    def encode(message: Any) -> tuple[Buffer, ...]:
        # The text may quote a peer's JSON, which can hold half a character (a lone surrogate).
        text = get(message).encode(errors="replace")[:MAX_TEXT_BYTES]
        return (as_buffer(text),) if text or not may_be_empty else ()

    def decode(raw: RawMessage, form: Form) -> tuple[str]:
        if may_be_empty and not raw.body:
            return ("",)
        return (printable(one_buffer(raw, at_most=MAX_TEXT_BYTES)),)

    return Body(encode, decode)


def priorities_body(dtype: str) -> Body:
    """Two fields, keys (rows,) int64 and priorities (rows,), finite (clients check this first)."""
    item_bytes = np.dtype(dtype).itemsize

    def encode(message: Any) -> tuple[Buffer, ...]:
        keys, priorities = message.keys.astype("<i8"), message.priorities.astype(dtype)
        return (as_buffer(keys.tobytes() + priorities.tobytes()),)

    def decode(raw: RawMessage, form: Form) -> tuple[Any, ...]:
        rows = raw.rows
        if rows > form.batch_size:
            raise BadMessage(
                f"{raw.kind.name} has at most a batch's rows, {form.batch_size}, got {rows}"
            )
        buffer = one_buffer(raw, nbytes=(8 + item_bytes) * rows)
        keys = np.frombuffer(buffer[: 8 * rows], "<i8")
        priorities = np.frombuffer(buffer[8 * rows :], dtype)
        if not np.isfinite(priorities).all():
            raise BadMessage("priorities must be finite")
        return keys, priorities

    return Body(encode, decode)
