"""A learner whose step takes a fixed time and computes nothing: what a fast GPU asks for.

    python -m benchmarks.support.paced_learner STEP_S learner --replay tcp://... ...
    python -m benchmarks.support.paced_learner STEP_S train --env ...

is `zapex learner` or `zapex train` with such a learner. All else is real: batches are gathered or
received, priorities and parameters are sent.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from zapex.chunks.batch import Batch
from zapex.cli import hosts
from zapex.cli.resolve import prepared, resolve
from zapex.run.train import train

_ROOT = Path(__file__).parents[2]
_STEP = "ZAPEX_BENCH_STEP_S"
_WRAP = "benchmarks.support.paced_learner:paced"


class PacedDqn:
    """Sleeps where a DQN would compute; all else is the DQN's, but for the batches' memory.

    Their images are as a GPU takes them, frame after frame.
    """

    channels_last = False

    def __init__(self, dqn: Any, step_s: float) -> None:
        self._dqn, self._step_s = dqn, step_s
        self._rng = np.random.default_rng(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dqn, name)

    def learn(self, batch: Batch, enter: Callable[[str], None]) -> tuple[Any, dict[str, float]]:
        """One step of `step_s` seconds; TD errors are random."""
        enter("forward")
        time.sleep(self._step_s)
        errors = self._rng.random(batch.layout.batch_size, np.float32)
        return errors, dict.fromkeys(("td_loss", "q_values", "td_error", "gradient_norm"), 1.0)


def paced(dqn: Any) -> PacedDqn:
    """What the learner's process puts in the place of its DQN."""
    return PacedDqn(dqn, float(os.environ[_STEP]))


def main(args: list[str]) -> int:
    """The command; its learner's process inherits the environment, and imports this module."""
    os.environ[_STEP], name, *flags = args
    os.environ["PYTHONPATH"] = str(_ROOT)
    if name == "train":
        run = resolve(flags, name, "Train on one host with a paced learner.")
        return train(prepared(run), run.spec, _WRAP)
    return hosts.command(name, flags, _WRAP)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
