"""Scores over seeds: interquartile means with intervals, and the curves in a figure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.learning.cells import OURS, PEERS, group_name
from zapex.envs.scores import human_share
from zapex.watch.curves import interquartile

Groups = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def groups(runs: Mapping[str, Mapping[str, Any]]) -> Groups:
    """Runs by (environment, variant)."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for run in runs.values():
        found[run["env"], run["variant"]].append(run)
    return found


def final(runs: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Of one group: the interquartile mean of its runs' mean final returns, and its interval.

    One run has no spread over runs: its interval is the 10th to the 90th percentile of its games.
    """
    means = np.array([[np.mean(run["final_returns"])] for run in runs])
    if len(runs) == 1:
        low, high = np.percentile(runs[0]["final_returns"], [10, 90])
        return float(means[0, 0]), float(low), float(high)
    return interquartile(means)


def scores(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of each group, by name: {"env", "variant", "runs", "p50": final(), "p10", "p90", "frames"}.

    frames: the runs' median. Machines differ in speed, so zapex's variants also have "at_frames",
    the most that all of them reached in that game, and the means of their curves: "return_there",
    and "return_halfway" at half as many. "spreads": of each of these the lowest and highest run.
    """
    found = {}
    for (env, variant), group in sorted(groups(runs).items()):
        value, low, high = final(group)
        frames = [_frames(run) for run in group]
        one = found[group_name(env, variant)] = {
            "env": env, "variant": variant, "runs": len(group),
            "p10": low, "p50": value, "p90": high,
            "frames": float(np.median(frames)), "spreads": {"frames": [min(frames), max(frames)]},
        }  # fmt: skip
        if variant not in PEERS:
            family = (r for r in runs.values() if r["env"] == env and r["variant"] not in PEERS)
            one["at_frames"] = at = min(map(_frames, family))
            returns = [_at(run["curve"], np.array([at / 2, at]), 1) for run in group]
            names = ("return_halfway", "return_there")
            for name, each in zip(names, np.transpose(returns), strict=True):
                one[name] = float(each.mean())
                one["spreads"][name] = [float(each.min()), float(each.max())]
    return found


def _frames(run: Mapping[str, Any]) -> float:
    return float(run["curve"][-1][1])


def table(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown, one for each game and variant."""
    lines = [
        "| game | variant | runs | M frames | interquartile mean (95 %; one run: its games, p10 to"
        " p90) | human = 1 | return in training at equal M frames, halfway and there |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in scores(runs).values():
        share = human_share(one["env"], one["p50"])
        human = "" if share is None else f"{share:.2f}"
        score = f"{one['p50']:.1f} ({one['p10']:.1f} to {one['p90']:.1f})"
        there = ""
        if "at_frames" in one:
            returns = f"{one['return_halfway']:.1f}, {one['return_there']:.1f}"
            there = f"{returns} at {one['at_frames'] / 1e6:.1f}"
        cells = (one["env"], one["variant"], one["runs"], f"{one['frames'] / 1e6:.1f}", score)
        lines.append(f"| {' | '.join(map(str, (*cells, human, there)))} |")
    return lines


def plot(runs: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Mean return of the last 100 games of all streams over minutes, a panel for each game."""
    grouped = groups(runs)
    games = sorted({env for env, _ in grouped})
    columns = min(len(games), 3)
    rows = -(-len(games) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for env, panel in zip(games, panels, strict=False):
        # Ours first, so that it has one colour in all panels.
        for variant in sorted((v for e, v in grouped if e == env), key=lambda v: (v != OURS, v)):
            _draw(panel, grouped[env, variant], variant)
        panel.set(title=env, xlabel="minutes", ylabel="return of the last 100 games")
        panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
        panel.grid(alpha=0.3)
    for panel in panels:
        panel.set_axis_off()
    return figure


def _draw(panel: Any, group: Sequence[Mapping[str, Any]], variant: str) -> None:
    """The mean of the runs, and from the lowest to the highest of them."""
    last_s = min(run["curve"][-1][0] for run in group)
    seconds = np.linspace(0, last_s, 200)
    curves = np.array([_at(run["curve"], seconds, 0) for run in group])
    (line,) = panel.plot(seconds / 60, curves.mean(0), label=f"{variant}, seeds: {len(group)}")
    panel.fill_between(
        seconds / 60, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.15, lw=0
    )


def _at(
    curve: Sequence[Sequence[float | None]], places: NDArray[np.float64], column: int
) -> NDArray[np.float64]:
    """Returns of a curve at seconds (column 0) or frames (column 1)."""
    known = np.array([point for point in curve if point[2] is not None], float)
    found: NDArray[np.float64] = np.interp(places, known[:, column], known[:, 2])
    return found
