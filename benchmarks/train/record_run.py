"""A training run as a result: curve, settings and a last evaluation, with the machine's facts.

    python -m benchmarks.train.record_run runs/RUN --json FILE --episodes 10

The evaluation is greedy (epsilon 0.001, up to 30 no-ops) and of two checkpoints: the one that the
run called best, and its last. The run's own evaluations are smaller; they only say when.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.harness import arguments, write_json
from zapex.watch.recorders import read_evaluations, read_metrics

_CURVE = (
    "wall_s",
    "frames",
    "batches",
    "charts/episodic_return_last100",
    "charts/episodic_return_greedy_last10",
)


def _curve(run: Path, points: int = 120) -> list[list[float | None]]:
    """Rows of _CURVE, evenly thinned."""
    lines = [line for line in read_metrics(run) if line.get("kind") in ("metrics", "final")]
    step = max(1, len(lines) // points)
    return [[line.get(name) for name in _CURVE] for line in [*lines[::step], lines[-1]]]


def _evaluate(run: Path, checkpoint: str, episodes: int) -> dict[str, Any]:
    """`zapex eval` in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "eval.json"
        command = [sys.executable, "-m", "zapex", "eval", str(run), "--checkpoint", checkpoint]
        command += ["--episodes", str(episodes), "--json", str(out)]
        subprocess.run(command, check=True)
        result: dict[str, Any] = json.loads(out.read_text())
    return {name: result[name] for name in ("mean", "std", "episodes", "returns")}


def main(argv: Sequence[str] | None = None) -> int:
    """Read a run's directory, evaluate its checkpoints, write one JSON."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("run", type=Path)
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--target", type=float, help="the return whose first crossing is told")
    parser.add_argument("--note", default="", help="what else was going on")
    options = parser.parse_args(argv)
    if options.quick:
        options.episodes = 1
    run: Path = options.run
    evaluations = read_evaluations(run)
    crossed = [e for e in evaluations if options.target is not None and e.mean >= options.target]
    results = {
        "curve_columns": _CURVE,
        "curve": _curve(run),
        "evaluations": [
            {"wall_s": e.wall_s, "frames": e.frames, "mean": e.mean, "games": len(e.returns)}
            for e in evaluations
        ],
        "target": options.target,
        "first_crossing_wall_s": crossed[0].wall_s if crossed else None,
        "best_checkpoint": _evaluate(run, "best", options.episodes),
        "last_checkpoint": _evaluate(run, "latest", options.episodes),
        "run": json.loads((run / "result.json").read_text()),
    }
    config = tomllib.loads((run / "config.toml").read_text())
    write_json(options, "training run", results, rounds=None, config=config, note=options.note)
    for name in ("best_checkpoint", "last_checkpoint"):
        print(f"{name}: mean {results[name]['mean']:g} over {options.episodes} games")
    return 0


if __name__ == "__main__":
    sys.exit(main())
