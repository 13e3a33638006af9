"""One `zapex train` of its own, looked at from outside through the memory that its parent holds.

Looking costs the run nothing: counters and phases are words of shared memory (zapex.host.metrics),
and processor times are the kernel's own.
"""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil

from benchmarks.support.machine import ROOT
from zapex.cli.flags import read_settings
from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.errors import SharedMemoryError
from zapex.host.metrics import RoleMetrics
from zapex.run.run import Run
from zapex.shm_transport import HostMemory

Result = dict[str, Any]

START_S = 600.0  # compiling every kernel on a busy machine, and then some
SETTLE_S = 10.0


@dataclass(frozen=True)
class Look:
    """All that only grows, at one moment. Seconds; names are those of the processes.

    roles: counters, gauges, "phase/<name>" and "cpu/<name>" of each role. cpu_s: of all threads; of
    the parent those that populate the memory are told apart. queued_s: how long threads were ready
    to run and had no core. populated: share of the shared memory that the parent has touched.
    """

    time_s: float
    roles: dict[str, dict[str, float]]
    cpu_s: dict[str, float]
    queued_s: dict[str, float]
    idle_s: float
    stolen_s: float
    populated: float


def zapex_command() -> list[str]:
    """What a user types, of the Python that runs this."""
    script = Path(sys.executable).with_name("zapex")
    return [str(script)] if script.exists() else [sys.executable, "-m", "zapex"]


def paced_command(step_s: float) -> list[str]:
    """The same with a learner whose step takes so long and computes nothing."""
    return [sys.executable, "-m", "benchmarks.support.paced_learner", str(step_s)]


class TrainRun:
    """`zapex train --plain ARGUMENTS` in a fresh run directory; left, it is ended and removed.

    began_s: `time.monotonic()` at the command. environment: variables that differ from ours.
    step_s: of a learner that computes nothing and takes so long for a batch; None: the real one.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        step_s: float | None = None,
    ) -> None:
        self._spec = spec
        self._directory = tempfile.TemporaryDirectory(prefix="zapex-bench-")
        self.path = Path(self._directory.name) / "run"
        self._log = Path(self._directory.name) / "log"
        self._blocks: dict[str, RoleMetrics] = {}
        self.nbytes = 0
        command = zapex_command() if step_s is None else paced_command(step_s)
        told = ["--env", spec.env_id, "--plain", "--run-dir", str(self.path)]
        with self._log.open("wb") as log:
            self.began_s = time.monotonic()
            self.process = subprocess.Popen(
                [*command, "train", *told, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                cwd=ROOT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            self._directory.cleanup()

    def end(self) -> None:
        """Ask it to stop, as Ctrl-C does, and wait until it has."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def blocks(self) -> dict[str, RoleMetrics]:
        """The counters of each process, by its name; empty until the memory is there."""
        if not self._blocks:
            self._attach()
        return self._blocks

    def count_cpu(self) -> None:
        """Have every role count its processor time by phase; costs it a few system calls a step."""
        for block in self.blocks().values():
            block.count_cpu()

    def _attach(self) -> None:
        links = Path(f"/proc/{self.process.pid}/fd")
        try:
            held = [fd for fd in links.iterdir() if "memfd:zapex-control" in os.readlink(fd)]
            if not held:
                return
            with held[0].open("r+b") as file:
                mapping = mmap.mmap(file.fileno(), 0)
            settings = read_settings(str(self.path / "config.toml"))
            plan = Run(Config().replace(**settings), self._spec, self.path).plan
            control = np.frombuffer(mapping, np.uint8)
            host = HostMemory(plan, control, np.empty(0, np.uint8), [])
            self._blocks = {name: host.metrics(name) for name, _ in plan.roles}
            self.config = Config().replace(**settings)
            self.nbytes = plan.nbytes + plan.replay.nbytes
        except (OSError, ValueError, SharedMemoryError):
            return  # it is only just being made; the next look will see it

    def count(self, name: str, counter: str) -> float:
        """One counter or gauge now; 0 before there is one."""
        block = self.blocks().get(name)
        return block.snapshot(alive=False)[counter] if block else 0.0

    def populated(self) -> float:
        """Share of the shared memory's pages that the parent has touched."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        shared = next((x for x in status.splitlines() if x.startswith("RssShmem:")), "0 0")
        return 1024 * int(shared.split()[1]) / self.nbytes if self.nbytes else 0.0

    def wait_until(self, ready: Callable[[], Any], timeout_s: float, poll_s: float = 0.25) -> None:
        """Raises RuntimeError, with what the run has printed, where it never comes to that."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run did not get there:\n{self.log[-4000:]}")
            time.sleep(poll_s)

    def look(self) -> Look:
        """Everything now; a process that has not begun yet is left out."""
        blocks = {name: block for name, block in self.blocks().items() if block.pid}
        pids = {"parent": self.process.pid} | {name: b.pid for name, b in blocks.items()}
        machine = psutil.cpu_times()
        cpu_s = {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}
        threads = psutil.Process(self.process.pid).threads()
        main_s = sum(t.user_time + t.system_time for t in threads if t.id == self.process.pid)
        return Look(
            time_s=time.monotonic(),
            roles={name: block.snapshot() for name, block in blocks.items()},
            cpu_s=cpu_s | {"parent": main_s, "populating": cpu_s["parent"] - main_s},
            queued_s={name: _queued_s(pid) for name, pid in pids.items()},
            idle_s=machine.idle + machine.iowait,
            stolen_s=machine.steal,
            populated=self.populated(),
        )


def _queued_s(pid: int) -> float:
    """Of the threads that live; their second number is nanoseconds ready without a core."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError):  # it has just ended, or the kernel does not count this
            continue
    return total / 1e9


def rates(before: Look, after: Look) -> dict[str, float]:
    """Frames, steps, batches and samples a second between two looks, of all processes."""
    counters = {"actor": ("frames", "steps"), "learner": ("batches", "samples")}
    elapsed_s = after.time_s - before.time_s
    return {
        counter: sum(
            after.roles[name][counter] - before.roles[name][counter]
            for name in after.roles
            if name.split()[0] == role
        )
        / elapsed_s
        for role, names in counters.items()
        for counter in names
    }
