"""A run of several processes: started, interrupted, killed, and what it leaves behind.

The runs are real commands in processes of their own. What they have to do in time is what they
promise a user; the waits for them to get there are long, because the machine may be busy.
"""

import contextlib
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import audit
from tests.support.parts import VARIABLES, Part
from zapex.cli import main as cli
from zapex.cli.flags import read_settings as settings_of
from zapex.config.settings import Config
from zapex.envs import environments
from zapex.run import checkpoints, train
from zapex.run.run import Run

SMALL = ["--env", "CartPole-v1", "--preset", "smoke", "--max-frames", "0"]
OVER_S = 5.0  # what is promised; see _in_time
ROLES = {"actor 0", "replay", "learner", "evaluator"}


def _in_time() -> float:
    """Five seconds; more where this process gets only a share of a core."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    while (cpu_s := time.process_time() - began_cpu_s) < 0.1:
        pass
    return OVER_S * max(1.0, (time.perf_counter() - began_s) / cpu_s)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Part]]:
    with contextlib.ExitStack() as stack:

        def begin(*args: str, **how: Any) -> Part:
            command = Part(tmp_path, "train", *args, **how)
            stack.callback(command.close)
            return command

        yield begin


@dataclass(frozen=True)
class Story:
    """One run: an actor was killed, training went on, Ctrl-C came."""

    command: Part
    titles: set[str]
    steps_at_the_kill: float
    code: int
    seconds: float
    within_s: float


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    command = Part(tmp_path_factory.mktemp("story"), "train", *SMALL, "--eval-period-s", "1")
    try:
        command.wait_for(lambda: command.children().keys() >= ROLES, "titles")
        titles = set(command.children())
        command.wait_for(lambda: [x for x in command.metrics() if x["batches"]], "batches")
        victim = command.children()["actor 0"]
        steps = command.metrics()[-1]["steps"]
        victim.kill()
        command.wait_for(lambda: "actor 0 died" in command.output, "report of the death")
        more = steps + 2000
        command.wait_for(lambda: command.metrics()[-1]["steps"] > more, "more steps")
        command.wait_for(lambda: "evaluation: mean return" in command.output, "evaluation")
        within_s = _in_time()
        began_s = time.monotonic()
        code = command.ends(within_s, signal.SIGINT)
        seconds = time.monotonic() - began_s
        yield Story(command, titles, steps, code, seconds, within_s)
    finally:
        command.close()


@pytest.mark.scenario
@pytest.mark.timeout(400)
def test_ctrl_c_ends_everything_in_time_with_success(story: Story) -> None:
    assert story.code == 0
    assert story.seconds < story.within_s
    assert story.command.is_gone()
    assert set(os.listdir("/dev/shm")) <= story.command.shared_before


@pytest.mark.scenario
def test_titles_name_the_roles(story: Story) -> None:
    assert story.titles == ROLES


@pytest.mark.scenario
def test_a_killed_actor_is_reported_and_started_again_and_its_slots_come_back(
    story: Story,
) -> None:
    output = story.command.output
    assert re.search(r"actor 0 died after [\d.]+ s: killed by SIGKILL", output)
    assert "restarting actor 0 in" in output
    facts = json.loads((story.command.run / "result.json").read_text())
    assert facts["steps"] > story.steps_at_the_kill
    replay = json.loads((story.command.run / "snapshot.json").read_text())["replay"]
    # Two streams hold at most two slots each: what the dead one held is not among the granted.
    assert replay["slots_granted"] <= 4
    config = Config.from_dict(tomllib.loads((story.command.run / "config.toml").read_text()))
    states = ("free", "granted", "live", "quarantined")
    assert sum(replay[f"slots_{state}"] for state in states) == config.slots


@pytest.mark.scenario
def test_counters_never_step_back(story: Story) -> None:
    lines = story.command.metrics()
    for name in ("steps", "frames", "episodes", "batches", "samples", "inserted", "wall_s"):
        values = [line[name] for line in lines]
        assert values == sorted(values), name


@pytest.mark.scenario
def test_an_interrupted_run_leaves_a_checkpoint_a_result_and_a_curve(story: Story) -> None:
    run = story.command.run
    path = checkpoints.latest(run)
    assert path is not None
    assert checkpoints.load(path).state["totals"]["batches"] > 0
    facts = json.loads((run / "result.json").read_text())
    assert facts["reason"] == "stopped by SIGINT"
    assert 0 < facts["startup"]["first_step_s"] <= facts["startup"]["first_batch_s"]
    assert facts["startup"]["first_batch_s"] < facts["wall_s"]
    if importlib.util.find_spec("matplotlib"):
        assert (run / "learning_curve.png").stat().st_size > 0
    assert "zapex eval run --episodes 5 --video game.mp4" in story.command.output
    assert "Traceback" not in story.command.output
    for log in (run / "logs").iterdir():
        assert "Traceback" not in log.read_text(), log


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_while_the_children_start_ends_the_run_in_time_and_without_a_traceback(
    start: Callable[..., Part], number: signal.Signals
) -> None:
    command = start(*SMALL)
    command.wait_for(command.children, "children")
    within_s = _in_time()
    began_s = time.monotonic()
    assert command.ends(within_s, number) == 0
    assert time.monotonic() - began_s < within_s
    assert command.is_gone()
    assert set(os.listdir("/dev/shm")) <= command.shared_before
    assert "Traceback" not in command.output
    assert f"stopped by {number.name}" in command.output


@pytest.mark.parametrize(
    "there",
    [
        pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.scenario),
    ],
)  # fmt: skip
def test_children_die_with_a_parent_that_is_killed(start: Callable[..., Part], there: int) -> None:
    command = start(*SMALL)
    command.wait_for(lambda: len(command.children()) >= there, "children")
    command.ends(10, signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while not command.is_gone() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert command.is_gone()
    assert set(os.listdir("/dev/shm")) <= command.shared_before


IMPATIENT = """
import functools, sys
from zapex.cli import main as cli
from zapex.run import parent
from zapex.machine.supervisor import RestartPolicy
policy = RestartPolicy(first_s=0.05, most_short_starts=2)
parent.Supervisor = functools.partial(parent.Supervisor, policy=policy)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [False, True], ids=["lines", "picture"])
def test_a_role_that_cannot_stay_up_ends_the_run_with_its_own_traceback_and_exit_code_1(
    start: Callable[..., Part], terminal: bool
) -> None:
    args = ["--env", "tests.support.toy_env:fragile", "--preset", "smoke"]
    command = start(*args, main=IMPATIENT, terminal=terminal)
    assert command.popen.wait(100) == 1
    output = command.output
    if terminal:
        picture, _, output = output.rpartition("\x1b[?25h")  # where the cursor is given back
        assert "actor 0 died" in picture
    # Each death of the actor is told; the evaluator, which plays too, may have died by then.
    assert output.count("RuntimeError: the joystick broke off") >= 2
    assert 'raise RuntimeError("the joystick broke off")' in output, "the traceback is the child's"
    assert terminal or "restarting actor 0 in" in output
    reason = "actor 0 is not restarted: it died 2 times in a row"
    assert reason in json.loads((command.run / "result.json").read_text())["reason"]
    assert command.is_gone()


