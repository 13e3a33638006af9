"""Learning curves: the picture of one run, and runs compared by settings, scores and curves."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zapex.envs.scores import human_share
from zapex.errors import ConfigError
from zapex.machine.reading import read_toml
from zapex.watch.recorders import is_number, read_metrics
from zapex.watch.runs import SETTINGS_FILE
from zapex.watch.terminal import count, in_columns, number

CURVE_FILE: Final = "learning_curve.png"
SCORES: Final = {
    "evaluation": "mean return of an evaluation",
    "training": "mean return of the last 100 games of all streams",
    "greedy": "mean return of the last 10 games of the greediest stream",
}
"""What runs are compared by, and how a legend names it."""
_SCORE_ROWS: Final = {
    "evaluation": ("frames", "mean"),
    "training": ("frames", "charts/episodic_return_last100"),
    "greedy": ("frames", "charts/episodic_return_greedy_last10"),
}
_RUN_ROWS: Final = {
    "all streams": ("charts/episodic_return",),
    "greediest stream": ("charts/episodic_return_greedy",),
    "evaluation": ("mean", "std"),
    "clock": ("frames", "charts/frames"),
}
MISSING: Final = "-"
"""In place of a setting that a run does not have, for example because it is of another version."""
_NOT_LEARNED_FROM: Final = {"run", "slurm", "kubernetes", "ray", "eval_period_s"}  # tables and keys
_RESAMPLES: Final = 2_000
_POINTS: Final = 200
_LEAST_SMOOTHED: Final = 50  # fewer points are drawn as they are
_ALL, _GREEDY, _GREEN, _QUIET = "#9aa5b1", "#2f7ed8", "#1b9e5a", "#6b7280"

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
    return {name: table for name, table in read_toml(file).items() if isinstance(table, dict)}


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


def read(runs: Sequence[Path], score: str = "auto") -> tuple[list[Curve], str, list[Path]]:
    """The curves of runs, which of SCORES they show, and the runs that have no such score yet.

    Args:
        runs: directories of runs.
        score: one of SCORES; "auto": evaluations if every run has at least two, else training.

    Raises:
        ConfigError: no run has such scores, or a file cannot be read.
    """
    points = {path: _points(path, _SCORE_ROWS) for path in runs}
    if score == "auto":
        evaluated = [
            len(found["evaluation"]) for found in points.values() if any(map(len, found.values()))
        ]
        score = "evaluation" if min(evaluated, default=0) >= 2 else "training"
    curves = [
        Curve(path, settings_of(path), found[score])
        for path, found in points.items()
        if len(found[score])
    ]
    if not curves:
        raise ConfigError(f"no {SCORES[score]} is stored yet: {', '.join(map(str, runs))}")
    return curves, score, [path for path, found in points.items() if not len(found[score])]


def _points(run_dir: Path, wanted: Mapping[str, tuple[str, ...]]) -> dict[str, Floats]:
    """Name -> (n, 1 + tags) of minutes and the values of tags in metrics.jsonl, by time.

    wanted: name -> the tags. A line counts if all of them are there and finite.
    """
    rows: dict[str, list[list[float]]] = {name: [] for name in wanted}
    for line in read_metrics(run_dir):
        minutes = line["wall_s"] / 60 if is_number(line.get("wall_s")) else math.nan
        for name, tags in wanted.items():
            row = [x for x in (minutes, *map(line.get, tags)) if is_number(x)]
            if len(row) == 1 + len(tags):
                rows[name].append(row)
    return {n: np.array(sorted(rows[n])).reshape(-1, 1 + len(tags)) for n, tags in wanted.items()}


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
    found = _points(run_dir, _RUN_ROWS)
    evaluated, clock = found.pop("evaluation"), found.pop("clock")[:, :2]
    if not len(evaluated) and not len(found["all streams"]):
        raise ConfigError(f"{run_dir} has stored no returns yet: nothing to draw")
    figure = _figure(figsize=(8, 4.8), dpi=150)
    axes = figure.add_subplot()
    for name, value in (references or {}).items():
        axes.axhline(value, color=_QUIET, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        place = {"xycoords": ("axes fraction", "data"), "xytext": (4, 0), "va": "center"}
        _annotate(axes, f"{name} {value:g}", (1, value), color=_QUIET, **place)
    for (label, points), colour in zip(found.items(), (_ALL, _GREEDY), strict=True):
        few = len(points) < _LEAST_SMOOTHED
        named = {"label": f"{label}, while learning"} if few and len(points) else {}
        look = {"markersize": 5 if few else 3, "alpha": 0.9 if few else 0.4, "markeredgewidth": 0}
        axes.plot(*points.T, "o", color=colour, clip_on=False, **look, **named)
        if not few:
            mean = f"{label}, while learning: running mean"
            axes.plot(*smooth(points).T, color=colour, linewidth=1.8, label=mean)
    if len(evaluated):
        # No lines between the points: nothing was measured there. The last one has its value.
        minutes, means, spread = evaluated.T
        style = {"color": _GREEN, "markersize": 5, "elinewidth": 0.8, "capsize": 2}
        label = "evaluation: mean ± standard deviation"
        axes.errorbar(minutes, means, yerr=spread, fmt="D", label=label, clip_on=False, **style)
        place = {"xytext": (0, 4), "ha": "center", "va": "bottom", "fontweight": "bold"}
        top = (minutes[-1], means[-1] + spread[-1])
        _annotate(axes, number(means[-1]), top, color=_GREEN, **place)
    axes.set_xlim(0, max(x[-1, 0] for x in (clock, evaluated, *found.values()) if len(x)))
    axes.set(xlabel="minutes", ylabel="return per game")
    axes.set_title(title, loc="left", fontsize=11)
    _plain_frame(axes)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    if len(clock) and clock[-1, 1] > 0:
        _draw_frames_axis(axes, clock)
    path, draft = run_dir / CURVE_FILE, run_dir / f".{CURVE_FILE}"
    draft.unlink(missing_ok=True)  # it may be a link: never written through
    figure.savefig(draft, format="png")
    draft.replace(path)
    return path


def smooth(points: Floats) -> Floats:
    """The mean of (n, 2) points of minutes and value over the last twentieth of the run."""
    minutes, values = points.T
    sums = np.concatenate([[0.0], np.cumsum(values)])
    window = (minutes[-1] - minutes[0]) / 20
    first, end = np.searchsorted(minutes, minutes - window), np.arange(1, len(points) + 1)
    return np.column_stack([minutes, (sums[end] - sums[first]) / (end - first)])


def _draw_frames_axis(axes: Any, clock: Floats) -> None:
    """Along the top, how many frames had been played at each tick: speed is not constant."""
    minutes, frames = np.concatenate([[(0.0, 0.0)], clock]).T
    places = [x for x in axes.get_xticks() if 0 < x <= minutes[-1]]
    top = axes.secondary_xaxis("top")
    top.set_xticks(places, [count(float(np.interp(x, minutes, frames))) for x in places])
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
