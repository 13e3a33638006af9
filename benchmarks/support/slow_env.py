"""An environment whose steps take a while, as an emulator's do, until a benchmark says otherwise.

For `--wrapper benchmarks.support.slow_env:slow`.
"""

import os
import time
from typing import Any

import gymnasium

STEP_S = 0.001
HURRY = "ZAPEX_BENCH_HURRY"
"""The variable with the path of a file; while that is there, a step takes only its own time."""


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Each step sleeps for a millisecond first, so that actors leave the cores to others."""

    def step(self, action: Any) -> Any:
        if not os.path.exists(os.environ[HURRY]):
            time.sleep(STEP_S)
        return super().step(action)


def slow(env: gymnasium.Env[Any, Any]) -> Slow:
    """The environment with slow steps."""
    return Slow(env)
