"""The settings of a run, merged: defaults, preset, file or saved run, flags; a later layer wins.

layers = Layers(presets.choose(preset, task, machine))
layers.put(read_settings("run.toml"), "from run.toml")
layers.put(flags, "you gave it")
config = layers.config()
print(explain(layers.chosen))
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from zapex.config.fields import flag_of, shown
from zapex.config.settings import FIELDS, Config, merged


class Choice(NamedTuple):
    """A value, and the reason for it."""

    value: Any
    reason: str


class Layers:
    """Settings by section, and the reason for each value that is not a default.

    Each value is checked when it is put in, but only `config` checks that the values fit together.
    """

    def __init__(self, preset: Mapping[str, Choice]) -> None:
        self.chosen = dict(preset)
        values = {name: value for name, (value, _) in preset.items()}
        self.sections = merged(vars(Config()), values)

    def __getitem__(self, name: str) -> Any:
        """The value of a setting, as the layers so far have it."""
        return getattr(self.sections[FIELDS[name][0]], name)

    def put(self, values: Mapping[str, Any], reason: str) -> set[str]:
        """Put a layer over the others. A value that changes nothing keeps its former reason.

        Returns:
            The names of the settings that changed.

        Raises:
            ConfigError: no setting has one of the names, or a value cannot work.
        """
        before = {name: self[name] for name in values.keys() & FIELDS.keys()}
        self.sections = merged(self.sections, values)
        changed = {name for name in values if self[name] != before[name]}
        self.chosen |= {name: Choice(self[name], reason) for name in values if name in changed}
        return changed

    def config(self) -> Config:
        """The settings. Raises ConfigError if they do not fit together."""
        return Config(**self.sections)


def explain(chosen: Mapping[str, Choice]) -> str:
    """Settings as the lines of a table: flag, value, reason."""
    rows = [(flag_of(name), shown(value), reason) for name, (value, reason) in chosen.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c}" for a, b, c in rows)
