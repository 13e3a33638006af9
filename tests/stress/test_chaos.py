"""Whole systems whose roles are killed and stopped at every step: everything is accounted for."""

import contextlib
import json
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.stress import steps
from tests.stress.chaos_account import Account
from tests.stress.chaos_content import Violation
from tests.stress.chaos_roles import AUDIT
from tests.stress.chaos_run import NETWORK_STEPS, STEPS
from zapex.chunks.layout import ACTOR, COMMITTED, HEADER_WORDS, INCARNATION, SEQUENCE, STATE


def chaos(*arguments: object) -> dict[str, Any]:
    """One run of the harness; it needs a process of its own, for it forks."""
    command = [sys.executable, "-m", "tests.stress.chaos", *map(str, arguments)]
    # The first run on a machine compiles every kernel with its steps.
    result = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=1500)
    facts: dict[str, Any] = json.loads(result.stdout)
    assert result.returncode == 0, facts
    return facts


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_lost_torn_foreign_doubled_or_stuck_whoever_is_killed_wherever() -> None:
    facts = chaos("--kills", "60,25,25,25", "--minutes", 2, "--seed", 1)
    assert all(facts["kills"][kind] >= 25 for kind in STEPS)
    assert facts["stops"]
    assert facts["transitions_accounted"] > 1000
    assert facts["rows_checked"] > 1000
    assert facts["parameters_checked"] > 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_replay_that_dies_between_granting_and_sending_loses_no_slot() -> None:
    facts = chaos("--only", "replay: slot-granted", "--kills", "0,40,0,0", "--seed", 2)
    assert facts["at_steps"] == {"replay: slot-granted": facts["kills"]["replay"]}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_named_step_is_survived() -> None:
    facts = chaos("--kills", "1000,300,300,300", "--minutes", 20, "--seed", 3)
    wanted = {f"{kind}: {step}" for kind, named in STEPS.items() for step in named}
    assert wanted <= facts["at_steps"].keys()


def test_every_step_of_the_source_belongs_to_a_role() -> None:
    assert set(steps.STEPS) == set().union(*STEPS.values(), NETWORK_STEPS)


def test_whatever_looks_like_a_step_is_one() -> None:
    for path in steps.PACKAGE.rglob("*.py"):
        source = path.read_text()
        assert len(re.findall(r"# STEP [a-z]", source)) == len(steps.MARKER.findall(source)), path


def test_the_document_says_what_a_death_at_each_step_means() -> None:
    document = (steps.PACKAGE.parent / "docs" / "ring_protocol.md").read_text()
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", document, re.M)) == steps.STEPS


@pytest.mark.parametrize(
    ("records", "committed", "fault"),
    [
        ([0, 1, 2, 2, 3, 4, 5], 6, None),  # reported twice by two lives of the replay
        ([0, 1, 2, 3, 4, 5], 7, "lost"),
        ([0, 1, 3, 4, 5], 6, "lost"),
        ([0, 1, 2, 3, 4, 5, 6], 6, "doubled"),  # chunk 4 under another commit sequence
    ],
)
def test_the_account_finds_lost_and_doubled_chunks(
    records: list[int], committed: int, fault: str | None
) -> None:
    account = Account()
    account.begin(0, 5)
    made = np.zeros(7, AUDIT)  # two streams of one life, chunks of three rows
    for i, record in enumerate(made):
        chunk = i if i < 6 else 4
        record["incarnation"], record["sequence"], record["commit_sequence"] = 5, chunk, 10 + i
        record["stream"], record["first"], record["count"] = chunk % 2, 3 * (chunk // 2), 3
    headers = np.zeros((1, HEADER_WORDS), np.int64)
    headers[0, [STATE, ACTOR, INCARNATION, SEQUENCE]] = COMMITTED, 0, 5, committed - 1
    account.end(0, 5, 0, headers)
    with pytest.raises(Violation, match=fault) if fault else contextlib.nullcontext():
        account.take(made[records])
        account.close()
    assert fault or (account.chunks, account.transitions) == (6, 18)
