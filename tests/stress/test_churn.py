"""Hosts that come and go: none shares a number with another, and none is refused wrongly."""

import pytest

from tests.stress.churn_hours import Churn


@pytest.mark.parametrize("seed", [1])
def test_half_an_hour_of_churn_gives_no_number_to_two_and_refuses_nobody_wrongly(seed):
    counts = Churn(seed).run(0.5)
    assert counts["joins"] > 500
    assert all(counts[how] for how in ("taken over", "refused", "told", "checks"))


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_six_hours_of_churn_give_no_number_to_two_and_refuse_nobody_wrongly():
    counts = Churn(3).run(6)
    assert counts["joins"] > 10_000
    assert counts["restarts"] > 7


def test_a_twin_that_is_told_wrong_things_is_noticed():
    churn = Churn(1)
    churn.run(0.1)
    owned = next(iter(churn._owner))
    churn._roster.release(churn._owner[owned])  # as if somebody else had been given it
    with pytest.raises(AssertionError):
        churn.run(0.2)
