"""What a run resumes from, and its best network: tensors and JSON in files that are never half.

    RUN/checkpoints/step-000000123456.safetensors    the three newest
    RUN/checkpoints/best.safetensors
    RUN/checkpoints/.best.tmp-4711                   being written, or left by a process that died

The JSON and a checksum are in the metadata of the safetensors header. One file needs one rename,
which is atomic. So a kill at any moment leaves the old checkpoint or the new one, and a process
that reads "best" while another replaces it never gets the tensors of one with the state of the
other.

Each step checkpoint has a number, one more than the newest that was there when it was saved. This
is their order. The steps in a name are for people: a resumed run may count them again.
"""

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zapex.config.settings import NETWORK_FIELDS, LearnerConfig
from zapex.envs.environments import EnvironmentSpec
from zapex.errors import CheckpointError, ConfigError
from zapex.machine.disk import replace_whole
from zapex.machine.reading import open_regular, parse_json, typed
from zapex.run.network import network_of

if TYPE_CHECKING:
    from zapex.agent.learning import DQN
    from zapex.agent.networks import Network

FORMAT = "zapex checkpoint 1"
BEST = "best"
_SUFFIX = ".safetensors"
_KEPT = 3
_UNREADABLE = 1 << 62  # the last: a damaged checkpoint is an error, an older one no replacement
_STEP = re.compile(r"step-(\d{12,})")
_STEP_FILE = re.compile(_STEP.pattern + re.escape(_SUFFIX))
_RETRY_S = 30.0  # after the disk has refused
_TEMPORARY = re.compile(r"\..+\.tmp-(\d+)")

Report = Callable[[int], object]
"""Called after each attempt to save: 0, or the error number of the disk."""


@dataclass(frozen=True)
class Checkpoint:
    """The result of `load`: arrays by name, and the JSON state with lists in place of tuples."""

    path: Path
    tensors: dict[str, NDArray[Any]]
    state: dict[str, Any]


