"""Every role dies in every way: the run recovers, or ends with exit code 1."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WAYS = {
    "exit 0": "sys.exit(0)",
    "exit 1": "sys.exit(1)",
    "os._exit": "os._exit(0)",
    "signal": "os.kill(os.getpid(), 9)",
    "exception": "raise ValueError('a fault')",
    "memory limit": "resource.setrlimit(resource.RLIMIT_AS, (1, 1)); bytearray(1 << 32)",
}
# Python imports this module in every process. The role of the name DIES dies in its fifth duty
# cycle that does anything: once, or in each incarnation.
SITECUSTOMIZE = """
import json, os, pathlib, resource, sys

if "zapex.run.child" in sys.orig_argv and json.loads(sys.orig_argv[-1])["name"] == {name!r}:
    from zapex.machine import child

    def run_until_stopped(role, wait, stop, real=child.run_until_stopped):
        do_work, done = role.do_work, 0

        def mortal():
            nonlocal done
            work = do_work()
            done += work > 0
            if done == 5 and ({always} or not os.path.exists({mark!r})):
                pathlib.Path({mark!r}).touch()
                {how}
            return work

        role.do_work = mortal
        real(role, wait, stop)

    child.run_until_stopped = run_until_stopped
"""
RUN = ["CartPole-v1", "--preset", "smoke", "--plain", "--eval-period-s", "0"]
LIMIT = ["--max-frames", "3000", "--samples-per-insert", "1"]  # actors need the learner


def zapex(directory: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "zapex", *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{directory}:{ROOT}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def dies(directory: Path, name: str, how: str, always: bool = False) -> Path:
    """The role of this name dies in runs of this directory. Returns the mark that it has died."""
    mark = directory / "died"
    text = SITECUSTOMIZE.format(name=name, how=WAYS[how], always=always, mark=str(mark))
    (directory / "sitecustomize.py").write_text(text)
    return mark


def result(run_dir: Path) -> dict[str, object]:
    facts: dict[str, object] = json.loads((run_dir / "result.json").read_text())
    return facts


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", ["actor 0", "inference", "replay", "learner", "evaluator"])
def test_run_recovers_from_the_death_of_a_role(tmp_path: Path, name: str, how: str) -> None:
    mark = dies(tmp_path, name, how)
    words = ["train", *RUN, *LIMIT, "--run-dir", "run"]
    if name == "inference":
        words += ["--inference", "central"]
    if name == "evaluator":  # only an evaluation ends this run
        words += ["--eval-period-s", "1", "--max-frames", "0", "--stop-at-return", "1"]
    with zapex(tmp_path, *words) as run:
        said, _ = run.communicate(timeout=500)
    assert mark.exists(), said
    assert run.returncode == 0, said
    assert f"{name} died" in said
    reason = "mean return" if name == "evaluator" else "3,000 frames"
    assert reason in str(result(tmp_path / "run")["reason"]), said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", WAYS)
def test_run_recovers_from_the_death_of_a_relay(tmp_path: Path, how: str) -> None:
    mark, url = dies(tmp_path, "relay", how), f"ipc://{tmp_path}/socket"
    learns = ["replay", "--with-learner", "--actors", "1", "--listen", url, *RUN, *LIMIT]
    plays = ["actor", "--actors", "1", "--replay", url, *RUN]
    with (
        zapex(tmp_path, *learns, "--run-dir", "run") as replay,
        zapex(tmp_path, *plays, "--run-dir", "played") as actor,
    ):
        said = [process.communicate(timeout=500)[0] for process in (replay, actor)]
    assert mark.exists(), said
    assert [replay.returncode, actor.returncode] == [0, 0], said
    assert "3,000 frames" in str(result(tmp_path / "run")["reason"]), said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["exit 0", "os._exit", "exception"])
@pytest.mark.parametrize("name", ["actor 0", "replay", "learner", "evaluator"])
def test_run_fails_if_a_role_dies_again_and_again(tmp_path: Path, name: str, how: str) -> None:
    mark = dies(tmp_path, name, how, always=True)
    words = ["train", *RUN, "--max-frames", "0", "--eval-period-s", "1", "--run-dir", "run"]
    with zapex(tmp_path, *words) as run:
        said, _ = run.communicate(timeout=500)
    assert mark.exists(), said
    assert run.returncode == 1, said
    assert name in str(result(tmp_path / "run")["reason"])
