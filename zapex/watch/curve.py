"""The learning curve of a run as a picture, from its metrics.jsonl."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError
from zapex.watch.recorders import read_metrics
from zapex.watch.screen import count, number

CURVE_FILE: Final = "learning_curve.png"
_ALL, _GREEDY, _EVALUATED, _QUIET = "#9aa5b1", "#2f7ed8", "#1b9e5a", "#6b7280"

Points = NDArray[np.float64]  # (n, 2): minutes, return


def draw(
    run_dir: Path,
    references: Mapping[str, float] | None = None,
    title: str = "",
) -> Path:
    """Draw returns over wall time, with frames along the top. Returns the path of the PNG.

    Args:
        run_dir: holds metrics.jsonl; every session of the run is drawn.
        references: name -> return of horizontal lines, for example "random" and "human".

    Raises:
        ConfigError: matplotlib is missing, or the run has stored no returns.
    """
    lines = list(read_metrics(run_dir))
    metrics = [line for line in lines if line.get("kind") in ("metrics", "final")]
    evaluations = [line for line in lines if line.get("kind") == "evaluation"]
    streams = {
        "all streams": (_points(metrics, "charts/episodic_return"), _ALL),
        "greediest stream": (_points(metrics, "charts/episodic_return_greedy"), _GREEDY),
    }
    if not evaluations and not len(streams["all streams"][0]):
        raise ConfigError(f"{run_dir} holds no returns yet: nothing to draw")
    try:
        from matplotlib.figure import Figure  # slow to import, so not before it is needed
    except ImportError:
        raise ConfigError("a learning curve needs matplotlib: pip install matplotlib") from None

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for name, value in (references or {}).items():
        _reference_line(axes, name, value)
    for label, (points, colour) in streams.items():
        if len(points):
            axes.plot(*points.T, ".", color=colour, markersize=3, alpha=0.35, markeredgewidth=0)
            mean = f"{label}: running mean of games while it learns"
            axes.plot(*smooth(points).T, color=colour, linewidth=1.8, label=mean)
    if evaluations:
        _draw_evaluations(axes, evaluations)
    axes.set_xlim(0, max(line["wall_s"] / 60 for line in lines if "wall_s" in line))
    axes.set_xlabel("minutes")
    axes.set_ylabel("return of a game")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["right", "top"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.legend(loc="upper left", fontsize=8, framealpha=0.9, edgecolor="none")
    _frames_axis(axes, metrics)
    path = run_dir / CURVE_FILE
    figure.savefig(path)
    return path


def _draw_evaluations(axes: Any, evaluations: list[dict[str, Any]]) -> None:
    """Points without lines between them: nothing was measured there. The last one has its value."""
    points = _points(evaluations, "mean")
    axes.errorbar(
        *points.T, yerr=[line["std"] for line in evaluations], fmt="o", color=_EVALUATED,
        markersize=5, elinewidth=0.8, capsize=2, label="evaluation, greedy: mean and deviation",
    )  # fmt: skip
    minutes, mean = points[-1]
    axes.annotate(
        number(mean), (minutes, mean + evaluations[-1]["std"]), xytext=(0, 4),
        textcoords="offset points", ha="center", va="bottom", fontsize=8, fontweight="bold",
        color=_EVALUATED,
    )  # fmt: skip


def _reference_line(axes: Any, name: str, value: float) -> None:
    axes.axhline(value, color=_QUIET, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"{name} {value:g}", (1, value), xycoords=("axes fraction", "data"), xytext=(4, 0),
        textcoords="offset points", va="center", fontsize=8, color=_QUIET,
    )  # fmt: skip


def _points(lines: list[dict[str, Any]], name: str) -> Points:
    pairs = [(line["wall_s"] / 60, line[name]) for line in lines if name in line]
    return np.array(sorted(pairs), np.float64).reshape(-1, 2)


def smooth(points: Points) -> Points:
    """Mean over the last twentieth of the run, but over at least five points if there are five."""
    minutes, values = points.T
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(points))
    window = (minutes[-1] - minutes[0]) / 20
    first = np.minimum(np.searchsorted(minutes, minutes - window), np.maximum(index - 4, 0))
    means = (sums[index + 1] - sums[first]) / (index + 1 - first)
    return np.column_stack([minutes, means])


def _frames_axis(axes: Any, metrics: list[dict[str, Any]]) -> None:
    """Frames along the top, at the time when they were played: speed is not constant."""
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
