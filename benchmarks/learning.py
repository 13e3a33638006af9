"""What is learned in so many minutes: variants x games x seeds, one run at a time.

    make learning ARGS="--variant preset --variant 'uniform=--alpha 0' --hours 3"
    make learning ARGS=--list        what there is, as scores
    make atari57 MINUTES=10          every game once, about ten hours

Settings are tuned on TUNING alone; REPORTED are looked at once, at the end, with seeds that nothing
used. A run trains, then its last network plays games. All runs are kept in one file, failed ones
too; those that are missing are made, the most different first: every variant and game with one seed
before the next seed. Stopped, it goes on with the run that was under way. A run beside which other
processes took more than 5 % of the processor is noted, and made again with --again, as is a failed
one.

Scores are human-normalised: the interquartile mean over games and seeds with its stratified 95 %
bootstrap interval (rliable), at equal minutes (games of the last network) and at equal frames
(returns in training of all exploring streams, at the most frames that all runs of a game reached).
--figure draws the curves beside those of Dopamine.
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.support.harness import FIRST_PRESET, arguments, evidence, put_json
from benchmarks.support.machine import RESULTS, ROOT, Watch
from zapex.envs.scores import RANDOM_AND_HUMAN, human_share
from zapex.watch.curves import interquartile
from zapex.watch.recorders import read_metrics

TUNING = ("Boxing", "Enduro", "Seaquest", "Asterix", "Krull", "RoadRunner")
REPORTED = ("Breakout", "Pong", "SpaceInvaders", "Qbert", "MsPacman", "BeamRider")
ALL = tuple(name.title().replace("_", "") for name in RANDOM_AND_HUMAN)
VARIANTS = {
    "preset": "",
    "first preset": FIRST_PRESET,
    "second preset": "--lr 2e-4 --optimiser-eps 3e-8 --average-targets 0 --no-layer-norm",
    "third preset": "--average-targets 0 --no-layer-norm",
    "without layer norm": "--no-layer-norm",
    "64x64": "--env-kwargs img_height=64 img_width=64",
    "mean": "--quantiles 0",
    "own trunk": "--no-share-trunk",
    "uniform": "--alpha 0",
    "alpha 0.2": "--alpha 0.2",
    "n-step 1": "--n-step 1",
    "actor priorities": "--initial-priority actor",
    "LAP": "--quantiles 0 --priority-floor 1 --beta 0",
    "recency": "--recency 3",
    "cut": "--cut-exploratory",
    "alpha 0.2 + cut": "--alpha 0.2 --cut-exploratory",
    "adam-rel": "--optimiser adam-rel",
    "munchausen": "--munchausen",
}
"""Flags of `zapex train` by name; others are given as NAME=FLAGS."""
RIVALS = {
    "SB3 DQN": ("dqn_learning.py",),
    "CleanRL DQN": ("cleanrl_learning.py",),
    "CleanRL PQN": ("on_policy_learning.py", "pqn"),
    "CleanRL PPO": ("on_policy_learning.py", "ppo"),
}
"""Their scripts in benchmarks/peers, which run in .peers-dqn (`make peers-dqn`)."""
PUBLISHED, WORK = RESULTS / "learning.json", ROOT / "build/learning"
DOPAMINE = ROOT / "benchmarks/peers/dopamine.json"
_RETURN = "charts/episodic_return_last100"
_POINTS = 120

Runs = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """One run: zapex with `flags`, or a rival. seed: of games and network."""

    variant: str
    flags: str
    env: str
    seed: int
    minutes: float

    @property
    def name(self) -> str:
        """Of its entry in the file, as pong_11_preset; with its minutes unless they are 20."""
        own = [] if self.minutes == 20 else [f"{self.minutes:g}min"]
        return "_".join([_game(self.env), str(self.seed), self.variant.replace(" ", "_"), *own])


def _game(env: str) -> str:
    return env.rpartition("/")[2].partition("-")[0].lower()


# Making runs


def make(run: Run, options: Namespace) -> dict[str, Any]:
    """Train and play. Returns the entry; "failed" says why there is no score."""
    watch, directory = Watch(), options.work / run.name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    facts: dict[str, Any] = {
        "variant": run.variant, "flags": run.flags, "env": run.env, "seed": run.seed,
        "minutes": run.minutes,
    }  # fmt: skip
    try:
        facts |= (_rival if run.variant in RIVALS else _ours)(run, directory, options)
    except (subprocess.SubprocessError, OSError, LookupError, ValueError) as error:
        facts["failed"] = str(error)
    return {**facts, **evidence(watch, None, options.quick)}


def _ours(run: Run, directory: Path, options: Namespace) -> dict[str, Any]:
    zapex = [sys.executable, "-m", "zapex"]
    size = ["--preset", "laptop", "--max-frames", "0"]
    if options.quick:
        size = ["--preset", "smoke", "--max-frames", "4k"]
    command = [*zapex, "train", "--env", run.env, "--seed", str(run.seed), "--plain",
               "--run-dir", str(directory / "run"), "--max-minutes", str(run.minutes), *size,
               "--eval-period-s", "0", *shlex.split(run.flags)]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, timeout=60 * run.minutes + 300)
    out = directory / "games.json"
    command = [*zapex, "eval", str(directory / "run"), "--checkpoint", "latest", "--episodes",
               str(options.games), "--json", str(out)]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, timeout=3600)
    lines = [one for one in read_metrics(directory / "run") if one["kind"] in ("metrics", "final")]
    thinned = [*lines[:: max(1, len(lines) // _POINTS)], *lines[-1:]]
    return {
        "curve": [[line["wall_s"], line["frames"], line.get(_RETURN)] for line in thinned],
        "batches": lines[-1]["learner/batches"],
        "final_returns": json.loads(out.read_text())["returns"],
    }


def _rival(run: Run, directory: Path, options: Namespace) -> dict[str, Any]:
    script, *words = RIVALS[run.variant]
    out = directory / "learned.json"
    command = [str(ROOT / ".peers-dqn/bin/python"), str(ROOT / "benchmarks/peers" / script), *words,
               run.env, str(run.seed), str(run.minutes), str(options.games),
               str(out)]  # fmt: skip
    subprocess.run(command, check=True, timeout=60 * run.minutes + 3900)
    found: dict[str, Any] = json.loads(out.read_text())
    return {name: found[name] for name in ("curve", "final_returns", "versions")}


# Scores


def grouped(runs: Runs) -> dict[tuple[str, str, float], list[Mapping[str, Any]]]:
    """Runs that have scores, by game, variant and minutes."""
    found: dict[tuple[str, str, float], list[Mapping[str, Any]]] = defaultdict(list)
    for run in runs.values():
        if "failed" not in run:
            found[run["env"], run["variant"], run["minutes"]].append(run)
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


def scores(runs: Runs) -> dict[str, Any]:
    """Of each group, by name: {"env", "variant", "runs", "p50": final(), "p10", "p90", "frames"}.

    frames: the runs' median. zapex's variants also have "at_frames", the most that all of them
    reached in that game and time, and the means of their curves: "return_there", and
    "return_halfway" at half as many. "spreads": of each of these the lowest and highest run.
    """
    found = {}
    groups = grouped(runs)
    for (env, variant, minutes), group in sorted(groups.items()):
        value, low, high = final(group)
        frames = [_frames(run) for run in group]
        name = Run(variant, "", env, 0, minutes).name.replace("_0_", "_", 1)
        one = found[name] = {
            "env": env, "variant": variant, "minutes": minutes, "runs": len(group),
            "p10": low, "p50": value, "p90": high,
            "frames": float(np.median(frames)), "spreads": {"frames": [min(frames), max(frames)]},
        }  # fmt: skip
        if not _is_rival(group):
            one["at_frames"] = at = equal_frames(groups, env, minutes)
            returns = [returns_at(run["curve"], np.array([at / 2, at]), 1) for run in group]
            for where, each in zip(
                ("return_halfway", "return_there"), np.transpose(returns), strict=True
            ):
                one[where] = float(each.mean())
                one["spreads"][where] = [float(each.min()), float(each.max())]
    return found


def equal_frames(groups: Mapping[Any, Any], env: str, minutes: float) -> float:
    """The most frames that all of zapex's runs of a game and a time have reached."""
    family = [
        run for (one, _, time), group in groups.items() for run in group
        if (one, time) == (env, minutes) and not _is_rival(group)
    ]  # fmt: skip
    return min(map(_frames, family))


