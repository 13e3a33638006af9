"""A launched run: checked, submitted, found again, asked, ended."""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from zapex.clusters.host import FACTS, KEYS, OVER, SETTINGS, facts_of
from zapex.clusters.placement import PENDING_S, Adapter, Host, Placement, place
from zapex.config.fields import toml_value
from zapex.errors import ConfigError
from zapex.machine.disk import replace_whole

ADAPTERS = {"slurm": "Slurm", "kubernetes": "Kubernetes", "ray": "Ray"}
"""Scheduler, which is its module too -> its class."""
_SPARE_S = 30.0  # for a scheduler to end what does not end itself
_LOOK_S = 2.0


def adapter_of(placement: Placement) -> Adapter:
    """What talks with the placement's scheduler."""
    module = import_module(f"zapex.clusters.{placement.on}")
    made: Adapter = getattr(module, ADAPTERS[placement.on])(placement)
    return made


@dataclass(frozen=True)
class Launched:
    """A run that was handed to a scheduler. Find it again with `Launched.find(directory)`."""

    placement: Placement
    ids: Mapping[str, Any]

    @classmethod
    def find(cls, directory: str | Path) -> "Launched":
        """The run of a launch directory. Raises ConfigError."""
        path = Path(directory)
        facts = facts_of(path)
        text = (path / SETTINGS).read_text(encoding="utf-8")
        if not facts.get("ids"):
            raise ConfigError(f"{path} was made and never submitted: launch it anew")
        return cls(place(facts["on"], facts["name"], path.absolute(), text), facts["ids"])

    @property
    def adapter(self) -> Adapter:
        """What talks with the scheduler."""
        return adapter_of(self.placement)

    def states(self) -> list[Host]:
        """Every host that the scheduler knows."""
        return self.adapter.states(self.ids)

    def log(self, role: str, lines: int = 50) -> str:
        """The last lines of each host of a role."""
        self.placement.group(role)
        return self.adapter.log(self.ids, role, lines)

    def stop(self, grace_s: float = 0.0) -> None:
        """End all hosts. They save first, within `grace_s` seconds; 0: as long as that may take."""
        replace_whole(self.placement.directory / OVER, [b"stopped by the user\n"])
        self.adapter.stop(self.ids, grace_s or self.placement.grace_s + _SPARE_S)

    def wait_for_start(
        self, tell: Callable[[str], None], patience_s: float = PENDING_S
    ) -> list[Host]:
        """Wait until no host is pending; after `patience_s` say what those lack that are."""
        deadline_s = time.monotonic() + patience_s
        while True:
            hosts = self.states()
            waiting = [host for host in hosts if host.state == "pending"]
            if (hosts and not waiting) or time.monotonic() >= deadline_s:
                break
            time.sleep(min(_LOOK_S, patience_s))
        for line in summary(hosts):
            tell(line)
        return hosts


def summary(hosts: list[Host]) -> list[str]:
    """A line for each host, and one for pending hosts that wait for the same."""
    lines, alike = [], dict[tuple[str, str], list[Host]]()
    for host in hosts:
        if host.state == "pending":
            alike.setdefault((host.role, host.why), []).append(host)
        else:
            lines.append(str(host))
    for (role, _), group in alike.items():
        more = f" (and {len(group) - 1} more of {role})" if len(group) > 1 else ""
        lines.append(str(group[0]) + more)
    return lines


def settings_of(config: str | Path | Mapping[str, Any]) -> str:
    """TOML text of a file's path, or of tables by name. Raises ConfigError."""
    if isinstance(config, Mapping):
        lines = []
        for section, table in config.items():
            lines.append(f"[{section}]")
            lines += [f"{key} = {toml_value(value, key)}" for key, value in table.items()]
        return "\n".join([*lines, ""])
    try:
        return Path(config).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config} cannot be read: {error}") from None


def launch(
    config: str | Path | Mapping[str, Any], on: str, *, name: str = "", directory: str | Path = ""
) -> Launched:
    """Hand a run's hosts to a scheduler.

    Args:
        config: A TOML file, or its tables by name: settings and the table of the scheduler.
        on: "slurm", "kubernetes" or "ray".
        name: Of the run at the scheduler; empty: from the time.
        directory: A new directory, for keys and, on SLURM and Ray, all output; empty: runs/NAME.

    Raises:
        ConfigError: the settings or the table cannot work.
        ZapexError: the scheduler refuses the run.
    """
    name = name or time.strftime("zapex-%m%d-%H%M%S")
    path = Path(directory or Path("runs") / name).absolute()
    placement = place(on, name, path, settings_of(config))
    adapter = adapter_of(placement)
    adapter.text()
    make_directory(placement)
    ids = adapter.submit()
    write_facts(placement, ids)
    return Launched(placement, ids)


def make_directory(placement: Placement) -> None:
    """The launch directory: mode 0700, with the settings and new keys. Raises ConfigError."""
    from zapex.net import keys

    path = placement.directory
    try:
        path.mkdir(mode=0o700, parents=True)
        path.chmod(0o700)
        (path / "logs").mkdir(mode=0o700)
        replace_whole(path / SETTINGS, [placement.settings.encode()])
    except FileExistsError:
        raise ConfigError(f"{path} exists: name a new directory, or another --name") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}") from None
    keys.make(path / KEYS)
    write_facts(placement, {})


def write_facts(placement: Placement, ids: Mapping[str, Any]) -> None:
    """launch.json: what finds the run again, and what its hosts start."""
    text = json.dumps(placement.facts(ids=ids), indent=2)
    replace_whole(placement.directory / FACTS, [text.encode()])
    os.chmod(placement.directory / FACTS, 0o600)
