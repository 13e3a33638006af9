"""One table of a run's hosts: how many of each part, what each needs, and its command."""

import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from zapex.clusters.host import GRACE_S, KEYS, SETTINGS
from zapex.config import clusters
from zapex.config.settings import Config, EnvConfig, ReplayConfig, flatten, merged
from zapex.errors import ConfigError, ZapexError
from zapex.host.parts import PARTS, Part
from zapex.machine.resources import Machine

_MOST_NAME = 40  # with a role and a number it is still a name of Kubernetes
_TOOL_S = 60.0
_GIB = 1 << 30
_SHARE = 0.8  # of a host's memory, for what the replay keeps
_MEMORY_S = 600.0  # for a replay's host that saves its memory
_SPARE_S = 20.0  # of what SLURM gives before the limit, to be queued again
_LEARNER_BYTES = 3 * _GIB  # torch, its networks and some batches
PENDING_S = 30.0
"""A host that has waited longer is reported with the scheduler's reason."""


@dataclass(frozen=True)
class Group:
    """Equal hosts of one part, numbered from 0.

    actors: of one host of actors, or those of all hosts for a replay. options: the scheduler's.
    """

    part: Part
    hosts: int
    cores: int
    memory_gb: int
    gpus: int
    actors: int
    options: str = ""

    @property
    def name(self) -> str:
        """replay, learner or actor; "replay" if it has the learner too."""
        return self.part.words[0]


@dataclass(frozen=True)
class Host:
    """One host as its scheduler sees it. state: pending, running or over. why: its own words."""

    role: str
    index: int
    state: str
    where: str = ""
    why: str = ""
    waited_s: float = 0.0

    def __str__(self) -> str:
        text = f"{self.role} {self.index}: {self.state}"
        text += f" for {self.waited_s:.0f} s" if self.state == "pending" and self.waited_s else ""
        text += f" on {self.where}" if self.where else ""
        return text + (f": {self.why}" if self.why else "")


@dataclass(frozen=True)
class Placement:
    """A run that is placed by a scheduler. directory: of the launch; settings: its TOML text."""

    on: str
    name: str
    directory: Path
    settings: str
    table: Any
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = field(default=())

    def group(self, role: str) -> Group:
        """The group of a role. Raises ConfigError for an unknown one."""
        names = [group.name for group in self.groups]
        if role not in names:
            raise ConfigError(f"a role of this run is one of {', '.join(names)}, got {role!r}")
        return self.groups[names.index(role)]

    def command(self, group: Group) -> list[str]:
        """The words after `zapex` of one host's command; the host fills in what is in braces."""
        part = group.part
        words = [*part.words, f"--{part.address}", "{url}"]
        words += ["--actors", str(group.actors)] if group.actors else []
        if self.table.shards > 1 and part.listens:
            words += ["--shards", str(self.table.shards), "--shard", "{index}"]
        words += ["--config", f"{{home}}/{SETTINGS}", "--keys", f"{{home}}/{KEYS}"]
        return [*words, "--run-dir", "{run}", "--resume", "auto", "--trust", "--plain"]

    @property
    def grace_s(self) -> float:
        """How long a host may take to save and end; the scheduler may give it less."""
        if flatten(tomllib.loads(self.settings)).get("save_replay", "never") == "never":
            return GRACE_S
        return max(GRACE_S, getattr(self.table, "signal_s", _MEMORY_S) - _SPARE_S)

    def facts(self, **more: Any) -> dict[str, Any]:
        """What each host must know (launch.json). more: of the scheduler."""
        return {
            "on": self.on,
            "name": self.name,
            "port": self.table.port,
            "grace_s": self.grace_s,
            "shards": self.table.shards,
            "cores": {group.name: group.cores for group in self.groups},
            "commands": {group.name: self.command(group) for group in self.groups},
            "ends": next(group.name for group in self.groups if group.part.learns),
            **more,
        }


class Adapter(Protocol):
    """What a scheduler must be able to do with a placement."""

    def text(self) -> str:
        """Exactly what is submitted. Raises ConfigError if it can be seen that it cannot work."""

    def submit(self) -> dict[str, Any]:
        """Submit it. Returns the scheduler's names of it, for the other calls."""

    def states(self, ids: Mapping[str, Any]) -> list[Host]:
        """Every host that the scheduler knows."""

    def log(self, ids: Mapping[str, Any], role: str, lines: int) -> str:
        """The last lines that the hosts of a role printed."""

    def stop(self, ids: Mapping[str, Any], grace_s: float) -> None:
        """End all hosts; the learner saves first, for which it has `grace_s` seconds."""


