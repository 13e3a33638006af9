"""The policy that a run's checkpoint holds."""

from pathlib import Path

import numpy as np

from zapex import checkpoint
from zapex.agent import networks
from zapex.agent.policy import Policy
from zapex.config import LearnerConfig
from zapex.environments import EnvironmentSpec
from zapex.errors import CheckpointError


def find(run_dir: Path, name: str) -> Path:
    """The checkpoint `name` of a run: "best" (or the latest, before any evaluation), "latest", a
    step checkpoint's name, or a path.

    Raises:
        CheckpointError: there is none.
    """
    steps = {path.stem: path for path in checkpoint.listing(run_dir)}
    newest, best = checkpoint.latest(run_dir), checkpoint.best(run_dir)
    named = {checkpoint.BEST: best or newest, "latest": newest, **steps}
    path = named.get(name) or Path(name)
    if not path.is_file():
        known = ", ".join(name for name, path in named.items() if path) or "none at all"
        raise CheckpointError(f"{run_dir} has no checkpoint {name!r}; there is {known}")
    return path


def load(path: Path, spec: EnvironmentSpec, config: LearnerConfig) -> Policy:
    """A policy with the online parameters of the checkpoint at `path`.

    Raises:
        CheckpointError: missing, damaged, or of another network than `spec` and `config` make.
    """
    tensors = checkpoint.load(path).tensors
    network = networks.build(
        spec.observation_shape,
        np.dtype(spec.observation_dtype),
        spec.num_actions,
        config.hidden,
        channels=config.channels,
        precision=config.precision,
        device=config.device,
    )
    found = [tensors.get(f"online.{name}", np.empty(0)) for name in network.shapes]
    for array, (name, shape) in zip(found, network.shapes.items(), strict=True):
        if array.shape != shape:
            raise CheckpointError(
                f"{path} is of another network: {name} is {array.shape} there and {shape} for "
                f"{spec.env_id}; use the environment that the run was trained on"
            )
    policy = Policy(network)
    policy.load_flat(np.concatenate([array.ravel() for array in found]))
    return policy
