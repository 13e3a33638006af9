"""The quick form of each benchmark: it runs, no row is missing or empty, and all did equal work."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import sb3_steps
from benchmarks.peers.replays import OURS
from benchmarks.replay import bench_clients, bench_scale
from benchmarks.support.machine import ROOT
from benchmarks.transport import bench_ring, bench_transport, redis_server

pytestmark = [pytest.mark.bench, pytest.mark.timeout(400)]
_PERCENTILES = ("p10", "p50", "p90", "p99")
_FRAME = 84 * 84
BENCH = ("zapex", "bench")


def run_quick(tmp_path: Path, *words: str) -> Any:
    """The JSON of `zapex bench WORDS --quick`, or of the module that WORDS name."""
    out = tmp_path / "quick.json"
    command = [sys.executable, "-m", *([] if words[0].startswith("benchmarks") else BENCH), *words]
    process = subprocess.Popen(
        [*command, "--quick", "--json", str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=360)
    except subprocess.TimeoutExpired:
        process.terminate()  # the benchmark ends what it has started
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output[-6000:]
    return json.loads(out.read_text())


def check_figures(results: Any, may_be_zero: Collection[str] = ()) -> None:
    """Nothing is empty, every number is finite and positive, percentiles are in order.

    may_be_zero: keys of numbers, or of whole dicts, that need not be positive.
    """
    for path, value in walk(results):
        where = ".".join(map(str, path))
        if isinstance(value, dict | list):
            assert value or set(may_be_zero) & set(path), f"{where} is empty"
        if isinstance(value, dict) and set(_PERCENTILES) <= set(value):
            points = [value[name] for name in _PERCENTILES]
            assert points == sorted(points), f"{where}: percentiles out of order: {points}"
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert math.isfinite(value), f"{where} is {value}"
            assert value > 0 or set(may_be_zero) & set(path), f"{where} is {value}"


def walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All values inside, with the keys that lead to them."""
    yield path, value
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from walk(inner, (*path, key))


def check_sumtree(found: Any) -> None:
    peers = {name: one for name, one in found["peers"].items() if "missing" not in one}
    assert {"zapex", "numpy"} <= set(peers)
    check_figures([found["sweep"], [one["stratified"] for one in peers.values()]])
    for state in ("cold", "fresh"):
        rows = {name: one["stratified"][state] for name, one in peers.items()}
        assert len({one["pair"]["n"] for one in rows.values()}) == 1, "equally many draws"
        for name, one in rows.items():  # the mean place tells who drew from the same uniforms
            close = 0.02 if name == "cpprb" else 1e-3
            assert one["places"] == pytest.approx(rows["zapex"]["places"], rel=close), name


def check_replay(found: Any) -> None:
    for by_name in found["batch"].values():
        present = {name: one for name, one in by_name.items() if "missing" not in one}
        assert set(OURS) <= set(present)
        assert {one["pair"]["n"] for one in present.values()} == {6}, "equally many pairs"
    assert {n for n, one in found["sequences"].items() if "sample" in one} >= {
        "roof, sequences", "zapex, sequences"
    }  # fmt: skip
    assert set(found["sb3"]) == set(sb3_steps.CONTENDERS)
    check_figures(found["insert"])
    for name in ("extend", "writer"):  # one frame, and a little more
        assert _FRAME < found["insert"][f"{name}_bytes_a_transition"] < 1.2 * _FRAME


def check_clients(found: Any) -> None:
    check_figures(found)
    assert set(found) == set(bench_clients.CASES)
    for by_client in found.values():
        assert set(by_client) == {"local", "moved", "handle", "url", "urls"}
        assert len({one["n"] for one in by_client.values()}) == 1


def check_scale(found: Any) -> None:
    assert set(found) == set(bench_scale.PARTS)
    check_figures(found)


def check_ring(found: Any) -> None:
    cells = found["cells"]
    check_figures(cells)
    rows = {(one["kind"], one["contender"], one["bytes"]) for one in cells}
    assert rows == set(bench_ring.CELLS)


