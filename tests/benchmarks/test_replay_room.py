"""Quick forms of the benchmarks of tree and replay: all did the same work, equally often."""

import itertools
import math
from pathlib import Path

import pytest

from benchmarks.peers.replays import OURS
from benchmarks.replay import bench_clients
from tests.benchmarks.quick import check_figures, quick

pytestmark = [pytest.mark.bench, pytest.mark.timeout(450)]


def test_trees_are_timed_at_the_same_places_as_often_as_the_memory_they_stand_beside(
    tmp_path: Path,
) -> None:
    results = quick(tmp_path, "sumtree", "--peers")
    missing = {name for name, one in results["peers"].items() if "missing" in one}
    assert not missing & {"zapex", "numpy"}
    peers = {name: one for name, one in results["peers"].items() if name not in missing}
    check_figures(
        [results["sweep"], [{k: one[k] for k in one if k != "version"} for one in peers.values()]]
    )
    assert len(results["sweep"]) == 4
    for cell in results["sweep"]:
        for state in ("fresh", "cold"):
            found = cell[state]
            counts = {found[name]["n"] for name in found if name != "pair_over_roof"}
            assert len(counts) == 1, "every contender takes its turn in every round"
            # The pair is a sample and an update of as many items: no less than either's least.
            assert found["pair"]["p90"] > max(found["sample"]["p10"], found["update"]["p10"])
            net = found["pair"]["p50"] - found["rng"]["p50"]
            assert found["pair_over_roof"] == pytest.approx(net / found["roof"]["p50"], abs=0.01)
    for draws, state in itertools.product(("stratified", "independent"), ("cold", "fresh")):
        found = {name: one[draws][state] for name, one in peers.items() if draws in one}
        counts = {one[what]["n"] for one in found.values() for what in ("sample", "update", "pair")}
        assert len(counts) == 1, "every tree was asked for equally many draws and updates"
        for name, one in found.items():
            # Other uniforms would put the mean place 1 % apart; sums of float32 put it 0.003 %.
            close = 0.02 if name == "cpprb" else 1e-3
            assert one["places"] == pytest.approx(found["zapex"]["places"], rel=close), name


def test_replays_draw_equally_often_and_rows_take_the_memory_that_is_said(tmp_path: Path) -> None:
    results = quick(tmp_path, "replay", "--peers")
    assert set(results) == {"batch", "memory", "insert", "tiny", "start_up"}
    assert set(results["batch"]) == {"1", "3"}
    for by_name in results["batch"].values():
        present = {name: one for name, one in by_name.items() if "missing" not in one}
        assert set(OURS) <= set(present)
        check_figures([{**one, "version": ""} for one in present.values()], may_be_zero={"update"})
        counts = {one[what]["n"] for one in present.values() for what in one if what != "version"}
        assert counts == {9}, "three rounds of three calls each"
        # Into new memory or old: neither is less work than the sample that is part of it.
        for one in present.values():
            assert one["pair"]["p90"] >= one["sample"]["p10"]
    check_figures([results["insert"], results["tiny"], results["start_up"]])
    assert 7056 * 0.9 < results["memory"]["zapex"] < 7056 * 1.3
    assert set(results["insert"]["microseconds"]) == {
        "add",
        "add_memcpy",
        "extend",
        "extend_memcpy",
    }
    assert set(results["tiny"]) == {
        "sample", "sample_new_batch", "update_priorities", "add", "extend",
    }  # fmt: skip
    for name in ("extend", "writer"):  # one frame, and what a chunk has more than that
        assert 7056 < results["insert"][f"{name}_bytes_a_transition"] < 1.2 * 7056


def test_curves_over_size_batch_actors_and_clients_have_their_tails_and_exponents(
    tmp_path: Path,
) -> None:
    results = quick(tmp_path, "scale", "--plot", str(tmp_path / "scale.png"))
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    assert set(results) == {"size", "batch", "restart", "snapshot", "actors", "clients"}
    assert set(results["size"]) == set(results["batch"]) == {"sample", "update", "pair", "add"}
    assert set(results["clients"]) == {"by handle", "by URL"}
    for part, by_call in results.items():
        for name, found in by_call.items():
            xs = sorted(map(int, found["curve"]))
            assert len(xs) == 2, (part, name)
            low, high = (found["curve"][str(x)] for x in xs)
            slope = math.log(high["p50"] / low["p50"]) / math.log(xs[1] / xs[0])
            assert found["exponent"] == pytest.approx(slope, abs=0.01)
            for one in (low, high):
                points = [one[p] for p in ("p10", "p50", "p90", "p99", "p99.9") if p in one]
                assert points == sorted(points)
                assert points[0] > 0
                assert one["n"] >= 1
            if "per_s" in found:
                assert all(found["per_s"][str(x)]["p10"] > 0 for x in xs)
    for part in ("size", "batch"):  # the pair is both of its calls, and they came equally often
        for x, pair in results[part]["pair"]["curve"].items():
            both = [results[part][name]["curve"][x] for name in ("sample", "update")]
            assert pair["p99.9"] >= max(one["p10"] for one in both)
            assert {one["n"] for one in both} == {pair["n"]}


def test_a_batch_has_as_many_bytes_from_several_replays_as_from_one(tmp_path: Path) -> None:
    results = quick(tmp_path, "shards")
    check_figures(results)
    assert set(results) == {"sample", "pair", "bytes"}
    for case in ("sample", "pair"):
        by_shards = {n: one for n, one in results[case].items() if n != "over one"}
        assert set(by_shards) == {"1", "2", "4"}
        assert {one["n"] for one in by_shards.values()} == {3}
        assert set(results[case]["over one"]) == {"2", "4"}
    for n in ("2", "4"):
        assert results["bytes"][n] == pytest.approx(results["bytes"]["1"], rel=0.1)


def test_every_kind_of_client_makes_every_call_equally_often(tmp_path: Path) -> None:
    results = quick(tmp_path, "clients")
    check_figures(results)
    assert set(results) == set(bench_clients.CASES)
    for by_client in results.values():
        assert set(by_client) == {"local", "moved", "handle", "url"}
        assert {one["n"] for one in by_client.values()} == {3}
    # One call of 512 rows or of one: what is moved is seen wherever there is something to move.
    for client in ("local", "moved", "url"):
        assert results["sample"][client]["p50"] > results["tiny sample"][client]["p50"]
