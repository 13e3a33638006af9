"""Scores over seeds: interquartile means with intervals, by rliable, and the curves in a figure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.learning.cells import group_name
from zapex.watch.scores import human_share, interquartile

Groups = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def groups(runs: Mapping[str, Mapping[str, Any]]) -> Groups:
    """Runs by (environment, variant)."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for run in runs.values():
        found[run["env"], run["variant"]].append(run)
    return found


def final(runs: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Of one group: the interquartile mean of its runs' mean final returns, and its interval."""
    means = np.array([[np.mean(run["final_returns"])] for run in runs])
    return interquartile(means)


def scores(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of each group, by name: {"env", "variant", "runs", "p50": final(), "p10" and "p90"}."""
    found = {}
    for (env, variant), group in sorted(groups(runs).items()):
        value, low, high = final(group)
        found[group_name(env, variant)] = {
            "env": env, "variant": variant, "runs": len(group),
            "p10": low, "p50": value, "p90": high,
        }  # fmt: skip
    return found


def table(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown, one for each game and variant."""
    lines = [
        "| game | variant | runs | interquartile mean (95 %) | human = 1 |",
        "|---|---|---|---|---|",
    ]
    for one in scores(runs).values():
        share = human_share(one["env"], one["p50"])
        human = "" if share is None else f"{share:.2f}"
        score = f"{one['p50']:.1f} ({one['p10']:.1f} to {one['p90']:.1f})"
        lines.append(f"| {one['env']} | {one['variant']} | {one['runs']} | {score} | {human} |")
    return lines


def plot(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Mean return of the last 100 games of all streams over minutes, a panel for each game."""
    from matplotlib.figure import Figure

    grouped = groups(runs)
    games = sorted({env for env, _ in grouped})
    if not games:
        return
    columns = min(len(games), 3)
    rows = -(-len(games) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for env, panel in zip(games, panels, strict=False):
        for variant in sorted(v for e, v in grouped if e == env):
            _draw(panel, grouped[env, variant], variant)
        panel.set(title=env, xlabel="minutes", ylabel="return of the last 100 games")
        panel.legend(fontsize=7)
        panel.grid(alpha=0.3)
    for panel in panels:
        panel.set_axis_off()
    figure.savefig(path, dpi=120)


def _draw(panel: Any, group: Sequence[Mapping[str, Any]], variant: str) -> None:
    """The mean of the runs, and from the lowest to the highest of them."""
    last_s = min(run["curve"][-1][0] for run in group)
    seconds = np.linspace(0, last_s, 200)
    curves = np.array([_at(run["curve"], seconds) for run in group])
    (line,) = panel.plot(seconds / 60, curves.mean(0), label=f"{variant} ({len(group)} runs)")
    panel.fill_between(
        seconds / 60, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.15, lw=0
    )


def _at(
    curve: Sequence[Sequence[float | None]], seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    points = [(at_s, value) for at_s, _, value in curve if value is not None]
    at_s, values = np.array(points, float).T
    found: NDArray[np.float64] = np.interp(seconds, at_s, values)
    return found
