"""Runs compared by settings, scores and curves; the picture of one run."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support import fake_run
from zapex.config.settings import Config
from zapex.envs.scores import human_share
from zapex.errors import ConfigError
from zapex.watch import curves
from zapex.watch.recorders import JsonLines

PNG = b"\x89PNG\r\n\x1a\n"


def a_run(
    path: Path, score: float, evaluated: int = 3, env: str = "ALE/Breakout-v5", **settings: object
) -> Path:
    """A run whose score rises to `score`."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(Config().replace(env=env, **settings).to_toml())
    lines = []
    for i in range(1, 21):
        at = {"wall_s": 60.0 * i, "frames": 1000 * i}
        lines.append({"kind": "metrics", **at, "charts/episodic_return_last100": score * i / 20})
        if i > 20 - evaluated:
            lines.append({"kind": "evaluation", **at, "mean": 2 * score * i / 20, "std": 1.0})
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return path


def test_runs_that_differ_only_in_their_seed_form_a_group(tmp_path):
    runs = [
        a_run(tmp_path / "a1", 30, seed=1, lr=1e-3, max_minutes=3.0),
        a_run(tmp_path / "a2", 32, seed=2, lr=1e-3, run_dir="elsewhere"),
        a_run(tmp_path / "b1", 20, seed=1, lr=1e-4),
        a_run(tmp_path / "pong", 20, seed=1, lr=1e-4, env="ALE/Pong-v5"),
    ]
    groups = curves.grouped(curves.read(runs)[0])
    assert {e: {text: len(c) for text, c in g.items()} for e, g in groups.items()} == {
        "ALE/Breakout-v5": {"lr 0.001": 2, "lr 0.0001": 1},
        "ALE/Pong-v5": {"lr 0.0001": 1},
    }
    runs = [a_run(tmp_path / name, 30, exp=name) for name in ("mine", "yours")]
    (configs,) = curves.grouped(curves.read(runs)[0]).values()
    assert list(configs) == ["exp mine", "exp yours"]


def test_evaluations_are_compared_if_every_run_has_two_and_otherwise_training(tmp_path):
    two = a_run(tmp_path / "two", 30, evaluated=2)
    one = a_run(tmp_path / "one", 30, evaluated=1)
    found, score, _ = curves.read([two])
    assert (score, found[0].score, len(found[0].points)) == ("evaluation", 60.0, 2)
    found, score, _ = curves.read([two, one])
    assert (score, found[0].score, len(found[0].points)) == ("training", 30.0, 20)
    none = a_run(tmp_path / "none", 30, evaluated=0)
    with pytest.raises(ConfigError, match=str(none)):
        curves.read([none], "evaluation")


def test_intervals_are_those_of_a_naive_bootstrap_and_the_same_each_time():
    rng = np.random.default_rng(1)
    returns = rng.normal(5, 2, (8, 3))
    naive = np.percentile(
        returns[rng.integers(0, 8, (20_000, 8))].mean(axis=1), [2.5, 97.5], axis=0
    )
    mean, *ends = curves.mean(returns)
    assert mean == pytest.approx(returns.mean(axis=0))
    assert np.array(ends) == pytest.approx(naive, abs=0.15)
    middle, low, high = curves.interquartile(returns)
    assert low < middle < high
    assert curves.interquartile(returns) == (middle, low, high)


def test_the_interquartile_mean_ignores_the_worst_and_the_best_quarter():
    middle, low, high = curves.interquartile(np.array([[-1000.0], [1.0], [3.0], [1000.0]]))
    assert middle == 2
    assert low < 2 < high
    assert curves.interquartile(np.array([[7.0]])) == (7, 7, 7)


def test_each_game_is_resampled_separately():
    """Two games whose runs always sum to 0: joint resampling would give an interval of 0."""
    runs = np.linspace(-1, 1, 6)
    _, low, high = curves.interquartile(np.stack([runs, -runs], axis=1))
    assert low < -0.05
    assert high > 0.05


@pytest.mark.parametrize(
    "env", ["ALE/Breakout-v5", "BreakoutNoFrameskip-v4", "Breakout-v4", "ALE/Breakout"]
)
def test_a_humans_score_is_one_by_every_name_of_the_game(env):
    assert human_share(env, 30.5) == 1
    assert human_share("CartPole-v1", 3) is None


