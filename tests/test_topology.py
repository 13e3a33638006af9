"""Roles made from a run's topology: what a new life of a role takes over."""

import os
from pathlib import Path

import numpy as np

from zapex import environments
from zapex.batch import aligned_zeros
from zapex.config import Config
from zapex.run import Clock, Run
from zapex.shm_transport import Host
from zapex.topology import make_learner


def test_a_learner_that_died_before_its_first_checkpoint_goes_on_from_what_it_published(
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
    host = Host(plan, control, experience, eventfds, create=True)
    make_learner(run, host, Clock(), dict)
    learned = np.arange(plan.parameter_bytes // 4, dtype=np.float32)
    host.parameter_sink().publish(7, learned.view(np.uint8))
    make_learner(run, host, Clock(), dict)  # publishes what it begins with
    received = np.empty(plan.parameter_bytes, np.uint8)
    assert host.parameter_source().newer_than(7, received) == 8
    np.testing.assert_array_equal(received.view(np.float32), learned)
    for fd in eventfds:
        os.close(fd)
