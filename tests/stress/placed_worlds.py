"""Runs that a scheduler has placed on this machine, and what can be killed of each.

A replay's own host is never killed but where there are several: its memory goes with it
(docs/clusters.md), and there would be nothing to account for.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.stress.placed_account import ROLES
from tests.support import slurm
from tests.support.containers import Pod
from tests.support.parts import Cluster, cluster_in, free_port
from zapex.clusters import launched
from zapex.clusters.kubernetes import Kubernetes
from zapex.clusters.placement import place
from zapex.host.parts import PartName

ENV = "tests.stress.marked_env:marked"
N_STEP, GAMMA = 3, 0.99
_SETTINGS: dict[str, dict[str, Any]] = {
    "env": {"env": ENV},
    "run": {"preset": "smoke", "max_frames": 0, "checkpoint_minutes": 0.1},
    "evaluator": {"eval_period_s": 0.0},
    "replay": {
        "capacity": 1_000_000, "learning_starts": 256, "n_step": N_STEP, "gamma": GAMMA,
        "samples_per_insert": 0.0,
    },
    "actor": {"envs_per_actor": 2},
    "learner": {"learner_threads": 1, "batch_size": 128},
}  # fmt: skip
_END_S = 120.0
Wait = Callable[[Callable[[], object], str], None]


@dataclass
class World:
    """One run. hosts: role -> how many there are when all is well."""

    hosts: dict[PartName, int]
    directory: Path
    loses_memory: bool = False  # what is killed is a replay

    def run_dirs(self, role: PartName) -> list[Path]:
        """Where lives of a role may be now."""
        return [self.directory / f"{role}-{i}" for i in range(self.hosts[role])]

    def kill(self, draw: random.Random, wait: Wait) -> str:
        """Kill one thing, and give it a place to come back to. Returns what it was."""
        raise NotImplementedError

    def end_actors(self) -> None:
        """End all hosts of actors; the replays stay."""
        raise NotImplementedError


def _tree(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _kill_all(pid: int) -> None:
    """A process and whatever it has started, as if its machine had lost its power."""
    found = _tree(pid)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=20)


def _pid_at(run_dir: Path) -> int:
    return int((run_dir / ".lock").read_text())


def _settings(table: str) -> str:
    return launched.settings_of(_SETTINGS) + table


# Ray.

_RAY = """
[ray]
address = "{address}"
wait_s = 100
replay = {{ cores = 4, memory_gb = 2 }}
learner = {{ cores = 3, memory_gb = 6 }}
actor = {{ hosts = 2, actors = 1, cores = 2, memory_gb = 3 }}
"""
# As Ray is told: then the replay fits on the head alone, the learner on its own node alone, and
# actors on the others.
_HEAD = {"num_cpus": 4, "memory": 3 << 30}
_ACTORS = {"num_cpus": 2, "memory": 3 << 30}
_NODES = {
    "learner": {"num_cpus": 3, "memory": 6 << 30}, "actor 0": _ACTORS, "actor 1": _ACTORS
}  # fmt: skip
_ALL = {"object_store_memory": 80 << 20, "num_gpus": 0}


class OnRay(World):
    """A head with the replay, a node for the learner and one for each host of actors."""

    def __init__(self, directory: Path, cluster: Any) -> None:
        super().__init__({"replay": 1, "learner": 1, "actor": 2}, directory / "launch")
        self._cluster = cluster
        self._nodes = {name: self._node(name) for name in _NODES}
        file = directory / "run.toml"
        file.write_text(_settings(_RAY.format(address=cluster.address)))
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "zapex", "launch", str(file), "--name", "n",
             "--dir", str(self.directory), "--trust"],
        )  # fmt: skip

    def _node(self, name: str) -> Any:
        return self._cluster.add_node(**_NODES[name], **_ALL)

    def kill(self, draw: random.Random, wait: Wait) -> str:
        name = draw.choice(sorted(_NODES))
        node = self._nodes[name]
        (raylet,) = node.all_processes["raylet"]
        _kill_all(raylet.process.pid)
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes[name] = self._node(name)
        return f"the node of {'the learner' if name == 'learner' else 'a host of actors'}"

    def end_actors(self) -> None:
        self.launcher.send_signal(signal.SIGKILL)  # nobody makes a host again
        self.launcher.wait(20)
        for name in ("actor 0", "actor 1"):
            (raylet,) = self._nodes[name].all_processes["raylet"]
            _kill_all(raylet.process.pid)


@contextlib.contextmanager
def _on_ray(directory: Path) -> Iterator[World]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster as RayCluster

    head = {**_HEAD, **_ALL, "include_dashboard": False}
    cluster = RayCluster(initialize_head=True, head_node_args=head)
    world = None
    try:
        world = OnRay(directory, cluster)
        yield world
    finally:
        if world is not None:
            world.launcher.kill()
            world.launcher.wait(20)
        cluster.shutdown()


# SLURM.

_SLURM = """
[slurm]
minutes = 600
replay = { cores = 1 }
learner = { cores = 1 }
actor = { hosts = 2, actors = 1, cores = 2 }
"""


class OnSlurm(World):
    """Jobs of a SLURM on this machine."""

    def __init__(self, directory: Path) -> None:
        super().__init__({"replay": 1, "learner": 1, "actor": 2}, directory / "launch")
        file = directory / "run.toml"
        file.write_text(_settings(_SLURM))
        self.run = launched.launch(file, "slurm", name="n", directory=self.directory)
        jobs = self.run.ids["jobs"]
        self._jobs = {"learner-0": jobs["learner"]}
        self._jobs |= {f"actor-{i}": f"{jobs['actor']}_{i}" for i in range(2)}

    def kill(self, draw: random.Random, wait: Wait) -> str:
        name = draw.choice(sorted(self._jobs))
        whose = "the learner's job" if name == "learner-0" else "a job of actors"
        if draw.random() < 0.5:  # as if its node had lost its power
            command = psutil.Process(_pid_at(self.directory / name))
            _kill_all(command.ppid())
            slurm.run("scontrol", "requeue", self._jobs[name])
            return f"{whose}, killed and requeued"
        before = _pid_at(self.directory / name)
        slurm.run("scontrol", "requeue", self._jobs[name])
        wait(lambda: not psutil.pid_exists(before), "the end of a requeued job")
        return f"{whose}, requeued"

    def end_actors(self) -> None:
        slurm.run("scancel", *(job for name, job in self._jobs.items() if name != "learner-0"))
        deadline_s = time.monotonic() + _END_S
        while any(psutil.pid_exists(_pid_at(path)) for path in self.run_dirs("actor")):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"jobs of actors did not end within {_END_S:g} s")
            time.sleep(0.2)


@contextlib.contextmanager
def _on_slurm(directory: Path) -> Iterator[World]:
    if why := slurm.why_not():
        raise RuntimeError(why)
    where = directory / "slurm"
    where.mkdir()
    with slurm.cluster(where):
        yield OnSlurm(directory)


# Containers.

_KUBERNETES = """
[kubernetes]
port = {port}
actor = {{ hosts = 2, actors = 1, cores = 2 }}
"""


class InContainers(World):
    """The containers' own commands. A killed one is made again as Kubernetes does it.

    A Job makes a new pod, with new volumes but for the learner's.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__({"replay": 1, "learner": 1, "actor": 2}, directory)
        port = free_port()
        placement = place(
            "kubernetes", "n", directory / "launch", _settings(_KUBERNETES.format(port=port))
        )
        launched.make_directory(placement)
        self._url, self._kubernetes = f"tcp://127.0.0.1:{port}", Kubernetes(placement)
        self._pods = 0
        self.running: dict[str, tuple[Pod, subprocess.Popen[bytes]]] = {}
        for role in ROLES:
            for index in range(self.hosts[role]):
                self._make(role, index)

    def _make(self, role: PartName, index: int) -> None:
        self._pods += 1
        kept = self.directory / "volume" if role == "learner" else None
        root = self.directory / f"pod{self._pods}"
        pod = Pod(root, self._kubernetes, role, index, url=self._url, runs=kept)
        pod.prepare()
        self.running[f"{role}-{index}"] = pod, pod.start()

    def run_dirs(self, role: PartName) -> list[Path]:
        found = [f"{role}-{i}" for i in range(self.hosts[role])]
        return [self.running[name][0].runs / name for name in found]

    def kill(self, draw: random.Random, wait: Wait) -> str:
        name = draw.choice(sorted(set(self.running) - {"replay-0"}))
        _kill_all(self.running[name][1].pid)
        self.running[name][1].wait(20)
        role, _, index = name.partition("-")
        self._make(role, int(index))  # type: ignore[arg-type]
        return f"a container of {'the learner' if role == 'learner' else 'actors'}"

    def end_actors(self) -> None:
        ending = [one for name, (_, one) in self.running.items() if name.startswith("actor")]
        for one in ending:
            one.send_signal(signal.SIGTERM)
        for one in ending:
            one.wait(_END_S)


