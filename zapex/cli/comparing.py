"""`zapex plot` and `zapex compare`: runs beside each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zapex.cli.flags import parse
from zapex.errors import ConfigError

_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class _PlotOptions:
    """Which runs, and what is drawn of them."""

    runs: tuple[str, ...] = ()
    """Runs, or directories of runs."""
    by: Literal["config", "seed"] = "config"
    """config: a curve for runs that differ only in their seed, with an interval; seed: each run."""
    score: Literal["auto", "evaluation", "training", "greedy"] = "auto"
    """What is compared; auto: evaluations if every run has two, otherwise training."""
    out: str = ""
    """Draw the curves in this file: .png, .svg or .pdf. Left out: only the table is printed."""

    def __post_init__(self) -> None:
        for flag, value, known in (
            ("--by", self.by, ("config", "seed")),
            ("--score", self.score, ("auto", "evaluation", "training", "greedy")),
        ):
            if value not in known:
                raise ConfigError(f"{flag} must be one of {', '.join(known)}, got {value!r}")
        if self.out and Path(self.out).suffix not in _PICTURES:
            raise ConfigError(f"--out must end in {', '.join(_PICTURES)}, got {self.out!r}")
        if self.out and not Path(self.out).parent.is_dir():
            raise ConfigError(f"--out {self.out} is in a directory that does not exist")


def plot(args: list[str]) -> int:
    """Print the scores of runs with their intervals, and draw their curves."""
    what = (
        "Compare runs: mean with a 95 % bootstrap interval, interquartile mean and share of a "
        "human's score, over wall time and frames."
    )
    options = parse(_PlotOptions(), args, "plot", what, "runs")
    from zapex.watch import curves

    found, score = curves.read(_runs(options.runs), options.score)
    groups = curves.grouped(found)
    print(f"score: {curves.SCORES[score]}, at the end of each run")
    print(*curves.score_table(groups), sep="\n")
    if options.out:
        curves.draw_runs(groups, score, options.by, Path(options.out))
        print(f"picture {options.out}")
    return 0


def _runs(words: tuple[str, ...]) -> list[Path]:
    """Every run that the words name, once."""
    from zapex.watch import runs

    found: dict[Path, Path] = {}
    for word in words:
        directory = Path(word)
        known = sorted(runs.runs_in(directory)) if directory.is_dir() else []
        for path in known or [runs.find(word)]:
            found.setdefault(path.resolve(), path)
    return list(found.values())


@dataclass(frozen=True)
class _CompareOptions:
    """Which runs."""

    runs: tuple[str, ...] = ()
    """Runs, or settings files (.toml)."""


def compare(args: list[str]) -> int:
    """Print the settings in which runs differ."""
    what = "Print what the settings of two or more runs, or of settings files, differ in."
    options = parse(_CompareOptions(), args, "compare", what, "runs")
    if len(options.runs) < 2:
        raise ConfigError("`zapex compare` needs two runs or more: zapex compare RUN RUN")
    from zapex.watch import curves, runs

    paths = [Path(w) if w.endswith(".toml") else runs.find(w) for w in options.runs]
    found = curves.differing([curves.settings_of(path) for path in paths])
    if not found:
        print("no settings differ")
        return 0
    names = [path.name for path in paths]
    same = len(set(names)) < len(names)
    print(*curves.settings_table([str(path) for path in paths] if same else names, found), sep="\n")
    return 0
