"""A run's state on disk: tensors and JSON in one file that is whole or not there.

    RUN/checkpoints/step-000000123456.safetensors    the last three
    RUN/checkpoints/best.safetensors
    RUN/checkpoints/.best.tmp-4711                   being written, or left by a process that died

The JSON and a checksum stand in the metadata of the safetensors header. One file needs one rename,
which is atomic, so a kill at any moment leaves the old checkpoint or the new one, and who reads
while another replaces "best" never gets the tensors of one with the state of the other.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zapex.errors import CheckpointError, ConfigError

FORMAT = "zapex checkpoint 1"
BEST = "best"
_SUFFIX = ".safetensors"
_STEP = re.compile(r"step-(\d{12,})")
_STEP_FILE = re.compile(_STEP.pattern + re.escape(_SUFFIX))
_TEMPORARY = re.compile(r"\..+\.tmp-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """What `load` found: arrays by name, and the JSON state with lists where tuples were."""

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
    keep_last: int = 3,
) -> Path:
    """Write checkpoint `name`, a `step_name` or BEST, in place of one with that name; its path.

    directory: RUN/checkpoints, made if need be; several processes may save there at once.
    tensors: arrays, or anything on the CPU that NumPy takes without a copy, such as detached torch
    tensors. state: JSON with NumPy's numbers, arrays and NaN allowed; its "schema" is what
    `check_schema` compares. Of the step checkpoints before this one, all but `keep_last` - 1 are
    removed, once this one is on the disk.

    Raises:
        CheckpointError: the disk refused; the checkpoints that were there are untouched.
    """
    from safetensors.numpy import save as serialise

    if keep_last < 1:
        raise ConfigError(f"keep_last must be at least 1 checkpoint, got {keep_last}")
    if name != BEST and not _STEP.fullmatch(name):
        raise ConfigError(f"a checkpoint's name is {BEST!r} or a step_name, got {name!r}")
    arrays = {key: _plain(value) for key, value in tensors.items()}
    text = json.dumps(state, default=_json_of_numpy)
    facts = {"format": FORMAT, "state": text, "sha256": _checksum(arrays, text)}
    content = serialise(arrays, facts)
    path = directory / (name + _SUFFIX)
    temporary = directory / f".{name}.tmp-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync(directory)
        older = [step for step in _in_order(directory) if _steps(step) < _steps(path)]
        for step in older[: max(0, len(older) - keep_last + 1)]:
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
        with safe_open(path, framework="np") as file:
            facts = file.metadata() or {}
            written = facts.get("format", "")
            if written != FORMAT:
                raise CheckpointError(
                    f"{path} is written as {written!r}, but this zapex reads {FORMAT!r}: use the "
                    "version that wrote it"
                    if written
                    else f"{path} is no checkpoint of zapex"
                )
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, str(error)) from error
    text = facts.get("state", "")
    if facts.get("sha256") != _checksum(tensors, text):
        raise _damaged(path, "its checksum does not match")
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its state is no JSON ({error})") from error
    if not isinstance(state, dict) or not isinstance(state.get("schema", {}), dict):
        raise _damaged(path, "its state is no table")
    return Checkpoint(path, tensors, state)


def check_schema(checkpoint: Checkpoint, asked: Mapping[str, Any]) -> None:
    """CheckpointError, naming both sides, unless `state["schema"]` has every fact of `asked`.

    asked: JSON facts under the names that the message shows, such as env, obs shape, actions.
    """
    made_for = checkpoint.state.get("schema", {})
    wanted = json.loads(json.dumps(asked, default=_json_of_numpy))
    wrong = [key for key in wanted if key not in made_for or made_for[key] != wanted[key]]
    if wrong:
        theirs = ", ".join(f"{key} {made_for.get(key, 'unknown')}" for key in wrong)
        ours = ", ".join(f"{key} {wanted[key]}" for key in wrong)
        raise CheckpointError(f"{checkpoint.path} was made for {theirs}; asked for is {ours}")


def listing(run_dir: Path) -> list[Path]:
    """The step checkpoints of a run, the oldest first."""
    return _in_order(run_dir / "checkpoints")


def latest(run_dir: Path) -> Path | None:
    """The step checkpoint with the most steps, if there is one yet."""
    return next(reversed(listing(run_dir)), None)


def best(run_dir: Path) -> Path | None:
    """The checkpoint that evaluated best, if there is one yet."""
    path = run_dir / "checkpoints" / (BEST + _SUFFIX)
    return path if path.exists() else None


def _in_order(directory: Path) -> list[Path]:
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = [name for name in names if _STEP_FILE.fullmatch(name)]
    return sorted((directory / name for name in steps), key=_steps)


def _steps(path: Path) -> int:
    match = _STEP.fullmatch(path.stem)
    return int(match[1]) if match else -1  # BEST has no steps before it, so it removes none


def _plain(value: ArrayLike) -> NDArray[Any]:
    # safetensors copies from the array's address on and looks at neither strides nor byte order.
    array = np.asarray(value)
    return array.astype(array.dtype.newbyteorder("="), order="C", copy=False)


def _json_of_numpy(value: object) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"a checkpoint's state is JSON, which has no {type(value).__name__}: {value!r}")


def _checksum(tensors: Mapping[str, NDArray[Any]], state: str) -> str:
    """Of what a reader gets, not of the file, so that it can stand in the file."""
    names = sorted(tensors)
    layout = [(name, tensors[name].dtype.str, tensors[name].shape) for name in names]
    digest = hashlib.sha256(json.dumps([state, layout]).encode())
    for name in names:
        digest.update(tensors[name].data)
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> CheckpointError:
    before = [other for other in _in_order(path.parent) if other != path]
    mend = f"; remove it to go on from {before[-1].name}" if before else ""
    return CheckpointError(f"{path} is damaged: {why}{mend}")


def _remove_leftovers(directory: Path) -> None:
    for path in directory.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and not _is_writing(int(match[1])):
            path.unlink(missing_ok=True)


def _is_writing(pid: int) -> bool:
    """Whether another process may still be at it; this one writes one checkpoint at a time."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _sync(directory: Path) -> None:
    """Put the rename itself on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
