"""What keeps a number honest: the doubts about a result, its rounds, and the work of others."""

import os
from typing import Any

import pytest

from benchmarks.support.harness import in_rounds
from benchmarks.support.machine import Watch, cpu_seconds, doubts

QUIET = {"commit": "0123456789ab", "foreign_cpu": 0.01, "steal": 0.0}


def test_busy_and_stolen_seconds_are_read_from_proc_stat() -> None:
    tick = os.sysconf("SC_CLK_TCK")
    # user (guests are part of it), nice, system, idle, iowait, irq, softirq, steal, guest
    line = "cpu  " + " ".join(str(n * tick) for n in (10, 1, 5, 900, 40, 2, 3, 7, 4, 0))
    assert cpu_seconds(line + "\ncpu0 1 2 3 4 5 6 7 8 9 10\n") == (21.0, 7.0)


def test_watch_reports_shares_of_all_cores_and_the_commit() -> None:
    watch = Watch()
    report = watch.report()
    assert min(report["foreign_cpu"], report["seconds"]) >= 0
    assert report["commit"] == watch.facts["commit"]


def test_clean_commit_on_a_quiet_machine_over_five_rounds_leaves_no_doubt() -> None:
    assert doubts(QUIET, QUIET, 5) == []
    assert doubts(QUIET, QUIET, None) == []


@pytest.mark.parametrize(
    ("facts", "during", "rounds", "reason"),
    [
        ({"commit": None}, {"commit": None}, 5, "no git commit"),
        ({"commit": "0123-dirty"}, {}, 5, "0123-dirty"),
        ({}, {"commit": "4567"}, 5, "0123456789ab to 4567"),
        ({}, {}, 4, "4 rounds"),
        ({}, {"foreign_cpu": 0.05}, 5, "5.0%"),
        ({}, {"steal": 0.02}, 5, "2.0%"),
    ],
)
def test_each_doubt_names_its_cause(
    facts: dict[str, Any], during: dict[str, Any], rounds: int, reason: str
) -> None:
    (found,) = doubts({**QUIET, **facts}, {**QUIET, **during}, rounds)
    assert reason in found


def test_rounds_give_median_and_spread_of_every_figure() -> None:
    turns = {"a": iter([1.0, 9.0, 2.0]), "b": iter([30.0, 10.0, 20.0])}
    found = in_rounds(
        {name: lambda n=name: {"us": {"p50": next(turns[n])}, "rows": [5.0]} for name in turns}, 3
    )
    assert found.medians["a"] == {"us": {"p50": 2.0}, "rows": [5.0]}
    assert found.medians["b"]["us"]["p50"] == 20.0
    assert found.spreads["a"]["us"]["p50"] == [pytest.approx(1.2), pytest.approx(7.6)]
