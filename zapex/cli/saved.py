"""`zapex.load_policy` and `zapex export`: a run's trained network for other programs."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zapex.cli.flags import check_output, parse
from zapex.cli.resolve import check_trust
from zapex.config.fields import SettingsGroup, setting
from zapex.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zapex.agent.networks import Network
    from zapex.envs.environments import EnvironmentSpec
    from zapex.roles.evaluator import QValues
    from zapex.run.checkpoints import Checkpoint


class SavedPolicy:
    """A trained policy: `policy(obs)` is the best action, `policy.q_values(obs)` has all values.

    Observations are the environment's own, one or a batch. `environment` is the environment's id,
    `checkpoint` the file.
    """

    def __init__(self, network: "Network", spec: "EnvironmentSpec", checkpoint: Path) -> None:
        self._network, self._spec = network, spec
        self.environment, self.checkpoint = spec.env_id, checkpoint

    def __call__(self, obs: Any) -> Any:
        """The action with the largest Q value.

        Args:
            obs: one observation (of the environment's shape), or a batch (one more axis in front);
                for a Dict space, a dict of such arrays.

        Returns:
            An int for one observation, int64 [B] for a batch, numbered as in the environment.

        Raises:
            ConfigError: the observation has another shape.
        """
        q = self.q_values(obs)
        actions = q.argmax(-1) + self._spec.first_action
        return int(actions) if q.ndim == 1 else actions.astype("int64")

    def q_values(self, obs: Any) -> "NDArray[np.float32]":
        """Q values, float32 [actions] for one observation or [B, actions] for a batch."""
        batch, single = self._spec.batch_of(obs)
        q = self._network.q_values(batch)
        return q[0] if single else q


def load_policy(
    run: str | Path, which: str = "best", *, trust: bool = False, device: str = "cpu"
) -> SavedPolicy:
    """The policy of a run; needs neither environment nor replay.

    Args:
        run: directory of the run, its name in runs/, or one of its checkpoint files.
        which: "best" (before the first evaluation: the latest), "latest", or a checkpoint's name.
        trust: whether modules that the run names, e.g. of a custom network, may be imported.
        device: "cpu", "cuda" or "auto".

    Raises:
        CheckpointError: no such checkpoint, or it is damaged.
        ConfigError: the run names a module and `trust` is False, or it cannot be imported.
    """
    found = _found(Path(run), which)
    network, spec = _network(found, trust, device, "auto")
    return SavedPolicy(network, spec, found.path)


def _found(run: Path, which: str) -> "Checkpoint":
    from zapex.run import checkpoints
    from zapex.watch import runs

    if run.is_file():
        return checkpoints.load(run)
    return checkpoints.load(checkpoints.find(runs.find(str(run)), which))


def _network(
    found: "Checkpoint", trust: bool, device: str, precision: str
) -> "tuple[Network, EnvironmentSpec]":
    from zapex.run import checkpoints

    spec, config = checkpoints.made_with(found)
    check_trust(str(found.path), {"network": config.network}, {}, trust)
    if device not in ("cpu", "cuda", "auto"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {device!r}")
    values: dict[str, Any] = {"device": device, "precision": precision}
    return checkpoints.load_network(found, spec, replace(config, **values)), spec


@dataclass(frozen=True)
class _ExportOptions(SettingsGroup):
    """Options."""

    run: str = ""
    """Directory of the run, or its name in runs/."""
    onnx: str = ""
    """ONNX file to write; needs pip install "zapex[onnx]"."""
    minari: str = ""
    """Directory of Minari datasets: play episodes and add them as one; needs pip install
    "zapex[minari]"."""
    episodes: int = setting(10, low=1)
    """Episodes to play for --minari."""
    epsilon: float | None = setting(None, low=0.0, high=1.0)
    """Share of random actions in these; default: the run's --eval-epsilon."""
    seed: int = setting(1, low=0, high=2**63 - 1)
    """Random seed of these episodes."""
    checkpoint: str = "best"
    """Checkpoint to export: best, latest, the name of one of the run's, or a file."""
    trust: bool = False
    """Allow the modules that the run names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output("--onnx", self.onnx, ".onnx")


def command(args: list[str]) -> int:
    """`zapex export RUN`: the float32 network as ONNX, or episodes of it as a Minari dataset."""
    what = (
        "Export a run's network as ONNX (input obs (B, ...), output q_values (B, actions)), or "
        "episodes that it plays as a Minari dataset."
    )
    options = parse(_ExportOptions(), args, "export", what, "run")
    if bool(options.onnx) == bool(options.minari):
        raise ConfigError(
            "`zapex export` writes one thing: zapex export RUN --onnx policy.onnx, or --minari DIR"
        )
    if options.minari:
        return _export_episodes(options)
    found = _found(Path(options.run), options.checkpoint)
    network, spec = _network(found, options.trust, "cpu", "float32")
    from zapex.agent.export import export

    off = export(network, Path(options.onnx), spec.observation_dtype)
    print(f"{spec.env_id}, {spec.observation_dtype} observations (B, {_shape(spec)})")
    print(f"checkpoint {found.path}")
    print(f"written and checked with onnxruntime: {options.onnx}; Q values differ by {off:.1e}")
    return 0


def _export_episodes(options: _ExportOptions) -> int:
    """Play whole episodes, and write each when it ends.

    Observations are those of the network: stacked on ALE, and flat for a Dict.
    """
    try:
        import minari
        from gymnasium import spaces
        from minari.data_collector import EpisodeBuffer
    except ImportError as error:
        raise ConfigError(f'--minari needs {error.name}: pip install "zapex[minari]"') from None
    import numpy as np

    from zapex.cli.play import Stored
    from zapex.run import checkpoints
    from zapex.watch import runs

    run = Stored.of(runs.find(options.run), "", options.trust, "cpu")
    saved = checkpoints.find(run.run_dir, options.checkpoint)
    policy = checkpoints.load_network(checkpoints.load(saved), run.spec, run.config.learner)
    evaluator, spec, directory = run.config.evaluator, run.spec, Path(options.minari)
    epsilon = evaluator.eval_epsilon if options.epsilon is None else options.epsilon
    name = f"zapex/{run.run_dir.absolute().name}-v0"
    if (directory / name).exists():
        raise ConfigError(f"there is a dataset already: {directory / name}")
    played = _played(policy.q_values, spec, options, epsilon, evaluator.eval_noop_max)
    low, high = (0, 255) if spec.observation_dtype == "uint8" else (-np.inf, np.inf)
    dtype: Any = np.dtype(spec.observation_dtype)
    try:
        with _minari_datasets_in(directory):
            dataset = minari.create_dataset_from_buffers(
                name,
                (EpisodeBuffer(**episode) for episode in played),
                observation_space=spaces.Box(low, high, spec.observation_shape, dtype),
                action_space=spaces.Discrete(spec.num_actions, start=spec.first_action),
                algorithm_name="Ape-X DQN (zapex)",
                description=f"{spec.env_id}: {spec.describe}",
                data_format="arrow",  # of the extra; the default needs h5py
                jpeg_encoding=False,  # it would lose what the network saw
            )
    except BaseException:  # an incomplete dataset cannot be read
        shutil.rmtree(directory / name, ignore_errors=True)
        raise
    print(f"checkpoint {saved}")
    print(
        f"dataset {name} in {options.minari}: {dataset.total_episodes} episodes, "
        f"{dataset.total_steps:,} steps"
    )
    return 0


def _played(
    q_values: "QValues", spec: "EnvironmentSpec", options: _ExportOptions, epsilon: float,
    noop_max: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The fields of each episode of T steps: T + 1 observations, T of all else."""
    import numpy as np

    from zapex.agent.policy import epsilon_greedy
    from zapex.envs import streams

    games = streams.make(spec, 1, seed=options.seed, noop_max=noop_max)
    rng = np.random.default_rng(options.seed)
    try:
        obs = games.reset()
        for number in range(options.episodes):
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


def _shape(spec: "EnvironmentSpec") -> str:
    return ", ".join(map(str, spec.observation_shape))
