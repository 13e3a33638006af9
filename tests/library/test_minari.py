"""Episodes in and out: `extend_from`, and `zapex export --minari`."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.stored_run import store_run
from zapex import Column, PrioritizedReplay, Schema
from zapex.cli.main import main
from zapex.errors import SchemaError

ROOT = Path(__file__).parents[2]


def episode(steps, first, *, terminated):
    """An episode whose observations are first, first + 1, ..."""
    ends = np.arange(steps) == steps - 1
    return SimpleNamespace(
        observations=np.arange(first, first + steps + 1, dtype=np.float32)[:, None],
        actions=np.arange(steps) % 2,
        rewards=np.arange(first, first + steps, dtype=np.float64),
        terminations=ends & terminated,
        truncations=ends & (not terminated),
    )


def stored(replay, count):
    batch = replay.sample(count, method="without_replacement")
    columns = (batch.obs, batch.next_obs, batch.reward, batch.discount, batch.action)
    table = np.column_stack([np.reshape(column, (count, -1)) for column in columns])
    return table[np.argsort(table[:, 0])]


@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_episodes_become_the_transitions_that_a_writer_makes(n_step):
    schema = Schema(
        {"obs": Column((1,), np.float32), "action": Column((), np.int64)}, n_step, gamma=0.9
    )
    ours, theirs = (PrioritizedReplay(500, schema, seed=1) for _ in range(2))
    episodes = [episode(t, 100 * t, terminated=t % 2 == 0) for t in (1, 2, 5, 9)]
    assert ours.extend_from(episodes) == 17
    with theirs.writer(1, autoreset="disabled") as writer:
        for one in episodes:
            writer.reset(one.observations[:1])
            for t in range(len(one.rewards)):
                writer.add(
                    action=one.actions[t : t + 1], reward=one.rewards[t : t + 1],
                    next_obs=one.observations[t + 1 : t + 2],
                    terminated=one.terminations[t : t + 1], truncated=one.truncations[t : t + 1],
                )  # fmt: skip
    assert np.allclose(stored(ours, 17), stored(theirs, 17))


def test_an_episode_with_parts_keeps_them():
    columns = {name: Column((2,), np.float32) for name in ("obs/a", "obs/b")}
    schema = Schema({**columns, "action": Column((), np.int64)}, n_step=2, gamma=0.9)
    replay = PrioritizedReplay(100, schema, seed=1)
    one = episode(4, 0, terminated=True)
    one.observations = {name: np.repeat(one.observations, 2, 1) + i for i, name in enumerate("ab")}
    assert replay.extend_from([one]) == 4
    batch = replay.sample(4)
    assert np.array_equal(batch.obs["b"], batch.obs["a"] + 1)


def test_a_dataset_of_another_schema_is_refused():
    schema = Schema({"obs": Column((2,), np.float32), "action": Column((), np.int64)}, 1, 0.9)
    with pytest.raises(SchemaError, match="obs"):
        PrioritizedReplay(100, schema).extend_from([episode(3, 0, terminated=True)])


@pytest.mark.slow  # minari is installed for `make test-slow`
def test_a_runs_episodes_are_exported_and_trained_from(tmp_path):
    pytest.importorskip("minari")
    store_run(tmp_path / "pole")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MINARI_DATASETS_PATH": str(tmp_path)}

    def run(*words):
        return subprocess.run(
            [sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True,
            text=True, timeout=200, check=True,
        ).stdout  # fmt: skip

    out = run(
        "-m", "zapex", "export", str(tmp_path / "pole"), "--minari", str(tmp_path),
        "--checkpoint", "latest", "--episodes", "20", "--epsilon", "1",
    )  # fmt: skip
    assert "zapex/pole-v0" in out
    assert "20 episodes" in out
    trained = run(str(ROOT / "examples/offline_minari.py"), "zapex/pole-v0", "--updates", "300")
    assert "of 20 episodes" in trained
    assert "loss" in trained


@pytest.mark.slow
def test_an_export_that_fails_leaves_no_dataset(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")

    def fail(name, *_, **__):
        (tmp_path / "out" / name).mkdir(parents=True)
        raise OSError("No space left on device")

    store_run(tmp_path / "pole")
    monkeypatch.setattr(minari, "create_dataset_from_buffers", fail)
    with pytest.raises(OSError, match="No space"):
        main(["export", str(tmp_path / "pole"), "--minari", str(tmp_path / "out")])
    assert not list((tmp_path / "out" / "zapex").iterdir())
