"""The commands of a run on several hosts, as real processes: started, killed, ended, examined."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import fstack
from tests.support.audit import ChunkAudit, attach
from zapex.cli.flags import read_settings
from zapex.config.settings import Config
from zapex.envs.environments import check
from zapex.run.run import Membership, Run
from zapex.watch import recorders

ROOT = Path(__file__).parents[2]
MOST_IN_A_CHUNK = 64
DEADLINE_S = 110.0  # a busy machine is no failure
VARIABLES = {
    "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8",
}  # fmt: skip


def free_port() -> int:
    """A TCP port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _terminal_into(file: int) -> int:
    """A terminal of 100x40 whose output goes to `file` until its last holder closes it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 100, 0, 0))
    copy = os.dup(file)

    def drain() -> None:
        with contextlib.suppress(OSError):  # EIO: nobody holds the other end
            while data := os.read(ours, 1 << 16):
                os.write(copy, data)
        os.close(ours)
        os.close(copy)

    threading.Thread(target=drain, daemon=True).start()
    return theirs


class Part:
    """`zapex COMMAND ...` in a directory, with its run directory `run`.

    module: what is run in the place of `zapex`, and what it gets before the command.
    main: a program that is run instead, with the same words. terminal: it has one, of 100x40.
    """

    def __init__(
        self,
        directory: Path,
        command: str,
        *args: str,
        prefix: Sequence[str] = (),
        module: Sequence[str] = ("zapex",),
        main: str = "",
        terminal: bool = False,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.directory, self.run = directory, directory / "run"
        self.shared_before = set(os.listdir("/dev/shm"))
        self._children: dict[int, psutil.Process] = {}
        argv = [sys.executable, *(["-c", main] if main else ["-m", *module]), command, *args]
        argv += [] if terminal else ["--plain"]
        argv += [] if "--resume" in args else ["--run-dir", "run"]
        with (directory / "output.txt").open("wb") as file:
            output = _terminal_into(file.fileno()) if terminal else file.fileno()
            self.popen = subprocess.Popen(
                [*prefix, *argv],
                cwd=directory,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **VARIABLES},
                # A shell ignores Ctrl-C for what it runs in its background; that is inherited.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )
        if terminal:
            os.close(output)

    @property
    def output(self) -> str:
        """All that it has said."""
        return (self.directory / "output.txt").read_text(errors="replace")

    def children(self) -> dict[str, psutil.Process]:
        """The living children by title."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.popen.pid).children(recursive=True):
                self._children[child.pid] = child
        titles = {}
        for child in self._children.values():
            with contextlib.suppress(psutil.Error):
                if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                    titles[" ".join(child.cmdline()).strip().removeprefix("zapex: ")] = child
        return titles

    def kill_child(self, title: str) -> None:
        """SIGKILL one role."""
        self.children()[title].kill()

    def wait_for(self, ready: Callable[[], object], what: str) -> None:
        """Wait until it is so; what it has said, where that never comes or where it ends first."""
        deadline = time.monotonic() + DEADLINE_S
        while not ready():
            over = self.popen.poll()
            if over is not None and ready():
                return
            if over is not None or time.monotonic() > deadline:
                pytest.fail(f"waited for {what}; exit code {over}\n{self.output}\n{self.logs()}")
            time.sleep(0.05)

    def wait_to_say(self, text: str, times: int = 1) -> None:
        """Wait until it has said something so many times."""
        self.wait_for(lambda: self.output.count(text) >= times, f"{text!r} x{times}")

    def snapshot(self) -> dict[str, Any]:
        """The newest that it has written of its run; at the end, the last."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            facts: dict[str, Any] = json.loads((self.run / "snapshot.json").read_text())
            return facts
        return {"totals": {"frames": 0, "batches": 0}, "relay": {}, "replay": {}, "learner": {}}

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of its metrics so far."""
        return [x for x in recorders.read_metrics(self.run) if x["kind"] != "evaluation"]

    def logs(self) -> str:
        """The roles' own words."""
        return "\n".join(path.read_text() for path in sorted(self.run.glob("logs/*.log")))

    def ends(self, within_s: float, number: int | None = None) -> int:
        """Send a signal where one is given; the exit code."""
        self.children()
        if number is not None:
            self.popen.send_signal(number)
        try:
            return self.popen.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still there after {within_s:g} s\n{self.output}\n{self.logs()}")

    def is_gone(self) -> bool:
        """No child of it is left."""
        return not self.children()

    def close(self) -> None:
        """Whatever happens, nothing of it stays."""
        self.children()
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait(10)
        for child in self.children().values():
            with contextlib.suppress(psutil.Error):
                child.kill()


class Cluster:
    """The parts of one run, each in a directory under `directory`; `config` is for all.

    scheme: of the replay's `--listen`, where it is another than that of `--replay`. On F-Stack the
    address is F-Stack's (tests/support/fstack.py).
    """

    def __init__(self, directory: Path, config: Sequence[str], url: str = "") -> None:
        self.directory, self.config = directory, list(config)
        self.url = url or f"tcp://127.0.0.1:{free_port()}"
        self.scheme = self.url.partition(":")[0]
        self.parts: list[Part] = []

    def start(self, command: str, *args: str, name: str = "", **how: Sequence[str]) -> Part:
        """One more part; its address is given. how: as in Part."""
        if self.scheme == "fstack" and not self.parts:
            self.url = fstack.url().replace("fstack", "tcp")
        listen = self.scheme + self.url[self.url.index(":") :]
        flags = ["--listen", listen] if command == "replay" else ["--replay", self.url]
        if listen.startswith("fstack") and command == "replay":
            setup = fstack.setup()
            flags += ["--fstack-lib", setup.library, "--fstack-conf", setup.config]
            flags += [f"--fstack-eal={setup.arguments}"]
        path = self.directory / (name or f"{command}{len(self.parts)}")
        self.parts.append(Part(path, command, *flags, *self.config, *args, **how))
        return self.parts[-1]

    def close(self) -> None:
        """Everything ends."""
        for part in self.parts:
            part.close()


def memory_of(replay: Part, url: str) -> ChunkAudit:
    """What looks into the memory of the replay's parent; it stays readable when that has ended."""
    replay.wait_to_say("listening at")
    settings = read_settings(str(replay.run / "config.toml"))
    config = Config().replace(**settings)
    run = Run(config, check(config.env.env), replay.run, membership=Membership("replay", url))
    host = attach(replay.popen.pid, run)
    assert host is not None
    return ChunkAudit(host.store())


def settled(audit: ChunkAudit) -> None:
    """Nothing is lost, torn or doubled of all that was ever seen."""
    audit.look()
    assert (audit.lost, audit.torn, audit.doubled) == (0, 0, 0)
    assert audit.chunks > 0


def check_account(replay: Part, hosts: Sequence[Part]) -> None:
    """What was acknowledged is in the replay, and nothing else but what no answer came for."""
    relays = [host.snapshot()["relay"] for host in hosts]
    sent = sum(int(relay["transitions"]) for relay in relays)
    unheard = sum(int(relay["unacknowledged"]) for relay in relays)
    inserted = int(replay.snapshot()["replay"]["inserted"])
    assert 0 < sent <= inserted <= sent + MOST_IN_A_CHUNK * unheard


@contextlib.contextmanager
def cluster_in(directory: Path, config: Sequence[str], url: str = "") -> Iterator[Cluster]:
    """A Cluster of which nothing stays."""
    cluster = Cluster(directory, config, url)
    try:
        yield cluster
    finally:
        cluster.close()