def _is_rival(group: Sequence[Mapping[str, Any]]) -> bool:
    return group[0]["variant"] in {*RIVALS, "stable-baselines3", "cleanrl"}  # runs before RIVALS


def _frames(run: Mapping[str, Any]) -> float:
    return float(run["curve"][-1][1])


def returns_at(
    curve: Sequence[Sequence[float | None]], places: NDArray[np.float64], column: int
) -> NDArray[np.float64]:
    """Returns of a curve at seconds (column 0) or frames (column 1)."""
    known = np.array([point for point in curve if point[2] is not None], float).reshape(-1, 3)
    if not len(known):  # no game has ended
        return np.full(len(places), np.nan)
    found: NDArray[np.float64] = np.interp(places, known[:, column], known[:, 2])
    return found


def table(runs: Runs) -> Iterator[str]:
    """Markdown: each variant over all games, then each game."""
    groups = grouped(runs)
    yield "| variant | minutes | games | seeds | at equal minutes | at equal frames |"
    yield "|---" * 6 + "|"
    for variant, minutes in sorted({key[1:] for key in groups}):
        games = {env: g for (env, *rest), g in groups.items() if rest == [variant, minutes]}
        seeds = min(map(len, games.values()))
        last, there = [], []
        for env, group in games.items():
            at = np.array([0.0 if _is_rival(group) else equal_frames(groups, env, minutes)])
            for run in group[:seeds]:
                last.append(human_share(env, float(np.mean(run["final_returns"]))))
                there.append(human_share(env, float(returns_at(run["curve"], at, 1)[0])))
        cells = []
        for shares in (last, there):
            known = np.array(shares, float).reshape(len(games), seeds).T
            mid, low, high = interquartile(known) if seeds > 1 else (np.mean(known), None, None)
            cells.append(f"{mid:.3f}" + (f" ({low:.3f} to {high:.3f})" if low is not None else ""))
        if any(map(_is_rival, games.values())):
            cells[1] = "-"
        yield f"| {variant} | {minutes:g} | {len(games)} | {seeds} | {' | '.join(cells)} |"
    yield ""
    yield "| game | variant | minutes | runs | M frames | score | human = 1 | in training, at |"
    yield "|---" * 8 + "|"
    for one in scores(runs).values():
        share = human_share(one["env"], one["p50"])
        there = ""
        if "at_frames" in one:
            there = f"{one['return_there']:.1f} at {one['at_frames'] / 1e6:.1f}"
        cells = [_game(one["env"]), one["variant"], f"{one['minutes']:g}", str(one["runs"]),
                 f"{one['frames'] / 1e6:.1f}",
                 f"{one['p50']:.1f} ({one['p10']:.1f} to {one['p90']:.1f})",
                 "" if share is None else f"{share:.2f}", there]  # fmt: skip
        yield f"| {' | '.join(cells)} |"
    for name, run in runs.items():
        if "failed" in run or run["doubts"]:
            yield f"{name}: {run.get('failed') or '; '.join(run['doubts'])}"


