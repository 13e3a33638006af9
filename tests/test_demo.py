"""`zapex demo kill`: what it refuses, what it counts, and a real one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fake_system import System, spec
from zapex import demo
from zapex.config import Config
from zapex.errors import ConfigError

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "there are two demos"),
        (["burn"], "there are two demos"),
        (["kill", "--every", "1"], "--every must be at least 4 s, got 1"),
        (["kill", "--minutes", "0"], "--minutes must be more than 0"),
        (["kill", "--run-dir", "."], "--run-dir must be new"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        demo.command(args)


def patient() -> tuple[System, demo.Patient]:
    config = Config().replace(
        actors=2, envs_per_actor=2, capacity=256, learning_starts=16, batch_size=8, hidden=8
    )
    one = System(config, spec(1))
    one.goes_on(batches=5, chunks=20)
    return one, demo.Patient(0, one.host)


def test_an_actors_wound_heals_step_by_step() -> None:
    one, somebody = patient()
    life = one.host.life("actor 0")
    wound = demo.Wound("actor 0", life, time.monotonic())
    assert somebody.examine(wound) == [], "nobody has noticed yet"
    del one.roles["actor 0"]
    one.host.set_life("actor 0", 0)
    assert somebody.examine(wound) == ["is seen dead"]
    one.step("replay")
    assert somebody.examine(wound) == ["slots are back"]
    one.start_actor(0)
    assert somebody.examine(wound) == ["is started"]
    assert not wound.healed
    one.goes_on(batches=1, chunks=1)
    assert somebody.examine(wound) == ["plays again"]
    assert wound.healed
    assert somebody.examine(wound) == []


@pytest.mark.parametrize(
    ("name", "last"), [("learner", "learns again"), ("replay", "answers again")]
)
def test_others_are_healed_when_they_work_again(name: str, last: str) -> None:
    one, somebody = patient()
    life = one.host.life(name)
    wound = demo.Wound(name, life, time.monotonic())
    one.host.set_life(name, life + 7)
    assert somebody.examine(wound) == ["is seen dead", "is started"]
    one.goes_on(batches=2, chunks=1)
    assert somebody.examine(wound) == [last]


def test_nobody_is_killed_who_is_no_child_of_the_run() -> None:
    one, somebody = patient()
    assert one.host.metrics("actor 0").pid == os.getpid()
    assert somebody.kill("actor 0") is None
    assert somebody.kill("replay") is None, "it has no life"


def test_the_table_fits_a_small_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _, somebody = patient()
    show = demo.Show(somebody, 8.0, plain=True)
    for name in demo.ORDER * 3:
        times = {"slots are back": 10.04, "is started": 0.2, demo._BACK[name.split()[0]]: 12.345}
        show.wounds.append(demo.Wound(name, 1, 0.0, dict(times)))
    somebody.audit.look()
    show.evaluated = 475.25
    show.tell("actor 0 is killed")
    show.close()
    told = capsys.readouterr().out
    assert "…" not in told
    assert max(map(len, told.splitlines())) <= 80
    assert "12.35 / 12.35" in told or "12.34 / 12.34" in told
    assert "0 lost, 0 torn, 0 twice" in told
    assert "last evaluation 475.25" in told


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_real_one_kills_everybody_and_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zapex.cli", "demo", "kill", "--minutes", "1", "--every", "6"]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")], cwd=ROOT, check=False, timeout=350,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    for told in ("actor 0 is killed", "slots are back after", "learns again", "answers again"):
        assert told in done.stdout
    assert "0 lost, 0 torn, 0 twice" in done.stdout
