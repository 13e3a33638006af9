"""The same run by hand and through `zapex launch --on ray`: its speed, its start, Ray's own work.

    zapex bench clusters [--rounds 5] [--seconds 8] [--quick] [--json FILE]

Replay, learner and one host with one actor play CartPole on this machine with keys, over tcp. By
hand they are the three plain commands; through Ray, `zapex launch` has a Ray of one node start the
same commands. The two take turns, and no Ray is there while a run goes by hand. Each run is looked
at twice: while a step of the environment sleeps a millisecond, so that the cores hold the run and
Ray beside it ("paced"), and then without that, when both cores are full and whatever Ray takes is
taken from the run ("unpaced").

    steps_per_s, batches_per_s   in each window
    first_batch_s                from the command until the learner's first batch
    cores                        all processes of the run
    ray_core_s_per_minute        Ray's own processes: control store, raylet, agents, monitors,
                                 dashboard, workers (those of the run's hosts included), and the
                                 `zapex launch` that watches
    host_core_s_per_minute       the small process beside each command of a placed host

The seconds in which Ray itself comes up are not in first_batch_s: they are ray_up_s.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.harness import arguments, goal, in_rounds, write_json
from benchmarks.support.machine import ROOT, machine_facts
from benchmarks.support.slow_env import HURRY
from zapex.cli.flags import read_settings
from zapex.clusters.launched import settings_of
from zapex.clusters.placement import place
from zapex.config.settings import Config
from zapex.envs.environments import check
from zapex.errors import ConfigError
from zapex.host.parts import PartName
from zapex.net import keys as curve_keys
from zapex.run.audit import attach
from zapex.run.run import Membership, Run
from zapex.shm_transport import HostMemory

_TABLES: dict[str, dict[str, Any]] = {
    "env": {"env": "CartPole-v1", "wrapper": ["benchmarks.support.slow_env:slow"]},
    "run": {"preset": "smoke", "max_frames": 0},
    "evaluator": {"eval_period_s": 0.0},
    "replay": {"capacity": 50_000, "learning_starts": 500, "samples_per_insert": 8.0},
    "actor": {"envs_per_actor": 4},
    "learner": {"learner_threads": 1, "batch_size": 128},
}
_RAY = """
[ray]
address = "{address}"
replay = {{ cores = 1 }}
learner = {{ cores = 1 }}
actor = {{ hosts = 1, actors = 1, cores = 1 }}
"""
_NODE = {"num_cpus": 3, "num_gpus": 0, "memory": 16 << 30, "object_store_memory": 100 << 20}
_START_S, _END_S, _SETTLE_S, _LOOK_S = 240.0, 60.0, 3.0, 0.02
_NAMES: dict[str, PartName] = {"actor-0": "actor", "learner-0": "learner"}
# How the command lines of Ray's processes begin; some are titles that they gave themselves.
_KINDS = {
    "/gcs_server": "control store", "/raylet/raylet": "raylet", "agent": "agents",
    "monitor": "monitors", "dashboard": "dashboard", "ray::RayHost": "hosts' workers",
    "ray::": "other workers", "default_worker": "other workers", "zapex launch": "zapex launch",
}  # fmt: skip
_HOSTS = ("zapex.clusters.host", "zapex: host of")
Used = dict[tuple[int, float], tuple[str, float]]  # (pid, start) -> what it is, its seconds
Form = Callable[[Path], contextlib.AbstractContextManager["Placed"]]


class Placed:
    """A run whose commands have been started; `directory` has the run directories.

    watched: commands that must not end. ray_up_s: how long Ray took to come up; None: it is by
    hand.
    """

    def __init__(
        self, directory: Path, watched: Sequence[subprocess.Popen[bytes]],
        ray_up_s: float | None = None,
    ) -> None:  # fmt: skip
        self.directory, self._watched, self.ray_up_s = directory, watched, ray_up_s
        self.began_s = time.monotonic()
        self._memory: dict[str, HostMemory] = {}

    def count(self, run_dir: str, role: str, name: str) -> float:
        """A counter of a role; 0 before it is there."""
        if run_dir not in self._memory:
            memory = _memory_at(self.directory / run_dir, _NAMES[run_dir])
            if memory is None:
                return 0.0
            self._memory[run_dir] = memory
        return float(self._memory[run_dir].metrics(role).snapshot(alive=False)[name])

    @property
    def steps(self) -> float:
        """Of the actor."""
        return self.count("actor-0", "actor 0", "steps")

    @property
    def batches(self) -> float:
        """Of the learner."""
        return self.count("learner-0", "learner", "batches")

    def wait_for(self, ready: Callable[[], bool], what: str) -> float:
        """Seconds since the command until it is so. Raises RuntimeError."""
        while not ready():
            ended = [one.args for one in self._watched if one.poll() is not None]
            if ended or time.monotonic() > self.began_s + _START_S:
                logs = [path.read_text()[-1500:] for path in self.directory.glob("*.txt")]
                raise RuntimeError(f"no {what}; ended: {ended}\n" + "\n".join(logs))
            time.sleep(_LOOK_S)
        return time.monotonic() - self.began_s


def _memory_at(run_dir: Path, part: PartName) -> HostMemory | None:
    """The memory of the command that has this run directory; None: not yet."""
    try:
        pid = int((run_dir / ".lock").read_text())
        config = Config().replace(**read_settings(str(run_dir / "config.toml")))
    except (OSError, ValueError, ConfigError):
        return None
    membership = Membership(part, "tcp://127.0.0.1:1")
    spec = check(config.env.env, {}, config.env.wrapper)
    return attach(pid, Run(config, spec, run_dir, membership=membership))


def _environment(directory: Path) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    own |= {"XDG_STATE_HOME": str(directory / "state"), HURRY: str(directory / "hurry")}
    return {**os.environ, **own}


def _start(words: Sequence[str], directory: Path, name: str) -> subprocess.Popen[bytes]:
    with (directory / f"{name}.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "zapex", *words], cwd=directory, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, env=_environment(directory),
        )  # fmt: skip


def _end(started: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for one in started:
        one.send_signal(number)
    for one in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.wait(_END_S)
        one.kill()
        one.wait()


@contextlib.contextmanager
def by_hand(directory: Path) -> Iterator[Placed]:
    """The three plain commands, as a placed host would start them."""
    file = directory / "run.toml"
    file.write_text(settings_of(_TABLES))
    curve_keys.make(directory / "keys")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    placement = place("ray", "bench", directory, file.read_text() + _RAY.format(address="none"))
    started: list[subprocess.Popen[bytes]] = []
    run = Placed(directory, started)
    try:
        for group in placement.groups:
            own = {"url": url, "home": directory, "run": directory / f"{group.name}-0"}
            words = [word.format(**own) for word in placement.command(group)]
            started.append(_start(words, directory, group.name))
        yield run
    finally:
        _end(started, signal.SIGTERM)


@contextlib.contextmanager
def through_ray(directory: Path) -> Iterator[Placed]:
    """`zapex launch --on ray`, on a Ray of one node that is there for this run alone."""
    os.environ.update(_environment(directory))
    began_s = time.monotonic()
    ray = import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={**_NODE, "include_dashboard": False}
    )
    up_s = time.monotonic() - began_s
    started: list[subprocess.Popen[bytes]] = []
    try:
        file, launch = directory / "run.toml", directory / "launch"
        file.write_text(settings_of(_TABLES) + _RAY.format(address=ray.address))
        words = ["launch", str(file), "--on", "ray", "--name", "bench", "--dir", str(launch)]
        words += ["--trust"]
        run = Placed(launch, started, up_s)
        started.append(_start(words, directory, "launch"))
        yield run
        words = ["stop", str(launch)]
        _start(words, directory, "stop").wait(2 * _END_S)
    finally:
        _end(started, signal.SIGTERM)
        ray.shutdown()


def _kind(process: psutil.Process) -> str:
    """Which of Ray's processes this is, or "host"."""
    words = " ".join(process.cmdline()[:4])
    if any(name in words for name in _HOSTS):
        return "host"
    return next((kind for text, kind in _KINDS.items() if text in words), "others")


