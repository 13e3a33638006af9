"""Real roles of `zapex train`, killed: nothing is lost or left behind, and all works again soon."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stress.group_kills import kill_once, shared_names

ROOT = Path(__file__).parent.parent.parent


def run(script: str, *arguments: object, timeout_s: float) -> None:
    """A script of tests/stress; it ends with an error where something is lost or stuck."""
    command = [sys.executable, "-m", f"tests.stress.{script}", *map(str, arguments)]
    done = subprocess.run(
        command, check=False, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=timeout_s, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_a_killed_replay_server_answers_again_from_what_it_had() -> None:
    run("replay_restart", "--transitions", 200_000, "--kills", 2, timeout_s=240)


@pytest.mark.parametrize(
    ("reads", "size"), [(20_000, 65536), pytest.param(100, 4 * 3_292_837, marks=pytest.mark.slow)]
)
def test_no_read_of_parameters_is_torn_by_a_busy_writer(reads: int, size: int) -> None:
    run("mailbox_reads", "--reads", reads, "--bytes", size, timeout_s=120)


@pytest.mark.parametrize("how", ["group", "parent"])
def test_a_killed_run_leaves_no_process_and_no_name(tmp_path: Path, how: str) -> None:
    there, _ = kill_once(how, random.Random(1), tmp_path)
    assert 1 <= there <= 4


def test_a_name_in_dev_shm_is_found_by_who_holds_it() -> None:
    path = Path("/dev/shm/zapex-test-held")
    try:
        with path.open("wb"):
            assert path.name in shared_names([os.getpid()])
        assert path.name not in shared_names([os.getpid()])
    finally:
        path.unlink()


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("where", [(), ("--central",)])
def test_six_kills_of_real_roles_lose_nothing(where: tuple[str, ...]) -> None:
    run("role_kills", "--kills", 6, "--seed", 7, *where, timeout_s=600)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("how", ["group", "parent"])
def test_ten_killed_runs_leave_nothing(how: str) -> None:
    run("group_kills", "--kills", 10, "--how", how, timeout_s=600)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_replay_server_killed_at_two_million_transitions_loses_none() -> None:
    run("replay_restart", "--kills", 4, timeout_s=600)
