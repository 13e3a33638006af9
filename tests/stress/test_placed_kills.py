"""Hosts that Ray, SLURM or a container runtime placed, killed: nothing acknowledged is lost."""

import json
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.stress.placed_account import At, account, unaccounted
from tests.stress.placed_kills import wrong
from tests.support import slurm

pytestmark = pytest.mark.xdist_group("scheduler")  # one cluster at a time on this machine
_A, _B = (3, 7), (4, 7)


def test_a_transition_is_where_it_should_be_or_it_is_lost_doubled_or_went_with_its_shard() -> None:
    acknowledged = {_A: {0, 1, 2}, _B: {0}}
    whole: Counter[At] = Counter({(_A, 0): 1, (_A, 1): 1, (_A, 2): 1, (_B, 0): 1})
    fine = {"acknowledged": 4, "found_once": 4, "with_a_killed_shard": 0, "lost": 0, "doubled": 0}
    assert account(acknowledged, whole, set()) == fine
    # What was not acknowledged may be there, too.
    assert account(acknowledged, whole + Counter({(_B, 1): 1}), set()) == fine
    less = whole - Counter({(_A, 1): 1})
    assert account(acknowledged, less, set()) == fine | {"found_once": 3, "lost": 1}
    gone = {(_A, 1), (_A, 2)}
    with_it = fine | {"found_once": 3, "with_a_killed_shard": 1}
    assert account(acknowledged, less, gone) == with_it
    # One that is there twice makes up for no other.
    more = less + Counter({(_B, 0): 1})
    twice = {"found_once": 2, "lost": 1, "doubled": 1}
    assert account(acknowledged, more, set()) == fine | twice


def test_what_came_and_was_overwritten_between_two_looks_must_be_in_a_memory() -> None:
    acknowledged, made = {_A: {0, 1, 2}, _B: {0, 1}}, {_A: 3, _B: 4}
    known = {(_A, 0), (_A, 1), (_B, 3), ((9, 9), 5)}
    assert unaccounted(5, acknowledged, made, known) == 0
    assert unaccounted(7, acknowledged, made, known) == 2
    assert unaccounted(7, acknowledged, made, known | {(_A, 3), (_A, 4)}) == 0
    assert unaccounted(7, acknowledged, made, known | {(_A, 3)}) == 1


def test_only_a_run_with_shards_may_lose_a_replays_memory() -> None:
    facts = {"on": "ray", "lost": 0, "doubled": 0, "acknowledged_unseen": 0}
    assert wrong({**facts, "with_a_killed_shard": 0}) == 0
    assert wrong({**facts, "with_a_killed_shard": 2}) == 2
    assert wrong({**facts, "with_a_killed_shard": 2, "on": "shards"}) == 0
    assert wrong({**facts, "with_a_killed_shard": 0, "lost": 1, "acknowledged_unseen": 1}) == 2


def killed(directory: Path, on: str, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the facts of some kills."""
    file = directory / "kills.json"
    command = [sys.executable, "-m", "tests.stress.placed_kills", "--on", on, *words]
    done = subprocess.run([*command, "--json", str(file)], check=False, timeout=580)
    facts: dict[str, Any] = json.loads(file.read_text())["results"][on]
    return done.returncode, facts


@pytest.mark.scenario
@pytest.mark.timeout(600)
@pytest.mark.parametrize("on", ["ray", "slurm", "container"])
def test_what_was_acknowledged_outlives_the_host_that_sent_it(on: str, tmp_path: Path) -> None:
    if on == "ray" and not (find_spec("ray") and find_spec("nacl")):
        pytest.skip('pip install "zapex[ray]"')
    if on == "slurm" and (why := slurm.why_not()):
        pytest.skip(why)
    code, facts = killed(tmp_path, on, "--kills", "1")
    assert code == 0, facts
    assert facts["acknowledged"] == facts["found_once"] > 0
    assert sum(facts["lives"].values()) >= 5  # a host that was silent too long joins anew


@pytest.mark.scenario
@pytest.mark.timeout(600)
def test_a_killed_shard_takes_with_it_what_it_had_and_nothing_else(tmp_path: Path) -> None:
    code, facts = killed(tmp_path, "shards", "--kills", "1")
    assert code == 0, facts
    assert facts["with_a_killed_shard"] > 0
    assert facts["found_once"] + facts["with_a_killed_shard"] == facts["acknowledged"]


@pytest.mark.scenario
@pytest.mark.timeout(600)
def test_chunks_that_a_relay_frees_without_sending_them_are_noticed(tmp_path: Path) -> None:
    code, facts = killed(tmp_path, "shards", "--kills", "0", "--mutant")
    assert code == 1
    assert facts["lost"] > 0
