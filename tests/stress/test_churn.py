"""Hosts that come and go: none shares a number with another, and none is refused wrongly."""

import json
import subprocess
import sys

import pytest

from tests.stress.churn_hours import Churn


@pytest.mark.parametrize("seed", [1, 2])
def test_half_an_hour_of_churn_gives_no_number_to_two_and_refuses_nobody_wrongly(seed):
    counts = Churn(seed).run(0.5)
    assert counts["joins"] > 500
    assert all(counts[how] for how in ("taken over", "refused", "told", "checks"))


@pytest.mark.timeout(400)
@pytest.mark.scenario
def test_six_hours_of_churn_give_no_number_to_two_and_refuse_nobody_wrongly():
    counts = Churn(3).run(6)  # a whole day: the claim "churn-day"
    assert counts["joins"] > 10_000
    assert counts["restarts"] > 7


def test_a_twin_that_is_told_wrong_things_is_noticed():
    churn = Churn(1)
    churn.run(0.1)
    owned = next(iter(churn._owner))
    churn._roster.release(churn._owner[owned])  # as if somebody else had been given it
    with pytest.raises(AssertionError):
        churn.run(0.2)


@pytest.mark.timeout(400)
@pytest.mark.scenario
def test_sixty_four_hosts_come_and_go_beside_real_ones_and_nothing_is_lost(tmp_path):
    words = ["--minutes", "0.8", "--a-minute", "100", "--real", "5", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress.churn", *words, str(tmp_path / "churn.json")],
        stdout=subprocess.PIPE, check=False, timeout=380,
    )  # fmt: skip
    facts = json.loads(done.stdout)
    assert done.returncode == 0, facts
    seen = facts["server"]
    for wrong in ("doubled", "robbed", "twice", "refused wrongly", "bad"):
        assert not seen.get(wrong, 0), wrong
    assert facts["lost"] == 0
    assert facts["odd"] == []
    assert facts["joins_and_leaves_a_minute"] >= 80
    assert seen["most hosts"] >= 60
    assert seen["chunks"] >= facts["acknowledged"] > 1_000
    assert facts["real_hosts"] >= 3
