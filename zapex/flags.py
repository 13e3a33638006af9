"""Flags, by way of tyro, and settings files: text in, values or one clear line out."""

import contextlib
import dataclasses
import difflib
import io
import itertools
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zapex.checked import flag_of
from zapex.config import SECTIONS, flatten
from zapex.errors import ConfigError
from zapex.text import parse_count

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

T = TypeVar("T")


def parse(kind: type[T], default: T, args: list[str], command: str, description: str) -> T:
    """The dataclass `kind` from flags; what is not given is `default`'s.

    Raises:
        ConfigError: an unknown flag (with the nearest one), or a value that does not do.
    """
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, unknown = tyro.cli(
                kind,
                default=default,
                args=args,
                prog=f"zapex {command}",
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
                registry=_registry(),
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_one_line(complaint.getvalue())) from None
    if unknown:
        flag = next((arg for arg in unknown if arg.startswith("-")), unknown[0])
        near = nearest(flag.partition("=")[0], _flags(kind))
        raise ConfigError(f"{flag!r} is no flag of `zapex {command}`{near}")
    return parsed


def _flags(kind: Any) -> list[str]:
    """Every flag of a dataclass of options, those of dataclasses inside it as well."""
    flags: list[str] = []
    for spec in dataclasses.fields(kind):
        nested = dataclasses.is_dataclass(spec.type)
        flags += _flags(spec.type) if nested else [flag_of(spec.name)]
    return flags


def _one_line(boxed: str) -> str:
    """What tyro draws in a box, up to the first ruler."""
    words: list[str] = []
    for line in boxed.splitlines()[1:]:
        text = line.strip("│╭╮╰╯ ")
        if text.startswith("──"):
            break
        words += text.split()
    # "Error parsing learner: --lr must be ..." names a table of ours that nobody asked about.
    if words[:2] == ["Error", "parsing"]:
        del words[:2]
        if words[0].rstrip(":") in SECTIONS:
            del words[0]
    return " ".join(words)


def _registry() -> "ConstructorRegistry":
    """How tyro reads counts and tables."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def count(info: "PrimitiveTypeInfo") -> "PrimitiveConstructorSpec[int] | None":
        if info.type is not int:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="COUNT",
            instance_from_str=lambda args: parse_count(args[0]),
            is_instance=lambda value: isinstance(value, int),
            str_from_instance=lambda value: [str(value)],
        )

    @registry.primitive_rule
    def table(info: "PrimitiveTypeInfo") -> "PrimitiveConstructorSpec[dict[str, Any]] | None":
        if info.type_origin is not dict:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="KEY=VALUE ...",
            instance_from_str=key_values,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [f"{k}={json.dumps(v)}" for k, v in value.items()],
        )

    return registry


def key_values(args: list[str]) -> dict[str, Any]:
    """`["a=1", "b=true", "c=text"]` -> a table; values are JSON where they can be."""
    table: dict[str, Any] = {}
    for arg in args:
        key, equals, text = arg.partition("=")
        if not key or not equals:
            raise ConfigError(f"--env-kwargs takes pairs like key=value, got {arg!r}")
        try:
            table[key] = json.loads(text)
        except ValueError:
            table[key] = text
    return table


def values_of(name: str, args: list[str]) -> list[str] | None:
    """What follows the last `--name`, or None: some flags must be known before all can be read."""
    values = None
    for position, arg in enumerate(args, start=1):
        head, equals, tail = arg.partition("=")
        if head.replace("_", "-") == flag_of(name):
            following = itertools.takewhile(lambda a: not a.startswith("--"), args[position:])
            values = [tail] if equals else list(following)
    return values


def value_of(name: str, args: list[str]) -> str | None:
    """The one value of the last `--name`, or None."""
    values = values_of(name, args)
    return values[0] if values else None


def read_settings(path: str) -> dict[str, Any]:
    """Settings by name out of a TOML file."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"--config {path} cannot be read: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from None
    try:
        return flatten(tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def nearest(name: str, names: Iterable[str]) -> str:
    """`"; did you mean X?"`, or nothing where no name is near."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""
