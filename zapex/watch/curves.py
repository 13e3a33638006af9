"""Learning curves: the picture of one run, and runs compared by settings, scores and curves."""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zapex.envs.scores import human_share
from zapex.errors import ConfigError
from zapex.watch.recorders import read_metrics
from zapex.watch.runs import SETTINGS_FILE
from zapex.watch.terminal import count, in_columns, number

CURVE_FILE: Final = "learning_curve.png"
SCORES: Final = {
    "evaluation": "mean return of an evaluation",
    "training": "mean return of the last 100 games of all streams",
    "greedy": "mean return of the last 10 games of the greediest stream",
}
"""What runs are compared by, and how a legend names it."""
_TAGS: Final = {
    "evaluation": "mean",
    "training": "charts/episodic_return_last100",
    "greedy": "charts/episodic_return_greedy_last10",
}
MISSING: Final = "-"
"""In place of a setting that a run does not have, for example because it is of another version."""
_NOT_LEARNED_FROM: Final = {"run", "slurm", "kubernetes", "ray", "eval_period_s"}  # tables and keys
_RESAMPLES: Final = 2_000
_POINTS: Final = 200
_ALL, _GREEDY, _EVALUATED, _QUIET = "#9aa5b1", "#2f7ed8", "#1b9e5a", "#6b7280"

Floats = NDArray[np.float64]
Settings = Mapping[str, Mapping[str, Any]]
"""The tables of a settings file: table -> key -> value."""
Interval = tuple[Any, Any, Any]
"""A value and the ends of its 95 % interval: floats, or arrays of one shape."""


# The settings of runs


def settings_of(path: Path) -> Settings:
    """The settings of a run's directory, or of a settings file of any version.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = path / SETTINGS_FILE if path.is_dir() else path
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as settings: {error}") from None
    return {name: table for name, table in tables.items() if isinstance(table, dict)}


def differing(runs: Sequence[Settings]) -> dict[str, list[Any]]:
    """The settings that differ: name -> the value of each run."""
    flat = [{key: x for table in one.values() for key, x in table.items()} for one in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    found = {name: [one.get(name, MISSING) for one in flat] for name in names}
    return {name: values for name, values in found.items() if any(x != values[0] for x in values)}


def settings_table(runs: Sequence[str], found: Mapping[str, Sequence[Any]]) -> list[str]:
    """What `differing` found as lines of text, with a column for each run."""
    return in_columns([["", *runs], *([name, *map(_shown, xs)] for name, xs in found.items())])


def _learned_from(settings: Settings) -> dict[str, Any]:
    """The settings that influence what is learned, and the experiment's name; without the seed."""
    found = {
        key: value
        for name, table in settings.items()
        for key, value in table.items()
        if not {name, key} & _NOT_LEARNED_FROM
    }
    return {"exp": settings.get("run", {}).get("exp", MISSING), **found}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


# The scores of runs


@dataclass(frozen=True)
class Curve:
    """The scores of one run. points: (n, 3) of minutes, frames and score, in order of time."""

    path: Path
    settings: Settings
    points: Floats

    @property
    def score(self) -> float:
        """The last score."""
        return float(self.points[-1, 2])


Groups = Mapping[str, Mapping[str, Sequence[Curve]]]
"""Environment -> configuration as text -> its runs, which differ only in their seed."""


def read(runs: Sequence[Path], score: str = "auto") -> tuple[list[Curve], str]:
    """The curves of runs, and which of SCORES they show.

    Args:
        runs: directories of runs.
        score: one of SCORES; "auto": evaluations if every run has at least two, else training.

    Raises:
        ConfigError: a run has no such scores.
    """
    lines = {path: list(read_metrics(path)) for path in runs}
    if score == "auto":
        evaluated = [sum(x.get("kind") == "evaluation" for x in lines[path]) for path in runs]
        score = "evaluation" if min(evaluated, default=0) >= 2 else "training"
    kinds, tag = {"evaluation"} if score == "evaluation" else {"metrics", "final"}, _TAGS[score]
    curves = []
    for path in runs:
        points = [
            (line["wall_s"] / 60, line["frames"], line[tag])
            for line in lines[path]
            if line.get("kind") in kinds and tag in line
        ]
        if not points:
            raise ConfigError(f"{path} has stored no {SCORES[score]}: leave it out")
        curves.append(Curve(path, settings_of(path), np.array(sorted(points), np.float64)))
    return curves, score


