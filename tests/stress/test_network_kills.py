"""Processes on a network killed, links cut: every committed chunk arrives, and once."""

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kills", "cuts", "seed"),
    [(8, 3, 1), pytest.param(60, 20, 2, marks=pytest.mark.slow)],
)
def test_kills_and_cuts_lose_double_and_tear_nothing(kills: int, cuts: int, seed: int) -> None:
    command = [sys.executable, "-m", "tests.stress.network_kills", "--transitions", "400000"]
    command += [f"--kills={kills}", f"--cuts={cuts}", f"--seed={seed}", "--long-cut=4"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=190)
    facts = json.loads(done.stdout)
    assert done.returncode == 0
    assert (facts["lost"], facts["doubled"], facts["torn"], facts["wrong_rows"]) == (0, 0, 0, 0)
    assert facts["at_the_replay"] >= facts["acknowledged"] > kills
    assert facts["batches"] > 0
    assert facts["done"]["long cuts that clients told of"] == 1
