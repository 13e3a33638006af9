"""What a result says of its machine, and what keeps it from being published."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.harness import in_rounds
from benchmarks.support.machine import ROOT, Watch, cpu_seconds, doubts

QUIET = {"commit": "0123456789ab", "foreign_cpu": 0.01, "steal": 0.0}


def test_busy_and_stolen_seconds_are_read_from_proc_stat() -> None:
    tick = os.sysconf("SC_CLK_TCK")
    # user (guests are part of it), nice, system, idle, iowait, irq, softirq, steal, guest
    line = "cpu  " + " ".join(str(n * tick) for n in (10, 1, 5, 900, 40, 2, 3, 7, 4, 0))
    assert cpu_seconds(line + "\ncpu0 1 2 3 4 5 6 7 8 9 10\n") == (21.0, 7.0)


def test_a_watch_reports_shares_of_all_cores_and_the_commit() -> None:
    report = Watch().report()
    assert report["foreign_cpu"] >= 0
    assert report["steal"] >= 0
    assert report["seconds"] >= 0
    assert report["commit"] == Watch().facts["commit"]


# The shell ends at once, so nobody waits for what it started.
WITH_AN_ORPHAN = """
import os, subprocess, sys, time
from benchmarks.support.machine import own_cgroup, own_seconds

before_s = own_seconds()
orphan = "import time\\nwhile time.process_time() < 0.5: pass"
ended, held = os.pipe()
command = ["sh", "-c", '"$@" &', "sh", sys.executable, "-c", orphan]
subprocess.run(command, pass_fds=[held], check=True)
os.close(held)
os.read(ended, 1)  # the orphan held the other end
group = own_cgroup()
while group and len((group / "cgroup.procs").read_text().split()) > 1:
    time.sleep(0.01)
print(own_seconds() - before_s, group)
"""


def test_what_nobody_waits_for_counts_as_ours_where_we_may_make_a_cgroup() -> None:
    said = subprocess.run(
        [sys.executable, "-c", WITH_AN_ORPHAN], cwd=ROOT, capture_output=True, text=True,
        check=True, timeout=60,
    ).stdout.split()  # fmt: skip
    if said[1] == "None":
        pytest.skip("no cgroup of our own can be made here")
    assert float(said[0]) > 0.5
    assert not Path(said[1]).exists()


def test_a_clean_commit_on_a_quiet_machine_over_five_rounds_may_be_published() -> None:
    assert doubts(QUIET, QUIET, 5) == []
    assert doubts(QUIET, QUIET, None) == []


@pytest.mark.parametrize(
    ("facts", "during", "rounds", "reason"),
    [
        ({"commit": None}, {"commit": None}, 5, "no git commit"),
        ({"commit": "0123-dirty"}, {}, 5, "uncommitted changes (0123-dirty)"),
        ({}, {"commit": "4567"}, 5, "the commit changed meanwhile (0123456789ab to 4567)"),
        ({}, {}, 4, "4 rounds, fewer than 5"),
        ({}, {"foreign_cpu": 0.05}, 5, "other processes took 5.0% of the processor"),
        ({}, {"steal": 0.02}, 5, "the hypervisor took 2.0% of the processor"),
    ],
)
def test_each_reason_against_a_result_is_said(
    facts: dict[str, Any], during: dict[str, Any], rounds: int, reason: str
) -> None:
    assert doubts({**QUIET, **facts}, {**QUIET, **during}, rounds) == [reason]


def test_rounds_give_the_median_and_spread_of_every_figure_in_dicts_and_lists() -> None:
    turns = {"a": iter([1.0, 9.0, 2.0]), "b": iter([30.0, 10.0, 20.0])}
    found = in_rounds(
        {name: lambda n=name: {"us": {"p50": next(turns[n])}, "rows": [5.0]} for name in turns}, 3
    )
    assert found.medians["a"] == {"us": {"p50": 2.0}, "rows": [5.0]}
    assert found.medians["b"]["us"]["p50"] == 20.0
    low, high = found.spreads["a"]["us"]["p50"]
    assert (low, high) == (pytest.approx(1.2), pytest.approx(7.6))
    assert found.spreads["b"]["rows"] == [[5.0, 5.0]]


def test_a_round_may_lack_what_another_has_and_words_stay_words() -> None:
    turns = iter([{"pulls": {}, "system": "a"}, {"pulls": {"ms": 4.0}, "system": "a"}])
    found = in_rounds({"cell": lambda: next(turns)}, 2)
    assert found.medians["cell"] == {"pulls": {"ms": 4.0}, "system": "a"}
