"""Runs beside each other: which belong together, and what comes out of them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from zapex.config.settings import Config
from zapex.errors import ConfigError
from zapex.watch import comparison, differences, scores

IMAGE = b"\x89PNG\r\n"


def a_run(
    path: Path, score: float, evaluated: int = 3, env: str = "ALE/Breakout-v5", **settings: object
) -> Path:
    """A run whose score rises to `score`."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(Config().replace(env=env, **settings).to_toml())
    lines = []
    for i in range(1, 21):
        at = {"wall_s": 60.0 * i, "frames": 1000 * i}
        tags = {"charts/episodic_return_last100": score * i / 20, "charts/frames": 1000 * i}
        lines.append({"kind": "metrics", **at, **tags})
        if i > 20 - evaluated:
            lines.append({"kind": "evaluation", **at, "mean": 2 * score * i / 20, "std": 1.0})
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return path


def test_runs_that_differ_only_in_their_seed_belong_together(tmp_path):
    runs = [
        a_run(tmp_path / "a1", 30, seed=1, lr=1e-3, max_minutes=3.0),
        a_run(tmp_path / "a2", 32, seed=2, lr=1e-3, run_dir="elsewhere"),
        a_run(tmp_path / "b1", 20, seed=1, lr=1e-4),
        a_run(tmp_path / "pong", 20, seed=1, lr=1e-4, env="ALE/Pong-v5"),
    ]
    groups = comparison.grouped(comparison.read(runs)[0])
    assert {e: {w: len(c) for w, c in g.items()} for e, g in groups.items()} == {
        "ALE/Breakout-v5": {"lr 0.001": 2, "lr 0.0001": 1},
        "ALE/Pong-v5": {"lr 0.0001": 1},
    }


def test_experiments_are_told_apart_by_their_name(tmp_path):
    runs = [a_run(tmp_path / name, 30, exp=name) for name in ("mine", "yours")]
    (configs,) = comparison.grouped(comparison.read(runs)[0]).values()
    assert list(configs) == ["exp mine", "exp yours"]


def test_evaluations_are_compared_if_every_run_has_two_and_otherwise_training(tmp_path):
    two = a_run(tmp_path / "two", 30, evaluated=2)
    one = a_run(tmp_path / "one", 30, evaluated=1)
    curves, score = comparison.read([two])
    assert (score, curves[0].score, len(curves[0].points)) == ("evaluation", 60.0, 2)
    curves, score = comparison.read([two, one])
    assert (score, curves[0].score, len(curves[0].points)) == ("training", 30.0, 20)
    with pytest.raises(ConfigError, match="has stored no return of an evaluation: leave it out"):
        comparison.read([a_run(tmp_path / "none", 30, evaluated=0)], "evaluation")


def test_intervals_hold_the_mean_and_a_naive_bootstrap_agrees():
    rng = np.random.default_rng(1)
    curves = rng.normal(5, 2, (8, 3))
    mean, low, high = scores.mean(curves)
    assert mean == pytest.approx(curves.mean(0))
    draws = rng.integers(0, 8, (20_000, 8))
    naive = np.percentile(curves[draws].mean(1), [2.5, 97.5], axis=0)
    assert low == pytest.approx(naive[0], abs=0.15)
    assert high == pytest.approx(naive[1], abs=0.15)


def test_equal_runs_have_equal_intervals_and_the_callers_random_numbers_go_on():
    returns = np.random.default_rng(1).normal(size=(5, 1))
    np.random.seed(1)
    expected = np.random.random()
    np.random.seed(1)
    first = scores.interquartile(returns)
    assert np.random.random() == expected
    assert scores.interquartile(returns) == first
    assert first[1] < first[0] < first[2]


def test_the_interquartile_mean_leaves_out_the_worst_and_the_best_quarter():
    middle, low, high = scores.interquartile(np.array([[-1000.0], [1.0], [3.0], [1000.0]]))
    assert middle == 2
    assert low < 2 < high


@pytest.mark.parametrize(
    "env", ["ALE/Breakout-v5", "BreakoutNoFrameskip-v4", "Breakout-v4", "ALE/Breakout"]
)
def test_a_humans_score_is_one_by_every_name_of_the_game(env):
    assert scores.human_share(env, 30.5) == 1
    assert scores.human_share("CartPole-v1", 3) is None


def test_the_table_has_a_row_for_all_games_where_runs_are_drawn_game_by_game(tmp_path):
    runs = []
    for env in ("ALE/Breakout-v5", "ALE/Pong-v5"):
        name = env[4:7]
        runs += [
            a_run(tmp_path / f"{name}{i}", 10.0 + i, env=env, seed=i, evaluated=0)
            for i in (1, 2, 3)
        ]
    lines = comparison.table(comparison.grouped(comparison.read(runs)[0]))
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "ALE/Breakout-v5",
        "ALE/Pong-v5",
        "2 games",
    ]
    assert "12.0 (11.0 to 13.0)" in lines[1]
    middle = (scores.human_share("ALE/Breakout-v5", 12) + scores.human_share("ALE/Pong-v5", 12)) / 2
    assert f"{middle:.2f} (" in lines[3]


@pytest.mark.parametrize("by", ["config", "seed"])
def test_the_picture_is_drawn_and_one_run_is_enough(tmp_path, by):
    runs = [a_run(tmp_path / "a", 30, seed=1), a_run(tmp_path / "b", 30, env="CartPole-v1")]
    curves, score = comparison.read(runs)
    comparison.draw(comparison.grouped(curves), score, by, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(IMAGE)
    assert "(one run)" in comparison.table(comparison.grouped(curves))[1]


def test_without_rliable_there_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "rliable", None)
    with pytest.raises(ConfigError, match=r'pip install "zapex\[plot\]"'):
        scores.interquartile(np.ones((3, 1)))


def test_settings_that_differ_are_found_whatever_the_versions(tmp_path):
    one = a_run(tmp_path / "one", 1, lr=1e-3)
    other = a_run(tmp_path / "other", 1, lr=5e-4)
    text = (other / "config.toml").read_text() + "\n[newer]\nswitch = true\n"
    (other / "config.toml").write_text(text)
    found = differences.differing([differences.settings_of(path) for path in (one, other)])
    assert found == {"lr": [1e-3, 5e-4], "switch": [differences.NONE, True]}
    assert differences.table(["one", "other"], found) == [
        "        one    other",
        "lr      0.001  0.0005",
        "switch  -      yes",
    ]
