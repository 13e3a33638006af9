"""Processes killed at random: nothing is lost, doubled or torn, and all of them work again."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def run(script: str, *arguments: object, timeout_s: float = 1000) -> str:
    """What a script of tests/stress prints; it fails where something is lost or stuck."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.stress.{script}", *map(str, arguments)],
        check=False, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def facts_of(script: str, *arguments: object) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run(script, *arguments))
    return facts


@pytest.mark.timeout(1100)
@pytest.mark.parametrize("kills", [20, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_ring_whose_ends_are_killed_hands_every_record_over_once(kills: int) -> None:
    facts = facts_of("ring_kills", "--kills", kills, "--seed", 1)
    assert (facts["torn"], facts["foreign"], facts["doubled"]) == (0, 0, 0)
    assert facts["records"] > kills


@pytest.mark.timeout(1100)
@pytest.mark.parametrize(
    ("kills", "kib"),
    [(15, 256), *(pytest.param(500, kib, marks=pytest.mark.slow) for kib in (1, 64, 13172))],
)
def test_a_mailbox_whose_writer_is_killed_gives_whole_values_only(kills: int, kib: int) -> None:
    facts = facts_of("mailbox_kills", "--kills", kills, "--seed", 1, "--kib", kib)
    assert (facts["torn"], facts["fell"]) == (0, 0)
    assert facts["reads"] > kills


@pytest.mark.timeout(1100)
@pytest.mark.parametrize("kills", [6, pytest.param(600, marks=pytest.mark.slow)])
def test_a_training_killed_at_any_step_of_a_save_never_steps_back(kills: int) -> None:
    facts = facts_of("checkpoint_kills", "--kills", kills, "--seed", 1)
    assert min(facts["killed_at"].values()) == kills / 6  # each of the six steps
    assert facts["resumed"] >= 2 * kills / 3


@pytest.mark.slow
def test_a_killed_replay_server_answers_again_from_what_it_had() -> None:
    run("replay_restart", "--transitions", 100_000, "--kills", 2, timeout_s=110)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("where", [(), ("--central",)])
def test_killed_roles_of_a_real_run_lose_nothing(where: tuple[str, ...]) -> None:
    run("role_kills", "--kills", 6, "--seed", 7, *where, timeout_s=600)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("scheme", ["tcp", "zmtp", "fstack"])
def test_kills_and_cuts_on_a_network_lose_double_and_tear_nothing(scheme: str) -> None:
    facts = facts_of(
        "network_kills", "--transitions", 400_000, "--kills", 60, "--cuts", 20, "--long-cut", 4,
        "--scheme", scheme,
    )  # fmt: skip
    assert (facts["lost"], facts["doubled"], facts["torn"], facts["wrong_rows"]) == (0, 0, 0, 0)
    assert facts["at_the_replay"] >= facts["acknowledged"] > 60
    assert facts["batches"] > 0
    assert facts["done"]["long cuts that clients told of"] == 1
