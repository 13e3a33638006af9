"""`zapex learner` whose step takes a fixed time and computes nothing: what a fast GPU asks for.

    python -m benchmarks.paced_learner STEP_S learner --replay tcp://... ...

Everything but the network is real: batches are received and unpacked, priorities and parameters
are sent.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from zapex import cli, launch
from zapex.batch import Batch
from zapex.roles.learner import Learner
from zapex.run import Clock, Run
from zapex.schema import BatchLayout
from zapex.shm_transport import Host

_STEP = "ZAPEX_BENCH_STEP_S"


class PacedDqn:
    """Sleeps where a DQN would compute."""

    def __init__(self, step_s: float, parameter_bytes: int) -> None:
        self._step_s = step_s
        self._parameters = np.zeros(parameter_bytes // 4, np.float32)
        self._rng = np.random.default_rng(1)

    def learn(self, batch: Batch, enter: Callable[[str], None]) -> tuple[Any, dict[str, float]]:
        """One step of `step_s` seconds; TD errors are random."""
        enter("forward")
        time.sleep(self._step_s)
        errors = self._rng.random(batch.layout.batch_size, np.float32)
        return errors, dict.fromkeys(("td_loss", "q_values", "td_error", "gradient_norm"), 1.0)

    def flat_parameters(self) -> Any:
        """All of them."""
        return self._parameters


class NoCheckpoints:
    """There is nothing to save."""

    def due(self) -> bool:
        return False

    def save(self, dqn: Any, version: int) -> None:
        pass


def make_learner(
    run: Run, host: Host, clock: Clock, totals: Any, source: Any, sink: Any
) -> Learner:
    """In the place of topology.make_learner."""
    plan = host.plan
    layout = BatchLayout(plan.replay.schema, plan.batch_size, channels_last=True)
    dqn: Any = PacedDqn(float(os.environ[_STEP]), plan.parameter_bytes)
    return Learner(
        dqn, source, sink, Batch.empty(layout), host.metrics("learner"), NoCheckpoints(),
        prefetch=plan.prefetch, publish_period_s=run.config.learner.publish_period_s,
        clock_s=clock.now_s, spare=Batch.empty(layout) if plan.prefetch >= 3 else None,
    )  # fmt: skip


def _here(specs: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """The same processes, this module in the place of zapex.child."""

    def through(*args: Any) -> Iterator[Any]:
        for spec in specs(*args):
            argv = [arg.replace("zapex.child", "benchmarks.paced_learner") for arg in spec.argv]
            yield dataclasses.replace(spec, argv=argv)

    return through


def main(args: list[str]) -> int:
    """The command, or one of its roles."""
    if len(args) == 1:
        from zapex import child, hosts

        with mock.patch.object(hosts, "make_learner", make_learner):
            child.main(args[0])
        return 0
    os.environ[_STEP] = args[0]
    specs = launch.Session._process_specs
    with mock.patch.object(launch.Session, "_process_specs", _here(specs)):
        return cli.main(args[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
