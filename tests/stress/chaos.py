"""Kills, stops and continues every role at random and at every named step, and accounts for all.

python -m tests.stress.chaos --minutes 10 --seed 7        prints one JSON document

Without --seed it draws one and prints it; a seed repeats the schedule of kills and stops. Ends with
status 1 and the reason where anything is torn, foreign, doubled or lost, or somebody is stuck.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

from benchmarks.support.harness import evidence
from benchmarks.support.machine import Watch
from tests.stress import steps

_ROLES = ("actor", "replay", "learner", "inference")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--kills", help="end at so many of actors, replay, learner, inference: 9,3,3,3"
    )
    parser.add_argument("--only", default="", help='one fault: "replay: slot-granted"')
    parser.add_argument("--json", type=Path, help="write the facts here, too")
    options = parser.parse_args()
    watch = Watch()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    steps.install()
    from tests.stress.chaos_content import Violation
    from tests.stress.chaos_run import Stuck, run

    kills: dict[str, int] = {}
    if options.kills:
        counts = options.kills.split(",")
        if len(counts) != len(_ROLES) or not all(count.isdecimal() for count in counts):
            parser.error(f"--kills takes {len(_ROLES)} counts, as 9,3,3,3, got {options.kills}")
        kills = dict(zip(_ROLES, map(int, counts), strict=True))
    try:
        facts = run(seed, 60 * options.minutes, kills, only=options.only)
    except (Violation, Stuck) as error:
        kind = "stuck" if isinstance(error, Stuck) else str(error).partition(":")[0]
        print(json.dumps({"seed": seed, "failed": kind, "how": str(error)}))
        return 1
    text = json.dumps({**evidence(watch, None), **facts}, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked, so of a single thread
    sys.exit(main())
