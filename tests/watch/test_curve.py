"""The learning curve as a picture."""

import sys

import numpy as np
import pytest

from tests.support import fake_run
from zapex.errors import ConfigError
from zapex.watch.curve import draw, smooth
from zapex.watch.recorders import JsonLines


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    fake_run.record([JsonLines(path)], 300, path)
    return path


def test_a_run_becomes_a_png_in_its_directory(run_dir):
    pytest.importorskip("matplotlib")
    path = draw(run_dir, references={"random": 1.7, "human": 30.5}, title="ALE/Breakout-v5")
    assert path == run_dir / "learning_curve.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_the_message_says_what_to_install(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        draw(run_dir)


def test_a_run_without_returns_has_nothing_to_draw(tmp_path):
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw(tmp_path)


def test_smoothing_is_the_mean_of_the_last_twentieth_of_the_run():
    minutes = np.arange(201.0)
    values = np.random.default_rng(0).normal(size=201)
    smoothed = smooth(np.column_stack([minutes, values]))
    expected = [values[max(0, i - 10) : i + 1].mean() for i in range(201)]
    np.testing.assert_allclose(smoothed[:, 1], expected)
    np.testing.assert_array_equal(smoothed[:, 0], minutes)


def test_few_points_are_smoothed_over_five_of_them():
    points = np.column_stack([np.arange(8.0), np.arange(8.0)])
    assert smooth(points)[-1, 1] == 5
    assert smooth(points[:1]).tolist() == [[0, 0]]
