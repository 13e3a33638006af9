"""A run at a scheduler: its hosts and what each needs; launched, found again, queried, stopped.

run = launch("run.toml", on="slurm")
run.states()
run.stop()
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from zapex.clusters.host import FACTS, GRACE_S, KEYS, OVER, SETTINGS, facts_of
from zapex.config import clusters
from zapex.config.clusters import HostTable
from zapex.config.fields import toml_value
from zapex.config.settings import EnvConfig, ReplayConfig, flatten
from zapex.errors import ConfigError, ZapexError
from zapex.host.parts import PARTS, Part
from zapex.machine.disk import replace_whole
from zapex.machine.reading import parse_toml, read_text

PENDING_S = 30.0
"""`launch` waits so long for hosts to start before it reports the scheduler's reason."""
KEY_OF = {"replay": "replay", "learner": "learner", "actor": "relay"}
"""Role of a host -> the key that it has, besides the public ones."""
_SCHEDULERS = {"slurm": "Slurm", "kubernetes": "Kubernetes", "ray": "Ray"}  # module -> class
_LONGEST_NAME = 40  # with a role and a number it is still a valid name in Kubernetes
_TOOL_S = 60.0
_LOOK_S = 2.0
_GIB = 1 << 30
_SHARE = 0.8  # of a host's memory, for what the replay keeps
_SAVE_S = 600.0  # for a replay's host to save its memory
_REQUEUE_S = 20.0  # of SLURM's time before the limit, to queue the job again
_STOP_S = 30.0  # for a scheduler to end what does not end by itself
_LEARNER_BYTES = 3 * _GIB  # torch, its networks and some batches


@dataclass(frozen=True)
class Group:
    """Equal hosts of one part, numbered from 0.

    actors: on each of these hosts; for a replay, on all hosts together. options: the scheduler's.
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
        return self.part.command[0]


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
    """The hosts of a run. directory: of the launch. settings: TOML. table: the scheduler's."""

    on: str
    name: str
    directory: Path
    settings: str
    table: Any
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()

    def group(self, role: str) -> Group:
        """The group of a role. Raises ConfigError for an unknown one."""
        names = [group.name for group in self.groups]
        if role not in names:
            raise ConfigError(f"a role of this run is one of {', '.join(names)}, got {role!r}")
        return self.groups[names.index(role)]

    @property
    def learner(self) -> Group:
        """The group with the learner, which ends the run."""
        return next(group for group in self.groups if group.part.learns)

    @property
    def grace_s(self) -> float:
        """How long a host may take to save and end; the scheduler may give it less."""
        if flatten(parse_toml(self.settings, SETTINGS)).get("save_replay", "never") == "never":
            return GRACE_S
        return max(GRACE_S, getattr(self.table, "signal_s", _SAVE_S) - _REQUEUE_S)

    def command(self, group: Group) -> list[str]:
        """The words after `zapex` of one host's command; the host fills in what is in braces."""
        part = group.part
        words = [*part.command, f"--{part.address}", "{url}"]
        words += ["--actors", str(group.actors)] if group.actors else []
        if self.table.shards > 1 and part.listens:
            words += ["--shards", str(self.table.shards), "--shard", "{index}"]
        words += ["--config", f"{{home}}/{SETTINGS}", "--keys", f"{{home}}/{KEYS}"]
        return [*words, "--run-dir", "{run}", "--resume", "auto", "--trust", "--plain"]

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
            "ends": self.learner.name,
            **more,
        }


class Scheduler(Protocol):
    """What SLURM, Kubernetes and Ray do with a placement."""

    def text(self) -> str:
        """Exactly what is submitted. Raises ConfigError for what cannot work."""

    def submit(self) -> dict[str, Any]:
        """Submit it. Returns the scheduler's names for it, which the other calls take as `ids`."""

    def states(self, ids: Mapping[str, Any]) -> list[Host]:
        """Every host that the scheduler knows."""

    def log(self, ids: Mapping[str, Any], role: str, lines: int) -> str:
        """The last lines that the hosts of a role printed."""

    def stop(self, ids: Mapping[str, Any], grace_s: float) -> None:
        """End all hosts; the learner has `grace_s` seconds to save first."""


