"""`--actors auto`: what `zapex balance` has found for this environment, network and machine."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zapex.config.settings import Config, merged

if TYPE_CHECKING:
    from zapex.config.presets import Choice
    from zapex.envs.environments import EnvironmentSpec
    from zapex.machine.resources import Machine


def cache_directory() -> Path:
    """Where results of this machine are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def taken(args: list[str]) -> tuple[list[str], bool]:
    """The words without `--actors auto`, and whether it was there."""
    rest: list[str] = []
    found = False
    for word in args:
        if word == "auto" and rest[-1:] == ["--actors"]:
            rest.pop()
            found = True
        elif word == "--actors=auto":
            found = True
        else:
            rest.append(word)
    return rest, found


def balanced(
    sections: Mapping[str, Any],
    chosen: "dict[str, Choice]",
    asked: Collection[str],
    spec: "EnvironmentSpec",
    machine: "Machine",
) -> dict[str, Any]:
    """Sections with what a balance found; adds to `chosen`. asked: settings that stay as they are.

    Without a result the preset's actors stay, and the reason says how to get one.
    """
    from zapex.config.presets import Choice
    from zapex.studies import advice

    config = Config(**sections)
    report = advice.kept(advice.kept_at(cache_directory(), config, spec, machine))
    if report is None:
        why = f"the preset's: nothing was measured here yet; `zapex balance {config.env.env}` does"
        chosen["actors"] = Choice(config.actor.actors, why)
        return dict(sections)
    quick = " --quick" if report["quick"] else ""
    found = {
        name: Choice(report["advice"][name], f"`zapex balance{quick}`, {report['time'][:10]}")
        for name in ("actors", "envs_per_actor", "inference")
        if name not in asked
    }
    chosen |= found
    return merged(sections, {name: value for name, (value, _) in found.items()})