def grouped(curves: Sequence[Curve]) -> Groups:
    """Curves by environment, and by the settings in which they differ, without the seed."""
    learned = [_learned_from(curve.settings) for curve in curves]
    names = dict.fromkeys(name for one in learned for name in one if name not in ("env", "seed"))
    named = [n for n in names if any(one.get(n) != learned[0].get(n) for one in learned)]
    found: dict[str, dict[str, list[Curve]]] = {}
    for curve, one in zip(curves, learned, strict=True):
        text = ", ".join(f"{name} {_shown(one.get(name, MISSING))}" for name in named) or "all"
        found.setdefault(str(one.get("env", "")), {}).setdefault(text, []).append(curve)
    return found


def mean(curves: Floats) -> Interval:
    """The mean of (runs, points) at each point, with the interval of a bootstrap over runs."""
    return _bootstrapped(curves, lambda drawn: drawn.mean(axis=0))


def interquartile(returns: Floats) -> Interval:
    """The interquartile mean of (runs, games), with a bootstrap interval.

    The bootstrap is stratified: it draws runs of each game separately, as rliable does (Agarwal et
    al. 2021, "Deep reinforcement learning at the edge of the statistical precipice").
    """

    def middle(drawn: Floats) -> Any:
        ordered, cut = np.sort(drawn, axis=None), drawn.size // 4
        return ordered[cut : drawn.size - cut].mean()

    return _bootstrapped(returns, middle, stratified=True)


def _bootstrapped(
    values: Floats, estimate: Callable[[Floats], Any], stratified: bool = False
) -> Interval:
    """`estimate(values)` and its 95 % percentile interval over resampled runs, the first axis."""
    rng = np.random.default_rng(0)
    runs, columns = values.shape
    shape = (_RESAMPLES, runs, columns if stratified else 1)
    drawn = rng.integers(0, runs, shape) if runs > 1 else np.zeros((1, *shape[1:]), np.int64)
    estimates = [estimate(np.take_along_axis(values, rows, axis=0)) for rows in drawn]
    low, high = np.percentile(estimates, [2.5, 97.5], axis=0)
    return estimate(values), low, high


def score_table(groups: Groups) -> list[str]:
    """Lines of text: the score at the end of the runs of each environment and configuration."""
    rows = [["environment", "runs", "frames", "mean (95 %)", "IQM (95 %)", "human = 1", "settings"]]
    shares: dict[str, list[list[float]]] = {}  # configuration -> of each game, its runs' shares
    for env, configs in groups.items():
        for text, curves in configs.items():
            last = np.array([[curve.score] for curve in curves])
            several, middle = len(curves) > 1, interquartile(last)
            human = [share for x in middle if (share := human_share(env, x)) is not None]
            cells = [count(float(np.mean([curve.points[-1, 1] for curve in curves])))]
            cells.append(_interval([float(x[0]) for x in mean(last)], several, number))
            cells.append(_interval(middle, several, number))
            cells.append(_interval(human, several, "{:.2f}".format) if human else "-")
            rows.append([env, str(len(curves)), *cells, text])
            if human:
                shares.setdefault(text, []).append(
                    [human_share(env, curve.score) or 0.0 for curve in curves]
                )
    for text, games in shares.items():
        if len(games) > 1:
            runs = min(map(len, games))  # as many runs of each game
            middle = interquartile(np.array([game[:runs] for game in games]).T)
            cells = ["", "", "", _interval(middle, True, "{:.2f}".format)]
            rows.append([f"{len(games)} games", str(runs), *cells, text])
    return in_columns(rows)


def _interval(values: Sequence[float], several: bool, form: Callable[[float], str]) -> str:
    value, low, high = map(form, values)
    return f"{value} ({low} to {high})" if several else f"{value} (one run)"


# Pictures


