"""What a run keeps of its learner, on a disk that refuses."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zapex.agent import networks
from zapex.agent.learning import DQN
from zapex.config.settings import LearnerConfig
from zapex.envs.environments import EnvironmentSpec
from zapex.errors import CheckpointError
from zapex.run import checkpoints
from zapex.run.checkpoints import BestNetwork, RunCheckpoints

SPEC = EnvironmentSpec("Toy-v0", {}, (3,), "float32", 1, 2, 1, False, "a toy")


class Disk:
    """A disk that is full while `full`; `codes` is what a run was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.codes = False, list[int]()
        fsync = os.fsync

        def refuse(descriptor: int) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", refuse)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def network(seed: int = 0) -> networks.Nature:
    return networks.build((3,), np.float32, 2, hidden=4, device="cpu", seed=seed)


def test_a_checkpoint_that_the_disk_refuses_is_tried_again_before_the_next_is_due(
    tmp_path: Path, disk: Disk
) -> None:
    now_s = 0.0
    saves = RunCheckpoints(
        tmp_path, SPEC, 1, lambda: now_s, 600.0, lambda: {"steps": 1.0}, disk.codes.append
    )
    dqn = DQN(network())
    now_s, disk.full = 600.0, True
    assert saves.due()
    saves.save(dqn, 1)
    assert disk.codes == [errno.ENOSPC]
    assert not saves.due()
    now_s += 30.0
    assert saves.due()
    disk.full = False
    saves.save(dqn, 2)
    assert disk.codes == [errno.ENOSPC, 0]
    assert checkpoints.latest(tmp_path) is not None
    now_s += 599.0
    assert not saves.due()


def test_the_best_network_that_the_disk_refused_is_written_with_a_later_evaluation(
    tmp_path: Path, disk: Disk
) -> None:
    played = network()
    best = BestNetwork(tmp_path, SPEC, played, disk.codes.append)
    disk.full = True
    best.offer([7.0, 9.0], 3, {"steps": 1.0})
    wanted = played.flat.clone().numpy()
    played.flat.zero_()
    best.offer([1.0], 4, {"steps": 2.0})  # worse: the one before is still to be written
    assert checkpoints.best(tmp_path) is None
    disk.full = False
    best.offer([2.0], 5, {"steps": 3.0})
    path = checkpoints.best(tmp_path)
    assert path is not None
    found = checkpoints.load(path)
    assert (found.state["mean_return"], found.state["params_version"]) == (8.0, 3)
    kept = np.concatenate([found.tensors[f"online.{n}"].ravel() for n in played.shapes])
    np.testing.assert_array_equal(kept, wanted)
    assert disk.codes == [errno.ENOSPC, errno.ENOSPC, 0]


@pytest.mark.parametrize("lost", ["online.value.bias", "optimiser.mean.value.bias"])
def test_a_checkpoint_without_a_tensor_is_one_clear_error(tmp_path: Path, lost: str) -> None:
    dqn = DQN(network())
    tensors: dict[str, Any] = dqn.state_dict_tensors()
    del tensors[lost]
    state = {"counters": dqn.counters(), "params_version": 1, "schema": {
        "env_id": "Toy-v0", "observation_shape": [3], "observation_dtype": "float32",
        "num_actions": 2,
    }}  # fmt: skip
    checkpoints.save(tmp_path / "checkpoints", checkpoints.step_name(1), tensors, state)
    saves = RunCheckpoints(tmp_path, SPEC, 1, lambda: 0.0, 0.0, dict, str)
    with pytest.raises(CheckpointError, match=f"step-0+1.*: {lost} is missing"):
        saves.restore(dqn)


def test_a_policy_without_a_tensor_or_of_another_type_is_one_clear_error(tmp_path: Path) -> None:
    config = LearnerConfig(hidden=4, device="cpu")
    tensors = DQN(network()).state_dict_tensors()
    for change, says in (
        ({"online.value.bias": None}, "value.bias is missing there"),
        ({"online.value.bias": np.zeros(1)}, r"value.bias is float64 \(1,\) there"),
    ):
        kept = {name: t for name, t in (tensors | change).items() if t is not None}
        path = checkpoints.save(tmp_path / "checkpoints", checkpoints.step_name(1), kept, {})
        with pytest.raises(CheckpointError, match=says):
            checkpoints.load_network(checkpoints.load(path), SPEC, config)