def each_game(runs: Runs) -> Iterator[Sequence[str]]:
    """The run of each game that has the most frames, beside Dopamine's DQN and Rainbow there.

    The last four columns are human-normalised. In the last two rows are their median and their
    interquartile mean over the games that all four know: Dopamine lacks Defender and Surround.
    """
    yield "", "minutes", "M frames", "score", "human = 1", "in training", "DQN", "Rainbow"
    done = [run for run in runs.values() if "failed" not in run]
    longest = {run["env"]: run for run in sorted(done, key=_frames)}
    rows = []
    for env, run in sorted(longest.items()):
        frames, score = _frames(run), float(np.mean(run["final_returns"]))
        returns = [score, float(returns_at(run["curve"], np.array([frames]), 1)[0])]
        returns += [dopamine_return(env, agent, frames) for agent in ("DQN", "Rainbow")]
        rows.append([human_share(env, one) for one in returns])
        cells = ["" if np.isnan(share) else f"{share:.2f}" for share in rows[-1]]
        yield env[4:-3], f"{run['minutes']:g}", f"{frames / 1e6:.1f}", f"{score:,.1f}", *cells
    known = np.array([row for row in rows if not np.isnan(row).any()])
    middles = {"median": np.median, "interquartile mean": lambda row: interquartile(row[None])[0]}
    for name, middle in middles.items() if len(known) else ():
        cells = [f"{middle(column):.2f}" for column in known.T]
        yield f"{name} of {len(known)} games", "", "", "", *cells


def dopamine_return(env: str, agent: str, frames: float) -> float:
    """The return in training of one of Dopamine's agents; NaN if it has not played the game."""
    points = json.loads(DOPAMINE.read_text())["returns"].get(env, {}).get(agent, [np.nan])
    return float(np.interp(frames / 1e6, range(1, 1 + len(points)), points))


