"""A run's directory: one process trains in it, and nothing that it says steps back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zapex.config.settings import Config
from zapex.envs import environments
from zapex.errors import ConfigError
from zapex.run import checkpoints, directory
from zapex.run.run import Run


def run_in(run_dir: Path, *, resumed: bool = True) -> Run:
    flags = {"resume": str(run_dir)} if resumed else {}
    config = Config().replace(env="CartPole-v1", run_dir=str(run_dir), **flags)
    return Run(config, environments.check("CartPole-v1"), run_dir)


def store(run_dir: Path, steps: int, name: str = "", **state: object) -> Path:
    """A checkpoint with these counters."""
    totals = {"steps": steps, "frames": 4 * steps, "batches": steps // 8, "wall_s": 1.0}
    name = name or checkpoints.step_name(steps)
    return checkpoints.save(run_dir / "checkpoints", name, {}, {"totals": totals, **state})


def record(run_dir: Path, steps: int, batches: int) -> None:
    counts = {"steps": steps, "frames": 4 * steps, "batches": batches}
    line = {"kind": "metrics", "wall_s": 2.0, **counts}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line | {"learner/params_version": 7}) + "\n")


def test_resume_counts_from_the_checkpoint_if_metrics_are_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The metrics said 59,336 frames beside a checkpoint of 121,538 steps."""
    record(tmp_path, 100, batches=1)
    store(tmp_path, 900, params_version=40)
    (tmp_path / "config.toml").write_text("")
    with directory.opened(run_in(tmp_path)) as (run, base):
        assert run.steps_before == base["steps"] == 900
        assert (base["frames"], base["batches"], base["wall_s"]) == (3600, 112, 2.0)
        assert base["params_version"] == 40
    assert "resuming at 3,600 frames; the replay" in capsys.readouterr().out


def test_resume_reports_learning_lost_since_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path, 900)
    record(tmp_path, 1000, batches=120)
    (tmp_path / "config.toml").write_text("")
    with directory.opened(run_in(tmp_path)) as (_, base):
        assert (base["frames"], base["batches"], base["params_version"]) == (4000, 120, 7)
    said = capsys.readouterr().out
    assert "resuming at 4,000 frames" in said
    assert "step-000000000900" in said
    assert "8 batches" in said


def test_resume_after_an_orderly_end_reports_no_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Actors play on for a moment while the learner saves its last checkpoint."""
    store(tmp_path, 900)
    record(tmp_path, 905, batches=112)
    (tmp_path / "config.toml").write_text("")
    with directory.opened(run_in(tmp_path)):
        pass
    assert "lost" not in capsys.readouterr().out


def test_best_evaluation_is_read_from_its_checkpoint(tmp_path: Path) -> None:
    assert directory.evaluations(tmp_path) == []
    store(tmp_path, 5, checkpoints.BEST, params_version=3, returns=[1.0, 3.0], mean_return=2.0)
    (one,) = directory.evaluations(tmp_path)
    assert (one.mean, one.params_version, one.frames) == (2.0, 3, 20)
    store(tmp_path, 5, checkpoints.BEST, params_version=3, mean_return=2.0)  # of an older version
    assert directory.evaluations(tmp_path) == []


def test_invalid_counters_are_ignored(tmp_path: Path) -> None:
    totals = {"steps": "many", "frames": float("nan"), "batches": None}
    checkpoints.save(tmp_path / "checkpoints", checkpoints.step_name(1), {}, {"totals": totals})
    (tmp_path / "metrics.jsonl").write_text('{"kind": "metrics", "steps": []}\n')
    assert directory.counters(tmp_path) == {}


def test_directory_is_locked(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    holder = (
        "import sys\nfrom pathlib import Path\nfrom tests.run.test_directory import *\n"
        "with directory.opened(run_in(Path(sys.argv[1]))):\n    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", holder, str(tmp_path)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=f"is being trained by process {other.pid}: end"),
            directory.opened(run_in(tmp_path)),
        ):
            pass
        other.kill()  # the kernel frees the lock
    with directory.opened(run_in(tmp_path)):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_failed_write_keeps_the_old_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text("before")

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"), directory.opened(run_in(tmp_path)):
        pass
    assert (tmp_path / "config.toml").read_text() == "before"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o077, 0o700)])
def test_directory_follows_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    former = os.umask(umask)
    try:
        with directory.opened(run_in(tmp_path / "run", resumed=False)):
            pass
    finally:
        os.umask(former)
    assert (tmp_path / "run").stat().st_mode & 0o777 == mode
    assert (tmp_path / "run/config.toml").stat().st_mode & 0o777 == mode & 0o666
