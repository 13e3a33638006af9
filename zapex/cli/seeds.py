"""`zapex train --seeds 1,2,3`: the same run with one seed after the other."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zapex.cli.resolve import AUTO, Options, Resolved
from zapex.errors import ConfigError

if TYPE_CHECKING:
    from zapex.run.collector import Ending


@dataclass(frozen=True)
class TrainOptions(Options):
    """What a command takes besides the settings."""

    seeds: str = ""
    """Train once with each of these seeds, one after the other: 1,2,3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.each
        if len(set(given)) < len(given):
            raise ConfigError(f"--seeds must name each seed once, got {self.seeds}")

    @property
    def each(self) -> list[int]:
        """The seeds in their order; none: --seed alone."""
        words = [word.strip() for word in self.seeds.split(",")] if self.seeds else []
        if not all(word.isdecimal() for word in words):
            raise ConfigError(f"--seeds must be numbers with commas, as 1,2,3; got {self.seeds!r}")
        return [int(word) for word in words]


def in_turn(run: Resolved, args: list[str], train: "Callable[[list[str]], Ending]") -> int:
    """Train with each seed, and list the runs. Ctrl-C ends them all. Returns the exit code.

    With --run-dir DIR the runs are DIR/seed-1, DIR/seed-2, ... train: one run, of a command line.
    """
    settings, seeds = run.config.run, run.more.each
    if settings.resume not in ("", AUTO):
        raise ConfigError(f"--seeds starts runs: give --resume {AUTO}, or leave --resume out")
    failed, trained = False, list[Path]()
    for i, seed in enumerate(seeds):
        print(f"seed {seed}, run {i + 1} of {len(seeds)}", flush=True)
        words = [*args, "--seeds=", "--seed", str(seed)]
        if settings.run_dir:
            words += ["--run-dir", str(Path(settings.run_dir) / f"seed-{seed}")]
        ending = train(words)
        failed |= ending.failed
        if ending.last is not None and ending.last.facts.run_dir is not None:
            trained.append(ending.last.facts.run_dir)
        if ending.reason.startswith("stopped by"):
            break
    from zapex.watch import runs

    print(*runs.table([runs.look(path) for path in trained], 80), sep="\n")
    print(f"compare them: zapex plot {' '.join(map(str, trained))} --out seeds.png")
    return int(failed)
