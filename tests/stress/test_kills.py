"""Killing either end of a ring, a mailbox's writer, or a run that saves loses and tears nothing."""

import json
import subprocess
import sys
from typing import Any

import pytest


def run(script: str, *arguments: object) -> dict[str, Any]:
    """What the script of tests/stress prints; it fails by itself where something gets stuck."""
    command = [sys.executable, "-m", f"tests.stress.{script}", *map(str, arguments)]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=1000)
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def check_ring(facts: dict[str, Any]) -> None:
    assert (facts["torn"], facts["foreign"], facts["doubled"]) == (0, 0, 0)
    assert facts["records"] > facts["kills"]


def check_mailbox(facts: dict[str, Any]) -> None:
    assert (facts["torn"], facts["fell"]) == (0, 0)
    assert facts["reads"] > facts["kills"]


def test_a_ring_whose_ends_are_killed_hands_every_record_over_once() -> None:
    check_ring(run("ring_kills", "--kills", 150, "--seed", 1))


def test_a_mailbox_whose_writer_is_killed_gives_whole_values_only() -> None:
    check_mailbox(run("mailbox_kills", "--kills", 100, "--seed", 1, "--kib", 256))


@pytest.mark.slow
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("seed", range(3))
def test_a_ring_survives_thousands_of_kills(seed: int) -> None:
    check_ring(run("ring_kills", "--kills", 5000, "--seed", 100 + seed))


@pytest.mark.slow
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("kib", [1, 64, 1024, 13172])
def test_a_mailbox_survives_hundreds_of_kills_of_its_writer(kib: int) -> None:
    check_mailbox(run("mailbox_kills", "--kills", 500, "--seed", kib, "--kib", kib))


def test_a_training_that_is_killed_at_any_step_of_a_save_never_steps_back() -> None:
    facts = run("checkpoint_kills", "--kills", 18, "--seed", 1)
    assert min(facts["killed_at"].values()) == 3  # each of the six steps
    assert facts["resumed"] >= 12


@pytest.mark.slow
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("seed", range(3))
def test_a_training_survives_hundreds_of_kills_at_the_steps_of_a_save(seed: int) -> None:
    assert run("checkpoint_kills", "--kills", 600, "--seed", seed)["resumed"] >= 400
