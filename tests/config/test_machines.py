"""Presets on fake machines of 2 to 128 cores: accepted by preflight, with sensible ratios."""

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.config.test_presets import ATARI, VECTOR
from tests.machine.test_resources import topology
from zapex.config.presets import Task, check_memory, choose, replay_bytes
from zapex.config.settings import Config
from zapex.host.parts import PARTS
from zapex.machine import gpu
from zapex.machine.resources import Machine
from zapex.run.preflight import check, demand

GIB = 1 << 30
MEMORY_GIB = {2: 8, 4: 16, 8: 32, 16: 64, 32: 128, 64: 256, 128: 512}
GPUS_GIB = (0, 8, 24, 80)


@dataclass(frozen=True)
class Faked:
    """One row of the table; quota: cores' worth of time that a container has, 0 for no limit."""

    cores: int
    smt: int = 1
    nodes: int = 1
    gpu_gib: int = 0
    memory_gib: float = 0.0
    quota: int = 0

    def build(self, root: Path) -> Machine:
        """The machine, from files of the kernel and an answer of torch."""
        gib = self.memory_gib or MEMORY_GIB[self.cores]
        files = topology(self.cores, self.nodes, self.smt)
        files["proc/meminfo"] = f"MemAvailable: {int(gib * 2**20)} kB\nHugepagesize: 2048 kB\n"
        if self.quota:
            files["proc/self/cgroup"] = "0::/\n"
            files["sys/fs/cgroup/cpu.max"] = f"{self.quota * 100_000} 100000\n"
        if self.gpu_gib:
            files["dev/nvidia0"] = ""
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        machine = Machine.look(None, root, cpus=set(range(self.cores * self.smt)))
        if not self.gpu_gib:
            return machine
        facts = {
            "name": "a GPU", "memory_bytes": self.gpu_gib << 30, "capability": [8, 9],
            "cuda": "12.8", "bfloat16": True, "tf32": "convolutions",
        }  # fmt: skip
        return replace(machine, gpu=gpu.look(lambda: json.dumps(facts), root))


TABLE = [
    *(Faked(cores, gpu_gib=size) for cores in MEMORY_GIB for size in GPUS_GIB),
    *(Faked(cores, smt=2, gpu_gib=24) for cores in MEMORY_GIB),
    *(Faked(cores, smt=2, nodes=2, gpu_gib=80) for cores in (32, 64, 128)),
    # As many cores as before, and little memory.
    *(Faked(cores, gpu_gib=24, memory_gib=cores / 2) for cores in (8, 32, 128)),
    *(Faked(64, gpu_gib=24, quota=quota) for quota in (2, 6, 24)),
]


def chosen_for(machine: Machine, part: str, task: Task = ATARI) -> Config:
    chosen = choose("auto", task, machine, part)
    return Config().replace(**{name: choice.value for name, choice in chosen.items()})


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_preflight_accepts_what_presets_choose(row: Faked, tmp_path: Path) -> None:
    machine = row.build(tmp_path)
    for part, task in itertools.product(PARTS.values(), (ATARI, VECTOR)):
        config = chosen_for(machine, part.name, task)
        needed = replay_bytes(task.schema, config) if part.holds_replay else 1
        if part.holds_replay:
            check_memory(config, task.schema, machine)
            assert config.replay.capacity >= config.replay.learning_starts >= 1_000
        cuda, processes = part.learns and row.gpu_gib > 0, part.processes(config.actor.actors)
        demand(check(needed, processes, gpu=machine.gpu, cuda=cuda, root=tmp_path))


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_roles_share_the_cores_of_one_host(row: Faked, tmp_path: Path) -> None:
    machine = row.build(tmp_path)
    config = chosen_for(machine, "all")
    actors, threads = config.actor.actors, config.learner.learner_threads
    assert machine.cores == min(row.cores, row.quota or row.cores)  # physical, within the quota
    assert actors >= 1
    if machine.cores > 2:
        assert actors + max(1, threads) <= machine.cores
    if row.gpu_gib:
        assert threads == 1
        if machine.cores >= 8 and not row.memory_gib:
            assert actors >= 0.75 * machine.cores
    else:
        assert actors <= 16
        assert threads == 0


@pytest.mark.parametrize("row", TABLE, ids=str)
@pytest.mark.parametrize("part", ["all", "replay"])
def test_transitions_outlast_the_target_network(row: Faked, part: str, tmp_path: Path) -> None:
    config = chosen_for(row.build(tmp_path), part)
    replay, learner, actors = config.replay, config.learner, config.actor.actors
    if actors <= 16:
        return
    # A sample is 1 / samples_per_insert inserts: how many target networks a transition lasts.
    samples = replay.capacity * replay.samples_per_insert
    lasts = samples / (learner.batch_size * learner.target_period)
    assert replay.capacity >= 125_000 * actors or lasts >= 2


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_each_part_uses_its_own_host(row: Faked, tmp_path: Path) -> None:
    machine = row.build(tmp_path)
    plays, keeps, learns = (chosen_for(machine, part) for part in ("actor", "replay", "learner"))
    whole = chosen_for(machine, "all")
    assert plays.actor.actors >= whole.actor.actors  # it reserves nothing for a learner
    if not row.memory_gib:
        assert plays.actor.actors >= 0.8 * machine.cores
    assert keeps.actor.actors > machine.cores  # those of all hosts
    both = chosen_for(machine, "replay with learner")
    assert both.actor.actors == keeps.actor.actors
    assert learns.learner.learner_threads == (1 if row.gpu_gib else 0)


def test_hosts_of_one_run_agree_on_any_machines(tmp_path: Path) -> None:
    """Cores, memory and GPUs of a host change only what may differ between hosts."""
    machines = [row.build(tmp_path / str(i)) for i, row in enumerate(TABLE[::5])]
    for task in (ATARI, VECTOR):
        every = [chosen_for(m, part, task) for m in machines for part in PARTS if part != "all"]
        assert all(config.shared() == every[0].shared() for config in every)
