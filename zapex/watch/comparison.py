"""Runs beside each other: curves over wall time and frames, and scores with their intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError
from zapex.watch import scores
from zapex.watch.differences import Settings, settings_of, shown, what_is_learned
from zapex.watch.recorders import read_metrics
from zapex.watch.screen import count, number

SCORES: Final = {
    "evaluation": "return of an evaluation",
    "training": "return of the last 100 games of all streams",
    "greedy": "return of the last 10 games of the greediest stream",
}
"""What is compared -> its words."""
_TAGS: Final = {
    "evaluation": "mean",
    "training": "charts/episodic_return_last100",
    "greedy": "charts/episodic_return_greedy_last10",
}
_POINTS: Final = 200
_AXES: Final = ("minutes", "frames")
_QUIET: Final = "#6b7280"


@dataclass(frozen=True)
class Curve:
    """One run. points: (n, 3), minutes, frames and score, in the order of time."""

    path: Path
    settings: Settings
    points: NDArray[np.float64]

    @property
    def env(self) -> str:
        return str(self.settings.get("env", {}).get("env", ""))

    @property
    def seed(self) -> str:
        return str(self.settings.get("run", {}).get("seed", ""))

    @property
    def score(self) -> float:
        """The last one."""
        return float(self.points[-1, 2])

    def at(self, axis: int, places: NDArray[np.float64]) -> NDArray[np.float64]:
        """The score at minutes (axis 0) or frames (axis 1)."""
        found: NDArray[np.float64] = np.interp(places, self.points[:, axis], self.points[:, 2])
        return found


Groups = Mapping[str, Mapping[str, Sequence[Curve]]]
"""Environment -> configuration, in words -> its runs, which differ in their seed."""


def read(runs: Sequence[Path], score: str = "auto") -> tuple[list[Curve], str]:
    """The curves of runs, and of which of SCORES.

    auto: evaluations if every run has two of them, otherwise training.

    Raises:
        ConfigError: a run has no such scores.
    """
    lines = {path: list(read_metrics(path)) for path in runs}
    if score == "auto":
        each = [sum(x.get("kind") == "evaluation" for x in lines[path]) for path in runs]
        score = "evaluation" if min(each, default=0) >= 2 else "training"
    curves = []
    for path in runs:
        wanted = {"evaluation"} if score == "evaluation" else {"metrics", "final"}
        rows = [
            (line["wall_s"] / 60, line["frames"], line[_TAGS[score]])
            for line in lines[path]
            if line.get("kind") in wanted and _TAGS[score] in line
        ]
        if not rows:
            raise ConfigError(f"{path} has stored no {SCORES[score]}: leave it out")
        points = np.array(sorted(rows), np.float64)
        curves.append(Curve(path, settings_of(path), points))
    return curves, score


def grouped(curves: Sequence[Curve]) -> Groups:
    """Runs that differ in nothing but their seed, together."""
    learned = [what_is_learned(curve.settings) for curve in curves]
    names = dict.fromkeys(name for one in learned for name in one if name not in ("env", "seed"))
    said = [n for n in names if any(one.get(n) != learned[0].get(n) for one in learned)]
    found: dict[str, dict[str, list[Curve]]] = {}
    for curve, one in zip(curves, learned, strict=True):
        words = ", ".join(f"{name} {shown(one.get(name, '-'))}" for name in said) or "all"
        found.setdefault(curve.env, {}).setdefault(words, []).append(curve)
    return found


def table(groups: Groups) -> list[str]:
    """Lines of text: of each environment and configuration the score at the end of its runs."""
    rows = [["environment", "runs", "frames", "mean (95 %)", "IQM (95 %)", "human = 1", "settings"]]
    for env, configs in groups.items():
        for words, curves in configs.items():
            last = np.array([[curve.score] for curve in curves])
            middle = scores.interquartile(last)
            mean = tuple(float(x[0]) for x in scores.mean(last))
            share = _human(env, middle)
            frames = count(float(np.mean([curve.points[-1, 1] for curve in curves])))
            cells = [_interval(mean, len(curves)), _interval(middle, len(curves))]
            cells.append("-" if share is None else _interval(share, len(curves), 2))
            rows.append([env, str(len(curves)), frames, *cells, words])
    rows += _over_games(groups)
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)).rstrip()
        for row in rows
    ]


def _over_games(groups: Groups) -> list[list[str]]:
    """A row for each configuration that has played several games whose human score is known."""
    rows = []
    every = dict.fromkeys(words for configs in groups.values() for words in configs)
    for words in every:
        shares = [
            [scores.human_share(env, curve.score) for curve in configs[words]]
            for env, configs in groups.items()
            if words in configs
        ]
        known = [[x for x in one if x is not None] for one in shares]
        if len(known) < 2 or not all(known):
            continue
        runs = min(map(len, known))  # rliable takes as many of each game
        found = scores.interquartile(np.array([one[:runs] for one in known]).T)
        cells = [f"{len(known)} games", str(runs), "", "", "", _interval(found, 2, 2)]
        rows.append([*cells, words])
    return rows


def _human(env: str, values: tuple[float, float, float]) -> tuple[float, float, float] | None:
    first, low, high = (scores.human_share(env, value) for value in values)
    return None if first is None or low is None or high is None else (first, low, high)


def _interval(values: Sequence[float], runs: int, decimals: int = -1) -> str:
    texts = [number(x) if decimals < 0 else f"{x:.{decimals}f}" for x in values]
    return f"{texts[0]} ({texts[1]} to {texts[2]})" if runs > 1 else f"{texts[0]} (one run)"


def draw(groups: Groups, score: str, by: str, path: Path) -> None:
    """A row of panels for each environment: over minutes, over frames, and the scores at the end.

    by: "config" draws the mean of each configuration with its interval, "seed" every run.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(13, 3.9 * len(groups)), dpi=120, layout="constrained")
    rows = figure.subplots(len(groups), 3, squeeze=False, width_ratios=(3, 3, 2))
    for panels, (env, configs) in zip(rows, groups.items(), strict=True):
        for axis, panel in enumerate(panels[:2]):
            for i, (words, curves) in enumerate(configs.items()):
                lines = _each if by == "seed" else _together
                lines(panel, curves, axis, words, f"C{i % 10}")
            panel.set(xlabel=_AXES[axis], title=env if axis == 0 else "")
            panel.set_xlim(left=0)
        panels[1].xaxis.set_major_formatter(EngFormatter(sep=""))
        panels[0].set_ylabel(SCORES[score], fontsize=9)
        panels[0].legend(loc="best", fontsize=8, framealpha=0.9, edgecolor="none")
        _ends(panels[2], env, configs)
        for panel in panels:
            panel.grid(axis="y" if panel is not panels[2] else "x", linewidth=0.4, alpha=0.5)
            panel.spines[["right", "top"]].set_visible(False)
    figure.savefig(path)