def test_the_table_has_a_row_for_each_game_and_one_for_all(tmp_path):
    runs = [
        a_run(tmp_path / f"{env}{i}", 10.0 + i, env=f"ALE/{env}-v5", seed=i, evaluated=0)
        for env in ("Breakout", "Pong")
        for i in (1, 2, 3)
    ]
    lines = curves.score_table(curves.grouped(curves.read(runs)[0]))[1:]
    assert [line.split("  ")[0] for line in lines] == ["ALE/Breakout-v5", "ALE/Pong-v5", "2 games"]
    assert "12.0 (11.0 to 13.0)" in lines[0]
    middle = (human_share("ALE/Breakout-v5", 12) + human_share("ALE/Pong-v5", 12)) / 2
    assert f"{middle:.2f} (" in lines[2]


@pytest.mark.parametrize("by", ["config", "seed"])
def test_one_run_is_enough_for_a_picture(tmp_path, by):
    runs = [a_run(tmp_path / "a", 30, seed=1), a_run(tmp_path / "b", 30, env="CartPole-v1")]
    found, score, _ = curves.read(runs)
    groups = curves.grouped(found)
    curves.draw_runs(groups, score, by, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)
    assert "60.0 (one run)" in curves.score_table(groups)[1]


def test_settings_of_different_versions_are_compared(tmp_path):
    one = a_run(tmp_path / "one", 1, lr=1e-3)
    other = a_run(tmp_path / "other", 1, lr=5e-4)
    text = (other / "config.toml").read_text() + "\n[newer]\nswitch = true\n"
    (other / "config.toml").write_text(text)
    found = curves.differing([curves.settings_of(path) for path in (one, other)])
    assert found == {"lr": [1e-3, 5e-4], "switch": [curves.MISSING, True]}
    assert [line.split() for line in curves.settings_table(["one", "other"], found)] == [
        ["one", "other"],
        ["lr", "0.001", "0.0005"],
        ["switch", "-", "yes"],
    ]


def test_a_run_becomes_a_png_in_its_directory(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        curves.draw_run(tmp_path)  # no returns
    fake_run.record([JsonLines(tmp_path)], 300, tmp_path)
    path = curves.draw_run(tmp_path, {"random": 1.7, "human": 30.5}, "ALE/Breakout-v5")
    assert path == tmp_path / "learning_curve.png"
    assert path.read_bytes().startswith(PNG)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        curves.draw_run(tmp_path)


def test_smoothing_is_the_mean_of_the_last_twentieth_of_the_run():
    minutes = np.arange(201.0)
    values = np.random.default_rng(0).normal(size=201)
    smoothed = curves.smooth(np.column_stack([minutes, values]))
    expected = [values[max(0, i - 10) : i + 1].mean() for i in range(201)]
    np.testing.assert_allclose(smoothed[:, 1], expected)
    np.testing.assert_array_equal(smoothed[:, 0], minutes)


def drawn(run_dir: Path, returns: list[float], monkeypatch: pytest.MonkeyPatch) -> dict[str, list]:
    """Label -> values of the lines in the picture of a run with a return each second."""
    lines = [
        {"kind": "metrics", "wall_s": float(i), "frames": 10 * i, "charts/episodic_return": x}
        for i, x in enumerate(returns, 1)
    ]
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    figures, make = [], curves._figure
    monkeypatch.setattr(curves, "_figure", lambda **x: figures.append(make(**x)) or figures[-1])
    curves.draw_run(run_dir)
    return {line.get_label(): list(line.get_ydata()) for line in figures[0].axes[0].lines}


def test_a_short_run_is_drawn_as_it_was_and_a_long_one_smoothed(tmp_path, monkeypatch):
    returns = [-0.10, 0.85, 0.90]
    assert drawn(tmp_path, returns, monkeypatch)["all streams, while learning"] == returns
    long = drawn(tmp_path, list(np.arange(100.0)), monkeypatch)
    assert long["all streams, while learning: running mean"][-1] == 97


def test_a_curve_is_never_drawn_through_a_link(tmp_path):
    run = a_run(tmp_path / "run", 30)
    fake_run.record([JsonLines(run)], 60, run)
    (run / curves.CURVE_FILE).symlink_to(tmp_path / "new")
    (run / f".{curves.CURVE_FILE}").symlink_to(tmp_path / "new")
    curves.draw_run(run)
    assert not (tmp_path / "new").exists()


def test_a_run_without_a_finished_game_is_left_out(tmp_path):
    played, new = a_run(tmp_path / "played", 30), tmp_path / "new"
    new.mkdir()
    (new / "config.toml").write_text(Config().to_toml())
    found, score, left_out = curves.read([played, new])
    assert ([curve.path for curve in found], score, left_out) == ([played], "evaluation", [new])
