"""The soak's fit finds the slope of a line, with an interval as wide as the noise."""

import os

import numpy as np
import pytest

from benchmarks.train.bench_soak import report, sample, slope

HOURS = np.arange(0.0, 1.0, 10 / 3600)


def test_the_slope_of_a_line_is_exact() -> None:
    found, within = slope(HOURS + 0.2, 5.0 - 3.0 * HOURS)
    assert found == pytest.approx(-3.0)
    assert within == pytest.approx(0.0, abs=1e-9)


def test_the_interval_holds_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        found, within = slope(HOURS, 2.0 * HOURS + rng.normal(size=len(HOURS)))
        held += abs(found - 2.0) <= within
    assert 0.92 < held / 400 < 0.98


def test_too_few_samples_have_no_slope() -> None:
    assert np.isnan(slope([0.0, 0.1], [1.0, 2.0])).all()


def test_a_report_begins_after_the_warm_up() -> None:
    seconds = [10.0 * i for i in range(100)]
    # Anonymous memory grows by 600 MiB an hour while warming up, and then by 36.
    rows = [[min(s, 200) / 6 + max(0.0, s - 200) / 100, 50.0, 0.0, 11.0, 2.0] for s in seconds]
    facts = report(seconds, {"learner": rows}, 200.0)["learner"]
    assert facts["mib_per_hour"] == pytest.approx(36.0)
    assert facts["descriptors"] == [11, 11]


def test_a_sample_is_of_a_living_process() -> None:
    anonymous, file, shared, descriptors, threads = sample(os.getpid())
    assert anonymous > 1
    assert file > 1
    assert shared >= 0
    assert descriptors >= 3
    assert threads >= 1
