"""A run at a scheduler: its hosts and what each needs; launched, found again, queried, stopped.

run = launch("run.toml", on="slurm")
run.states()
run.stop()
"""

import dataclasses
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from zapex.clusters.host import GRACE_S, KEYS, OVER, SETTINGS, Group, Placement
from zapex.config import clusters
from zapex.config.clusters import HostTable
from zapex.config.fields import toml_value
from zapex.config.settings import EnvConfig, ReplayConfig, flatten
from zapex.errors import ConfigError, ZapexError
from zapex.host.parts import PARTS
from zapex.machine.disk import replace_whole
from zapex.machine.reading import parse_toml, read_text

PENDING_S = 30.0
"""`launch` waits so long for hosts to start before it reports the scheduler's reason."""
KEY_OF = {"replay": "replay", "learner": "learner", "actor": "relay"}
"""Role of a host -> the key that it has, besides the public ones."""
_CLASSES = {"slurm": "Slurm", "kubernetes": "Kubernetes", "ray": "Ray"}  # module -> class
_TOOL_S = 60.0
_LOOK_S = 2.0
_GIB = 1 << 30
_SHARE = 0.8  # of a host's memory, for what the replay keeps
_SAVE_S = 600.0  # for a replay's host to save its memory
_REQUEUE_S = 20.0  # of SLURM's time before the limit, to queue the job again
_STOP_S = 30.0  # for a scheduler to end what does not end by itself
_LEARNER_BYTES = 3 * _GIB  # torch, its networks and some batches


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


class Launched:
    """A run at a scheduler; each scheduler is a subclass. Find it again with `Launched.find`."""

    def __init__(self, placement: Placement, directory: Path, settings: str) -> None:
        self.placement, self.directory, self.settings = placement, directory, settings
        self.table: Any = clusters.read(parse_toml(settings, "the settings"), placement.on)

    @staticmethod
    def find(directory: str | Path) -> "Launched":
        """The run of a launch directory; imports nothing that it names. Raises ConfigError."""
        path = Path(directory).absolute()
        placement = Placement.read(path)
        if not placement.ids:
            raise ConfigError(f"{path} was created but never submitted: launch it again")
        return of(placement, path, settings_of(path / SETTINGS))

    def text(self) -> str:
        """Exactly what is submitted. Raises ConfigError for what cannot work."""
        raise NotImplementedError

    def submit(self) -> dict[str, Any]:
        """Submit it. Returns the scheduler's names for it, which a launched placement has."""
        raise NotImplementedError

    def states(self) -> list[Host]:
        """Every host that the scheduler knows."""
        raise NotImplementedError

    def log(self, role: str, lines: int = 50) -> str:
        """The last lines that each host of a role printed."""
        raise NotImplementedError

    def stop(self, grace_s: float = 0.0) -> None:
        """End all hosts. They save first, within `grace_s` seconds; 0: as long as that may take."""
        replace_whole(self.directory / OVER, [b"stopped by the user\n"])
        self._stop(grace_s or self.placement.grace_s + _STOP_S)

    def _stop(self, grace_s: float) -> None:
        raise NotImplementedError

    def watch(self) -> int:
        """Serve the run until it is over, if its scheduler needs that. Returns the exit code."""
        return 0

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


def of(placement: Placement, directory: Path, settings: str) -> Launched:
    """The run of a placement, of its scheduler's class."""
    kind = getattr(import_module(f"zapex.clusters.{placement.on}"), _CLASSES[placement.on])
    made: Launched = kind(placement, directory, settings)
    return made


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
        ZapexError: the scheduler refuses the run; the directory is removed again.
    """
    run = place(config, on, name, directory)
    run.text()
    make_directory(run)
    try:
        ids = run.submit()
    except ZapexError:
        shutil.rmtree(run.directory, ignore_errors=True)
        raise
    placement = dataclasses.replace(run.placement, ids=ids)
    placement.write(run.directory)
    return of(placement, run.directory, run.settings)


def settings_of(config: str | Path | Mapping[str, Any]) -> str:
    """TOML text of a file's path, or of tables by name. Raises ConfigError."""
    if isinstance(config, Mapping):
        lines = []
        for section, table in config.items():
            lines.append(f"[{section}]")
            lines += [f"{key} = {toml_value(value, key)}" for key, value in table.items()]
        return "\n".join([*lines, ""])
    return read_text(Path(config))


