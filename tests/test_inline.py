"""Whole systems in one thread: they learn, repeat bit for bit, save, go on and are evaluated."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zapex import checkpoint, cli, launch, recorders

SMALL = ["--env", "CartPole-v1", "--preset", "smoke"]
TINY_ALE = ["--env", "ALE/Breakout-v5", "--preset", "smoke", "--eval-period-s", "0"]


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # The command is this test, not the process that runs them all.
    began_ns = time.perf_counter_ns()
    monkeypatch.setattr(launch, "_command_started_ns", lambda: began_ns)


def train(*args: str) -> int:
    return cli.main(["train", "--inline", "--plain", *args])


def result(run: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((Path(run) / "result.json").read_text())
    return facts


def newest(run: str) -> checkpoint.Checkpoint:
    path = checkpoint.latest(Path(run))
    assert path is not None
    return checkpoint.load(path)


def test_cartpole_is_learned_in_a_bounded_number_of_steps() -> None:
    learner = ["--lr", "1e-3", "--batch-size", "64", "--target-period", "100"]
    actor = ["--envs-per-actor", "4", "--eval-period-s", "10", "--eval-episodes", "10"]
    limits = ["--max-frames", "30k", "--stop-at-return", "150"]
    args = ["--env", "CartPole-v1", "--preset", "laptop", "--seed", "1", "--run-dir", "run"]
    assert train(*args, *learner, *actor, *limits) == 0
    facts = result("run")
    assert facts["best"]["mean"] >= 150, f"best {facts['best']} after {facts['steps']} steps"
    assert facts["steps"] < 30_000
    assert facts["reason"] == "the mean return of an evaluation reached 150"


def test_the_same_seed_twice_gives_the_same_run_bit_for_bit_and_another_seed_does_not() -> None:
    for run, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        limits = ["--max-frames", "2500", "--eval-period-s", "2"]
        assert train(*SMALL, *limits, "--seed", seed, "--run-dir", run) == 0
    counters = ("steps", "frames", "episodes", "batches", "samples", "inserted")
    a, b, c = result("a"), result("b"), result("c")
    assert a["batches"] > 0
    assert [a[name] for name in counters] == [b[name] for name in counters]
    assert a["returns"] == b["returns"]
    played = [[(e["returns"], e["steps"]) for e in facts["evaluations"]] for facts in (a, b)]
    assert played[0] == played[1]
    assert played[0]
    first, second, other = newest("a"), newest("b"), newest("c")
    assert first.path.name == second.path.name
    assert first.tensors.keys() == second.tensors.keys()
    for name, tensor in first.tensors.items():
        assert tensor.tobytes() == second.tensors[name].tobytes(), name
    assert first.state["counters"] == second.state["counters"]
    assert any(not np.array_equal(t, other.tensors[name]) for name, t in first.tensors.items())
    assert a["returns"] != c["returns"]


def test_ale_runs_saves_goes_on_and_is_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*TINY_ALE, "--max-frames", "1600", "--run-dir", "run") == 0
    before, saved = result("run"), newest("run")
    assert before["batches"] > 0
    assert before["startup"]["first_step_s"] <= before["startup"]["first_batch_s"]
    assert saved.state["totals"]["frames"] == before["frames"] >= 1600

    capsys.readouterr()
    assert train("--resume", "run", "--max-frames", "3200") == 0
    said = capsys.readouterr().out
    assert f"going on at {before['frames']:,.0f} frames; the replay is refilled first" in said
    assert "learning starts after 256 transitions" in said
    after, resaved = result("run"), newest("run")
    for name in ("steps", "frames", "batches", "samples", "inserted", "wall_s"):
        assert after[name] > before[name], name
    lines = [x for x in recorders.read_metrics(Path("run")) if x["kind"] != "evaluation"]
    for name in ("steps", "frames", "episodes", "batches", "inserted", "wall_s"):
        values = [line[name] for line in lines]
        assert values == sorted(values), name
    assert resaved.state["counters"]["batches"] > saved.state["counters"]["batches"]
    assert resaved.state["params_version"] > saved.state["params_version"]
    assert {path.stem for path in checkpoint.listing(Path("run"))} == {
        saved.path.stem,
        resaved.path.stem,
    }

    # Random play, because an untrained policy may never serve the ball.
    args = ["--episodes", "2", "--epsilon", "1", "--json", "games.json"]
    assert cli.main(["eval", "run", *args]) == 0
    said = capsys.readouterr().out
    games = json.loads(Path("games.json").read_text())
    assert games["checkpoint"] == str(resaved.path)
    assert len(games["returns"]) == 2
    assert f"mean {games['mean']:g}" in said


def test_a_run_that_ends_before_it_played_a_game_says_why_it_has_no_curve(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(*TINY_ALE, "--max-frames", "8", "--run-dir", "run") == 0
    said = capsys.readouterr().out
    assert "no learning curve: run holds no returns yet: nothing to draw" in said
    assert "zapex train --resume run" in said


def test_without_matplotlib_the_run_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert train(*SMALL, "--max-frames", "300", "--run-dir", "run") == 0
    assert 'pip install "zapex[plot]"' in capsys.readouterr().out