@pytest.mark.slow
def test_roles_that_exit_with_status_0_fail_the_run(start: Callable[..., Part]) -> None:
    args = ["--env", "tests.support.toy_env:quitting", "--preset", "smoke"]
    command = start(*args, main=IMPATIENT)
    assert command.popen.wait(100) == 1
    assert "exit status 0" in command.output
    reason = "actor 0 is not restarted: it died 2 times in a row"
    assert reason in json.loads((command.run / "result.json").read_text())["reason"]


def test_ctrl_c_before_anything_was_started_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(train, "train", interrupted)
    assert cli.main(["train", *SMALL]) == 130
    assert capsys.readouterr().err == "zapex: interrupted\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_role_is_told_within_three_seconds_and_keeps_what_it_holds(
    start: Callable[..., Part],
) -> None:
    command = start(*SMALL, "--eval-period-s", "0")
    command.wait_for(lambda: [x for x in command.metrics() if x["batches"]], "batches")
    settings = settings_of(str(command.run / "config.toml"))
    run = Run(Config().replace(**settings), environments.check("CartPole-v1"), command.run)
    host = audit.attach(command.popen.pid, run)
    assert host is not None
    slots, life = audit.ChunkAudit(host.store()), host.incarnation("actor 0")
    actor = command.children()["actor 0"]
    within_s = 3.0 / OVER_S * _in_time()
    actor.send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    told = "actor 0 is stopped by SIGSTOP; to continue it: kill -CONT"
    command.wait_for(lambda: told in command.output, "word of the stop")
    assert time.monotonic() - stopped_s < within_s
    held = slots.granted(0, life)
    assert held > 0
    time.sleep(1.0)
    assert (slots.granted(0, life), host.incarnation("actor 0")) == (held, life)
    steps = host.metrics("actor 0").snapshot(alive=False)["steps"]
    actor.send_signal(signal.SIGCONT)
    command.wait_for(lambda: "actor 0 is running again" in command.output, "word that it goes on")
    command.wait_for(
        lambda: host.metrics("actor 0").snapshot(alive=False)["steps"] > steps, "more steps"
    )
    assert "died" not in command.output


@pytest.mark.parametrize(
    ("limit", "value", "told"),
    [("NOFILE", 60, "open files: 60; needed: "), ("FSIZE", 1 << 16, "file size: 0.0 GiB; needed")],
)
def test_a_limit_is_told_before_any_process_starts(
    tmp_path: Path, limit: str, value: int, told: str
) -> None:
    number = getattr(resource, f"RLIMIT_{limit}")
    done = subprocess.run(
        [sys.executable, "-m", "zapex", "train", "--run-dir", "run", *SMALL],
        cwd=tmp_path, env={**os.environ, **VARIABLES}, timeout=100, check=False,
        capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(number, (value, value)),
    )  # fmt: skip
    assert done.returncode == 2
    assert told in done.stderr
    assert "to fix it: sudo prlimit --pid $$" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists(), "nothing has begun"