def plot(runs: Runs, dopamine: bool = False) -> Figure:
    """Mean return of the last 100 games of all streams, a panel for each game.

    dopamine: over frames, beside Dopamine's agents. Otherwise over minutes.
    """
    groups = grouped(runs)
    games = sorted({env for env, *_ in groups})
    published = json.loads(DOPAMINE.read_text())["returns"] if dopamine else {}
    columns = min(len(games), 3)
    rows = -(-len(games) // columns)
    figure = Figure(figsize=(4.2 * columns, 3 * rows + 1), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    shades = colormaps["tab20"].colors  # type: ignore[attr-defined]
    palette, colours = [*shades[::2], *shades[1::2]], dict[str, Any]()
    lines = dict[str, Any]()
    for env, panel in zip(games, panels, strict=False):
        for (one, variant, minutes), group in sorted(groups.items()):
            if one == env:
                colour = colours.setdefault(variant, palette[len(colours) % 20])
                lines[f"{variant}, {minutes:g} min"] = _draw(panel, group, colour, dopamine)
        for agent, returns in published.get(env, {}).items():
            panel.plot(range(1, 1 + len(returns)), returns, ":", color="grey", lw=1)
            panel.annotate(agent, (len(returns), returns[-1]), fontsize=6, color="grey")
        panel.set(title=env, xlabel="million frames" if dopamine else "minutes", ylabel="return")
        panel.grid(alpha=0.3)
    for panel in panels:
        panel.set_axis_off()
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=columns, fontsize=8
    )
    return figure


def _draw(panel: Any, group: Sequence[Mapping[str, Any]], colour: Any, frames: bool) -> Any:
    """The mean of the runs, and from the lowest to the highest of them. Returns the mean's line."""
    column, unit = (1, 1e6) if frames else (0, 60.0)
    places = np.linspace(0, min(run["curve"][-1][column] for run in group), 200)
    curves = np.array([returns_at(run["curve"], places, column) for run in group])
    (mean,) = panel.plot(places / unit, curves.mean(0), color=colour)
    panel.fill_between(places / unit, curves.min(0), curves.max(0), color=colour, alpha=0.15, lw=0)
    return mean


# The command


def chosen(options: Namespace) -> list[Run]:
    """The runs that were asked for, one seed of all before the next."""
    games = {"tuning": TUNING, "reported": REPORTED, "all": ALL}.get(options.games_of)
    envs = [f"ALE/{game}-v5" for game in games or options.games_of.split(",")]
    variants = dict(one.partition("=")[::2] for one in options.variant or ["preset"])
    flags = {name: words or VARIANTS.get(name, "") for name, words in variants.items()}
    if unknown := [n for n, words in flags.items() if not words and n not in {*VARIANTS, *RIVALS}]:
        sys.exit(f"no variant {unknown[0]}: give NAME=FLAGS, or one of "
                 f"{', '.join([*VARIANTS, *RIVALS])}")  # fmt: skip
    return [
        Run(variant, flags[variant], env, int(seed), options.minutes)
        for seed in options.seeds.split(",") for env in envs for variant in flags
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Learn what is missing. Exit code 1 if a run failed."""
    parser = arguments("What is learned: variants, games and seeds, one run at a time.")
    known = ", ".join([*VARIANTS, *RIVALS])
    parser.add_argument("--variant", action="append", metavar="NAME[=FLAGS]", help=f"of {known}")
    parser.add_argument("--games-of", default="tuning", help="tuning, reported, all or Pong,Qbert")
    parser.add_argument("--seeds", default="1,2", help="one seed of all runs before the next")
    parser.add_argument("--minutes", type=float, default=10.0, help="of training")
    parser.add_argument("--games", type=int, default=100, help="that the last network plays")
    parser.add_argument("--hours", type=float, default=100.0, help="begin no run after so long")
    parser.add_argument("--again", action="store_true", help="failed and doubtful runs too")
    parser.add_argument("--list", action="store_true", help="print scores, and what is missing")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the runs and Dopamine's")
    parser.add_argument("--work", type=Path, default=WORK, metavar="DIR", help="runs' directories")
    parser.set_defaults(json=WORK / "learning.json")
    options = parser.parse_args(argv)
    report: dict[str, Any] = {"benchmark": "learning", "results": {}}
    for file in (options.json, PUBLISHED):
        if file.exists() and not options.quick:
            report = json.loads(file.read_text())
            break
    runs: dict[str, Any] = report["results"]
    todo = [
        run for run in chosen(options)
        if (known := runs.get(run.name)) is None
        or (options.again and ("failed" in known or known["doubts"]))
    ]  # fmt: skip
    failed, end_s = 0, time.monotonic() + 3600 * options.hours
    for number, run in enumerate([] if options.list else todo, 1):
        if time.monotonic() > end_s:
            break
        print(f"[{number} of {len(todo)}] {run.name} {run.flags}", flush=True)
        one = runs[run.name] = make(run, options)
        failed += "failed" in one
        score = one.get("failed") or f"mean {np.mean(one['final_returns']):g}"
        print(f"  {score}, {_frames(one) / 1e6 if 'curve' in one else 0:.1f} million frames")
        put_json(options.json, {**report, "scores": scores(runs)})
    mine = {name: runs[name] for name in (run.name for run in chosen(options)) if name in runs}
    print("\n".join(table(mine)))
    if options.games_of == "all":
        print("\n".join(f"| {' | '.join(row)} |" for row in each_game(mine)))
    if options.list:
        print(f"missing: {', '.join(run.name for run in todo) or 'none'}")
    if options.figure:
        plot(mine, dopamine=True).savefig(options.figure, dpi=110)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
