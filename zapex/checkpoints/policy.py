"""The policy that a run's checkpoint holds."""

from pathlib import Path

import numpy as np

from zapex.agent.networks import Network
from zapex.checkpoints import file as checkpoint
from zapex.checkpoints.network import network_of
from zapex.config.settings import LearnerConfig
from zapex.envs.environments import EnvironmentSpec
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
        known = ", ".join(name for name, path in named.items() if path) or "none"
        raise CheckpointError(f"{run_dir} has no checkpoint {name!r}; there is {known}")
    return path


def made_with(found: checkpoint.Checkpoint) -> tuple[EnvironmentSpec, LearnerConfig] | None:
    """The environment and the network of a checkpoint; None: of a version that did not say.

    Raises CheckpointError if they cannot be used.
    """
    facts = found.state.get("policy")
    if facts is None:
        return None
    try:
        return EnvironmentSpec(**facts["environment"]), LearnerConfig(**facts["network"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{found.path} does not say what its network is made from: {error}"
        ) from error


def load(path: Path, spec: EnvironmentSpec, config: LearnerConfig) -> Network:
    """The network with the online parameters of the checkpoint at `path`.

    Raises:
        CheckpointError: missing, damaged, or of another network than `spec` and `config` make.
    """
    return loaded(checkpoint.load(path), spec, config)


def loaded(found: checkpoint.Checkpoint, spec: EnvironmentSpec, config: LearnerConfig) -> Network:
    """The same, of a checkpoint that was read. Raises CheckpointError as `load` does."""
    path, tensors = found.path, found.tensors
    network = network_of(spec, config, config.device, config.precision)
    for name, shape in network.shapes.items():
        array = tensors.get(f"online.{name}")
        if array is None or array.shape != shape or array.dtype != np.float32:
            there = "missing" if array is None else f"{array.dtype} {array.shape}"
            raise CheckpointError(
                f"{path} is of another network: {name} is {there} there and float32 {shape} for "
                f"{spec.env_id}; use the environment that the run was trained on"
            )
    network.load_flat(
        np.concatenate([tensors[f"online.{name}"].ravel() for name in network.shapes])
    )
    return network
