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
from zapex.envs import environments
from zapex.errors import SharedMemoryError
from zapex.host.metrics import RoleMetrics
from zapex.run.run import Run
from zapex.shm_transport import HostMemory

START_S = 600.0  # compiling every kernel on a busy machine, and then some
SETTLE_S = 10.0


@dataclass(frozen=True)
class Look:
    """Everything that only grows, at one moment. Names are those of the processes.

    roles: counters, gauges and "phase/<name>" seconds of each role. cpu_s: processor seconds of all
    threads of a process.
    """

    time_s: float
    roles: dict[str, dict[str, float]]
    cpu_s: dict[str, float]


def zapex_command() -> list[str]:
    """What a user types, of the Python that runs this."""
    script = Path(sys.executable).with_name("zapex")
    return [str(script)] if script.exists() else [sys.executable, "-m", "zapex"]


class TrainRun:
    """`zapex train --plain ARGUMENTS` in a fresh run directory; left, it is ended and removed.

    environment: variables that differ from ours. began_s: `time.monotonic()` at the command.
    inside: what runs, once `blocks` has found its memory.
    """

    def __init__(
        self,
        env: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="zapex-bench-")
        self.path = Path(self._directory.name) / "run"
        self._log = Path(self._directory.name) / "log"
        self._blocks: dict[str, RoleMetrics] = {}
        command = [*zapex_command(), "train", "--env", env, "--plain"]
        with self._log.open("wb") as log:
            self.began_s = time.monotonic()
            self.process = subprocess.Popen(
                [*command, "--run-dir", str(self.path), *arguments],
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

    def _attach(self) -> None:
        links = Path(f"/proc/{self.process.pid}/fd")
        try:
            held = [fd for fd in links.iterdir() if "memfd:zapex-control" in os.readlink(fd)]
            if not held:
                return
            with held[0].open("r+b") as file:
                mapping = mmap.mmap(file.fileno(), 0)
            settings = read_settings(str(self.path / "config.toml"))
            config = Config().replace(**settings)
            played = config.env
            spec = environments.check(played.env, played.env_kwargs, played.wrapper)
            inside = Run(config, spec, self.path)
            plan = inside.plan
            control = np.frombuffer(mapping, np.uint8)
            host = HostMemory(plan, control, np.empty(0, np.uint8), [])
            self._blocks = {name: host.metrics(name) for name, _ in plan.roles}
            self.inside = inside
        except (OSError, ValueError, SharedMemoryError):
            return  # it is only just being made; the next look will see it

    def count(self, name: str, counter: str) -> float:
        """One counter or gauge now; 0 before there is one."""
        block = self.blocks().get(name)
        return block.snapshot(alive=False)[counter] if block else 0.0

    def wait_until(self, ready: Callable[[], Any], timeout_s: float, poll_s: float = 0.25) -> None:
        """Wait for it. Raises RuntimeError with the run's output if the run ends or time is up."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run did not get there:\n{self.log[-4000:]}")
            time.sleep(poll_s)

    def look(self) -> Look:
        """Everything now; a process that has not started yet is left out."""
        blocks = {name: block for name, block in self.blocks().items() if block.pid}
        pids = {"parent": self.process.pid} | {name: b.pid for name, b in blocks.items()}
        return Look(
            time_s=time.monotonic(),
            roles={name: block.snapshot() for name, block in blocks.items()},
            cpu_s={name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()},
        )


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