def check_name(name: str) -> str:
    """The name, if every scheduler takes it. Raises ConfigError."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > _MOST_NAME:
        raise ConfigError(
            f"--name must be small letters, digits and '-', at most {_MOST_NAME}, from a letter "
            f"on; got {name!r}"
        )
    return name


def place(on: str, name: str, directory: Path, settings: str) -> Placement:
    """The placement of a run. settings: TOML with the table of the scheduler `on`.

    Raises ConfigError for whatever can be seen to be wrong before anything is submitted.
    """
    try:
        tables = tomllib.loads(settings)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"this is not TOML: {error}") from None
    values, table = flatten(tables), clusters.read(tables, on)
    most = max(getattr(table, "most_hosts", 0), table.actor.hosts)
    actors = table.actor.actors or max(1, table.actor.cores - 1)
    replay, learner = table.replay, table.learner
    needed = _memory(values, actors, most * actors)
    if table.with_learner and table.shards > 1:
        raise ConfigError(
            f"[{on}] with_learner is for one replay: leave it out, or shards = {table.shards}"
        )
    first = PARTS["replay with learner" if table.with_learner else "replay"]
    cores = replay.cores + learner.cores * table.with_learner
    memory = needed["replay"] + needed["learner"] * table.with_learner
    given = replay.memory_gb + learner.memory_gb * table.with_learner
    gpus = learner.gpus if table.with_learner else 0
    groups = [
        Group(first, table.shards, cores, given or memory, gpus, most * actors, replay.options)
    ]
    if not table.with_learner:
        memory = learner.memory_gb or needed["learner"]
        groups.append(
            Group(PARTS["learner"], 1, learner.cores, memory, learner.gpus, 0, learner.options)
        )
    actor = table.actor
    memory = actor.memory_gb or needed["actor"]
    groups.append(Group(PARTS["actor"], actor.hosts, actor.cores, memory, 0, actors, actor.options))
    notes = _check(on, table, needed, groups, "capacity" in values)
    return Placement(on, check_name(name), directory, settings, table, tuple(groups), notes)


def _memory(values: Mapping[str, Any], actors: int, total: int) -> dict[str, int]:
    """GiB that a host of each role needs with these settings. Raises ConfigError."""
    from zapex.config import presets
    from zapex.envs import environments

    env = {name: values[name] for name in ("env", "env_kwargs") if name in values}
    spec = environments.check(
        env.get("env", EnvConfig.env), env.get("env_kwargs", {}), env.get("wrapper", ())
    )
    schema = spec.schema(ReplayConfig.n_step, ReplayConfig.gamma)
    machine = Machine(cores=8, memory_bytes=64 * _GIB, gpus=0)
    preset = values.get("preset", "auto")
    chosen = presets.choose(preset, presets.Task(schema, spec.atari), machine, "replay")
    sections = merged(vars(Config()), {name: value for name, (value, _) in chosen.items()})
    config = Config(**merged(sections, {**values, "actors": total}))
    schema = spec.schema(config.replay.n_step, config.replay.gamma)
    # Without a capacity the preset takes what fits.
    kept = presets.replay_bytes(schema, config) if "capacity" in values else 4 * _GIB
    needed = {
        "replay": (kept + 2 * presets.PROCESS_BYTES) / _SHARE,
        "learner": _LEARNER_BYTES + presets.PROCESS_BYTES,
        "actor": (actors + 2) * presets.PROCESS_BYTES / _SHARE,
    }
    return {role: math.ceil(size / _GIB) for role, size in needed.items()}


def _check(
    on: str, table: Any, needed: Mapping[str, int], groups: Sequence[Group], has_capacity: bool
) -> tuple[str, ...]:
    """Raise ConfigError for too little memory; returns what may be meant and is worth a word."""
    for role, gib in needed.items():
        given = getattr(table, role).memory_gb
        if 0 < given < gib and not table.with_learner and (has_capacity or role != "replay"):
            raise ConfigError(
                f"[{on}] {role} memory_gb is {given}, and these settings need about {gib}: raise "
                "it, or leave it out"
            )
    notes = []
    group = groups[-1]
    if group.actors > group.cores:
        notes.append(f"{group.actors} actors a host share {group.cores} cores")
    if not has_capacity:
        notes.append("the settings name no capacity: the replay takes 40 % of its host's memory")
    return tuple(notes)


def tool(*words: str, given: str = "", wait_s: float = _TOOL_S) -> str:
    """Run a scheduler's command; what it prints. Raises ZapexError with its own reason."""
    try:
        done = subprocess.run(
            words, input=given, capture_output=True, text=True, timeout=wait_s, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{words[0]} is not here: run this where the scheduler's commands are installed"
        ) from None
    except subprocess.TimeoutExpired:
        raise ZapexError(f"{words[0]} did not answer within {wait_s:g} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it gave no reason").splitlines()
        raise ZapexError(f"{words[0]} refuses: {said[-1].strip()}")
    return done.stdout


def host_words(home: Path, role: str, index: str | int) -> list[str]:
    """The command of one placed host: zapex.clusters.host watches the ordinary command."""
    return [sys.executable, "-P", "-m", "zapex.clusters.host", str(home), role, str(index)]
