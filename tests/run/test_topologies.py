"""Roles made from a run's topology: what a new incarnation takes over."""

import os
from pathlib import Path

import numpy as np
import pytest

from zapex.chunks.batch import aligned_zeros
from zapex.config.settings import Config
from zapex.envs import environments
from zapex.host.parts import PARTS
from zapex.run.run import Membership, Run
from zapex.run.topologies import Start, make_learner
from zapex.shm_transport import HostMemory


def test_learner_without_checkpoint_resumes_from_published_parameters(
    tmp_path: Path,
) -> None:
    config = Config().replace(
        env="CartPole-v1", actors=1, envs_per_actor=2, capacity=2_000, learning_starts=100,
        batch_size=32, hidden=16,
    )  # fmt: skip
    run = Run(config, environments.check("CartPole-v1"), tmp_path)
    plan = run.plan
    eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in plan.roles]
    control, experience = aligned_zeros(plan.nbytes), aligned_zeros(plan.replay.nbytes)
    host = HostMemory(plan, control, experience, eventfds, create=True)
    make_learner(Start("learner", run, host), host.mailbox())
    learned = np.arange(plan.parameter_bytes // 4, dtype=np.float32)
    host.mailbox().publish(7, learned.view(np.uint8))
    make_learner(Start("learner", run, host), host.mailbox())  # publishes what it begins with
    received = np.empty(plan.parameter_bytes, np.uint8)
    assert host.mailbox().newer_than(7, received) == 8
    np.testing.assert_array_equal(received.view(np.float32), learned)
    for fd in eventfds:
        os.close(fd)


@pytest.mark.parametrize("name", [name for name in PARTS if name != "all"])
def test_each_part_has_its_rings_and_its_command(name: str, tmp_path: Path) -> None:
    membership = Membership(name, "tcp://127.0.0.1:1")  # type: ignore[arg-type]
    config = Config().replace(env="CartPole-v1", actors=2, envs_per_actor=2)
    run = Run(config, environments.check("CartPole-v1"), tmp_path, membership=membership)
    rings = run.plan.rings
    shares = {"replay", "learner"} <= {*run.part.roles}
    assert ({"requests", "answers", "updates"} <= rings.keys()) == shares
    assert ("endings" in rings) == shares
    assert {"episodes", "notices"} <= rings.keys()
    assert run.command[1:3] == (
        ("replay", "--with-learner") if shares else (name, f"--{run.part.address}")
    )
