"""Whole systems whose roles are killed and stopped at every step: everything is accounted for."""

import itertools
import json
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.stress import chaos_content, steps
from tests.stress.chaos_account import Account
from tests.stress.chaos_content import Violation
from tests.stress.chaos_roles import AUDIT
from tests.stress.chaos_run import STEPS, schedule
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
    assert facts["back_s"]["slots"]["p99"] < 1.0


def test_a_seed_repeats_the_schedule_of_every_nemesis() -> None:
    def beginning(seed: int, name: str) -> list[Any]:
        return list(itertools.islice(schedule(seed, name, 0.25), 50))

    for name in ("actor 0", "actor 1", "replay", "learner"):
        assert beginning(7, name) == beginning(7, name)
        assert beginning(7, name) != beginning(8, name)
    assert beginning(7, "actor 0") != beginning(7, "actor 1")


@pytest.mark.parametrize("name", ["actor 0", "replay", "learner", "inference"])
def test_a_nemesis_comes_to_every_step_of_its_role(name: str) -> None:
    faults = list(itertools.islice(schedule(1, name, 0.25), 400))
    assert {fault.step for fault in faults} == {None, *STEPS[name.partition(" ")[0]]}
    assert {fault.kind for fault in faults} == {"kill", "stop"}


def test_every_step_of_the_source_belongs_to_a_role() -> None:
    assert set(steps.STEPS) == set().union(*STEPS.values())


class Ledger:
    """Records for an account: two streams of one life, chunks of three rows."""

    def __init__(self) -> None:
        self.account = Account()
        self.account.begin(0, 5)
        self.records = np.zeros(6, AUDIT)
        for i, record in enumerate(self.records):
            record["incarnation"], record["sequence"], record["commit_sequence"] = 5, i, 10 + i
            record["stream"], record["first"], record["count"] = i % 2, 3 * (i // 2), 3

    def headers(self, committed: int) -> Any:
        rows = np.zeros((4, HEADER_WORDS), np.int64)
        rows[1, [STATE, ACTOR, INCARNATION, SEQUENCE]] = COMMITTED, 0, 5, committed - 1
        return rows

    def close(self, committed: int = 6) -> None:
        self.account.end(0, 5, 0, self.headers(committed))
        self.account.take(self.records)
        self.account.close()


def test_an_account_of_everything_once_is_in_order_even_where_it_was_told_twice() -> None:
    ledger = Ledger()
    ledger.records = np.repeat(ledger.records, [1, 1, 2, 1, 1, 1])
    ledger.close()
    assert (ledger.account.chunks, ledger.account.transitions) == (6, 18)


def test_a_chunk_that_is_missing_at_the_end_or_in_between_is_lost() -> None:
    with pytest.raises(Violation, match="lost"):
        Ledger().close(committed=7)
    ledger = Ledger()
    ledger.records = np.delete(ledger.records, 2)
    with pytest.raises(Violation, match="lost"):
        ledger.close()


def test_a_chunk_that_came_in_twice_is_doubled() -> None:
    ledger = Ledger()
    ledger.records = np.concatenate([ledger.records, ledger.records[4:5]])
    ledger.records[6]["commit_sequence"] = 20
    with pytest.raises(Violation, match="doubled"):
        ledger.close()


def test_rows_that_come_again_in_the_next_chunk_are_doubled_and_skipped_ones_are_lost() -> None:
    for first, kind in ((2, "doubled"), (4, "lost")):
        ledger = Ledger()
        ledger.records[2]["first"] = first
        with pytest.raises(Violation, match=kind):
            ledger.close()


def test_a_chunk_of_a_life_that_nobody_began_is_foreign() -> None:
    ledger = Ledger()
    ledger.records[3]["incarnation"] = 6
    with pytest.raises(Violation, match="foreign"):
        ledger.close()


def test_one_changed_word_of_any_column_is_seen() -> None:
    stamps = np.array([[1, 10**18, 2, number] for number in range(120)])
    length = chaos_content.episode_steps(stamps[:, 2])
    episode, step = stamps[:, 3] // length, stamps[:, 3] % length
    after = np.minimum(step + 2, length)
    reward = stamps[:, 3] % 7 + np.where(after - step == 2, 0.5 * ((stamps[:, 3] + 1) % 7), 0.0)
    over = (after == length) & (episode % 2 == 0)
    rows: dict[str, Any] = {
        "stamp": stamps,
        "action": chaos_content.actions(stamps),
        "obs": chaos_content.observations(stamps, episode, step),
        "next_obs": chaos_content.observations(stamps, episode, after),
        "reward": reward,
        "discount": np.where(over, 0.0, 0.5 ** (after - step)),
    }
    chaos_content.check_rows(rows, "test")
    rng = random.Random(1)
    for name, column in rows.items():
        changed = {**rows, name: column.copy()}
        flat = changed[name].reshape(-1)
        flat[rng.randrange(len(flat))] += 1
        with pytest.raises(Violation, match="torn"):
            chaos_content.check_rows(changed, "test")