@contextlib.contextmanager
def _in_containers(directory: Path) -> Iterator[World]:
    world = None
    try:
        world = InContainers(directory)
        yield world
    finally:
        for _, process in world.running.values() if world is not None else ():
            _kill_all(process.pid)
            process.wait(20)


# Shards.

_SHARDS = 3


class OfShards(World):
    """Three replays of one run, by their plain commands."""

    def __init__(self, cluster: Cluster) -> None:
        hosts: dict[PartName, int] = {"replay": _SHARDS, "learner": 1, "actor": 1}
        super().__init__(hosts, cluster.directory, loses_memory=True)
        self._cluster = cluster
        self._urls = [f"tcp://127.0.0.1:{free_port()}" for _ in range(_SHARDS)]
        self._replays = [self._replay(shard) for shard in range(_SHARDS)]
        cluster.url = ",".join(self._urls)
        actors = cluster.start("actor", "--actors", str(_SHARDS))
        self._runs = {"actor": [actors.run], "learner": [cluster.start("learner").run]}
        self._actors = actors

    def _replay(self, shard: int) -> Any:
        self._cluster.url = self._urls[shard]
        words = ["--actors", str(_SHARDS), "--shards", str(_SHARDS), "--shard", str(shard)]
        return self._cluster.start("replay", *words)

    def run_dirs(self, role: PartName) -> list[Path]:
        return self._runs[role] if role in self._runs else [one.run for one in self._replays]

    def kill(self, draw: random.Random, wait: Wait) -> str:
        shard = draw.randrange(_SHARDS)
        _kill_all(self._replays[shard].popen.pid)
        self._replays[shard].popen.wait(20)
        self._replays[shard] = self._replay(shard)
        return "a shard"

    def end_actors(self) -> None:
        self._actors.ends(_END_S, signal.SIGTERM)


@contextlib.contextmanager
def _of_shards(directory: Path) -> Iterator[World]:
    file = directory / "run.toml"
    file.write_text(_settings(""))
    with cluster_in(directory, ["--config", str(file), "--trust"]) as cluster:
        yield OfShards(cluster)


WORLDS = {"ray": _on_ray, "slurm": _on_slurm, "container": _in_containers, "shards": _of_shards}
