"""Actors that ask the inference role play and send what actors with policies of their own do."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from zapex.chunks.batch import aligned_zeros
from zapex.chunks.layout import ACTOR, COUNT, INCARNATION, SEQUENCE
from zapex.config.settings import Config
from zapex.envs import environments
from zapex.host.parts import PARTS
from zapex.machine.child import DutyCycle
from zapex.run.run import Run
from zapex.run.topologies import Start, make_role
from zapex.shm_transport import HostMemory

STEPS = 150


@dataclass
class Host:
    """A run's actors and replay in this process, with parameters that nobody learns."""

    run: Run
    host: HostMemory
    roles: dict[str, DutyCycle]

    def restart(self, name: str) -> None:
        """The role is dead, and begins its second life."""
        self.host.set_incarnation(name, 2)
        self.roles[name] = make_role(Start(name, self.run, self.host, 2))

    def publish(self, seed: int) -> None:
        size = self.host.plan.parameter_bytes // 4
        values = np.random.default_rng(seed).normal(0, 0.3, size).astype(np.float32)
        self.host.mailbox().publish(self.host.mailbox().version + 1, values.view(np.uint8))

    def steps(self, actor: int) -> int:
        return int(self.host.metrics(f"actor {actor}").value("steps"))

    def play(self, steps: int) -> None:
        """Until each actor has made so many; no faster than the slowest."""
        actors = [name for name in self.roles if name.startswith("actor")]
        for _ in range(100 * steps):
            slowest = min(self.steps(i) for i in range(len(actors)))
            if slowest >= steps:
                return
            for i, name in enumerate(actors):
                if self.steps(i) == slowest:
                    self.roles[name].do_work()
            for name in self.roles.keys() - actors:
                self.roles[name].do_work()
        raise AssertionError("stuck")

    def chunks(self) -> dict[tuple[int, int], tuple[int, bytes]]:
        """(actor, sequence) -> (count, all columns' bytes) of what was sent."""
        store, found = self.host.store(), {}
        for slot in np.flatnonzero(store.header_rows[:, COUNT]).tolist():
            header = store.header_rows[slot]
            body = store.body(slot)
            whole = store.mem[body : body + store.layout.body_bytes].tobytes()
            found[int(header[ACTOR]), int(header[SEQUENCE])] = int(header[COUNT]), whole
        return found


def make(tmp_path: Path, inference: str, actors: int = 1, env: str = "CartPole-v1") -> Host:
    config = Config().replace(
        env=env, actors=actors, envs_per_actor=3, capacity=4_000, learning_starts=1_000,
        batch_size=32, hidden=16, channels=4, param_period=20, inference=inference,
        inference_device="cpu", actor_precision="float32",
    )  # fmt: skip
    run = Run(config, environments.check(env), tmp_path)
    plan = run.plan
    eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in plan.roles]
    memory = aligned_zeros(plan.nbytes), aligned_zeros(plan.replay.nbytes)
    host = HostMemory(plan, *memory, eventfds, create=True)
    names = [name for name, role in plan.roles if role in ("actor", "inference", "replay")]
    for name in names:
        host.set_incarnation(name, 1)
    return Host(run, host, {name: make_role(Start(name, run, host)) for name in names})


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    made: list[Host] = []
    yield made
    for one in made:
        for fd in one.host.eventfds:
            os.close(fd)


@pytest.mark.parametrize("inference", ["cpu", "central"])
def test_phases_cover_all_time_of_a_role(inference: str, tmp_path: Path, hosts: list[Host]) -> None:
    began = time.perf_counter()
    one = make(tmp_path, inference, actors=2)
    hosts.append(one)
    one.publish(1)
    one.play(STEPS)
    for name in one.roles:
        found = one.host.metrics(name).snapshot()
        seconds = sum(value for key, value in found.items() if key.startswith("phase/"))
        assert 0 < seconds <= time.perf_counter() - began, name


@pytest.mark.parametrize(
    "env", ["CartPole-v1", pytest.param("ALE/Breakout-v5", marks=pytest.mark.slow)]
)
def test_central_inference_gives_the_same_experience(
    env: str, tmp_path: Path, hosts: list[Host]
) -> None:
    sent = []
    for inference in ("cpu", "central"):
        one = make(tmp_path, inference, env=env)
        hosts.append(one)
        one.publish(1)
        one.play(STEPS)
        one.publish(2)
        one.play(2 * STEPS)
        sent.append(one.chunks())
        assert one.host.metrics("actor 0").value("params_version") == 2
    both = sent[0].keys() & sent[1].keys()
    assert len(both) >= 3
    for key in both:
        assert sent[0][key][0] == sent[1][key][0]
        assert sent[0][key][1] == sent[1][key][1], key


def test_inference_and_actors_survive_restarts(tmp_path: Path, hosts: list[Host]) -> None:
    one = make(tmp_path, "central", actors=2)
    hosts.append(one)
    one.publish(1)
    one.play(STEPS)
    del one.roles["inference"]
    one.roles["actor 0"].do_work()  # it asks, and waits for what nobody answers
    assert not one.roles["actor 0"].ready()
    one.roles["actor 1"].do_work()  # it asks too, and dies
    one.restart("inference")
    one.restart("actor 1")
    one.play(2 * STEPS)
    lives = {(int(row[ACTOR]), int(row[INCARNATION])) for row in one.host.store().header_rows}
    assert {(0, 1), (1, 1), (1, 2)} <= lives


def test_inference_role_is_only_on_hosts_with_actors() -> None:
    for name, part in PARTS.items():
        acts = "actor" in part.roles
        assert ("inference" in part.acting("central").roles) == acts, name
        assert part.acting("cpu") is part
        assert part.acting("central").processes(4) == part.processes(4) + acts


WITHOUT_TORCH = """
import os, sys
from pathlib import Path
from tests.run.test_acting import make
import zapex.run.topologies as topology
real = topology.make_role
import tests.run.test_acting as acting
acting.make_role = lambda start: real(start) if start.name.startswith("actor") else None
one = make(Path("nowhere"), "central", env=sys.argv[1])
one.roles["actor 0"].do_work()
assert not one.roles["actor 0"].ready()
print(sorted(name for name in sys.modules if name.partition(".")[0] == "torch"))
"""


@pytest.mark.parametrize(
    "env", ["CartPole-v1", pytest.param("ALE/Breakout-v5", marks=pytest.mark.slow)]
)
def test_actor_with_central_inference_imports_no_torch(env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, env],
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