def check_transport(found: Any) -> None:
    check_figures(found)
    rows = found["rows"]
    assert {f"zapex {kind}" for kind in bench_transport.KINDS} | {"zmq tcp"} <= set(rows)
    ours = [one for name, one in rows.items() if name.startswith("zapex")]
    assert len({one["push_bytes"] for one in ours}) == 1, "the same push"
    for one in ours:
        assert 512 * _FRAME < one["sample_bytes"] < 1.05 * 512 * 8 * _FRAME


def check_cluster(found: Any) -> None:
    (one,) = found.values()
    assert set(one["shares"]) == {"replay", "actor", "relay", "learner"}
    assert all(0 < sum(shares.values()) <= 1.05 for shares in one["shares"].values())
    assert one["step_s"] >= 0.9 * 0.020, "a step took less than its pace"


def check_learner(found: Any) -> None:
    check_figures(found)
    for one in found["step"].values():
        kernels = dict(one["kernels_ms"])
        assert kernels.pop("sum") == pytest.approx(sum(kernels.values()), abs=0.01)


def check_speed(found: Any) -> None:
    check_figures(found["rates_per_s"])
    per_s = found["rates_per_s"]
    assert per_s["frames"] == pytest.approx(4 * per_s["steps"])
    assert per_s["samples"] == pytest.approx(found["batch_size"] * per_s["batches"])


def check_cartpole(found: Any) -> None:
    (seed,) = found["seeds"].values()
    check_figures(seed)
    assert [seed["at_s"], seed["steps"], seed["mean"]] in seed["evaluations"]


def check_learning(runs: Any) -> None:
    (found,) = runs.values()
    assert (found["env"], found["seed"], len(found["final_returns"])) == ("ALE/Pong-v5", 11, 1)
    assert found["curve"][-1][1] > 0
    assert found["doubts"][0] == "this is a quick form"


def check_paper(rows: Any) -> None:
    assert "e" in {row["system"] for row in rows}
    for row in rows:
        for shares in (row["actor_share"], row["learner_share"]):
            assert sum(shares.values()) == pytest.approx(1.0, abs=0.05)
            assert shares["compute"] > 0
        assert 0 < row["communication_share" if row["paced"] else "moving_share"] < 1
        assert row["paced"] or (row["steps_per_s"] > 0 and row["batches_per_s"] > 0)


_PACED = ["--seconds", "2", "--actors", "1", "--actor-ms", "150", "--learner-ms", "100"]
_REDIS = [] if redis_server.missing() else ["a"]
CASES: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "sumtree": (check_sumtree, ["sumtree", "--peers"]),
    "replay": (check_replay, ["replay", "--peers"]),
    "clients": (check_clients, ["clients"]),
    "scale": (check_scale, ["scale"]),
    "ring": (check_ring, ["ring"]),
    "transport": (check_transport, ["transport"]),
    "cluster": (check_cluster, ["cluster"]),
    "learner": (check_learner, ["learner"]),
    "speed": (check_speed, ["train", "speed"]),
    "cartpole": (check_cartpole, ["train", "cartpole"]),
    "learning": (
        check_learning,
        ["benchmarks.learning", "--games-of", "Pong", "--seeds", "11", "--games", "1"],
    ),
    "paper": (check_paper, ["paper", "--systems", *_REDIS, "b2", "c", "e", *_PACED]),
    "paper-real": (check_paper, ["paper", "--real", "--systems", *_REDIS, "c", "e", *_PACED]),
}


def test_every_benchmark_has_a_quick_form_here() -> None:
    scripts = {path.stem.removeprefix("bench_") for path in ROOT.glob("benchmarks/*/bench_*.py")}
    assert scripts == {words[0] for _, words in CASES.values()} - {"benchmarks.learning"}


@pytest.mark.parametrize("name", CASES)
def test_quick_form_did_equal_work_and_misses_no_row(name: str, tmp_path: Path) -> None:
    check, words = CASES[name]
    found = run_quick(tmp_path, *words)
    check(found["results"] if isinstance(found, dict) else found)
