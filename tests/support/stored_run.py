"""The directory of a run of CartPole as it lies on the disk: settings and a checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np

from zapex.agent.architecture import layers, parameter_shapes, state_shapes
from zapex.config.settings import Config
from zapex.run import checkpoints

CARTPOLE = {
    "env_id": "CartPole-v1",
    "observation_shape": [4],
    "observation_dtype": "float32",
    "num_actions": 2,
}


def store_run(run: Path, schema: dict[str, Any] = CARTPOLE, **settings: Any) -> Config:
    """Make the directory; every parameter of the checkpoint is 0.

    Args:
        run: the directory.
        schema: what the checkpoint says of its environment.
        settings: in place of those of a small run.

    Returns:
        The run's settings.
    """
    small = {"env": "CartPole-v1", "preset": "smoke", "capacity": 4096, "learning_starts": 64,
             "batch_size": 32, "actors": 1, "hidden": 8}  # fmt: skip
    config = Config().replace(**small | settings)
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.toml").write_text(config.to_toml())
    shapes = state_shapes(parameter_shapes(layers((4,), np.float32, 2, config.learner.hidden)))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    state = {"schema": schema, "counters": {}, "params_version": 1, "totals": {}}
    checkpoints.save(run / "checkpoints", checkpoints.step_name(7), tensors, state)
    return config
