"""Shares of the cores: processor time divided among phases, with what is left told apart."""

import pytest

from benchmarks.core_shares import IDLE, OUTSIDE, STOLEN, overhead_of, shares_between
from benchmarks.train_run import Look


def _look(
    time_s: float, cpu_s: dict[str, float], roles: dict[str, dict[str, float]], idle_s: float
) -> Look:
    phases = {
        name: {f"phase/{phase}": value for phase, value in one.items()}
        for name, one in roles.items()
    }
    return Look(time_s, phases, cpu_s, dict.fromkeys(cpu_s, 0.0), idle_s, 0.0, 1.0)


BEFORE = _look(
    10.0,
    {"parent": 1.0, "actor 0": 2.0, "learner": 3.0},
    {
        "actor 0": {"environment": 1.0, "forward": 1.0, "push": 0.0, "wait": 5.0},
        "learner": {"gather": 0.0, "forward": 0.0, "backward": 1.0, "wait": 0.0},
    },
    idle_s=7.0,
)
AFTER = _look(
    20.0,
    {"parent": 1.1, "actor 0": 11.0, "learner": 11.0, "replay": 0.4},
    {
        "actor 0": {"environment": 7.0, "forward": 4.0, "push": 1.0, "wait": 5.0},
        "learner": {"gather": 1.0, "forward": 3.0, "backward": 7.0, "wait": 0.0},
    },
    idle_s=7.5,
)


@pytest.fixture(name="shares")
def _shares() -> dict[str, float]:
    before = Look(**vars(BEFORE) | {"cpu_s": BEFORE.cpu_s | {"replay": 0.0}})
    return shares_between(before, AFTER, cores=2)


def test_rows_add_up_to_all_cores(shares: dict[str, float]) -> None:
    assert sum(shares.values()) == pytest.approx(1.0)


def test_processor_time_is_divided_by_the_wall_time_of_working_phases(
    shares: dict[str, float],
) -> None:
    # The actor used 9 of 20 core-seconds; its phases took 6, 3 and 1 seconds of wall time.
    assert shares["environment"] == pytest.approx(9 / 20 * 6 / 10)
    assert shares["forward (acting)"] == pytest.approx(9 / 20 * 3 / 10)
    assert shares["push"] == pytest.approx(9 / 20 * 1 / 10)


def test_learning_is_one_row_and_the_gather_another(shares: dict[str, float]) -> None:
    assert shares["forward, backward, optimiser (learning)"] == pytest.approx(8 / 20 * 9 / 10)
    assert shares["gather"] == pytest.approx(8 / 20 * 1 / 10)


def test_what_nobody_of_the_run_used_is_idle_or_not_of_this_run(shares: dict[str, float]) -> None:
    assert shares[IDLE] == pytest.approx(0.5 / 20)
    assert shares[STOLEN] == 0.0
    assert shares[OUTSIDE] == pytest.approx((20 - 0.1 - 9 - 8 - 0.4 - 0.5) / 20)


def test_overhead_is_what_is_neither_work_nor_evaluation(shares: dict[str, float]) -> None:
    push, replay, parent = 9 / 20 * 1 / 10, 0.4 / 20, 0.1 / 20
    assert overhead_of(shares) == pytest.approx(push + replay + parent)
    assert overhead_of(shares | {"evaluation": 0.1}) == pytest.approx(push + replay + parent)
