"""`zapex export --minari`: whole episodes of a run's network as a Minari dataset."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from zapex.agent.policy import epsilon_greedy
from zapex.envs import streams
from zapex.envs.environments import EnvironmentSpec
from zapex.errors import ConfigError
from zapex.roles.evaluator import QValues


def export(
    q_values: QValues, spec: EnvironmentSpec, directory: Path, name: str, **play: Any
) -> tuple[int, int]:
    """Play episodes, and write each when it ends. `play`: as in `_played`.

    directory: Minari's, MINARI_DATASETS_PATH. name: of the dataset in it. Observations are those
    of the network: stacked on ALE, and flat for a Dict.

    Returns how many episodes and steps it has. Raises ConfigError: minari is missing, or there is
    such a dataset.
    """
    try:
        import minari
        from gymnasium import spaces
        from minari.data_collector import EpisodeBuffer
    except ImportError as error:
        raise ConfigError(f'--minari needs {error.name}: pip install "zapex[minari]"') from None
    if (directory / name).exists():
        raise ConfigError(f"there is a dataset already: {directory / name}")
    images = spec.observation_dtype == "uint8"
    low, high = (0, 255) if images else (-np.inf, np.inf)
    dtype: Any = np.dtype(spec.observation_dtype)
    with _minari_datasets_in(directory):
        dataset = minari.create_dataset_from_buffers(
            name,
            (EpisodeBuffer(**episode) for episode in _played(q_values, spec, **play)),
            observation_space=spaces.Box(low, high, spec.observation_shape, dtype),
            action_space=spaces.Discrete(spec.num_actions, start=spec.first_action),
            algorithm_name="Ape-X DQN (zapex)",
            description=f"{spec.env_id}: {spec.describe}",
            jpeg_encoding=False,  # it would lose what the network saw
        )
        return int(dataset.total_episodes), int(dataset.total_steps)


def _played(
    q_values: QValues,
    spec: EnvironmentSpec,
    *,
    episodes: int,
    seed: int,
    epsilon: float,
    noop_max: int,
) -> Iterator[dict[str, Any]]:
    """The fields of each episode of T steps: T + 1 observations, T of all else."""
    games = streams.make(spec, 1, seed=seed, noop_max=noop_max)
    rng = np.random.default_rng(seed)
    try:
        obs = games.reset()
        for number in range(episodes):
            seen, rows = [obs[0].copy()], []
            while True:
                action = epsilon_greedy(np.asarray(q_values(obs)), epsilon, rng)
                step = games.step(action)
                obs = step.obs
                seen.append(obs[0].copy())
                ends = bool(step.terminated[0]), bool(step.truncated[0])
                rows.append((int(action[0]) + spec.first_action, float(step.reward[0]), *ends))
                if any(ends):
                    break
            columns = ("actions", "rewards", "terminations", "truncations")
            fields = dict(zip(columns, map(np.array, zip(*rows, strict=True)), strict=True))
            yield {"id": number, "observations": np.stack(seen), **fields}
            obs = games.step(action).obs  # the first of the next game; the action is ignored
    finally:
        games.close()


@contextlib.contextmanager
def _minari_datasets_in(directory: Path) -> Iterator[None]:
    """Minari takes its directory from the process's environment alone."""
    before = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = str(directory.absolute())
    try:
        yield
    finally:
        if before is None:
            del os.environ["MINARI_DATASETS_PATH"]
        else:
            os.environ["MINARI_DATASETS_PATH"] = before