def scheduler_of(placement: Placement) -> Scheduler:
    """What talks to the placement's scheduler."""
    kind = getattr(import_module(f"zapex.clusters.{placement.on}"), _SCHEDULERS[placement.on])
    made: Scheduler = kind(placement)
    return made


# --- the placement -------------------------------------------------------------------------------


def place(on: str, name: str, directory: Path, settings: str) -> Placement:
    """The placement of a run.

    Args:
        on: "slurm", "kubernetes" or "ray".
        name: of the run at the scheduler.
        directory: of the launch.
        settings: TOML with the table of the scheduler.

    Raises:
        ConfigError: something cannot work, as far as this can be seen before it is submitted.
    """
    tables = parse_toml(settings, "the settings file")
    values, table = flatten(tables), clusters.read(tables, on)
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"--name must start with a letter and have at most {_LONGEST_NAME} lower-case letters, "
            f"digits and '-', got {name!r}"
        )
    if table.with_learner and table.shards > 1:
        raise ConfigError(
            f"[{on}] with_learner is for one replay: leave it out, or shards = {table.shards}"
        )
    actor, both = table.actor, table.with_learner
    actors = actor.actors or max(1, actor.cores - 1)
    all_actors = actors * max(getattr(table, "most_hosts", 0), actor.hosts)
    needed = _memory_gb(values, actors, all_actors)

    def group(part: str, hosts: int, actors: int, **roles: HostTable) -> Group:
        given = sum(row.memory_gb for row in roles.values())
        return Group(
            PARTS[part],
            hosts,
            cores=sum(row.cores for row in roles.values()),
            memory_gb=given or sum(needed[role] for role in roles),
            gpus=sum(row.gpus for row in roles.values()),
            actors=actors,
            options=next(iter(roles.values())).options,
        )

    if both:
        first = [
            group("replay with learner", 1, all_actors, replay=table.replay, learner=table.learner)
        ]
    else:
        first = [
            group("replay", table.shards, all_actors, replay=table.replay),
            group("learner", 1, 0, learner=table.learner),
        ]
    groups = (*first, group("actor", actor.hosts, actors, actor=actor))
    has_capacity = "capacity" in values
    for role, gib in needed.items():
        given = getattr(table, role).memory_gb
        if 0 < given < gib and not both and (has_capacity or role != "replay"):
            raise ConfigError(
                f"[{on}] {role} memory_gb is {given}, and these settings need about {gib}: raise "
                "it, or leave it out"
            )
    notes = []
    if actors > actor.cores:
        notes.append(f"{actors} actors per host share {actor.cores} cores")
    if not has_capacity:
        notes.append("the settings have no capacity: the replay takes 40 % of its host's memory")
    return Placement(on, name, directory, settings, table, groups, tuple(notes))


def _memory_gb(values: Mapping[str, Any], actors: int, all_actors: int) -> dict[str, int]:
    """GiB that one host of each role needs with these settings. Raises ConfigError."""
    from zapex.config import presets
    from zapex.config.layers import Layers
    from zapex.envs import environments
    from zapex.machine.resources import Machine

    names = values.keys() & {"env", "env_kwargs", "wrapper"}
    played = EnvConfig(**{name: values[name] for name in names})
    spec = environments.check(played.env, played.env_kwargs, played.wrapper)
    machine = Machine(cores=8, memory_bytes=64 * _GIB, gpus=0)
    task = presets.Task(spec.schema(ReplayConfig.n_step, ReplayConfig.gamma), spec.atari)
    layers = Layers(presets.choose(values.get("preset", "auto"), task, machine, "replay"))
    layers.put({**values, "actors": all_actors}, "")
    config = layers.config()
    schema = spec.schema(config.replay.n_step, config.replay.gamma)
    # Without a capacity the preset takes what fits.
    kept = presets.replay_bytes(schema, config) if "capacity" in values else 4 * _GIB
    needed = {
        "replay": (kept + 2 * presets.PROCESS_BYTES) / _SHARE,
        "learner": _LEARNER_BYTES + presets.PROCESS_BYTES,
        "actor": (actors + 2) * presets.PROCESS_BYTES / _SHARE,
    }
    return {role: math.ceil(size / _GIB) for role, size in needed.items()}


