"""Real runs of Breakout, not paced: zapex's own commands, and the paper's baseline over Redis.

A role's shares are the phases that it counts itself. On few cores roles compete for them, and the
limiter of samples per insert makes the faster side wait: `wait` is not communication. Here an
actor's `push` includes writing its chunks, and a learner's `sample` gathering the batch, which
paced roles don't count: so it is `moving_share`, not `communication_share`. In `c` an actor hands
its chunks to its host's relay over shared memory, so the relay's shares are separate; in `a` an
actor pushes to Redis itself, as in the paper.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.paper.baseline import BATCHES, connect
from benchmarks.paper.points import FORMATS
from benchmarks.support.harness import FIRST_PRESET
from benchmarks.transport import redis_server
from zapex.machine.child import PARENT_VARIABLE

SYSTEMS = ("a", "c", "e")
_FLAGS = [
    "--env",
    "ALE/Breakout-v5",
    "--preset",
    "laptop",
    "--capacity",
    "20k",
    "--learning-starts",
    "2k",
    "--eval-period-s",
    "0",
    "--envs-per-actor",
    "8",
    "--plain",
    *FIRST_PRESET.split(),
]
_ACTOR = {"pull": "pull", "push": "push", "wait": "wait"}
_LEARNER = {
    "gather": "sample",
    "update": "update",
    "publish": "set",
    "wait": "wait",
    "fill": "wait",
}
_RELAY = {"push": "push", "pull": "pull", "report": "report", "idle": "wait"}
_START_S, _END_S = 300.0, 60.0
_SKIP = 4  # frames of a step


def _commands(system: str, actors: int, port: int) -> dict[str, list[str]]:
    """The commands by the name of their run directory."""
    if system == "e":
        return {"learner": ["train", "--actors", str(actors)]}
    url = f"tcp://127.0.0.1:{port}"
    dial = ["--replay", url, "--actors"]
    joined = {"learner": ["learner", *dial, str(actors)], "actor": ["actor", *dial, str(actors)]}
    return {"replay": ["replay", "--listen", url, "--actors", str(actors)], **joined}


@contextlib.contextmanager
def _running(system: str, actors: int, directory: Path, port: int) -> Iterator[None]:
    """All commands of one run; none is left afterwards."""
    started: list[subprocess.Popen[bytes]] = []
    try:
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
    """Shares of a role's time since its start."""
    found = [one for one in snapshot.get("roles", ()) if one["role"] == role]
    return _named(found[0]["phases_total"], names) if found else {}


def _named(phases: dict[str, float], names: dict[str, str]) -> dict[str, float]:
    """Shares of phases by the names of the result; those without a name are computation."""
    found: dict[str, float] = {}
    whole = sum(phases.values()) or 1.0
    for phase, value in phases.items():
        name = names.get(phase, "compute") if names else phase
        found[name] = found.get(name, 0.0) + value / whole
    return found


def _measure_commands(system: str, actors: int, seconds: float, port: int) -> dict[str, Any]:
    """Shares and counters of one run of zapex's commands, `seconds` after its first batches."""
    with tempfile.TemporaryDirectory(prefix="zapex-paper-") as place:
        directory = Path(place)
        with _running(system, actors, directory, port):
            deadline = time.monotonic() + _START_S
            while _snapshot(directory).get("totals", {}).get("batches", 0) < 2:
                assert time.monotonic() < deadline, (directory / "learner.log").read_text()[-3000:]
                time.sleep(0.5)
            before = found = _snapshot(directory)
            deadline = time.monotonic() + seconds + _END_S
            while (span_s := (found["time_ns"] - before["time_ns"]) / 1e9) < seconds:
                assert time.monotonic() < deadline, (directory / "learner.log").read_text()[-3000:]
                time.sleep(0.5)
                found = _snapshot(directory) or found
            actors_host = _snapshot(directory, "actor")
    made = {name: found["totals"][name] - before["totals"][name] for name in ("frames", "batches")}
    return {
        "actor": _shares(found, "actor", _ACTOR),
        "learner": _shares(found, "learner", _LEARNER),
        **_rates(made["frames"], made["batches"], span_s),
        "machine": {
            "totals": found["totals"],
            "relay_share": _shares(actors_host, "relay", _RELAY),
        },
    }


def _rates(frames: float, batches: float, seconds: float) -> dict[str, float]:
    return {"steps_per_s": frames / _SKIP / seconds, "batches_per_s": batches / seconds}


def _measure_baseline(actors: int, seconds: float, port: int) -> dict[str, Any]:
    """As `_measure_commands`, of a run over Redis."""
    url = f"redis://127.0.0.1:{port}/0"
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    roles: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="zapex-paper-") as place:
        words = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", place]
        with (Path(place) / "log").open("wb") as log:
            server = subprocess.Popen([str(redis_server.BINARY), *words], stdout=log, stderr=log)
        try:
            client, deadline = connect(url), time.monotonic() + _START_S
            for role in ("learner", *map(str, range(actors))):
                command = [sys.executable, "-m", "benchmarks.paper.real_baseline", role, url]
                command += [*_FLAGS, "--actors", str(actors)]
                roles.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
            while int(client.get(BATCHES) or 0) < 2:
                assert time.monotonic() < deadline, "the run did not begin in time"
                assert all(role.poll() is None for role in roles), "a role has ended too early"
                time.sleep(0.2)
            for role in roles:
                role.send_signal(signal.SIGUSR1)  # it counts from here
            time.sleep(seconds)
            for role in roles:
                role.terminate()
            learner, *played = [json.loads(role.communicate(timeout=_END_S)[0]) for role in roles]
        finally:
            for process in (*roles, server):
                process.kill()
                process.wait()
    each = [_named(one["phases"], _ACTOR) for one in played]
    names = {name for one in each for name in one}
    frames = sum(one["frames"] for one in played)
    return {
        "actor": {name: sum(one.get(name, 0.0) for one in each) / actors for name in names},
        "learner": _named(learner["phases"], {}),
        **_rates(frames, learner["batches"], seconds),
        "machine": {},
    }


def measure_real(system: str, actors: int, seconds: float, port: int) -> dict[str, Any]:
    """One run, `seconds` after its first batches; as a row of the result."""
    if system == "a":
        found = _measure_baseline(actors, seconds, port)
    else:
        found = _measure_commands(system, actors, seconds, port)
    moving = [
        1 - sum(one.get(name, 0.0) for name in ("compute", "wait")) / max(1e-9, sum(one.values()))
        for one in (found["actor"], found["learner"])
    ]
    return {
        "system": system,
        "actors": actors,
        "gbit": None,
        "format": FORMATS[system],
        "paced": None,
        "moving_share": sum(moving) / 2,
        "actor_share": found["actor"],
        "learner_share": found["learner"],
        "steps_per_s": found["steps_per_s"],
        "batches_per_s": found["batches_per_s"],
        "machine": found["machine"],
    }