def make_directory(run: Launched) -> None:
    """The launch directory: mode 0700, with the settings and new keys. Raises ConfigError."""
    from zapex.net import keys

    path = run.directory
    try:
        path.mkdir(mode=0o700, parents=True)
        path.chmod(0o700)
        (path / "logs").mkdir(mode=0o700)
        replace_whole(path / SETTINGS, [run.settings.encode()])
        run.placement.write(path)
    except FileExistsError:
        raise ConfigError(f"{path} exists: name a new directory, or another --name") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be created: {error.strerror}") from None
    keys.make(path / KEYS)


# --- the placement -------------------------------------------------------------------------------


def place(
    config: str | Path | Mapping[str, Any], on: str, name: str = "", directory: str | Path = ""
) -> Launched:
    """A run that is not submitted yet; the arguments are those of `launch`.

    Raises:
        ConfigError: something cannot work, as far as this can be seen before it is submitted.
    """
    settings = settings_of(config)
    tables = parse_toml(settings, "the settings")
    values, table = flatten(tables), clusters.read(tables, on)
    name = name or time.strftime("zapex-%m%d-%H%M%S")
    path = Path(directory or Path("runs") / name).absolute()
    if not str(path).isprintable():
        raise ConfigError(f"--dir must be printable and without line breaks, got {str(path)!r}")
    if table.with_learner and table.shards > 1:
        raise ConfigError(
            f"[{on}] with_learner is for one replay: leave it out, or shards = {table.shards}"
        )
    actor, both = table.actor, table.with_learner
    actors = actor.actors or max(1, actor.cores - 1)
    all_actors = actors * max(getattr(table, "most_hosts", 0), actor.hosts)
    needed = _memory_gb(values, actors, all_actors)
    for role, gib in needed.items():
        given = getattr(table, role).memory_gb
        if 0 < given < gib and not both and ("capacity" in values or role != "replay"):
            raise ConfigError(
                f"[{on}] {role} memory_gb is {given}, and these settings need about {gib}: raise "
                "it, or leave it out"
            )

    def group(name: str, hosts: int, actors: int, **roles: HostTable) -> Group:
        part = PARTS[name]
        words = [*part.command, f"--{part.address}", "{url}"]
        words += ["--actors", str(actors)] if actors else []
        if table.shards > 1 and part.listens:
            words += ["--shards", str(table.shards), "--shard", "{index}"]
        words += ["--config", f"{{home}}/{SETTINGS}", "--keys", f"{{home}}/{KEYS}"]
        words += ["--run-dir", "{run}", "--resume", "auto", "--trust", "--plain"]
        given = sum(row.memory_gb for row in roles.values())
        return Group(
            cores=sum(row.cores for row in roles.values()),
            memory_gb=given or sum(needed[role] for role in roles),
            gpus=sum(row.gpus for row in roles.values()),
            options=next(iter(roles.values())).options,
            name=part.command[0],
            hosts=hosts,
            learns=part.learns,
            command=tuple(words),
        )

    if both:
        learner = {"replay": table.replay, "learner": table.learner}
        groups = [group("replay with learner", 1, all_actors, **learner)]
    else:
        groups = [
            group("replay", table.shards, all_actors, replay=table.replay),
            group("learner", 1, 0, learner=table.learner),
        ]
    groups.append(group("actor", actor.hosts, actors, actor=actor))
    grace_s = GRACE_S
    if values.get("save_replay", "never") != "never":
        grace_s = max(GRACE_S, getattr(table, "signal_s", _SAVE_S) - _REQUEUE_S)
    placement = Placement(
        on,
        name,
        {one.name: one for one in groups},
        shards=table.shards,
        port=table.port,
        grace_s=grace_s,
    )
    return of(placement, path, settings)


def notes(run: Launched) -> list[str]:
    """What a user may not expect of a run that is to be launched."""
    actor, found = run.table.actor, []
    if actor.actors > actor.cores:
        found.append(f"{actor.actors} actors per host share {actor.cores} cores")
    if "capacity" not in flatten(parse_toml(run.settings, "the settings")):
        found.append("the settings have no capacity: the replay takes 40 % of its host's memory")
    return found


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