def step_name(steps: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"step-{steps:012d}"


def save(
    directory: Path,
    name: str,
    tensors: Mapping[str, ArrayLike],
    state: Mapping[str, Any],
) -> Path:
    """Write a checkpoint, replacing one with the same name, and then remove the oldest ones.

    Args:
        directory: RUN/checkpoints, created if missing; several processes may save there at once.
        name: a `step_name` or BEST.
        tensors: arrays, or anything on the CPU that NumPy takes without a copy, such as detached
            torch tensors.
        state: JSON, with NumPy's numbers, arrays and NaN allowed; `check_schema` compares its
            "schema".

    Returns:
        The file.

    Raises:
        CheckpointError: the disk refused; existing checkpoints are unchanged.
    """
    from safetensors.numpy import save as serialise

    assert name == BEST or _STEP.fullmatch(name), f"{name!r} is neither {BEST!r} nor a step_name"
    arrays = {key: _plain(value) for key, value in tensors.items()}
    text = json.dumps(state, default=_json_of_numpy)
    path = directory / (name + _SUFFIX)
    temporary = directory / f".{name}.tmp-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory)
        older = {step: n for n, step in _numbered(directory) if step != path}
        number = str(1 + max((n for n in older.values() if n != _UNREADABLE), default=0))
        facts = {"format": FORMAT, "state": text, "sha256": _checksum(arrays, text, number)}
        replace_whole(path, [serialise(arrays, facts | {"number": number})], temporary)
        for step in list(older)[: 1 - _KEPT] if name != BEST else ():
            step.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot save {path}: {error.strerror or error}") from error
    return path


def load(path: Path) -> Checkpoint:
    """Read one checkpoint and verify its checksum.

    Raises:
        CheckpointError: missing, unreadable, damaged, or of a format that this version cannot read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()
        with safe_open(path, framework="np") as file:
            facts = file.metadata() or {}
            written = facts.get("format", "")
            if written != FORMAT:
                raise CheckpointError(
                    f"{path} is written as {written!r}, but this zapex reads {FORMAT!r}: use the "
                    "version that wrote it"
                    if written
                    else f"{path} is not a checkpoint of zapex"
                )
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, str(error)) from error
    text = facts.get("state", "")
    if facts.get("sha256") != _checksum(tensors, text, facts.get("number", "")):
        raise _damaged(path, "its checksum does not match")
    try:
        state = typed(dict[str, Any], parse_json(text, "its state"), "its state")
        for name, kind in _FACTS.items():
            if name in state:
                typed(kind, state[name], f"{name} in its state")
    except ConfigError as error:
        raise _damaged(path, str(error)) from error
    return Checkpoint(path, tensors, state)


_FACTS: dict[str, Any] = {
    "schema": dict[str, Any],
    "policy": dict[str, Any],
    "counters": dict[str, int],
    "totals": dict[str, Any],
    "params_version": int,
    "mean_return": float,
    "returns": tuple[float, ...],
}
"""The types of the facts of a state; a version may store more of them, or fewer."""


def check_schema(checkpoint: Checkpoint, asked: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless `state["schema"]` has every fact of `asked`.

    asked: JSON facts under the names that the message shows, such as env, obs shape, actions.
    """
    made_for = checkpoint.state.get("schema", {})
    wanted = json.loads(json.dumps(asked, default=_json_of_numpy))
    wrong = [key for key in wanted if key not in made_for or made_for[key] != wanted[key]]
    if wrong:
        theirs = ", ".join(f"{key} {made_for.get(key, 'unknown')}" for key in wrong)
        ours = ", ".join(f"{key} {wanted[key]}" for key in wrong)
        raise CheckpointError(f"{checkpoint.path} was made for {theirs}; this run has {ours}")


def check_tensors(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless it has a tensor of each of these shapes."""
    for name, shape in shapes.items():
        array = checkpoint.tensors.get(name)
        if array is None or array.shape != shape:
            there = "missing" if array is None else f"{array.shape}"
            raise CheckpointError(
                f"{checkpoint.path} is of another network: {name} is {there} there, and this run "
                f"needs {shape}; resume from another checkpoint, or start a new run"
            )


def listing(run_dir: Path) -> list[Path]:
    """The step checkpoints of a run, the oldest first."""
    return [path for _, path in _numbered(run_dir / "checkpoints")]


def latest(run_dir: Path) -> Path | None:
    """The step checkpoint that was saved last, if there is one."""
    return next(reversed(listing(run_dir)), None)


def best(run_dir: Path) -> Path | None:
    """The checkpoint with the best evaluation, if there is one."""
    path = run_dir / "checkpoints" / (BEST + _SUFFIX)
    return path if path.exists() else None


def _numbered(directory: Path) -> list[tuple[int, Path]]:
    """Step checkpoints with their numbers, the oldest first."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = {directory / m[0]: int(m[1]) for m in map(_STEP_FILE.fullmatch, names) if m}
    found = [(_number(path), path) for path in sorted(steps, key=steps.__getitem__)]
    return sorted((pair for pair in found if pair[0] >= 0), key=itemgetter(0))


def _number(path: Path) -> int:
    """A step checkpoint's number; -1 if it no longer exists."""
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()
        with safe_open(path, framework="np") as file:
            return max(0, int(file.metadata()["number"]))
    except FileNotFoundError:
        return -1
    except (OSError, SafetensorError, ValueError, TypeError, KeyError):
        return _UNREADABLE


def _plain(value: ArrayLike) -> NDArray[Any]:
    # safetensors copies from the array's address and ignores strides and byte order.
    array = np.asarray(value)
    return array.astype(array.dtype.newbyteorder("="), order="C", copy=False)


def _json_of_numpy(value: object) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"a checkpoint's state is JSON, which has no {type(value).__name__}: {value!r}")


def _checksum(tensors: Mapping[str, NDArray[Any]], state: str, number: str) -> str:
    """A checksum of the content, not of the file, so that the file can hold it."""
    names = sorted(tensors)
    layout = [(name, tensors[name].dtype.str, tensors[name].shape) for name in names]
    digest = hashlib.sha256(json.dumps([state, layout, number]).encode())
    for name in names:
        digest.update(tensors[name].data)
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> CheckpointError:
    before = [other for _, other in _numbered(path.parent) if other != path]
    hint = f"; remove it to resume from {before[-1].name}" if before else ""
    return CheckpointError(f"{path} is damaged: {why}{hint}")


def _remove_leftovers(directory: Path) -> None:
    for path in directory.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and not _is_writing(int(match[1])):
            path.unlink(missing_ok=True)


def _is_writing(pid: int) -> bool:
    """Whether another process may still be writing it; this one writes one file at a time."""
    return pid != os.getpid() and Path(f"/proc/{pid}").exists()


def find(run_dir: Path, name: str) -> Path:
    """Find a checkpoint of a run.

    Args:
        run_dir: of the run.
        name: "best" (before any evaluation: the latest), "latest", a step checkpoint's name, or a
            path.

    Raises:
        CheckpointError: there is none.
    """
    newest = latest(run_dir)
    steps = {path.stem: path for path in listing(run_dir)}
    named = {BEST: best(run_dir) or newest, "latest": newest, **steps}
    path = named.get(name) or Path(name)
    if not path.is_file():
        known = ", ".join(name for name, path in named.items() if path) or "none"
        raise CheckpointError(f"{run_dir} has no checkpoint {name!r}; there is {known}")
    return path


def made_with(found: Checkpoint) -> tuple[EnvironmentSpec, LearnerConfig]:
    """The environment and the network of a checkpoint. Raises CheckpointError if unusable."""
    try:
        facts = typed(dict[str, dict[str, Any]], found.state["policy"], "policy")
        spec = typed(EnvironmentSpec, facts["environment"], "environment")
        np.dtype(spec.observation_dtype)
        sizes = (*spec.observation_shape, *spec.played_shape, spec.stack, spec.num_actions)
        if min(sizes) < 1:
            raise ValueError(f"sizes must be at least 1, got {sizes}")
        return spec, LearnerConfig(**facts["network"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{found.path} does not say what its network is made from: {error}"
        ) from error


def load_network(found: Checkpoint, spec: EnvironmentSpec, config: LearnerConfig) -> "Network":
    """The network with the average parameters of a checkpoint, or the newest if it has none.

    Raises:
        CheckpointError: it is of another network than `spec` and `config` make.
    """
    path, tensors = found.path, found.tensors
    network = network_of(spec, config, config.device, config.precision)
    part = "average" if any(name.startswith("average.") for name in tensors) else "online"
    for name, shape in network.shapes.items():
        array = tensors.get(f"{part}.{name}")
        if array is None or array.shape != shape or array.dtype != np.float32:
            there = "missing" if array is None else f"{array.dtype} {array.shape}"
            raise CheckpointError(
                f"{path} is of another network: {name} is {there} there and float32 {shape} for "
                f"{spec.env_id}; use the environment that the run was trained on"
            )
    network.load_flat(
        np.concatenate([tensors[f"{part}.{name}"].ravel() for name in network.shapes])
    )
    return network


def _facts(spec: EnvironmentSpec) -> dict[str, Any]:
    """What a resumed run must agree with: a network fits only observations of the same shape."""
    return {
        "env_id": spec.env_id,
        "observation_shape": list(spec.observation_shape),
        "observation_dtype": spec.observation_dtype,
        "num_actions": spec.num_actions,
    }


def _made_with(spec: EnvironmentSpec, config: LearnerConfig) -> dict[str, Any]:
    """What another program needs to make the network: `zapex.load_policy` reads it."""
    return {
        "environment": asdict(spec),
        "network": {name: getattr(config, name) for name in NETWORK_FIELDS},
    }


def _saved(
    run_dir: Path, name: str, tensors: Mapping[str, Any], state: Mapping[str, Any], report: Report
) -> bool:
    """Write a checkpoint. Returns whether it was written: a full disk must not end a run."""
    try:
        save(run_dir / "checkpoints", name, tensors, state)
    except CheckpointError as error:
        report(getattr(error.__cause__, "errno", None) or errno.EIO)
        return False
    report(0)
    return True


class RunCheckpoints:
    """Writes a checkpoint when `period_s` has passed (0: only on request); reads the newest."""

    def __init__(
        self,
        run_dir: Path,
        spec: EnvironmentSpec,
        seed: int,
        clock_s: Callable[[], float],
        period_s: float,
        totals: Callable[[], dict[str, float]],
        report: Report,
        config: LearnerConfig | None = None,
    ) -> None:
        self._run_dir, self._spec, self._seed, self._report = run_dir, spec, seed, report
        self._policy = _made_with(spec, config or LearnerConfig())
        self._clock_s, self._period_s, self._totals = clock_s, period_s, totals
        self._saved_s, self._wait_s = clock_s(), period_s
        self.version = 0

    def due(self) -> bool:
        """Whether it is time to save."""
        return self._period_s > 0 and self._clock_s() - self._saved_s >= self._wait_s

    def save(self, dqn: "DQN", version: int) -> None:
        """Write networks, optimiser and counters; if the disk refuses, try again soon."""
        from zapex.agent.learning import memory_given_back

        totals = self._totals()
        state = {
            "schema": _facts(self._spec),
            "policy": self._policy,
            "counters": dqn.counters(),
            "params_version": version,
            "totals": totals,
            # The learner draws nothing. Actors and replay seed each incarnation from these two.
            "random": {"seed": self._seed, "steps_before": int(totals.get("steps", 0))},
        }
        tensors = {name: t.cpu().numpy() for name, t in dqn.state_dict_tensors().items()}
        name = step_name(int(totals.get("steps", 0)))
        with memory_given_back():
            saved = _saved(self._run_dir, name, tensors, state, self._report)
        self._saved_s = self._clock_s()
        self._wait_s = self._period_s if saved else min(self._period_s, _RETRY_S)

    def restore(self, dqn: "DQN") -> None:
        """Load the newest checkpoint of the run, if there is one.

        Raises CheckpointError for one that is damaged or was made for another environment.
        """
        path = latest(self._run_dir)
        if path is None:
            return
        loaded = load(path)
        check_schema(loaded, _facts(self._spec))
        try:
            dqn.load_state(loaded.tensors, loaded.state["counters"])
            self.version = int(loaded.state["params_version"])
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path} lacks what a learner resumes from: {error!r}") from error


class BestNetwork:
    """Keeps the network of the best evaluation of the run under the name "best".

    If the disk refuses, it is written with a later evaluation.
    """

    def __init__(
        self,
        run_dir: Path,
        spec: EnvironmentSpec,
        network: "Network",
        report: Report,
        config: LearnerConfig | None = None,
    ) -> None:
        self._policy = _made_with(spec, config or LearnerConfig())
        self._run_dir, self._spec, self._network = run_dir, spec, network
        self._report = report
        self._unwritten: tuple[dict[str, Any], dict[str, Any]] | None = None
        path = best(run_dir)
        mean = load(path).state.get("mean_return") if path else None
        self._mean = mean if isinstance(mean, (int, float)) and math.isfinite(mean) else -math.inf

    def offer(self, returns: Sequence[float], version: int, totals: dict[str, float]) -> None:
        """Keep the present network if its mean return is the best so far, and finite."""
        mean = float(np.mean(returns))
        if math.isfinite(mean) and mean > self._mean:
            self._mean = mean
            self._unwritten = self._best(mean, returns, version, totals)
        if self._unwritten and _saved(self._run_dir, BEST, *self._unwritten, self._report):
            self._unwritten = None

    def _best(
        self, mean: float, returns: Sequence[float], version: int, totals: dict[str, float]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The present network, copied, and its state."""
        state = {
            "schema": _facts(self._spec),
            "policy": self._policy,
            "params_version": version,
            "totals": totals,
            "mean_return": mean,
            "returns": list(returns),
        }
        views = self._network.views
        return {f"online.{name}": view.numpy().copy() for name, view in views.items()}, state
