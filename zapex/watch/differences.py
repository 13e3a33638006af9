"""What the settings of runs differ in, and which runs differ in nothing but their seed."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from zapex.errors import ConfigError
from zapex.watch.runs import SETTINGS_FILE

NONE: Final = "-"
"""A setting that a run does not have: it is of another version, or left out."""
_OF_A_RUN: Final = {"run", "slurm", "kubernetes", "ray"}  # how long, where, and how it is shown
_NOT_LEARNED_FROM: Final = {"eval_period_s"}

Settings = Mapping[str, Mapping[str, Any]]


def settings_of(path: Path) -> Settings:
    """The tables of a run's settings, or of a settings file; of any version.

    Raises:
        ConfigError: it cannot be read.
    """
    file = path / SETTINGS_FILE if path.is_dir() else path
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as settings: {error}") from None
    return {name: table for name, table in tables.items() if isinstance(table, dict)}


def differing(runs: Sequence[Settings]) -> dict[str, list[Any]]:
    """Name of each setting that is not the same in all -> its values, in the order of `runs`."""
    flat = [{key: x for table in one.values() for key, x in table.items()} for one in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    found = {name: [one.get(name, NONE) for one in flat] for name in names}
    return {name: xs for name, xs in found.items() if any(x != xs[0] for x in xs)}


def what_is_learned(settings: Settings) -> dict[str, Any]:
    """The settings that decide what is learned, without the seed; and the experiment's name."""
    found = {
        key: value
        for name, table in settings.items()
        for key, value in table.items()
        if name not in _OF_A_RUN and key not in _NOT_LEARNED_FROM
    }
    return {"exp": settings.get("run", {}).get("exp", NONE), **found}


def table(names: Sequence[str], found: Mapping[str, Sequence[Any]]) -> list[str]:
    """Lines of text: a head with the runs' names, and one for each setting."""
    rows = [["", *names], *([key, *map(shown, values)] for key, values in found.items())]
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)).rstrip()
        for row in rows
    ]


def shown(value: Any) -> str:
    """A value of a setting, as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'