def _together(panel: Any, curves: Sequence[Curve], axis: int, words: str, colour: str) -> None:
    """The mean of runs while all of them have one, and its interval."""
    first = max(curve.points[0, axis] for curve in curves)
    last = min(curve.points[-1, axis] for curve in curves)
    places = np.linspace(min(first, last), last, _POINTS)
    mean, low, high = scores.mean(np.array([curve.at(axis, places) for curve in curves]))
    label = f"{words} ({len(curves)} run{'s' if len(curves) > 1 else ''})"
    panel.plot(places, mean, color=colour, linewidth=1.8, label=label)
    panel.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)


def _each(panel: Any, curves: Sequence[Curve], axis: int, words: str, colour: str) -> None:
    styles = ("-", "--", ":", "-.")
    for i, curve in enumerate(curves):
        panel.plot(
            curve.points[:, axis], curve.points[:, 2], styles[i % 4], color=colour, linewidth=1.2,
            label=f"{words}, seed {curve.seed}",
        )  # fmt: skip


def _ends(panel: Any, env: str, configs: Mapping[str, Sequence[Curve]]) -> None:
    """Interquartile means with their intervals, and along the top the share of a human's score."""
    for i, curves in enumerate(configs.values()):
        ends = np.array([[curve.score] for curve in curves])
        middle, low, high = scores.interquartile(ends)
        panel.plot(ends[:, 0], np.full(len(ends), i), "o", color=f"C{i % 10}", alpha=0.35, ms=4)
        panel.plot([low, high], [i, i], color=f"C{i % 10}", linewidth=3, solid_capstyle="butt")
        panel.plot(middle, i, "D", color=f"C{i % 10}", markersize=7)
    panel.set_yticks(range(len(configs)), [""] * len(configs))
    panel.set_ylim(len(configs) - 0.5, -0.5)
    panel.set_xlabel("score at the end: interquartile mean, 95 %", fontsize=9)
    zero, one = scores.human_share(env, 0.0), scores.human_share(env, 1.0)
    if zero is not None and one is not None and not math.isclose(zero, one):
        slope = one - zero
        top = panel.secondary_xaxis(
            "top", functions=(lambda x: zero + slope * x, lambda y: (y - zero) / slope)
        )
        top.set_xlabel("random = 0, human = 1", fontsize=8, color=_QUIET)
        top.tick_params(labelsize=8, colors=_QUIET)
        top.spines["top"].set_visible(False)
