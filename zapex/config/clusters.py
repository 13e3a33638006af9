"""The tables [slurm], [kubernetes] and [ray]: the hosts of a run, and what each needs."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zapex.config.fields import SettingsGroup, setting
from zapex.config.words import did_you_mean
from zapex.errors import ConfigError


class Table(SettingsGroup):
    """Settings that are no flags: a table of a settings file, or what launch.json stores."""

    @staticmethod
    def label(name: str) -> str:  # not a flag
        return name


@dataclass(frozen=True)
class HostTable(Table):
    """What each host of a role needs."""

    cores: int = setting(2, low=1)
    """Cores."""
    memory_gb: int = setting(0, low=0)
    """Memory in GiB; 0: as much as the settings need."""
    gpus: int = setting(0, low=0)
    """GPUs."""
    options: str = ""
    """Further sbatch options for this role's job, e.g. "--partition=gpu"."""


@dataclass(frozen=True)
class ActorTable(HostTable):
    """The actor hosts."""

    hosts: int = setting(1, low=1, high=10_000)
    """Number of hosts."""
    actors: int = setting(0, low=0)
    """Actors per host; 0: one per core, minus one core for the relay."""


@dataclass(frozen=True)
class ClusterTable(Table):
    """What all schedulers need."""

    replay: HostTable = field(default_factory=HostTable)
    learner: HostTable = field(default_factory=HostTable)
    actor: ActorTable = field(default_factory=ActorTable)
    shards: int = setting(1, low=1, high=128)
    """Replay hosts, each as `replay` says."""
    with_learner: bool = False
    """Put the learner on the replay's host, which then gets what both need."""
    port: int = setting(0, low=0, high=65_535)
    """The replay's port; 0: a free one."""


@dataclass(frozen=True)
class SlurmTable(ClusterTable):
    """Jobs of SLURM."""

    minutes: int = setting(0, low=0)
    """The time limit of each job; 0: the partition's."""
    signal_s: int = setting(120, low=10, high=3600)
    """Seconds before the time limit at which a job saves and asks to be started again."""
    options: str = ""
    """Further sbatch options for all jobs, e.g. "--account=a --partition=p"."""
    setup: str = ""
    """Shell commands that each job runs first, e.g. "module load python"."""


@dataclass(frozen=True)
class KubernetesTable(ClusterTable):
    """Objects of Kubernetes."""

    image: str = "zapex"
    """The container image, built from `Containerfile`."""
    namespace: str = "default"
    """The namespace of all objects."""
    storage_gb: int = setting(10, low=1)
    """GiB of the volume with the learner's run directory."""
    storage_class: str = ""
    """Its storage class; default: the cluster's."""
    gpu_resource: str = "nvidia.com/gpu"
    """The cluster's resource name of a GPU."""


@dataclass(frozen=True)
class RayTable(ClusterTable):
    """Placement groups of Ray."""

    address: str = "auto"
    """Address of the Ray cluster."""
    wait_s: int = setting(120, low=1)
    """Seconds that replay and learner may wait for room."""
    most_hosts: int = setting(0, low=0, high=10_000)
    """Add actor hosts as the cluster grows, up to this number; 0: no more than `hosts`."""


TABLES: dict[str, type[ClusterTable]] = {
    "slurm": SlurmTable,
    "kubernetes": KubernetesTable,
    "ray": RayTable,
}
"""Name of a scheduler -> its table in a settings file."""


def read(tables: Mapping[str, Any], on: str) -> Any:
    """The table of the scheduler `on`, with its defaults.

    Raises:
        ConfigError: an unknown scheduler or setting (with the nearest name), or a bad value.
    """
    if on not in TABLES:
        raise ConfigError(f"--on must be one of {', '.join(TABLES)}, got {on!r}")
    return _made(TABLES[on], tables.get(on, {}), f"[{on}]")


def check(tables: Mapping[str, Any]) -> None:
    """Raise ConfigError for a mistake in any scheduler's table."""
    for on in TABLES.keys() & tables.keys():
        read(tables, on)


def _made(kind: type[Any], table: Any, where: str) -> Any:
    """A dataclass from a table of its fields. Raises ConfigError, which names `where`."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table, got {table!r}")
    hints, values = typing.get_type_hints(kind), {}
    names = [spec.name for spec in dataclasses.fields(kind)]
    for name, value in table.items():
        if name not in names:
            near = did_you_mean(name, names) or f"; there are {', '.join(names)}"
            raise ConfigError(f"{where} has no setting {name!r}{near}")
        inner = dataclasses.is_dataclass(hints[name])
        values[name] = _made(hints[name], value, f"{where} {name}") if inner else value
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from None
