"""A run's state on disk: tensors and JSON in one file that is whole or not there.

    RUN/checkpoints/step-000000123456.safetensors    the three that were saved last
    RUN/checkpoints/best.safetensors
    RUN/checkpoints/.best.tmp-4711                   being written, or left by a process that died

The JSON and a checksum are in the metadata of the safetensors header. One file needs one rename,
which is atomic. So a kill at any moment leaves the old checkpoint or the new one, and a process
that reads "best" while another replaces it never gets the tensors of one with the state of the
other.

Each step checkpoint has a number, one more than the newest that was there when it was saved. This
is their order. The steps in a name are for people: a run that goes on may count them anew.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import ArrayLike, NDArray

from zapex.errors import CheckpointError
from zapex.machine.disk import replace_whole

FORMAT = "zapex checkpoint 1"
BEST = "best"
_SUFFIX = ".safetensors"
_KEPT = 3
_UNREADABLE = 1 << 62  # sorted last: a damaged checkpoint is told, and no older one taken instead
_STEP = re.compile(r"step-(\d{12,})")
_STEP_FILE = re.compile(_STEP.pattern + re.escape(_SUFFIX))
_TEMPORARY = re.compile(r"\..+\.tmp-(\d+)")


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
    """Write checkpoint `name`, a `step_name` or BEST, over one with that name. Returns its path.

    directory: RUN/checkpoints, created if missing; several processes may save there at once.
    tensors: arrays, or anything on the CPU that NumPy takes without a copy, such as detached torch
    tensors. state: JSON with NumPy's numbers, arrays and NaN allowed; its "schema" is what
    `check_schema` compares. Once this one is on the disk, older step checkpoints are removed.

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
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its state is not JSON ({error})") from error
    if not isinstance(state, dict) or not isinstance(state.get("schema", {}), dict):
        raise _damaged(path, "its state is not a table")
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
        raise CheckpointError(f"{checkpoint.path} was made for {theirs}; this run has {ours}")


def check_tensors(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """CheckpointError, naming both sides, unless it has a tensor of each of these shapes."""
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
    """A step checkpoint's number; 0 from versions that gave none, -1 if it is gone by now."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return max(0, int((file.metadata() or {}).get("number", 0)))
    except FileNotFoundError:
        return -1
    except (OSError, SafetensorError, ValueError):
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
    """The checksum of what a reader gets, not of the file, so that the file can hold it."""
    names = sorted(tensors)
    layout = [(name, tensors[name].dtype.str, tensors[name].shape) for name in names]
    numbered = [state, layout, *([number] if number else [])]  # there was none in earlier versions
    digest = hashlib.sha256(json.dumps(numbered).encode())
    for name in names:
        digest.update(tensors[name].data)
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> CheckpointError:
    before = [other for _, other in _numbered(path.parent) if other != path]
    mend = f"; remove it to resume from {before[-1].name}" if before else ""
    return CheckpointError(f"{path} is damaged: {why}{mend}")


def _remove_leftovers(directory: Path) -> None:
    for path in directory.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and not _is_writing(int(match[1])):
            path.unlink(missing_ok=True)


def _is_writing(pid: int) -> bool:
    """Whether another process may still write it; this one writes one checkpoint at a time."""
    return pid != os.getpid() and psutil.pid_exists(pid)