# --- launched runs -------------------------------------------------------------------------------


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
        text = read_text(path / SETTINGS)
        if not facts.get("ids"):
            raise ConfigError(f"{path} was created but never submitted: launch it again")
        return cls(place(facts["on"], facts["name"], path.absolute(), text), facts["ids"])

    @property
    def scheduler(self) -> Scheduler:
        """What talks to the scheduler."""
        return scheduler_of(self.placement)

    def states(self) -> list[Host]:
        """Every host that the scheduler knows."""
        return self.scheduler.states(self.ids)

    def log(self, role: str, lines: int = 50) -> str:
        """The last lines of each host of a role."""
        self.placement.group(role)
        return self.scheduler.log(self.ids, role, lines)

    def stop(self, grace_s: float = 0.0) -> None:
        """End all hosts. They save first, within `grace_s` seconds; 0: as long as that may take."""
        replace_whole(self.placement.directory / OVER, [b"stopped by the user\n"])
        self.scheduler.stop(self.ids, grace_s or self.placement.grace_s + _STOP_S)

    def wait_for_start(
        self, report: Callable[[str], None], timeout_s: float = PENDING_S
    ) -> list[Host]:
        """Wait until no host is pending, at most `timeout_s`; report each host's state."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            hosts = self.states()
            waiting = [host for host in hosts if host.state == "pending"]
            if (hosts and not waiting) or time.monotonic() >= deadline_s:
                break
            time.sleep(min(_LOOK_S, timeout_s))
        for line in summary(hosts):
            report(line)
        return hosts


def summary(hosts: Sequence[Host]) -> list[str]:
    """One line per host; hosts of a role that are pending for the same reason share one."""
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


def launch(
    config: str | Path | Mapping[str, Any], on: str, *, name: str = "", directory: str | Path = ""
) -> Launched:
    """Hand a run's hosts to a scheduler.

    Args:
        config: a TOML file, or its tables by name: settings and the table of the scheduler.
        on: "slurm", "kubernetes" or "ray".
        name: of the run at the scheduler; empty: from the time.
        directory: a new directory, for keys and, on SLURM and Ray, all output; empty: runs/NAME.

    Raises:
        ConfigError: the settings or the table cannot work.
        ZapexError: the scheduler refuses the run.
    """
    name = name or time.strftime("zapex-%m%d-%H%M%S")
    path = Path(directory or Path("runs") / name).absolute()
    placement = place(on, name, path, settings_of(config))
    scheduler = scheduler_of(placement)
    scheduler.text()
    make_directory(placement)
    ids = scheduler.submit()
    _write_facts(placement, ids)
    return Launched(placement, ids)


def settings_of(config: str | Path | Mapping[str, Any]) -> str:
    """TOML text of a file's path, or of tables by name. Raises ConfigError."""
    if isinstance(config, Mapping):
        lines = []
        for section, table in config.items():
            lines.append(f"[{section}]")
            lines += [f"{key} = {toml_value(value, key)}" for key, value in table.items()]
        return "\n".join([*lines, ""])
    return read_text(Path(config))


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
        raise ConfigError(f"{path} cannot be created: {error.strerror}") from None
    keys.make(path / KEYS)
    _write_facts(placement, {})


def _write_facts(placement: Placement, ids: Mapping[str, Any]) -> None:
    """launch.json: how to find the run again, and what its hosts start."""
    text = json.dumps(placement.facts(ids=ids), indent=2)
    replace_whole(placement.directory / FACTS, [text.encode()])
    os.chmod(placement.directory / FACTS, 0o600)


# --- for all schedulers --------------------------------------------------------------------------


def tool(*words: str, given: str = "", timeout_s: float = _TOOL_S) -> str:
    """Run a scheduler's command. Returns what it prints; raises ZapexError with its reason."""
    try:
        done = subprocess.run(
            words, input=given, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{words[0]} is not installed here: run this where the scheduler's commands are"
        ) from None
    except subprocess.TimeoutExpired:
        raise ZapexError(f"{words[0]} did not answer within {timeout_s:g} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it gave no reason").splitlines()
        raise ZapexError(f"{words[0]} refuses: {said[-1].strip()}")
    return done.stdout


def host_words(home: Path, role: str) -> list[str]:
    """The command of a host, to which its index is added: zapex.clusters.host."""
    return [sys.executable, "-P", "-m", "zapex.clusters.host", str(home), role]
