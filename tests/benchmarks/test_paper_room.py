"""The quick form of the paper's benchmark: that it measures what it says."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.paper import figures, points
from benchmarks.paper.accounts import Account
from benchmarks.paper.bench_paper import PAPER_SHARE, calibrated
from benchmarks.paper.experience import PAIR_BYTES
from benchmarks.paper.model import Cycle, share, transfer_s
from benchmarks.paper.points import Pace
from benchmarks.paper.roles import OVER, actor
from benchmarks.transport.server import PARAMETER_BYTES
from tests.benchmarks.quick import ROOT
from tests.support.redis_server import MISSING

KEYS = {
    "system", "modelled", "actors", "gbit", "format", "paced", "bytes", "host_bound",
    "communication_share", "actor_share", "learner_share", "core_seconds", "actor_push_ms",
    "actor_pull_ms", "learner_set_ms", "learner_sample_ms", "learner_pull_experiences_per_s",
    "push_hz", "ideal_push_hz", "spreads", "machine",
}  # fmt: skip
SYSTEMS = ["b", "b2", "c", "d-zmtp", "e", *([] if MISSING else ["a", "a2"])]


def quick(tmp_path: Path, name: str, *words: str) -> list[dict]:
    """The rows of `zapex bench paper --quick`; the file is a list."""
    out = tmp_path / "paper.json"
    command = [sys.executable, "-m", "zapex", "bench", name, "--quick", "--seconds", "2"]
    command += ["--actors", "1", "--actor-ms", "150", "--learner-ms", "100", "--json", str(out)]
    done = subprocess.run(
        [*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(out.read_text())


@pytest.mark.bench
@pytest.mark.timeout(500)
def test_every_system_moves_the_bytes_that_it_says_at_the_pace_that_it_says(tmp_path: Path) -> None:
    rows = quick(tmp_path, "paper", "--systems", *SYSTEMS, "--figures", str(tmp_path / "figures"))
    assert {row["system"] for row in rows} == set(SYSTEMS)
    for row in rows:
        assert row.keys() == KEYS
        facts = row["machine"]
        # A paced role is never faster than its pace, and every phase is in a share.
        assert facts["shortest_step_s"] >= 0.1
        assert facts["steps"] <= facts["seconds"] / 0.1 + 1
        assert 0 < row["push_hz"] <= row["ideal_push_hz"]
        # Of whole cycles: a window has at most the ends of two more.
        assert facts["pushes"] <= row["push_hz"] * facts["seconds"] * 1.1 + 1
        assert row["push_hz"] * facts["seconds"] <= facts["pushes"] * 1.1 + 3
        assert facts["windows"] == 2
        low, high = row["spreads"]["communication_share"]
        assert low <= row["communication_share"] <= high
        for shares in (row["actor_share"], row["learner_share"]):
            assert sum(shares.values()) == pytest.approx(1.0)
        assert row["actor_share"]["compute"] > 0.2
        moved = facts["transitions_per_push"]
        assert moved == 100
        if row["format"] == "pairs":  # plain: nothing is saved, and little is added
            assert PAIR_BYTES * moved < row["bytes"]["push"] < 1.01 * PAIR_BYTES * moved
        elif row["system"] != "e":  # each frame once
            assert 7056 * moved < row["bytes"]["push"] < 1.3 * 7056 * moved
        assert row["bytes"]["pull"] in (0, PARAMETER_BYTES)
        for name in ("actor_push_ms", "learner_sample_ms"):
            assert 0 < row[name]["q25"] <= row[name]["median"] <= row[name]["q75"]
        cpu_s = sum(
            t["cpu_s"] for threads in row["core_seconds"].values() for t in threads.values()
        )
        assert cpu_s > 0
        assert {"learner", "actor 0"} <= row["core_seconds"].keys()
        assert ("server" in row["core_seconds"]) == (row["system"] not in ("b", "b2"))
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "table.md", "breakdown.png", "push.png", "latency.png", "pull.png", "server.png",
    }  # fmt: skip
    # It goes on where it was: nothing is left to be measured.
    assert quick(tmp_path, "paper", "--systems", *SYSTEMS) == rows


@pytest.mark.bench
@pytest.mark.timeout(500)
def test_a_real_run_has_the_phases_that_its_roles_count(tmp_path: Path) -> None:
    words = "--real", "--systems", "e", "--figures", str(tmp_path / "figures")
    (row,) = quick(tmp_path, "paper", *words)
    assert row.keys() == KEYS
    assert row["paced"] is None
    assert row["machine"]["windows"] == 2
    assert row["machine"]["totals"]["batches"] >= 2
    for shares in (row["actor_share"], row["learner_share"]):
        assert shares["compute"] > 0
        assert sum(shares.values()) == pytest.approx(1.0, abs=0.05)
    assert 0 < row["communication_share"] < 1
    made = {path.name for path in (tmp_path / "figures").iterdir()}
    assert made == {"table.md", "real.png"}
    assert quick(tmp_path, "paper", "--real", "--systems", "e") == [row]


def test_a_role_returns_the_whole_cycles_of_each_window_by_itself() -> None:
    words = np.zeros(8, np.int64)
    plan = iter([0, 1, 1, 1, 2, 2, 2, 2, OVER])

    class End:
        """Each push begins what comes next: the word changes while the cycle runs."""

        def push(self) -> int:
            words[0] = next(plan, OVER)
            return 100

        def pull(self) -> int:
            return 7

    found = actor(End, words, 2, 0.0)
    # The cycle in which a word changes belongs to no window.
    assert {window: one["pushes"] for window, one in found.items()} == {1: 2, 2: 3}
    assert all(one["bytes"] == {"push": 100, "pull": 7} for one in found.values())
    assert all(one["ms"]["push"]["n"] == one["pushes"] for one in found.values())
    assert words[2] == OVER


def test_figures_of_windows_are_their_medians_and_counts_stay_counts() -> None:
    def window(share: float, pull: dict[str, float]) -> dict[str, object]:
        return {
            "system": "a", "actors": 8, "gbit": None, "communication_share": share,
            "actor_push_ms": {}, "actor_pull_ms": pull, "learner_set_ms": {},
            "learner_sample_ms": {}, "learner_pull_experiences_per_s": None, "push_hz": 2.0,
            "machine": {"load": share},
        }  # fmt: skip

    row = points.over([window(0.1, {}), window(0.3, {"median": 4.0}), window(0.2, {"median": 6.0})])
    assert (row["system"], row["gbit"], str(row["actors"])) == ("a", None, "8")
    assert row["communication_share"] == row["machine"]["load"] == 0.2
    assert row["spreads"]["communication_share"] == pytest.approx([0.12, 0.28])
    assert row["actor_pull_ms"] == {"median": 5.0}  # a window may have no pull
    assert row["learner_pull_experiences_per_s"] is None  # as in a real run


def test_a_role_without_a_whole_cycle_in_a_window_is_told() -> None:
    found = {"learner": {"1": {}, "2": {}}, "actor 0": {"1": {}}}
    assert points.cycles_of(found, 1).keys() == {"learner", "actor 0"}
    with pytest.raises(RuntimeError, match="no whole cycle of actor 0 in a window"):
        points.cycles_of(found, 2)


def test_the_pace_is_found_at_which_communication_takes_the_papers_share() -> None:
    tried = []

    def share_at(pace: Pace) -> float:
        """An actor pushes for 80 ms; the learner pulls each push for 160 ms, whatever its sleep."""
        tried.append(pace)
        actor = 0.08 / (0.08 + pace.actor_s)
        return (actor + 0.16 / (0.08 + pace.actor_s)) / 2

    assert abs(share_at(calibrated(share_at)) - PAPER_SHARE) < 0.01
    assert len(tried) > 2
    assert len({round(pace.actor_s / pace.learner_s, 6) for pace in tried}) == 1
    with pytest.raises(RuntimeError, match=r"no pace was found .*40\.0%: is the machine quiet"):
        calibrated(lambda pace: 0.4)


def test_the_model_waits_for_those_before_it_and_never_beats_the_server() -> None:
    cycle = Cycle(compute_s=1.0, transfer_s=0.2, service_s=0.1)
    assert transfer_s(cycle, 1) == pytest.approx(0.2)
    assert share(cycle, 1) == pytest.approx(0.2 / 1.2)
    times = [transfer_s(cycle, n) for n in range(1, 40)]
    assert times == sorted(times)
    # At most one service at a time: with many actors the server is the bound.
    assert 40 / (1.0 + transfer_s(cycle, 40)) == pytest.approx(1 / 0.1, rel=0.01)
    free = Cycle(1.0, 0.2, 0.0)
    assert transfer_s(free, 8) == pytest.approx(0.2)


def test_an_account_sees_the_processor_time_of_each_thread() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        account = Account({"busy": child.pid})
        cpu_s = 0.0
        while cpu_s < 0.3:
            found = account.close()
            cpu_s = sum(thread for thread in found["core_seconds"]["busy"].values())
        assert cpu_s <= found["seconds"] * 1.2 + 0.1
        assert 0 < found["load"] <= 1.2
        assert all(waited >= 0 for waited in found["run_queue_wait_s"]["busy"].values())
    finally:
        child.kill()
        child.wait(30)


def test_a_table_has_the_papers_number_beside_the_baseline_only() -> None:
    spread = {"median": 2.0, "q25": 1.0, "q75": 3.0}
    row = {
        "system": "a", "modelled": False, "actors": 1, "gbit": None, "host_bound": False,
        "paced": {"actor_ms": 1.0, "learner_ms": 1.0, "set_every": 8},
        "communication_share": 0.2, "bytes": {"push": 5e6, "pull": 1e6, "sample": 2e6},
        "actor_push_ms": spread, "actor_pull_ms": {}, "learner_set_ms": spread,
        "learner_sample_ms": spread, "learner_pull_experiences_per_s": 10.0, "push_hz": 1.0,
        "ideal_push_hz": 2.0,
    }  # fmt: skip
    first, second = figures.table([row, {**row, "system": "c"}]).splitlines()[2:]
    assert "20.0% | 14.5%" in first
    assert "14.5%" not in second
    assert "2.0 (1.0..3.0) | 5.00" in first
