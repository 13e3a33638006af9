"""`zapex balance`: how far its predictions are from points that its model was not fitted to.

    python -m benchmarks.train.bench_balance [--quick] [--json FILE] [--figure FILE]

A game with pictures and one with four numbers, one after the other. --figure: the balance of the
first. The results are those of `zapex balance --json`, by environment.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.harness import arguments, goal, write_json

ENVS = ("ALE/Breakout-v5", "CartPole-v1")


def main(argv: Sequence[str] | None = None) -> int:
    """The errors of `zapex balance` at points that were held out."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--figure", type=Path, metavar="FILE", help=f"draw that of {ENVS[0]} here")
    options = parser.parse_args(argv)
    results = {}
    for env in ENVS[1:] if options.quick else ENVS:
        with tempfile.TemporaryDirectory(prefix="zapex-bench-") as name:
            file = Path(name, "balance.json")
            words = ["balance", env, "--json", str(file), *["--quick"] * options.quick]
            if options.figure and env == ENVS[0]:
                words += ["--figure", str(options.figure)]
            subprocess.run([sys.executable, "-m", "zapex", *words], check=True)
            results[env] = json.loads(file.read_text())
        worst = results[env]["held_out_error"]
        print(goal(f"{env}, worst held-out point:", 100 * worst, 10, " %"))
    rounds = min(p["rounds"] for one in results.values() for p in one["points"])
    write_json(options, "balance", results, rounds=rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
