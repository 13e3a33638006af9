"""`zapex demo kill`: what it refuses, what it counts, and a real demo."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.fake_system import System, spec
from zapex.cli import demo_kill, demos
from zapex.cli.main import main
from zapex.config.settings import Config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["burn"], "there is no demo 'burn'"),
        (["kill", "--every", "1"], "--every must be at least 4 s, got 1"),
        (["kill", "--minutes", "0"], "--minutes must be more than 0"),
        (["kill", "--run-dir", "."], "--run-dir must be new"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *args]) == 2
    assert message in capsys.readouterr().err


def killed_run() -> tuple[System, demo_kill.KilledRun]:
    config = Config().replace(
        actors=2, envs_per_actor=2, capacity=256, learning_starts=16, batch_size=8, hidden=8
    )
    one = System(config, spec(1))
    one.goes_on(batches=5, chunks=20)
    return one, demo_kill.KilledRun(0, one.host)


def test_a_killed_actor_comes_back_step_by_step() -> None:
    one, run = killed_run()
    incarnation = one.host.incarnation("actor 0")
    kill = demo_kill.Kill("actor 0", incarnation, time.monotonic())
    assert run.examine(kill) == [], "nobody has noticed yet"
    del one.roles["actor 0"]
    one.host.set_incarnation("actor 0", 0)
    assert run.examine(kill) == ["is seen dead"]
    one.step("replay")
    assert run.examine(kill) == ["slots are back"]
    one.start_actor(0)
    assert run.examine(kill) == ["is started"]
    assert not kill.recovered
    one.goes_on(batches=1, chunks=1)
    assert run.examine(kill) == ["plays again"]
    assert kill.recovered
    assert run.examine(kill) == []


@pytest.mark.parametrize(
    ("name", "last"), [("learner", "learns again"), ("replay", "answers again")]
)
def test_other_roles_have_recovered_when_they_work_again(name: str, last: str) -> None:
    one, run = killed_run()
    incarnation = one.host.incarnation(name)
    kill = demo_kill.Kill(name, incarnation, time.monotonic())
    one.host.set_incarnation(name, incarnation + 7)
    assert run.examine(kill) == ["is seen dead", "is started"]
    one.goes_on(batches=2, chunks=1)
    assert run.examine(kill) == [last]


def test_no_process_is_killed_that_is_no_child_of_the_run() -> None:
    one, run = killed_run()
    assert one.host.metrics("actor 0").pid == os.getpid()
    assert not run.kill("actor 0")
    assert not run.kill("replay"), "it has no incarnation"
    assert run.kills == []


def test_the_table_fits_a_small_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _, run = killed_run()
    for name in demo_kill.ORDER * 3:
        again = demo_kill.WORKS_AGAIN[name.split()[0]]
        times = {"slots are back": 10.04, "is started": 0.2, again: 12.345}
        run.kills.append(demo_kill.Kill(name, 1, 0.0, times))
    run.audit.look()
    Console(width=78, color_system=None).print(run.view())
    told = capsys.readouterr().out
    assert "…" not in told
    assert max(map(len, told.splitlines())) <= 80
    assert "12.35 / 12.35" in told or "12.34 / 12.34" in told
    assert "0 lost, 0 torn, 0 twice" in " ".join(told.split())


def test_the_outcome_is_the_reason_and_the_last_evaluation(tmp_path: Path) -> None:
    assert demos.outcome(tmp_path) == "the run has left no result"
    result = {"reason": "it was solved", "last": {"mean": 475.25, "returns": [475.0, 475.5]}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    told = demos.outcome(tmp_path)
    assert told.startswith("ended because it was solved, mean return 475.25 over 2 games;")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_real_one_kills_everybody_and_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zapex", "demo", "kill", "--minutes", "2", "--every", "6"]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")], cwd=ROOT, check=False, timeout=350,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    for told in ("actor 0 is killed", "slots are back after", "learns again", "answers again"):
        assert told in done.stdout
    assert "0 lost, 0 torn, 0 twice" in done.stdout
