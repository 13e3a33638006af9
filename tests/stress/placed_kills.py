"""Hosts that a scheduler has placed, killed again and again: is all that was acknowledged there?

    python -m tests.stress.placed_kills --on ray|slurm|container|shards [--kills 20] [--seed 1]
                                        [--json FILE]

A whole run on this machine. A real Ray of several nodes or a real SLURM places its hosts, or they
are the containers' own commands, or plain commands with three replays. At random times a node (or a
job, a container, a shard) loses all of its processes; it gets a place to come back to, and the next
kill waits until every host works again. How the account is made: tests/stress/placed_account.py.

    lost      transitions that were acknowledged and are in no replay's memory
    doubled   transitions that are there once more than they should be
    with a killed shard   those that were in the memory of a shard that was killed

Ends with status 1 where any is lost or doubled, or with a replay that was not killed.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.support.harness import add_json, evidence, percentiles
from benchmarks.support.machine import Watch
from tests.stress.placed_account import ROLES, Life, Witness
from tests.stress.placed_worlds import GAMMA, N_STEP, WORLDS, World
from tests.support.parts import ROOT, VARIABLES

_PATIENCE_S = 400.0  # on a busy machine, with every kernel to compile and a silence to wait for
_LOOK_S, _PAUSE_S = 0.02, 1.0
_AGAIN = 5  # chunks acknowledged, batches learned or transitions inserted by a life that works
_MUTANT = Path(__file__).parent / "frees_unsent"


class Kills:
    """A run, its witness, and who kills."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.draw = world, random.Random(seed)
        self.witness = Witness(world.run_dirs, N_STEP, GAMMA)
        self.counts: Counter[str] = Counter()
        self.back_s: dict[str, list[float]] = {}

    def wait(self, ready: Callable[[], object], what: str) -> None:
        """Look on until it is so. A machine that stands still meanwhile is no failure."""
        left_s, now_s = _PATIENCE_S, time.monotonic()
        while not ready():
            if left_s < 0:
                raise TimeoutError(f"{what} did not come within {_PATIENCE_S:g} s: {self.state()}")
            time.sleep(_LOOK_S)
            self.witness.look()
            before_s, now_s = now_s, time.monotonic()
            left_s -= min(now_s - before_s, _PAUSE_S)

    def pause(self, seconds: float) -> None:
        """Let it run, and look on."""
        end_s = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= end_s, "a moment of the run")

    def state(self) -> dict[str, list[int]]:
        """How far each living host is."""
        return {role: [life.progress for life in self.witness.living(role)] for role in ROLES}

    def all_work(self, what: str) -> float:
        """Wait until every host is there and gets on. Returns the seconds."""
        began_s = time.monotonic()
        # A new life begins at 0, so it must get on, too.
        before = {life.inode: life.progress for life in self.witness.lives}

        def gets_on(life: Life) -> bool:
            return life.progress >= before.get(life.inode, 0) + _AGAIN

        def all_get_on() -> bool:
            there = {role: self.witness.living(role) for role in ROLES}
            as_many = all(len(there[role]) == n for role, n in self.world.hosts.items())
            return as_many and all(gets_on(life) for lives in there.values() for life in lives)

        self.wait(all_get_on, f"work of every host after {what}")
        return time.monotonic() - began_s

    def kill(self) -> None:
        """One kill at a random time, and the way back."""
        self.pause(self.draw.uniform(0.0, 3.0))
        what = self.world.kill(self.draw, self.wait)
        self.counts[what] += 1
        self.back_s.setdefault(what, []).append(self.all_work(what))
        if self.world.loses_memory:
            self.witness.bury()
        said = f"{sum(self.counts.values())}: {what}, all work after {self.back_s[what][-1]:.1f} s"
        print(said, file=sys.stderr, flush=True)

    def settle(self) -> dict[str, Any]:
        """End those who play, and take stock."""
        self.world.end_actors()
        self.witness.look()
        if playing := self.witness.living("actor"):
            raise RuntimeError(f"{playing} play on")
        return {
            **self.witness.settle(),
            "kills": sum(self.counts.values()),
            "killed": dict(self.counts),
            "lives": dict(Counter(life.role for life in self.witness.lives)),
            "back_s": {
                what: percentiles(times) | {"max": round(max(times), 3)}
                for what, times in sorted(self.back_s.items())
            },
        }


def run(on: str, kills: int, seed: int) -> dict[str, Any]:
    """A run of its own, its kills, and the account."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zapex-placed-") as name:
        os.environ.update({**VARIABLES, "XDG_STATE_HOME": f"{name}/state"})
        with WORLDS[on](Path(name)) as world:
            it = Kills(world, seed)
            it.all_work("the start")
            for _ in range(kills):
                it.kill()
            found = it.settle()
    return {"on": on, "seed": seed, **found, "seconds": round(time.monotonic() - began_s, 1)}


def wrong(facts: dict[str, Any]) -> int:
    """How many transitions are not where they should be."""
    names = ["lost", "doubled", "acknowledged_unseen"]
    names += ["with_a_killed_shard"] if facts["on"] != "shards" else []
    return sum(int(facts[name]) for name in names)


def main(argv: list[str] | None = None) -> int:
    """Kills, and the account as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--on", choices=tuple(WORLDS), required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the result to this file")
    parser.add_argument(
        "--mutant", action="store_true", help="relays free a chunk unsent now and then: must fail"
    )
    options = parser.parse_args(argv)
    if options.mutant:
        VARIABLES["PYTHONPATH"] = f"{_MUTANT}:{ROOT}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # nothing stays
    watch = Watch()
    facts = run(options.on, options.kills, options.seed)
    print(json.dumps(facts, indent=1))
    if options.json:
        add_json(options.json, "placed_kills", options.on, facts, evidence(watch, None))
    return int(wrong(facts) > 0)


if __name__ == "__main__":
    sys.exit(main())
