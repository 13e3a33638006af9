"""Shares of the cores: processor time divided among phases, and the rest."""

import pytest

from benchmarks.train.core_shares import IDLE, OUTSIDE, STOLEN, overhead_of, shares_between
from benchmarks.train.whole_run import Look


def _look(
    time_s: float, cpu_s: dict[str, float], roles: dict[str, dict[str, float]], idle_s: float
) -> Look:
    phases = {
        name: {f"cpu/{phase}": value for phase, value in one.items()} for name, one in roles.items()
    }
    return Look(time_s, phases, cpu_s, dict.fromkeys(cpu_s, 0.0), idle_s, 0.0, 1.0)


BEFORE = _look(
    10.0,
    {"parent": 1.0, "actor 0": 2.0, "learner": 3.0, "replay": 0.0},
    {
        "actor 0": {"environment": 0.1, "forward": 1.0, "push": 0.0, "wait": 0.0},
        "learner": {"gather": 0.0, "forward": 0.0, "backward": 1.0, "wait": 0.0},
    },
    idle_s=7.0,
)
AFTER = _look(
    20.0,
    {"parent": 1.1, "actor 0": 11.0, "learner": 11.0, "replay": 0.4},
    {
        "actor 0": {"environment": 0.3, "forward": 4.0, "push": 0.5, "wait": 0.1},
        "learner": {"gather": 1.0, "forward": 2.0, "backward": 5.0, "wait": 0.5},
    },
    idle_s=7.5,
)


@pytest.fixture(name="shares")
def _shares() -> dict[str, float]:
    return shares_between(BEFORE, AFTER, cores=2)


def test_rows_add_up_to_all_cores(shares: dict[str, float]) -> None:
    assert sum(shares.values()) == pytest.approx(1.0)


def test_phases_have_the_processor_time_that_the_role_counted(shares: dict[str, float]) -> None:
    assert shares["forward (acting)"] == pytest.approx(3.0 / 20)
    assert shares["push"] == pytest.approx(0.5 / 20)
    assert shares["gather"] == pytest.approx(1.0 / 20)


def test_other_threads_of_an_actor_are_its_environment(shares: dict[str, float]) -> None:
    # The actor used 9 seconds, and its own thread 0.2 + 3 + 0.5 + 0.1 of them.
    assert shares["environment"] == pytest.approx((0.2 + 9 - 3.8) / 20)


def test_learning_is_one_row_with_the_other_threads_of_torch(shares: dict[str, float]) -> None:
    assert shares["forward, backward, optimiser (learning)"] == pytest.approx((6.0 + 8 - 7.5) / 20)


def test_what_nobody_of_the_run_used_is_idle_or_not_of_this_run(shares: dict[str, float]) -> None:
    assert shares[IDLE] == pytest.approx(0.5 / 20)
    assert shares[STOLEN] == 0.0
    assert shares[OUTSIDE] == pytest.approx((20 - 0.1 - 9 - 8 - 0.4 - 0.5) / 20)


def test_overhead_is_what_is_neither_work_nor_evaluation(shares: dict[str, float]) -> None:
    actor, learner, replay, parent = 0.5 + 0.1, 0.5, 0.4, 0.1
    expected = (actor + learner + replay + parent) / 20
    assert overhead_of(shares) == pytest.approx(expected)
    assert overhead_of(shares | {"evaluation": 0.1}) == pytest.approx(expected)