def draw_runs(groups: Groups, score: str, by: str, path: Path) -> None:
    """Draw three panels for each environment: over minutes, over frames, scores at the end.

    Args:
        groups: the runs, as `grouped` returns them.
        score: which of SCORES the curves show.
        by: "config" draws the mean of each configuration with its interval, "seed" every run.
        path: of the picture.

    Raises:
        ConfigError: matplotlib is missing.
    """
    figure = _figure(figsize=(13, 3.9 * len(groups)), dpi=120)
    from matplotlib.ticker import EngFormatter

    rows = figure.subplots(len(groups), 3, squeeze=False, width_ratios=(3, 3, 2))
    for panels, (env, configs) in zip(rows, groups.items(), strict=True):
        for axis, panel in enumerate(panels[:2]):
            for i, (text, curves) in enumerate(configs.items()):
                draw = _draw_each if by == "seed" else _draw_mean
                draw(panel, curves, axis, text, f"C{i % 10}")
            _plain_frame(panel)
            panel.set_xlim(left=0)
        panels[0].set(xlabel="minutes", title=env)
        panels[0].set_ylabel(SCORES[score], fontsize=9)
        panels[0].legend(loc="best", fontsize=8, framealpha=0.9, edgecolor="none")
        panels[1].set(xlabel="frames")
        panels[1].xaxis.set_major_formatter(EngFormatter(sep=""))
        _draw_ends(panels[2], env, configs)
    figure.savefig(path)


def _draw_mean(panel: Any, curves: Sequence[Curve], axis: int, text: str, colour: str) -> None:
    """The mean of runs, where all of them have a score, with its interval."""
    first = max(curve.points[0, axis] for curve in curves)
    last = min(curve.points[-1, axis] for curve in curves)
    places = np.linspace(min(first, last), last, _POINTS)
    each = [np.interp(places, curve.points[:, axis], curve.points[:, 2]) for curve in curves]
    middle, low, high = mean(np.array(each))
    label = f"{text} ({len(curves)} run{'s' if len(curves) > 1 else ''})"
    panel.plot(places, middle, color=colour, linewidth=1.8, label=label)
    panel.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)


def _draw_each(panel: Any, curves: Sequence[Curve], axis: int, text: str, colour: str) -> None:
    for i, curve in enumerate(curves):
        label = f"{text}, seed {curve.settings.get('run', {}).get('seed', '')}"
        style = {"color": colour, "linestyle": ("-", "--", ":", "-.")[i % 4], "linewidth": 1.2}
        panel.plot(curve.points[:, axis], curve.points[:, 2], label=label, **style)


def _draw_ends(panel: Any, env: str, configs: Mapping[str, Sequence[Curve]]) -> None:
    """Interquartile means with their intervals, and along the top the human-normalised score."""
    for i, curves in enumerate(configs.values()):
        colour, ends = f"C{i % 10}", np.array([[curve.score] for curve in curves])
        middle, low, high = interquartile(ends)
        panel.plot(ends[:, 0], np.full(len(ends), i), "o", color=colour, alpha=0.35, ms=4)
        panel.plot([low, high], [i, i], color=colour, linewidth=3, solid_capstyle="butt")
        panel.plot(middle, i, "D", color=colour, markersize=7)
    _plain_frame(panel, grid="x")
    panel.set_yticks(range(len(configs)), [""] * len(configs))
    panel.set_ylim(len(configs) - 0.5, -0.5)
    panel.set_xlabel("score at the end: interquartile mean, 95 %", fontsize=9)
    zero, one = human_share(env, 0.0), human_share(env, 1.0)
    if zero is not None and one is not None and not math.isclose(zero, one):
        slope = one - zero
        functions = (lambda x: zero + slope * x, lambda y: (y - zero) / slope)
        _style_top(panel.secondary_xaxis("top", functions=functions), "random = 0, human = 1")


