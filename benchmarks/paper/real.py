"""Real runs of Breakout, not paced: zapex's own commands, as users start them.

A role's shares are the phases that it counts itself. On few cores roles compete for them, and the
limiter of samples per insert makes the faster side wait: `wait` is no communication. An actor hands
its chunks to its host's relay over shared memory, so the relay's shares stand beside.
"""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.paper.points import FORMATS
from benchmarks.transport import redis_server

SYSTEMS = ("a", "c", "e")
_FLAGS = [
    "--env", "ALE/Breakout-v5", "--preset", "laptop", "--capacity", "20k", "--learning-starts",
    "2k", "--eval-period-s", "0", "--envs-per-actor", "8", "--plain",
]  # fmt: skip
_ACTOR = {"pull": "pull", "push": "push", "wait": "wait"}
_LEARNER = {"gather": "sample", "update": "update", "publish": "set", "wait": "wait"}
_RELAY = {"push": "push", "pull": "pull", "report": "report", "idle": "wait"}
_START_S, _END_S = 300.0, 60.0


def _commands(system: str, actors: int, port: int) -> dict[str, list[str]]:
    """The commands by the name of their run directory."""
    if system == "e":
        return {"learner": ["train", "--actors", str(actors)]}
    url = f"redis://127.0.0.1:{port}/0" if system == "a" else f"tcp://127.0.0.1:{port}"
    dial = ["--replay", url, "--actors"]
    joined = {"learner": ["learner", *dial, str(actors)], "actor": ["actor", *dial, str(actors)]}
    if system == "a":
        return joined
    return {"replay": ["replay", "--listen", url, "--actors", str(actors)], **joined}


@contextlib.contextmanager
def _running(system: str, actors: int, directory: Path, port: int) -> Iterator[None]:
    """All commands of one run; none is left afterwards."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        if system == "a":
            words = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir"]
            with (directory / "redis.log").open("wb") as log:
                command = [str(redis_server.BINARY), *words, str(directory)]
                started.append(subprocess.Popen(command, stdout=log, stderr=log))
        for name, words in _commands(system, actors, port).items():
            with (directory / f"{name}.log").open("wb") as log:
                command = [sys.executable, "-m", "zapex", *words, *_FLAGS]
                command += ["--run-dir", str(directory / name)]
                started.append(subprocess.Popen(command, stdout=log, stderr=log))
        yield
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGINT)
        for process in reversed(started):
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _snapshot(directory: Path, name: str = "learner") -> dict[str, Any]:
    """A host's view of the run, the learner's of all of it; {} before it has one."""
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((directory / name / "snapshot.json").read_text())
        return found
    return {}


def _shares(snapshot: dict[str, Any], role: str, names: dict[str, str]) -> dict[str, float]:
    """Shares of a role's time since its start; what is not named is computation."""
    found: dict[str, float] = {}
    for one in snapshot.get("roles", ()):
        if one["role"] == role:
            for phase, value in one["phases_total"].items():
                name = names.get(phase, "compute")
                found[name] = found.get(name, 0.0) + value
    return found


def measure_real(system: str, actors: int, seconds: float, port: int) -> dict[str, Any]:
    """One run, `seconds` after its first batches; as a row of the result."""
    with tempfile.TemporaryDirectory(prefix="zapex-paper-") as place:
        directory = Path(place)
        with _running(system, actors, directory, port):
            deadline = time.monotonic() + _START_S
            while _snapshot(directory).get("totals", {}).get("batches", 0) < 2:
                assert time.monotonic() < deadline, (directory / "learner.log").read_text()[-3000:]
                time.sleep(0.5)
            time.sleep(seconds)
            found, actors_host = _snapshot(directory), _snapshot(directory, "actor")
    actor, learner = _shares(found, "actor", _ACTOR), _shares(found, "learner", _LEARNER)
    communication = [
        1 - sum(one.get(name, 0.0) for name in ("compute", "wait")) / max(1e-9, sum(one.values()))
        for one in (actor, learner)
    ]
    return {
        "system": system, "modelled": False, "actors": actors, "gbit": None,
        "format": FORMATS[system], "paced": None, "bytes": {}, "host_bound": True,
        "communication_share": sum(communication) / 2, "actor_share": actor,
        "learner_share": learner, "core_seconds": {}, "actor_push_ms": {}, "actor_pull_ms": {},
        "learner_set_ms": {}, "learner_sample_ms": {}, "learner_pull_experiences_per_s": None,
        "push_hz": None, "ideal_push_hz": None,
        "machine": {"totals": found["totals"], "rates": found["rates"],
                    "relay_share": _shares(actors_host, "relay", _RELAY)},
    }  # fmt: skip
