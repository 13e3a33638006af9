"""Learning as evidence: the cells, one of them in seconds, and the scores over seeds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.learning import learning
from benchmarks.learning.cells import ABLATIONS, CELLS, OURS, SB3
from benchmarks.learning.scores import final, human_share, plot, scores, table
from benchmarks.support.machine import ROOT
from zapex.cli import main as cli

FACTS: dict[str, Any] = {"machine": {}, "during": {}, "doubts": []}


def run_of(env: str, variant: str, seed: int, returns: list[float]) -> dict[str, Any]:
    curve = [[10.0 * i, 1000.0 * i, None if i < 2 else float(i)] for i in range(20)]
    return {"variant": variant, "env": env, "seed": seed, "minutes": 20.0, "curve": curve,
            "final_returns": returns}  # fmt: skip


def test_no_seed_is_the_one_that_the_settings_were_tuned_with() -> None:
    assert all(cell.seed > 10 for cell in CELLS.values())
    assert len({(c.variant, c.env, c.seed) for c in CELLS.values()}) == len(CELLS)
    assert sum(cell.variant == OURS for cell in CELLS.values()) == 16


@pytest.mark.parametrize("variant", ABLATIONS)
def test_an_ablation_changes_one_setting(
    variant: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def settings(*flags: str) -> list[str]:
        assert cli.main(["config", "--env", "ALE/Breakout-v5", "--preset", "laptop", *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line.partition("#")[0].strip() for line in lines if "=" in line.partition("#")[0]]

    usual, changed = settings(), settings(*ABLATIONS[variant])
    assert len(usual) == len(changed)
    assert sum(a != b for a, b in zip(usual, changed, strict=True)) == 1


def test_the_score_is_the_mean_of_the_middle_half_of_the_runs() -> None:
    runs = [run_of("ALE/Pong-v5", OURS, i, [x, x + 2]) for i, x in enumerate([-9, 3, 5, 100])]
    value, low, high = final(runs)
    assert value == pytest.approx((4 + 6) / 2)
    assert low <= value <= high
    assert low < 0
    assert high > 50


def test_the_interval_of_one_run_is_that_of_its_games() -> None:
    assert final([run_of("ALE/Pong-v5", OURS, 11, [*map(float, range(11))])]) == (5, 1, 9)


def test_a_faster_machine_is_no_gain_where_zapex_variants_are_compared_at_equal_frames() -> None:
    fast, slow = (run_of("ALE/Pong-v5", v, 11, [0.0]) for v in (OURS, "uniform replay"))
    peer = run_of("ALE/Pong-v5", SB3, 11, [0.0])
    fast["curve"] = [[float(i), 2000.0 * i, 2.0 * i] for i in range(20)]
    peer["curve"] = [[float(i), 10.0 * i, 0.0] for i in range(20)]
    found = scores({run["variant"]: run for run in (fast, slow, peer)})
    assert found["pong_zapex"]["at_frames"] == found["pong_uniform_replay"]["at_frames"] == 19_000
    assert found["pong_zapex"]["return_there"] == found["pong_uniform_replay"]["return_there"] == 19
    assert found["pong_zapex"]["return_halfway"] == 9.5
    assert found["pong_stable-baselines3"]["frames"] == 190
    assert "at_frames" not in found["pong_stable-baselines3"]


def test_figures_of_curves_stand_between_those_of_the_lowest_and_the_highest_seed() -> None:
    runs = {str(seed): run_of("ALE/Pong-v5", OURS, seed, [0.0]) for seed in (11, 12)}
    for slope, run in zip((1.0, 3.0), runs.values(), strict=True):
        run["curve"] = [[float(i), 100.0 * i * slope, float(i)] for i in range(20)]
    one = scores(runs)["pong_zapex"]
    assert one["spreads"]["frames"] == [1900, 5700]
    assert one["frames"] == 3800
    low, high = one["spreads"]["return_there"]
    assert (low, high) == (pytest.approx(19 / 3), 19)
    assert one["return_there"] == pytest.approx((low + high) / 2)
    assert one["spreads"]["return_halfway"] == pytest.approx([19 / 6, 9.5])


def test_human_is_one_and_random_is_zero() -> None:
    assert human_share("ALE/SpaceInvaders-v5", 1668.7) == pytest.approx(1, abs=0.01)
    assert human_share("ALE/Breakout-v5", 1.7) == 0
    assert human_share("CartPole-v1", 3) is None


def test_the_table_and_the_figure_have_every_game_and_variant(tmp_path: Path) -> None:
    runs = {
        f"{env}{variant}{seed}": run_of(env, variant, seed, [seed, 3.0])
        for env in ("ALE/Breakout-v5", "ALE/Qbert-v5")
        for variant in (OURS, "uniform replay")
        for seed in (11, 12)
    }
    lines = table(runs)
    assert len(lines) == 2 + 4
    assert all("| 2 |" in line for line in lines[2:])
    plot(runs, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 10_000


def test_new_runs_join_the_published_ones_and_replace_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = list(CELLS)[:2]
    work, results = tmp_path / "work", tmp_path / "results"
    for folder in (work, results):
        folder.mkdir()

    def learned(name: str, score: float) -> None:
        cell = CELLS[name]
        report = {**FACTS, "results": run_of(cell.env, cell.variant, cell.seed, [score])}
        (work / f"{name}.json").write_text(json.dumps(report))

    folders = ["--work", str(work), "--results", str(results)]
    for name, score in ((first, 1.0), (second, 2.0), (first, 3.0)):
        learned(name, score)
        assert learning.main(["--publish", *folders]) == 0
        (work / f"{name}.json").unlink()
    runs = json.loads((results / "learning.json").read_text())["results"]
    assert {name: run["final_returns"] for name, run in runs.items()} == {first: [3.0], second: [2]}
    assert runs[first]["doubts"] == []
    scores = json.loads((results / "learning.json").read_text())["scores"]
    assert [(score["runs"], score["p50"]) for score in scores.values()] == [(1, 3.0), (1, 2.0)]
    assert learning.main(["--list", *folders]) == 0
    out = capsys.readouterr().out
    assert f"2 of {len(CELLS)} runs" in out
    assert first not in out.rpartition("missing:")[2]


def test_chosen_runs_that_are_made_are_written_with_their_score_and_nothing_published(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out.json"
    for seed in range(11, 16):
        report = {**FACTS, "results": run_of("ALE/Pong-v5", OURS, seed, [float(seed)])}
        (tmp_path / f"pong_{seed}_zapex.json").write_text(json.dumps(report))
    folders = ["--work", str(tmp_path)]
    assert learning.main(["--cell", "pong_*_zapex", "--json", str(out), *folders]) == 0
    report = json.loads(out.read_text())
    assert list(report["results"]) == [f"pong_{seed}_zapex" for seed in range(11, 16)]
    assert report["scores"]["pong_zapex"]["p50"] == 13


def test_a_pattern_that_names_no_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        learning.main(["--cell", "tennis_*"])
    assert "no run is named tennis_*: they are breakout_11_zapex" in capsys.readouterr().err


@pytest.mark.bench
@pytest.mark.timeout(400)
def test_a_cell_is_a_curve_and_games_of_its_last_network(tmp_path: Path) -> None:
    out = tmp_path / "cell.json"
    command = [sys.executable, "-m", "benchmarks.learning.learn", "breakout_11_zapex", "--quick"]
    subprocess.run([*command, "--json", str(out)], check=True, timeout=380, cwd=ROOT)
    report = json.loads(out.read_text())
    found = report["results"]
    assert (found["env"], found["seed"], len(found["final_returns"])) == ("ALE/Breakout-v5", 11, 1)
    seconds, frames, _ = np.array(found["curve"], float).T
    assert (np.diff(seconds) >= 0).all()
    assert frames[-1] > 0
    assert "seed = 11" in found["config"]
    assert "this is a quick form" in report["doubts"]