def _used(with_ray: bool) -> Used:
    """Processor seconds of each process that came from here, and what it is; "": of the run."""
    found: Used = {}

    def walk(process: psutil.Process, of_run: bool) -> None:
        with contextlib.suppress(psutil.Error):
            kind = "" if of_run else _kind(process)
            seconds = sum(process.cpu_times()[:2])
            found[process.pid, process.create_time()] = kind, seconds
            for child in process.children():
                walk(child, of_run or kind == "host")

    for child in psutil.Process().children():
        walk(child, not with_ray)
    return found


def _window(run: Placed, seconds: float) -> dict[str, Any]:
    """What the run does in a while, and what its processes and Ray's take."""
    with_ray = run.ray_up_s is not None
    began_s, steps, batches, before = time.monotonic(), run.steps, run.batches, _used(with_ray)
    time.sleep(seconds)
    took_s = time.monotonic() - began_s
    steps, batches = run.steps - steps, run.batches - batches
    spent = dict.fromkeys(["", "host", *_KINDS.values()] if with_ray else [""], 0.0)
    for who, (kind, used_s) in _used(with_ray).items():
        more_s = used_s - before.get(who, ("", 0.0))[1]
        spent[kind] = spent.get(kind, 0.0) + more_s * 60 / took_s
    found = {
        "steps_per_s": steps / took_s,
        "batches_per_s": batches / took_s,
        "cores": spent.pop("") / 60,
    }
    if not with_ray:
        return found
    host_s = spent.pop("host")
    rays = {**spent, "all": sum(spent.values())}
    return {**found, "host_core_s_per_minute": host_s, "ray_core_s_per_minute": rays}


