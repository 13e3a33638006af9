"""`make simulate`: runs of a whole cluster in one process, each drawn from its seed.

python -m tests.simulation [--seed N] [--hours H | --seeds N] [--jobs 2] [--history] [--planted]
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import time

from tests.simulation import clock
from tests.stress import steps


def main() -> int:
    """One seed, or new seeds for some time."""
    parser = argparse.ArgumentParser(prog="make simulate", description="simulate a cluster")
    parser.add_argument("--seed", type=int, help="one run, with what went wrong in it")
    parser.add_argument("--hours", type=float, default=1 / 60, help="new seeds for so long")
    parser.add_argument("--seeds", type=int, help="so many new seeds for each job instead")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--first", type=int, default=secrets.randbits(40), help="the first seed")
    parser.add_argument("--history", action="store_true", help="print all that happened")
    parser.add_argument("--planted", action="store_true", help="find the faults of faults/")
    parser.add_argument("--cpu-s", type=float, default=600.0, help="for each of them")
    parser.add_argument("names", nargs="*", help="only these of them")
    options = parser.parse_args()
    if options.seed is None and options.jobs > 1 and not options.planted:
        return _share_out(options)
    steps.install()
    clock.install()
    from tests.simulation import runs

    if options.planted:
        return runs.find_planted(options.names, options.cpu_s)
    if options.seed is not None:
        return runs.show(options.seed, history=options.history)
    return runs.explore(options.first, options.hours, options.seeds)


def _share_out(options: argparse.Namespace) -> int:
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.simulation", "--jobs", "1"]
    command += ["--hours", str(options.hours)]
    command += ["--seeds", str(options.seeds)] if options.seeds else []
    jobs = [
        subprocess.Popen([*command, "--first", str(options.first + (job << 41))])
        for job in range(options.jobs)
    ]
    codes = [job.wait() for job in jobs]
    print(json.dumps({"jobs": options.jobs, "wall_s": round(time.monotonic() - began, 1)}))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
