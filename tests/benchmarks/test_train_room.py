"""Quick forms of the benchmarks of whole runs and of the learner: their parts add up."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.quick import check_figures, quick

pytestmark = [pytest.mark.bench, pytest.mark.timeout(450)]


def test_the_learners_step_stands_beside_the_sum_of_its_kernels(tmp_path: Path) -> None:
    results = quick(tmp_path, "learner")
    check_figures(results)
    assert set(results) == {"plain", "step", "samples_per_s_by_hidden", "acting_ms"}
    for size, found in results["step"].items():
        kernels = dict(found["kernels_ms"])
        total = kernels.pop("sum")
        assert len(kernels) == 10
        assert total == pytest.approx(sum(kernels.values()), abs=0.01)
        assert found["ratio"] == pytest.approx(found["step_ms"]["p50"] / total, abs=0.01)
        assert found["samples_per_s"] == pytest.approx(
            1000 * int(size) / found["step_ms"]["p50"], rel=0.01
        )
    assert set(results["acting_ms"]) == {"8", "16", "32", "64"}


def test_shares_of_the_cores_add_up_to_all_of_them(tmp_path: Path) -> None:
    results = quick(tmp_path, "train", "shares")
    shares = results["shares"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(results["replay_fill"]) > 0.9, "the memory was to be full"
    for row in ("environment", "forward (acting)", "forward, backward, optimiser (learning)",
                "gather", "replay server"):  # fmt: skip
        assert shares[row] > 0, row
    assert {"idle", "not of this run", "taken by the hypervisor"} <= set(shares)
    check_figures([results["rates_per_s"], results["window_s"], results["batch_size"]])
    rates = results["rates_per_s"]
    assert rates["frames"] == pytest.approx(4 * rates["steps"])
    assert rates["samples"] == pytest.approx(results["batch_size"] * rates["batches"])
    for name, facts in results["roles"].items():
        if "wall_shares" in facts:
            assert sum(facts["wall_shares"].values()) == pytest.approx(1, abs=0.1), name
    alone = results["everything_else"]
    evaluation = shares.get("evaluation", 0.0)
    assert alone["with_evaluation"] == pytest.approx(alone["alone"] + evaluation)


def test_an_actor_is_measured_beside_its_bare_parts_round_by_round(tmp_path: Path) -> None:
    results = quick(tmp_path, "train", "acting")
    check_figures(results, may_be_zero={"wall_shares"})
    assert len(results["shares_by_round"]) == results["rounds"] == 2
    assert (
        min(results["shares_by_round"])
        <= results["share_reached"]
        <= max(results["shares_by_round"])
    )
    assert results["wall_shares"]["environment"] > 0
    assert results["wall_shares"]["forward"] > 0


def test_the_marks_of_a_start_come_in_their_order_with_and_without_cached_kernels(
    tmp_path: Path,
) -> None:
    results = quick(tmp_path, "train", "startup")
    assert set(results["runs"]) == {
        f"kernels {how}, small memory" for how in ("compiled", "cached")
    }
    for runs in results["runs"].values():
        for marks in runs:
            check_figures({k: v for k, v in marks.items() if not k.startswith("cpu, ")})
            order = ["memory is mapped", "actor 0 is made", "first step", "first batch"]
            assert [marks[name] for name in order] == sorted(marks[name] for name in order)
            assert sum(v for k, v in marks.items() if k.startswith("cpu, ")) > 0
    compiled, cached = (
        sum(results["runs"][f"kernels {how}, small memory"][0][f"cpu, {role}"]
            for role in ("parent", "actor 0", "replay"))
        for how in ("compiled", "cached")
    )  # fmt: skip
    assert compiled > cached, "the kernels were not compiled, or not cached"


def test_steps_a_second_beside_a_peer_at_equal_samples_a_step(tmp_path: Path) -> None:
    # Stable-Baselines3 is not here: what it would answer, which says what it was asked for.
    peer = tmp_path / "python"
    asked = tmp_path / "asked"
    facts = json.dumps({"steps_per_s": 100.0, "samples_per_step": 8.0})
    peer.write_text(f"#!/bin/sh\necho \"$@\" >> {asked}\necho '{facts}'\n")
    peer.chmod(0o755)
    results = quick(tmp_path, "train", "ratio", "--peer-python", str(peer))
    lines = sorted(asked.read_text().splitlines())
    assert [line.split("dqn.py ")[1] for line in lines] == [
        "Breakout 5.0 0 dueling 32", "Breakout 5.0 0 own 32",
    ]  # fmt: skip
    same = "same network and float32, batch 32"
    contenders = {
        f"stable-baselines3, {same}", f"zapex, {same}",
        "stable-baselines3, batch 32", "zapex, batch 32",
    }  # fmt: skip
    assert set(results["runs"]) == set(results["medians"]) == contenders
    check_figures(results, may_be_zero={"leaps"})
    assert {len(runs) for runs in results["runs"].values()} == {1}
    assert results["runs"]["zapex, batch 32"][0]["batch_size"] == 32
    assert results["runs"][f"zapex, {same}"][0]["batch_size"] == 32
    for name, runs in results["runs"].items():
        assert results["medians"][name] == runs[0]["steps_per_s"]
        assert 2 < runs[0]["samples_per_step"] < 32, f"{name}: asked for 8 samples a step"


def test_a_seed_of_cartpole_is_told_with_its_evaluations(tmp_path: Path) -> None:
    results = quick(tmp_path, "train", "cartpole")
    (seed,) = results["seeds"].values()
    check_figures(seed)
    assert results["solved"] == int(seed["mean"] >= 475)
    assert seed["at_s"] < seed["command_s"]
    assert [seed["at_s"], seed["steps"], seed["mean"]] in seed["evaluations"]


def test_a_soak_has_every_process_and_as_many_samples_of_each(tmp_path: Path) -> None:
    results = quick(tmp_path, "soak")
    assert results["deaths"] == []
    processes = {"parent", "actor 0", "replay", "learner", "evaluator"}
    assert set(results["roles"]) == set(results["curves"]) == processes
    assert len({len(curve) for curve in results["curves"].values()}) == 1
    for name, curve in results["curves"].items():
        assert len(curve) >= 8
        for _, anonymous, _, _, descriptors, threads in curve:
            assert min(anonymous, descriptors, threads) > 0, name
    for name, unit in (("actor 0", "steps"), ("learner", "batches")):
        assert results["worked"][name][unit] > 0


def test_a_learner_with_a_fixed_step_is_never_faster_than_its_step(tmp_path: Path) -> None:
    results = quick(tmp_path, "train", "gathering", "--step-ms", "20")
    check_figures(results, may_be_zero={"learner_shares_by_gather_threads"})
    for threads in "01":
        batches = results["batches_per_s_by_gather_threads"][threads]
        assert batches["p50"] <= 1000 / results["step_ms"] + 1
        assert results["learner_shares_by_gather_threads"][threads]["forward"] > 0


def test_many_actors_commit_chunks_while_looks_and_ticks_are_timed(tmp_path: Path) -> None:
    results = quick(tmp_path, "many_actors")
    check_figures(results)
    assert results["actors"] == 8
    for name in ("replay_look_us", "replay_cycle_us", "parent_tick_ms"):
        assert results[name]["n"] > 10
    assert results["parent_tick_ms"]["mean"]["n"] == 5


def test_a_run_is_measured_with_two_watchers_and_without(tmp_path: Path) -> None:
    results = quick(tmp_path, "train", "watchers")
    check_figures(results)
    assert results["watchers"] == 2
    for name in ("frames", "batches"):
        found = results[name]
        (share,) = found["share_by_round"]
        assert share == found["share"]
        assert share == pytest.approx(found["watched_per_s"][0] / found["alone_per_s"][0])


def test_a_run_by_hand_stands_beside_the_same_run_through_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason='pip install "zapex[ray]"')
    results = quick(tmp_path, "clusters")
    hand, ray = results["by hand"], results["through Ray"]
    check_figures(hand)
    # A process that rests may use less than a tick of the clock.
    check_figures(ray, may_be_zero={"ray_core_s_per_minute", "host_core_s_per_minute"})
    for pace, ratio in results["steps_ratio"].items():
        spent = dict(ray[pace]["ray_core_s_per_minute"])
        assert spent.pop("all") == pytest.approx(sum(spent.values()))
        assert spent["control store"] + spent["raylet"] > 0
        assert spent.get("others", 0) == 0, "a process of Ray that has no name here"
        assert ratio == pytest.approx(ray[pace]["steps_per_s"] / hand[pace]["steps_per_s"])
    # Four environments in lockstep, each of which sleeps for a millisecond.
    assert max(one["paced"]["steps_per_s"] for one in (hand, ray)) < 1000
    more_s = ray["first_batch_s"] - hand["first_batch_s"]
    assert results["start_more_s"] == pytest.approx(more_s)
