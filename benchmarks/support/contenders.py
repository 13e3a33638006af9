"""Libraries to compare with, each at work in a process of its own, in turns.

The other end is benchmarks/peers/serving.py, under the interpreter that has the library.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from benchmarks.support.harness import sweep_bytes
from benchmarks.support.machine import ROOT

_NOTHING = "missing its process died"


def add_peer_arguments(parser: argparse.ArgumentParser, **apart: str) -> None:
    """--peers, --peers-python, and for each contender `apart` in the same way --NAME-python.

    apart: contender -> directory of the virtual environment that it needs for itself.
    """
    parser.add_argument("--peers", action="store_true", help="add other libraries")
    for name, directory in {"peers": ".peers", **apart}.items():
        python = ROOT / directory / "bin/python"
        parser.add_argument(
            f"--{name}-python", metavar="PYTHON",
            default=str(python) if python.exists() else sys.executable,
            help=f"the interpreter that has them (default: {directory}/ if it is there)",
        )  # fmt: skip


class _Contender:
    """One process, asked for rounds over its standard input."""

    def __init__(self, module: str, name: str, python: str, capacity: int, quick: bool) -> None:
        self._process = subprocess.Popen(
            [python, "-m", module, name, str(capacity), str(sweep_bytes(quick))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.status, _, self.detail = self._answer().partition(" ")
        self.version, _, resident = self.detail.partition(" ")
        self.resident_bytes = int(resident) if self.status == "ready" else 0

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip() or _NOTHING

    def work(self, words: tuple[int, ...]) -> np.ndarray:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return np.array(json.loads(self._answer()), float)

    def close(self) -> None:
        self._process.kill()  # it holds nothing, and some libraries take long to leave
        self._process.communicate()


class Contenders:
    """All that are installed; missing: why the others are not there.

    versions, resident_bytes: of those that are there; the latter is what the filled process holds.

    module: their script. pythons: the interpreter of each.
    """

    def __init__(self, module: str, pythons: Mapping[str, str], capacity: int, quick: bool) -> None:
        self._all = {
            name: _Contender(module, name, python, capacity, quick)
            for name, python in pythons.items()
        }
        self._present = {name: c for name, c in self._all.items() if c.status == "ready"}
        self.versions = {name: c.version for name, c in self._present.items()}
        self.resident_bytes = {name: c.resident_bytes for name, c in self._present.items()}
        self.missing: dict[str, Any] = {
            name: {"missing": c.detail} for name, c in self._all.items() if c.status != "ready"
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for contender in self._all.values():
            contender.close()

    def in_turns(self, rounds: int, *words: int) -> dict[str, np.ndarray]:
        """Each one's rows; words: what every round asks for."""
        rows: dict[str, list[np.ndarray]] = {name: [] for name in self._present}
        for turn in range(rounds + 1):
            for name in random.Random(turn).sample(sorted(rows), len(rows)):
                measured = self._present[name].work(words)
                if turn:  # the first one compiles and warms up
                    rows[name].append(measured)
        return {name: np.concatenate(measured) for name, measured in rows.items()}
