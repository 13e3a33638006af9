"""An insider with the key of an actor host, a reader or a client lies to a replay server.

    python -m tests.stress.insider [--minutes 10] [--seed 1] [--scheme zmtp] [--json FILE]

Two honest actor hosts, a learner and a reader work beside it, with keys, over tcp. After each lie
they must go on. At the end every chunk of theirs is there once, their counters are exact, no batch
had an impossible row, a new host can join, and transitions with false priorities won no more than
their share of the samples. `LIES` is the table of the lies and of what counts each.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.harness import add_json, evidence
from benchmarks.support.machine import Watch
from tests.stress.insider_lies import FINITE, LIES, Insider, Lie
from tests.stress.insider_world import INSIDER, World
from tests.support.transport_rigs import OPEN, until
from zapex.net import keys as curve_keys

_AGAIN_S = 2.0


class Attack:
    """A world, and an insider with each key."""

    def __init__(self, keys: Path, scheme: str = "tcp") -> None:
        self.world = World(keys, scheme)
        roles = ("relay", "reader", "client")
        self.insiders = {
            role: Insider(self.world, role, INSIDER + i) for i, role in enumerate(roles)
        }
        self.told: Counter[str] = Counter()

    def tell(self, name: str) -> None:
        """One lie; the honest go on, and it is counted."""
        lie, world = LIES[name], self.world
        who = self.insiders[lie.role]
        before = world.counts
        self._said(who, lie)
        until(lambda: self._heard(who, lie, before), world.turn, name)
        world.goes_on(name)
        self.told[name] += 1

    def _said(self, who: Insider, lie: Lie) -> None:
        who.join()
        lie.tell(who)
        self._said_s = time.monotonic()

    def _heard(self, who: Insider, lie: Lie, before: Counter[str]) -> bool:
        """It is counted. What was said while its connection was being closed is said again."""
        if not lie.counted or self.world.counts[lie.counted] > before[lie.counted]:
            return True
        if time.monotonic() - self._said_s > _AGAIN_S:
            self._said(who, lie)
        return False

    def win(self, batches: int) -> float:
        """Give false priorities for so many batches. Returns samples won over the fair share."""
        world, who = self.world, self.insiders["relay"]
        world.won = world.fair = 0.0
        end, names = world.batches + batches, list(FINITE)
        while world.batches < end:
            who.join()
            LIES[names[int(who.rng.integers(len(names)))]].tell(who)
            for _ in range(4):
                world.turn()
        return world.won / world.fair

    def close(self) -> None:
        for who in self.insiders.values():
            who.close()
        while OPEN:
            OPEN.pop().close()


def run(seconds: float, seed: int, scheme: str) -> dict[str, Any]:
    """All lies again and again in random order, then the account."""
    rng, end = np.random.default_rng(seed), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        curve_keys.make(Path(folder, "keys"))
        attack = Attack(Path(folder, "keys"), scheme)
        try:
            share = attack.win(300)
            while time.monotonic() < end or len(attack.told) < len(LIES):
                for name in rng.permutation(list(LIES)).tolist():
                    attack.tell(name)
            found = attack.world.settle()
        finally:
            attack.close()
    found |= {"kinds": len(attack.told), "lies": attack.told.total(), "share": round(share, 3)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Lies of an insider beside honest peers.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scheme", choices=("tcp", "zmtp", "fstack"), default="tcp")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    watch = Watch()
    result = run(60 * chosen.minutes, chosen.seed, chosen.scheme)
    print(json.dumps(result, indent=1))
    if chosen.json:
        add_json(chosen.json, "hostile", f"insider_{chosen.scheme}", result, evidence(watch, None))
    return int(result["share"] > 1.25)


if __name__ == "__main__":
    sys.exit(main())
