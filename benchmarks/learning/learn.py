"""One cell: a training run of so many minutes, then 100 games of its last network.

    python -m benchmarks.learning.learn CELL --json FILE [--minutes 20] [--quick]

Other libraries play in .peers-dqn (`make peers-dqn`). A game has at most 27,000 steps.
"""

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.cells import CELLS, EVALUATION_GAMES, MINUTES, PEERS, Cell
from benchmarks.support.harness import arguments, write_json
from benchmarks.support.machine import ROOT
from zapex.watch.recorders import read_metrics

_RETURN = "charts/episodic_return_last100"
_POINTS = 120


def main(argv: Sequence[str] | None = None) -> int:
    """Learn, play, write one JSON."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("cell", choices=list(CELLS), metavar="CELL")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--games", type=int, default=EVALUATION_GAMES)
    parser.add_argument("--run-dir", type=Path, help="where the run is kept; default: beside FILE")
    options = parser.parse_args(argv)
    options.most = ["--max-frames", "0", "--preset", "laptop"]
    if options.quick:
        options.most, options.games = ["--max-frames", "4k", "--preset", "smoke"], 1
    cell = CELLS[options.cell]
    beside = options.json.with_suffix("") if options.json else ROOT / "build/learning" / cell.name
    run = options.run_dir or beside
    shutil.rmtree(run, ignore_errors=True)
    results = (_theirs if cell.variant in PEERS else _ours)(cell, run, options)
    results |= {"variant": cell.variant, "env": cell.env, "seed": cell.seed,
                "minutes": options.minutes}  # fmt: skip
    write_json(options, "learning", results, rounds=None)
    games = results["final_returns"]
    print(f"{cell.name}: mean {sum(games) / len(games):g} over {len(games)} games")
    return 0


def _ours(cell: Cell, run: Path, options: Namespace) -> dict[str, Any]:
    zapex = [sys.executable, "-m", "zapex"]
    command = [*zapex, "train", "--env", cell.env, "--seed", str(cell.seed), "--plain",
               "--run-dir", str(run), "--max-minutes", str(options.minutes), *options.most,
               "--eval-period-s", "0", *cell.flags]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, timeout=60 * options.minutes + 300)
    out = run / "games.json"
    command = [*zapex, "eval", str(run), "--checkpoint", "latest", "--episodes", str(options.games),
               "--json", str(out)]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, timeout=3600)
    lines = [line for line in read_metrics(run) if line.get("kind") in ("metrics", "final")]
    step = max(1, len(lines) // _POINTS)
    thinned = [*lines[::step], *lines[-1:]]
    return {
        "curve": [[line["wall_s"], line["frames"], line.get(_RETURN)] for line in thinned],
        "final_returns": json.loads(out.read_text())["returns"],
        "config": (run / "config.toml").read_text(),
    }


def _theirs(cell: Cell, run: Path, options: Namespace) -> dict[str, Any]:
    python, script = ROOT / ".peers-dqn/bin/python", ROOT / "benchmarks/peers" / PEERS[cell.variant]
    run.mkdir(parents=True)
    out = run / "learned.json"
    command = [str(python), str(script), cell.env, str(cell.seed), str(options.minutes),
               str(options.games), str(out)]  # fmt: skip
    subprocess.run(command, check=True, timeout=60 * options.minutes + 3900)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
