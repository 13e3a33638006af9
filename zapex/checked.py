"""Dataclass fields with a type and a range, checked when the dataclass is made."""

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from zapex.errors import ConfigError


def flag_of(name: str) -> str:
    """The flag of a field: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def bounded(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    local: bool = False,
    invocation: bool = False,
) -> Any:
    """A field with its range: `low <= value <= high` and `value > above`.

    `local` fields may differ between the hosts of one run; `invocation` fields belong to one call
    of the command and are not written to `config.toml` (they are local too).
    """
    metadata = {
        "low": low,
        "high": high,
        "above": above,
        "local": local or invocation,
        "invocation": invocation,
    }
    return field(default=default, metadata=metadata)


def _type_problem(value: Any, kind: Any) -> str | None:
    """What `value` should have been, or None where it is of `kind`."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        options = typing.get_args(kind)
        return None if value in options else "one of " + ", ".join(map(repr, options))
    if origin in (types.UnionType, typing.Union):
        problems = [_type_problem(value, option) for option in typing.get_args(kind)]
        return None if None in problems else " or ".join(p for p in problems if p)
    if origin is dict:
        named = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        return None if named else "a table of named values"
    if kind is type(None):
        return None if value is None else "left out"
    if isinstance(value, bool):
        return (
            None if kind is bool else {int: "a whole number", float: "a number"}.get(kind, "text")
        )
    if kind is bool:
        return "true or false"
    if kind is int:
        return None if isinstance(value, int) else "a whole number"
    if kind is float:
        fits = isinstance(value, (int, float)) and math.isfinite(value)
        return None if fits else "a finite number"
    return None if isinstance(value, kind) else "text"


@dataclass(frozen=True)
class Section:
    """Types and ranges are checked here, once for all sections."""

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
                raise ConfigError(f"{flag_of(spec.name)} must be {problem}, got {value!r}")
            if hints[spec.name] is float:  # 1 and 1.0 have one hash
                object.__setattr__(self, spec.name, float(value))
