"""Whole systems in one thread: they learn, repeat bit for bit, save, resume and are evaluated."""

import errno
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zapex.cli import main as cli
from zapex.run import checkpoints, collector
from zapex.watch import recorders

SMALL = ["--env", "CartPole-v1", "--preset", "smoke"]
TINY_ALE = ["--env", "ALE/Breakout-v5", "--preset", "smoke", "--eval-period-s", "0"]


@pytest.fixture(autouse=True)
def begins_now(in_an_empty_directory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is the test, not the process that runs them all."""
    began_ns = time.perf_counter_ns()
    monkeypatch.setattr(collector, "command_started_ns", lambda: began_ns)


def train(*args: str) -> int:
    return cli.main(["train", "--inline", "--plain", *args])


def result(run: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((Path(run) / "result.json").read_text())
    return facts


def newest(run: str) -> checkpoints.Checkpoint:
    path = checkpoints.latest(Path(run))
    assert path is not None
    return checkpoints.load(path)


@pytest.mark.slow
def test_cartpole_is_learned_in_a_bounded_number_of_steps() -> None:
    learner = ["--lr", "1e-3", "--batch-size", "64", "--target-period", "100"]
    actor = ["--envs-per-actor", "4", "--eval-period-s", "10", "--eval-episodes", "10"]
    limits = ["--max-frames", "30k", "--stop-at-return", "100"]
    args = ["--env", "CartPole-v1", "--preset", "laptop", "--seed", "1", "--run-dir", "run"]
    assert train(*args, *learner, *actor, *limits) == 0
    facts = result("run")
    # A random policy scores about 20: 100 leaves room for an unlucky seed.
    assert facts["best"]["mean"] >= 100, f"best {facts['best']} after {facts['steps']} steps"
    assert facts["steps"] < 30_000
    assert facts["reason"] == "the mean return of an evaluation reached 100"


def test_a_run_says_why_its_learner_waits(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--learning-starts", "3000", "--max-frames", "500", "--eval-period-s", "0"]
    assert train(*SMALL, *limits, "--run-dir", "run") == 0
    reasons = [x for x in capsys.readouterr().out.splitlines() if "of the time" in x]
    assert any("learner" in x and "min_size_to_sample=3000" in x for x in reasons), reasons


def test_frame_limit_is_exceeded_by_less_than_a_step_of_all_streams() -> None:
    assert train(*SMALL, "--max-frames", "301", "--eval-period-s", "0", "--run-dir", "run") == 0
    assert 301 <= result("run")["frames"] < 301 + 2
    assert train("--resume", "run", "--more-frames", "200") == 0
    assert 501 <= result("run")["frames"] < 501 + 2 + 2


def test_time_before_the_first_step_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    an_hour_ago_ns = time.perf_counter_ns() - 3600 * 10**9
    monkeypatch.setattr(collector, "command_started_ns", lambda: an_hour_ago_ns)
    limits = ["--max-minutes", "0.05", "--max-frames", "0", "--eval-period-s", "0"]
    assert train(*SMALL, *limits, "--run-dir", "run") == 0
    facts = result("run")
    assert facts["reason"] == "0.05 minutes are over"
    assert facts["frames"] > 100


def test_printed_resume_command_continues_after_a_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(*SMALL, "--max-frames", "300", "--eval-period-s", "0", "--run-dir", "run") == 0
    before = result("run")["frames"]
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "train --resume" in x]
    command = shlex.split(line[line.index("train") :])
    assert train("--resume", "run") == 2
    assert "--more-frames" in capsys.readouterr().err
    assert train(*command[1:]) == 0
    assert result("run")["frames"] >= 2 * before - 2


def test_the_same_seed_twice_gives_the_same_run_bit_for_bit_and_another_seed_does_not() -> None:
    for run, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        limits = ["--max-frames", "1200", "--eval-period-s", "1"]
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
    assert f"resuming at {before['frames']:,.0f} frames; the replay is refilled first" in said
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
    assert {path.stem for path in checkpoints.listing(Path("run"))} == {
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
    assert "no learning curve: run" in said
    assert "zapex train --resume run" in said


def test_without_matplotlib_the_run_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert train(*SMALL, "--max-frames", "300", "--run-dir", "run") == 0
    assert "pip install matplotlib" in capsys.readouterr().out


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Checkpoints and metrics cannot be written from now on; call it to make room."""
    with monkeypatch.context() as patched:

        def refuse(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patched.setattr(checkpoints, "replace_whole", refuse)
        patched.setattr(recorders, "append_whole", refuse)
        yield patched.undo


@pytest.mark.slow
def test_on_a_full_disk_training_goes_on_in_memory_and_the_run_resumes_once_there_is_room(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    limits = ["--eval-period-s", "1", "--checkpoint-minutes", "0.02"]
    assert train(*SMALL, *limits, "--max-frames", "600", "--run-dir", "run") == 0
    before = newest("run")
    capsys.readouterr()

    make_room = request.getfixturevalue("full_disk")
    assert train("--resume", "run", "--max-frames", "1500") == 1
    said = capsys.readouterr().out
    why = "cannot be written: No space left on device; free space on the disk of run"
    assert said.count(f"checkpoints {why}") == 1  # not at each attempt
    assert said.count(f"JsonLines failed, the run continues: {why.partition(': ')[2]}") == 1
    assert "not saved  what was learned last: No space left on device" in said
    assert result("run")["batches"] > before.state["totals"]["batches"]
    assert newest("run").state == before.state

    make_room()
    assert train("--resume", "run", "--max-frames", "2500") == 0
    assert newest("run").state["totals"]["frames"] >= 2500
    assert [line["kind"] for line in recorders.read_metrics(Path("run"))][-1] == "final"


def test_a_learner_that_diverges_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*SMALL, "--lr", "1e9", "--max-frames", "4000", "--run-dir", "run") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("zapex: ")
    assert "lower lr" in line.lower().replace("--", "")


@pytest.mark.slow
def test_frames_kept_on_the_learners_device_change_no_bit_of_a_run() -> None:
    few = [*TINY_ALE, "--max-frames", "1600"]
    for run, *flags in (["host"], ["device", "--replay-device", "cpu-tensor"]):
        assert train(*few, *flags, "--run-dir", run) == 0
    host, device = newest("host"), newest("device")
    assert host.state["counters"]["batches"] > 0
    for name, tensor in host.tensors.items():
        assert tensor.tobytes() == device.tensors[name].tobytes(), name


@pytest.mark.parametrize(
    ("env", "flags", "told"),
    [
        (SMALL, ["cpu-tensor"], "observations that are images"),
        (TINY_ALE, ["cuda", "--device", "cpu"], "needs a learner on cuda, but it computes on cpu"),
    ],
)
def test_a_replay_device_that_cannot_be_is_refused(
    env: list[str], flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*env, "--replay-device", *flags, "--run-dir", "run") == 2
    assert told in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [[], ["--replay-device", "cuda"], ["--gather-threads", "0"]])
def test_a_learner_on_a_gpu_trains_saves_and_goes_on(flags: list[str]) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    few = [*TINY_ALE, "--device", "cuda", "--prefetch", "4", *flags]
    assert train(*few, "--max-frames", "1600", "--run-dir", "run") == 0
    first = newest("run").state["counters"]["batches"]
    assert first > 0
    assert train("--resume", "run", "--max-frames", "3200") == 0
    assert newest("run").state["counters"]["batches"] > first
