"""Code that only a file names is run when its user has agreed, and not before."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from zapex.errors import ConfigError

RUNS_CODE = ("env", "env_kwargs", "wrapper", "network", "loss")
"""Settings that may name modules."""


def check_trust(
    path: str, values: Mapping[str, Any], given: Mapping[str, Any], trusted: bool
) -> None:
    """Ask before a module is imported and run that only a file of settings names.

    given: what the command line sets. Raises ConfigError if the user does not trust the file.
    """
    stored = [values[name] for name in RUNS_CODE if name in values.keys() - given]
    modules = [text for text in _texts(stored) if ":" in text]
    if trusted or not modules:
        return
    what = f"{path} names {', '.join(map(repr, modules))}, code of this machine that would be run"
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    if terminal and input(f"{what}. Run it? [y/N] ").strip().lower() in ("y", "yes"):
        return
    raise ConfigError(
        f"{what}: look at it first. If you trust it, give --trust, or name it with --env"
    )


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of a settings file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in [*value, *(value.values() if isinstance(value, dict) else ())]:
            yield from _texts(part)