def draw_run(run_dir: Path, references: Mapping[str, float] | None = None, title: str = "") -> Path:
    """Draw a run's returns over wall time, with frames along the top. Returns the path of the PNG.

    Args:
        run_dir: holds metrics.jsonl; every session of the run is drawn.
        references: name -> return of horizontal lines, for example "random" and "human".
        title: of the picture.

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
        raise ConfigError(f"{run_dir} has stored no returns yet: nothing to draw")
    figure = _figure(figsize=(8, 4.5), dpi=150)
    axes = figure.add_subplot()
    for name, value in (references or {}).items():
        axes.axhline(value, color=_QUIET, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        place = {"xycoords": ("axes fraction", "data"), "xytext": (4, 0), "va": "center"}
        _annotate(axes, f"{name} {value:g}", (1, value), color=_QUIET, **place)
    for label, (points, colour) in streams.items():
        if len(points):
            axes.plot(*points.T, ".", color=colour, markersize=3, alpha=0.35, markeredgewidth=0)
            mean = f"{label}, while learning: running mean"
            axes.plot(*smooth(points).T, color=colour, linewidth=1.8, label=mean)
    if evaluations:
        # No lines between the points: nothing was measured there. The last one has its value.
        points, spread = _points(evaluations, "mean"), [line["std"] for line in evaluations]
        style = {"color": _EVALUATED, "markersize": 5, "elinewidth": 0.8, "capsize": 2}
        label = "evaluation, greedy: mean ± standard deviation"
        axes.errorbar(*points.T, yerr=spread, fmt="o", label=label, **style)
        place = {"xytext": (0, 4), "ha": "center", "va": "bottom", "fontweight": "bold"}
        top = (points[-1, 0], points[-1, 1] + spread[-1])
        _annotate(axes, number(points[-1, 1]), top, color=_EVALUATED, **place)
    axes.set_xlim(0, max(line["wall_s"] / 60 for line in lines if "wall_s" in line))
    axes.set(xlabel="minutes", ylabel="return per game")
    axes.set_title(title, loc="left", fontsize=11)
    _plain_frame(axes)
    axes.legend(loc="upper left", fontsize=8, framealpha=0.9, edgecolor="none")
    if metrics and metrics[-1]["frames"] > 0:
        _draw_frames_axis(axes, metrics)
    path = run_dir / CURVE_FILE
    figure.savefig(path)
    return path


def smooth(points: Floats) -> Floats:
    """The running mean of (n, 2) points of minutes and value.

    It is over the last twentieth of the run, but over at least five points if there are five.
    """
    minutes, values = points.T
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(points))
    window = (minutes[-1] - minutes[0]) / 20
    first = np.minimum(np.searchsorted(minutes, minutes - window), np.maximum(index - 4, 0))
    means = (sums[index + 1] - sums[first]) / (index + 1 - first)
    return np.column_stack([minutes, means])


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> Floats:
    pairs = [(line["wall_s"] / 60, line[name]) for line in lines if name in line]
    return np.array(sorted(pairs), np.float64).reshape(-1, 2)


def _draw_frames_axis(axes: Any, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Frames along the top, at the time when they were played: speed is not constant."""
    minutes, frames = (
        [line["wall_s"] / 60 for line in metrics],
        [line["frames"] for line in metrics],
    )
    step = 10 ** math.floor(math.log10(frames[-1]))
    step = next(step * m for m in (0.1, 0.2, 0.5, 1, 2) if frames[-1] / (step * m) <= 6)
    ticks = np.arange(step, frames[-1] + 1, step)
    top = axes.secondary_xaxis("top")
    labels = [count(tick).replace(".00", "") for tick in ticks]
    top.set_xticks(np.interp(ticks, frames, minutes), labels)
    _style_top(top, "frames")


def _figure(**options: Any) -> Any:
    """An empty figure. matplotlib is slow to import, so not before it is needed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install matplotlib") from None
    return Figure(layout="constrained", **options)


def _plain_frame(panel: Any, grid: str = "y") -> None:
    panel.spines[["right", "top"]].set_visible(False)
    panel.grid(axis=grid, linewidth=0.4, alpha=0.5)


def _style_top(axis: Any, label: str) -> None:
    axis.set_xlabel(label, fontsize=8, color=_QUIET)
    axis.tick_params(labelsize=8, colors=_QUIET, length=2)
    axis.spines["top"].set_visible(False)


def _annotate(axes: Any, text: str, at: tuple[float, float], **style: Any) -> None:
    axes.annotate(text, at, textcoords="offset points", fontsize=8, **style)
