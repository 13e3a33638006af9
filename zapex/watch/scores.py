"""Scores over seeds and games: means and interquartile means with 95 % intervals, by rliable."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.envs.atari_scores import RANDOM_AND_HUMAN
from zapex.errors import ConfigError

_RESAMPLES = 2_000
Interval = tuple[Any, Any, Any]  # point, low, high: floats, or arrays of one shape


def interquartile(returns: NDArray[np.float64]) -> tuple[float, float, float]:
    """The interquartile mean of (runs, games), and its 95 % interval by stratified bootstrap.

    Games are the strata and runs are drawn, as rliable does with (runs, tasks). Raises ConfigError
    where rliable is missing.
    """
    from_rliable = _rliable()[1]
    point, low, high = _estimate(returns, lambda x: np.array([from_rliable.aggregate_iqm(x)]))
    return float(point[0]), float(low[0]), float(high[0])


def mean(curves: NDArray[np.float64]) -> Interval:
    """The mean of (runs, points) at each point, and its 95 % interval: arrays (points,)."""
    if len(curves) == 1:
        return curves[0], curves[0], curves[0]
    return _estimate(curves[:, None], lambda x: x.mean((0, 1)))


def _estimate(
    scores: NDArray[np.float64], aggregate: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> Interval:
    library, _ = _rliable()
    # rliable 1.2 draws from numpy's global generator, whatever `random_state` it is given.
    before = np.random.get_state()
    np.random.seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of a package that rliable uses
            point, interval = library.get_interval_estimates(
                {"one": scores}, aggregate, reps=_RESAMPLES
            )
    finally:
        np.random.set_state(before)
    low, high = interval["one"]
    return point["one"], low, high


def _rliable() -> tuple[Any, Any]:
    try:
        from rliable import library, metrics
    except ImportError:
        raise ConfigError(
            'scores over seeds are computed by rliable: pip install "zapex[plot]"'
        ) from None
    return library, metrics


def human_share(env: str, score: float) -> float | None:
    """(score - random) / (human - random); None where these are not known."""
    game = env.rpartition("/")[2].partition("-")[0].removesuffix("NoFrameskip")
    snake = "".join("_" + c.lower() if c.isupper() else c for c in game).lstrip("_")
    known = RANDOM_AND_HUMAN.get(snake)
    return None if known is None else (score - known[0]) / (known[1] - known[0])
