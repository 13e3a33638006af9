"""Snapshots and checkpoints on a disk whose power is cut anywhere in a save."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zapex
import zapex.machine.disk
from tests.simulation.disk import Disk, Killed
from zapex.errors import CheckpointError
from zapex.replay import snapshots
from zapex.run import checkpoints

SCHEMA = zapex.Schema({"obs": zapex.Column((2,), np.float32), "action": zapex.Column((), np.int64)})


class Snapshots:
    """A replay that has 100 transitions more at each save."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._replay = zapex.PrioritizedReplay.load(folder)
        except CheckpointError:
            self._replay = zapex.PrioritizedReplay(1000, SCHEMA, seed=1)

    def save(self) -> None:
        number = len(self._replay) // 100
        self._replay.extend(
            obs=np.full((100, 2), number, np.float32), action=np.full(100, number),
            reward=np.zeros(100), next_obs=np.zeros((100, 2), np.float32),
            terminated=np.zeros(100, bool),
        )  # fmt: skip
        self._replay.save(self._folder)

    @staticmethod
    def found(folder: Path) -> int:
        """Which save is there; 0: none. Raises CheckpointError for one that is damaged."""
        if not (folder / snapshots.MANIFEST).exists():
            return 0
        replay = zapex.PrioritizedReplay.load(folder)
        batch = replay.sample(100)
        assert set(batch["action"].tolist()) <= set(range(len(replay) // 100))
        return len(replay) // 100


class Checkpoints:
    """A network whose parameters are the number of the save."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self) -> None:
        number = 1 + self.found(self._folder)
        tensors = {"parameters": np.full(500, number)}
        checkpoints.save(self._folder, checkpoints.step_name(number), tensors, {})

    @staticmethod
    def found(folder: Path) -> int:
        """Which save is there; 0: none. Raises CheckpointError for one that is damaged."""
        steps = checkpoints._numbered(folder)
        if not steps:
            return 0
        return int(checkpoints.load(steps[-1][1]).tensors["parameters"].max())


def saved_and_cut(kind: Any, folder: Path, seed: int) -> int:
    """Some saves, some of which fail or are killed; after each operation the power may be cut."""
    rng, cuts = random.Random(seed), 0
    on_disk = folder / "run"
    on_disk.mkdir()
    allowed = {0}

    def look() -> None:
        nonlocal cuts
        for _ in range(2):
            cuts += 1
            after = folder / f"cut{cuts}"
            a_disk.cut(after, rng)
            assert kind.found(after) in allowed, (seed, cuts, allowed)

    a_disk = Disk(on_disk, look)
    saver = kind(on_disk)
    for _ in range(4):
        allowed = {*allowed, kind.found(on_disk) + 1}
        stops = rng.choice([None, (rng.randint(1, 12), OSError), (rng.randint(1, 12), Killed)])
        try:
            with a_disk.process(stops):
                saver.save()
            allowed = {max(allowed)}
        except (CheckpointError, Killed):
            saver = kind(on_disk)
        look()
    return cuts


@pytest.mark.parametrize("kind", [Snapshots, Checkpoints])
@pytest.mark.parametrize("seed", range(12))
def test_a_save_is_whole_or_not_there(kind: Any, seed: int, tmp_path: Path) -> None:
    assert saved_and_cut(kind, tmp_path, seed) > 20


def nothing(*_: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "module"), [(Snapshots, snapshots), (Checkpoints, zapex.machine.disk)]
)
def test_a_directory_that_is_not_synced_is_found(
    kind: Any, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "sync_directory", nothing)
    found = 0
    for seed in range(12):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            saved_and_cut(kind, folder, seed)
        except (AssertionError, CheckpointError):
            found += 1
    assert found
