"""The learning curve of a run as a picture, from its metrics.jsonl."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError
from zapex.recorders import read_metrics
from zapex.screen import count

CURVE_FILE: Final = "learning_curve.png"
_ALL, _GREEDY, _EVALUATED, _QUIET = "#9aa5b1", "#2f7ed8", "#1b9e5a", "#6b7280"

Points = NDArray[np.float64]  # (n, 2): minutes, return


def draw(
    run_dir: Path,
    out_png: Path | None = None,
    references: Mapping[str, float] | None = None,
    title: str = "",
) -> Path:
    """Draw returns over wall time, frames above; the path of the PNG.

    Args:
        run_dir: holds metrics.jsonl; every life of the run is drawn.
        out_png: learning_curve.png in `run_dir` where not given.
        references: name -> return of horizontal lines, for example "random" and "human".

    Raises:
        ConfigError: matplotlib is missing, or the run has stored no returns yet.
    """
    lines = list(read_metrics(run_dir))
    metrics = [line for line in lines if line.get("kind") in ("metrics", "final")]
    evaluations = [line for line in lines if line.get("kind") == "evaluation"]
    everyone = _points(metrics, "charts/episodic_return")
    greedy = _points(metrics, "charts/episodic_return_greedy")
    evaluated = _points(evaluations, "mean")
    if not len(everyone) and not len(evaluated):
        raise ConfigError(f"{run_dir} holds no returns yet: nothing to draw")
    try:
        from matplotlib.figure import Figure  # it takes a while: not where there is nothing to draw
    except ImportError:
        raise ConfigError('a learning curve needs matplotlib: pip install "zapex[plot]"') from None

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for name, value in (references or {}).items():
        axes.axhline(value, color=_QUIET, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"{name} {value:g}",
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=_QUIET,
        )
    for points, label, colour in (
        (everyone, "all streams", _ALL),
        (greedy, "greedy stream", _GREEDY),
    ):
        if len(points):
            axes.plot(*points.T, ".", color=colour, markersize=3, alpha=0.35, markeredgewidth=0)
            axes.plot(*_smooth(points).T, color=colour, linewidth=1.8, label=label)
    if len(evaluated):
        axes.errorbar(
            evaluated[:, 0],
            evaluated[:, 1],
            yerr=[line["std"] for line in evaluations],
            color=_EVALUATED,
            fmt="o-",
            markersize=4,
            linewidth=1,
            elinewidth=0.8,
            capsize=2,
            label="evaluation: mean and deviation",
        )
    ends = [line["wall_s"] / 60 for line in lines if "wall_s" in line]
    axes.set_xlim(0, max(ends))
    axes.set_xlabel("minutes")
    axes.set_ylabel("return of a game")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["right", "top"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    _frames_axis(axes, metrics)
    path = out_png or run_dir / CURVE_FILE
    figure.savefig(path)
    return path


def _points(lines: list[dict[str, Any]], name: str) -> Points:
    pairs = [(line["wall_s"] / 60, line[name]) for line in lines if name in line]
    return np.array(sorted(pairs), np.float64).reshape(-1, 2)


def _smooth(points: Points) -> Points:
    """Mean over the last twentieth of the run, at least of five points where there are so many."""
    minutes, values = points.T
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(points))
    window = (minutes[-1] - minutes[0]) / 20
    first = np.minimum(np.searchsorted(minutes, minutes - window), np.maximum(index - 4, 0))
    means = (sums[index + 1] - sums[first]) / (index + 1 - first)
    return np.column_stack([minutes, means])


def _frames_axis(axes: Any, metrics: list[dict[str, Any]]) -> None:
    """Frames along the top, where the run had played them: speed is not constant."""
    minutes = [line["wall_s"] / 60 for line in metrics]
    frames = [line["frames"] for line in metrics]
    if not frames or frames[-1] <= 0:
        return
    step = 10 ** math.floor(math.log10(frames[-1]))
    step = next(step * m for m in (0.1, 0.2, 0.5, 1, 2) if frames[-1] / (step * m) <= 6)
    ticks = np.arange(step, frames[-1] + 1, step)
    top = axes.secondary_xaxis("top")
    top.set_xticks(
        np.interp(ticks, frames, minutes), [count(tick).replace(".00", "") for tick in ticks]
    )
    top.set_xlabel("frames", fontsize=8, color=_QUIET)
    top.tick_params(labelsize=8, colors=_QUIET, length=2)
    top.spines["top"].set_visible(False)
