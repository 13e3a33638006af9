"""Settings as dataclass fields with a type and a range; counts like 200k; values as TOML."""

import contextlib
import dataclasses
import json
import math
import re
import types
import typing
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from zapex.errors import ConfigError


def flag_of(name: str) -> str:
    """The flag of a field: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def setting(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    local: bool = False,
    replays: bool = False,
    invocation: bool = False,
) -> Any:
    """A field with a default and a range.

    Args:
        default: its value if nothing sets it.
        low: the least value.
        high: the largest value.
        above: values must be larger.
        local: hosts of one run may differ in it.
        replays: only the replay's host uses it, so other hosts may differ.
        invocation: it belongs to one call of the command and is not written to `config.toml`;
            it is local too.
    """
    metadata = {"low": low, "high": high, "above": above, "replays": replays}
    metadata |= {"local": local or invocation, "invocation": invocation}
    return field(default=default, metadata=metadata)


def check_path(text: str, flag: str, others: str = "") -> None:
    """Raise ConfigError unless `text` is module:name. others: what else `flag` takes."""
    module, _, name = text.rpartition(":")
    if not (name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ConfigError(f"{flag} must be {others}module:name, got {text!r}")


_TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    types.NoneType: "left out",
    list: "a list of texts",
    tuple: "texts",
    dict: "a table of named values",
}


def _type_problem(value: Any, kind: Any) -> str | None:
    """What `value` should have been, or None if it is of `kind`."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        options = typing.get_args(kind)
        return None if value in options else "one of " + ", ".join(map(repr, options))
    if origin in (types.UnionType, typing.Union):
        problems = [_type_problem(value, option) for option in typing.get_args(kind)]
        return None if None in problems else " or ".join(p for p in problems if p)
    kind = origin or kind
    if isinstance(value, bool) or kind is bool:
        fits = isinstance(value, bool) and kind is bool
    elif kind is float:
        fits = isinstance(value, (int, float)) and math.isfinite(value)
    else:
        fits = isinstance(value, kind)
        if fits and kind in (list, tuple, dict):  # of texts, or named by texts
            fits = all(isinstance(each, str) for each in value)
    return None if fits else _TYPES[kind]


@dataclass(frozen=True)
class SettingsGroup:
    """The base of all groups of settings: checks types and ranges."""

    @staticmethod
    def label(name: str) -> str:
        """A field's name in error messages."""
        return flag_of(name)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            problem = _type_problem(value, hints[spec.name])
            low, high, above = (spec.metadata.get(key) for key in ("low", "high", "above"))
            if problem is None and value is not None:
                if low is not None and value < low:
                    problem = f"at least {low:,}"
                elif above is not None and value <= above:
                    problem = f"more than {above:,}"
                elif high is not None and value > high:
                    problem = f"at most {high:,}"
            if problem is not None:
                raise ConfigError(f"{self.label(spec.name)} must be {problem}, got {value!r}")
            if hints[spec.name] is float:  # 1 and 1.0 are the same setting, also in JSON
                object.__setattr__(self, spec.name, float(value))


_COUNT_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def parse_count(text: str) -> int:
    """`"200k"`, `"2e5"`, `"10M"`, `"50_000"` as a whole number.

    Raises:
        ConfigError: the text is not a whole number.
    """
    match = re.fullmatch(r"([-+]?[0-9_.]{1,40}(?:e[-+]?[0-9]{1,2})?)([kmgb]?)", text.lower())
    with contextlib.suppress(ValueError):
        value = Fraction(match[1]) * _COUNT_SUFFIXES[match[2]] if match else Fraction(1, 2)
        if value.denominator == 1 and abs(value) < 1 << 63:
            return int(value)
    raise ConfigError(f"a count must be a whole number like 5000, 200k, 2e5 or 10M, got {text!r}")


def shown(value: Any) -> str:
    """A setting's value as a reader sees it, and could type it; "" if there is none."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (int, float)):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    if isinstance(value, dict):
        return " ".join(f"{key}={toml_value(one, key)}" for key, one in value.items())
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value or "")


def toml_value(value: Any, name: str) -> str:
    """One value as TOML. Raises ConfigError if TOML cannot express it."""
    if isinstance(value, str):
        # JSON's escapes are TOML's, except for one control character that JSON does not escape.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item, name) for item in value) + "]"
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        items = (f"{toml_value(key, name)} = {toml_value(value[key], name)}" for key in value)
        return "{" + ", ".join(items) + "}"
    raise ConfigError(
        f"{name} must be text, a number, true, false, a list or a table, got {value!r}"
    )
