"""Mutations that know the structure of messages and JSON documents.

Random bytes die at the first check. A mutant here is a real message whose fields, lengths, counts
and parts are changed, and whose length and checksum are mostly made right again, so that the checks
behind them are reached.
"""

import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from zapex.wire.protocol import HEADER, MAGIC, VERSION

Blind = Callable[[bytes], bytes]
"""The engine's own mutation of some bytes: coverage-guided where there is an engine for that."""

_FIELDS = (  # offset, format: those of message_header.HEADER that a reader looks at
    (4, "<H"), (6, "<H"), (8, "<Q"), (16, "<q"), (24, "<q"), (32, "<q"), (48, "<i"), (52, "<I"),
    (56, "<I"),
)  # fmt: skip
_NEAR = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 16, 255, 256, 4095, 4096, 65535)
_FAR = (-1, -2, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63))
_VERSION_AT, _KIND_AT, _LENGTH_AT, _CRC_AT = 4, 6, 40, 60


def joined(parts: Sequence[Any]) -> bytes:
    """Parts as one: each behind its length, as in the golden files."""
    return b"".join([len(p).to_bytes(4, "little") + bytes(p) for p in parts])


def split(data: bytes, most: int = 24) -> list[bytes]:
    """The inverse; a length that is too large takes the rest."""
    parts, at = [], 0
    while at + 4 <= len(data) and len(parts) < most:
        size = int.from_bytes(data[at : at + 4], "little")
        parts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return parts


def _number(draw: random.Random, size: int) -> bytes:
    """Some number of `size` bytes, mostly one at a border."""
    choice = draw.random()
    if choice < 0.6:
        value = draw.choice(_NEAR)
    elif choice < 0.8:
        value = draw.choice(_FAR)
    else:
        value = draw.getrandbits(8 * size)
    return (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")


def change_body(parts: list[bytes], draw: random.Random, blind: Blind) -> None:
    """One change of the body's parts, in place."""
    which = draw.randrange(8)
    if len(parts) < 2:
        if which < 3:
            parts.append(draw.randbytes(draw.choice(_NEAR[:10])))
        return
    i = draw.randrange(1, len(parts))
    part = parts[i]
    if which <= 2 and part:  # a number inside
        size = draw.choice((1, 2, 4, 8))
        at = draw.randrange(len(part)) // size * size
        parts[i] = part[:at] + _number(draw, size) + part[at + size :]
    elif which == 3:
        parts[i] = blind(part)
    elif which == 4:
        parts[i] = part[: draw.randrange(len(part) + 1)]
    elif which == 5:
        parts[i] = part + draw.randbytes(draw.choice(_NEAR[:12]))
    elif which == 6:
        parts.insert(i, parts[draw.randrange(1, len(parts))])
    else:
        del parts[i]


def _write_checksum(head: bytearray, body: Sequence[bytes]) -> None:
    crc = zlib.crc32(head[:_CRC_AT])
    for part in body:
        crc = zlib.crc32(part, crc)
    struct.pack_into("<I", head, _CRC_AT, crc)


def renewed(parts: list[bytes]) -> list[bytes]:
    """An older version's message as this one's: otherwise it would be refused for that alone."""
    if not parts or len(parts[0]) != HEADER.size:
        return parts
    head = bytearray(parts[0])
    struct.pack_into("<H", head, _VERSION_AT, VERSION)
    _write_checksum(head, parts[1:])
    return [bytes(head), *parts[1:]]


def seal(parts: list[bytes], draw: random.Random, kind: int) -> None:
    """Make length, checksum and kind right, each with some exceptions; in place."""
    head = bytearray(parts[0].ljust(HEADER.size, b"\0")[: HEADER.size])
    if draw.random() < 0.97:
        head[:4] = MAGIC
        struct.pack_into("<H", head, _VERSION_AT, VERSION)
    if draw.random() < 0.97:
        struct.pack_into("<H", head, _KIND_AT, kind)
    if draw.random() < 0.97:
        struct.pack_into("<Q", head, _LENGTH_AT, sum(map(len, parts[1:])))
    if draw.random() < 0.97:
        _write_checksum(head, parts[1:])
    parts[0] = bytes(head)


def mutate_message(
    data: bytes, draw: random.Random, blind: Blind, kind: int, others: Sequence[bytes]
) -> bytes:
    """A message of (mostly) `kind` made from `data`; `others`: messages to splice with."""
    parts = split(data) or [b""]
    for _ in range(1 if draw.random() < 0.6 else draw.randrange(2, 5)):
        choice = draw.random()
        if choice < 0.45:
            offset, form = draw.choice(_FIELDS)
            size = struct.calcsize(form)
            head = parts[0].ljust(HEADER.size, b"\0")
            parts[0] = head[:offset] + _number(draw, size) + head[offset + size :]
        elif choice < 0.9:
            change_body(parts, draw, blind)
        elif choice < 0.95:
            other = split(draw.choice(others))
            if draw.random() < 0.5:
                parts[1:] = other[1:]
            else:
                parts[0] = other[0]
        else:
            parts[0] = blind(parts[0])
    seal(parts, draw, kind)
    if draw.random() < 0.02:
        i = draw.randrange(len(parts))
        parts[i] = parts[i][: draw.randrange(len(parts[i]) + 1)]
    return joined(parts)


_VALUES = (
    "null", "true", "0", "1", "-1", "3", "255", "2147483648", "9223372036854775808",
    "18446744073709551616", "1" + "0" * 400, "0.5", "-1e308", "Infinity", "NaN", '""', '"x"',
    '"\\ud800"', '"0"', '"-1"', '"../x"', '"\\u0000"', "[]", "{}", "[[]]", "[0]", '{"": 0}',
)  # fmt: skip


def _value(draw: random.Random) -> Any:
    return json.loads(draw.choice(_VALUES))


def _place(value: Any, draw: random.Random) -> tuple[Any, Any]:
    """Somewhere inside a list or dict that is not empty: what holds it, and its key there."""
    while True:
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        inner = value[key]
        if not inner or not isinstance(inner, (dict, list)) or draw.random() < 0.2:
            return value, key
        value = inner


def mutate_value(value: Any, draw: random.Random) -> Any:
    """A JSON value with some values inside replaced, keys dropped or added; changed in place."""
    for _ in range(draw.randrange(1, 4)):
        if not value or not isinstance(value, (dict, list)) or draw.random() < 0.02:
            value = _value(draw)
            continue
        holder, key = _place(value, draw)
        choice = draw.random()
        if choice < 0.5:
            holder[key] = _value(draw)
        elif choice < 0.6:
            del holder[key]
        elif choice < 0.7 and isinstance(holder, dict):
            holder[draw.choice(("", "x", "-1", "9", "state", "\ud800"))] = _value(draw)
        elif choice < 0.8 and isinstance(holder[key], int):
            holder[key] += draw.choice((-1, 1, 64, 2**31))
        elif choice < 0.9:
            other, there = _place(value, draw)
            holder[key] = json.loads(json.dumps(other[there]))  # a copy: no circle
        else:
            holder[key] = [holder[key]]
    return value


def mutate_json(text: bytes, draw: random.Random, blind: Blind) -> bytes:
    """A document with some values replaced, keys dropped or added; or its bytes changed."""
    if draw.random() < 0.15:
        return blind(text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return blind(text)
    return json.dumps(mutate_value(value, draw)).encode()
