"""Files that another version, another program or a stranger may have written, such as a run's.

A FIFO would block, a device never end, and some numbers and nestings break a parser: each of these
is one error that names the file. Facts are used only once `typed` has checked them.
"""

import dataclasses
import errno
import itertools
import json
import math
import os
import stat
import sys
import tomllib
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, TextIO

from zapex.errors import ConfigError

_MOST_TOML_BYTES: Final = 1 << 18
_MOST_JSON_BYTES: Final = 4 << 20  # Python needs up to 25 times as much for the values
_MOST_LINE_BYTES: Final = 1 << 20
_MOST_DOTS: Final = 200  # in a line of TOML: the time for a key grows with their square
_MOST_DEPTH: Final = 32
_MOST_INT: Final = 1 << 63
_MOST_FLOAT: Final = 1e18


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read. Raises OSError if it is none: a FIFO would block, a device never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a file. Raises OSError if it is none, or has more than `most_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
        return file.read(size)


def read_text(path: Path, most_bytes: int = _MOST_TOML_BYTES) -> str:
    """The text of a small file. Raises ConfigError."""
    try:
        return read_regular(path, most_bytes).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{path} cannot be read: {why}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError."""
    return parse_toml(read_text(path), path)


def parse_toml(text: str, name: object) -> dict[str, Any]:
    """The tables in a text; `name` names it in errors. Raises ConfigError."""
    try:
        if max((line.count(".") for line in text.splitlines()), default=0) > _MOST_DOTS:
            raise ValueError(f"a line has more than {_MOST_DOTS} dots")
        return dict(_bounded(tomllib.loads(text)))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not TOML: {error}") from None


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises ConfigError."""
    return parse_json(read_text(path, _MOST_JSON_BYTES), path)


def parse_json(text: str | bytes, name: object) -> Any:
    """The value in a text; `name` names it in errors. Raises ConfigError."""
    try:
        return _bounded(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of lines, without lines that are damaged. Raises ConfigError."""
    try:
        with open_regular(path) as file:
            while line := file.readline(_MOST_LINE_BYTES):
                if len(line) == _MOST_LINE_BYTES:
                    raise OSError(errno.EFBIG, f"a line has more than {_MOST_LINE_BYTES} bytes")
                try:
                    found = _bounded(json.loads(line))
                except (ValueError, RecursionError):
                    continue
                if isinstance(found, dict):
                    yield found
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _bounded(value: Any) -> Any:
    """`value`, if what works on its parts can't fail on their depth or size; else a ValueError."""
    parts = [value]
    for _ in range(_MOST_DEPTH):
        whole = [part for part in parts if type(part) is int] or [0]
        if min(whole) < -_MOST_INT or max(whole) >= _MOST_INT:
            raise ValueError("it has an integer of more than 64 bits")
        inner = [
            part.values() if type(part) is dict else part
            for part in parts
            if type(part) in (dict, list)
        ]
        parts = list(itertools.chain.from_iterable(inner))
        if not parts:
            return value
    raise ValueError(f"it is nested more than {_MOST_DEPTH} deep")


def typed(kind: Any, value: Any, name: str = "it") -> Any:
    """`value`, parsed JSON, as a `kind`: a dataclass, or a type that its fields may have.

    null is NaN where a float is expected, because JSON has no NaN. Another version's file may lack
    names in a table of floats, which are 0 then, and have fields that a dataclass does not know.
    name: of the value in errors. Raises ConfigError.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        if value is None and NoneType in inner:
            return None
        (kind,) = (one for one in inner if one is not NoneType)
        return typed(kind, value, name)
    if kind is Any or (origin is Literal and value in inner):
        return value
    if kind is float and isinstance(value, (int, float, NoneType)):
        number = math.nan if value is None else float(value)
        if not isinstance(value, bool) and not abs(number) > _MOST_FLOAT:
            return number
    elif kind is int and isinstance(value, (int, float)) and value % 1 == 0:
        return int(value)
    elif kind is Path and isinstance(value, str):
        return Path(value)
    elif kind in (bool, str) and isinstance(value, kind):
        return value
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        found = {key: typed(inner[1], one, f"{name}.{key}") for key, one in value.items()}
        return defaultdict(float, found) if inner[1] is float else found
    elif origin in (tuple, list) and isinstance(value, list):
        kinds = inner[:1] * len(value) if origin is list or Ellipsis in inner else inner
        if len(kinds) == len(value):
            return origin(typed(*pair, name) for pair in zip(kinds, value, strict=True))
    elif dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        known = {
            field.name: typed(hints[field.name], value[field.name], f"{name}.{field.name}")
            for field in dataclasses.fields(kind)
            if field.name in value
        }
        try:
            return kind(**known)
        except TypeError as error:  # a field without a default is missing
            raise ConfigError(f"{name}: {error}") from None
    shown = getattr(kind, "__name__", kind)
    raise ConfigError(f"{name} is no {shown}: {str(value)[:40]!r}")


def printable(text: str) -> str:
    """`text` with "?" for each character that a terminal would obey, such as ESC."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print what may hold a stranger's text, or what the stream's encoding lacks."""
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    shown = printable(text).encode(encoding, "replace").decode(encoding)
    print(shown, file=stream, flush=True)