def measure(form: Form, seconds: float, settle_s: float) -> dict[str, Any]:
    """One run: its start, and its two windows."""
    with tempfile.TemporaryDirectory(prefix="zapex-bench-") as name, form(Path(name)) as run:
        first_batch_s = run.wait_for(lambda: run.batches > 0 and run.steps > 0, "first batch")
        time.sleep(settle_s)
        paced = _window(run, seconds)
        (Path(name) / "hurry").touch()
        time.sleep(settle_s)
        found = {"first_batch_s": first_batch_s, "paced": paced, "unpaced": _window(run, seconds)}
    return found if run.ray_up_s is None else {**found, "ray_up_s": run.ray_up_s}


_FORMS: dict[str, Form] = {"by hand": by_hand, "through Ray": through_ray}


def main(argv: Sequence[str] | None = None) -> int:
    """What it costs to have Ray place a run."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each window")
    options = parser.parse_args(argv)
    rounds, seconds = (1, 3.0) if options.quick else (options.rounds, options.seconds)
    settle_s = 0.5 if options.quick else _SETTLE_S
    cells = {name: partial(measure, form, seconds, settle_s) for name, form in _FORMS.items()}
    medians, spreads = in_rounds(cells, rounds)
    hand, ray = (medians[name] for name in _FORMS)
    more_s = ray["first_batch_s"] - hand["first_batch_s"]
    ends_s = spreads["through Ray"]["first_batch_s"]
    spreads["start_more_s"] = [end_s - hand["first_batch_s"] for end_s in ends_s]
    print(
        f"first batch by hand after {hand['first_batch_s']:.1f} s, through Ray "
        f"{ray['first_batch_s']:.1f} s; Ray itself came up in {ray['ray_up_s']:.1f} s before"
    )
    print(goal("start-up more", more_s, 5.0, " s"))
    ratios = {pace: _compare(pace, hand[pace], ray[pace]) for pace in ("paced", "unpaced")}
    write_json(
        options, "clusters", {**medians, "start_more_s": more_s, "steps_ratio": ratios},
        rounds=rounds, spreads=spreads, seconds=seconds,
        versions=machine_facts(["ray"])["versions"],
    )  # fmt: skip
    return 0


def _compare(pace: str, hand: dict[str, Any], ray: dict[str, Any]) -> float:
    """Print both; steps/s through Ray over those by hand."""
    ratio = float(ray["steps_per_s"] / hand["steps_per_s"])
    print(f"{pace}: by hand {hand['steps_per_s']:,.0f} steps/s, {hand['cores']:.2f} cores; through "
          f"Ray {ray['steps_per_s']:,.0f}, {ray['cores']:.2f}")  # fmt: skip
    told = ", ".join(f"{kind} {s:.2f}" for kind, s in ray["ray_core_s_per_minute"].items())
    print(f"  Ray's own core-seconds a minute: {told}; hosts {ray['host_core_s_per_minute']:.2f}")
    print(goal("steps/s through Ray, of those by hand", ratio, 0.97, least=True))
    return ratio


if __name__ == "__main__":
    sys.exit(main())
