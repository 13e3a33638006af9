"""One placed host: runs the ordinary command as a child until the run is over.

    python -m zapex.clusters.host HOME ROLE INDEX [REQUEUE ...]

HOME is a directory of mode 0700 with run.toml, launch.json and keys/; launch.json says what is
started here. The replay's host writes its address to HOME/replay.url (shard 1 to replay-1.url, and
so on); the others wait for it, and rejoin when the replay is placed elsewhere. SIGTERM ends the
child, which saves. So does SIGUSR1, after which the command REQUEUE asks the scheduler to start
this host again.
"""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zapex.config.clusters import TABLES, HostTable, Table
from zapex.config.fields import setting
from zapex.errors import ConfigError
from zapex.machine.child import PARENT_VARIABLE, child_setup
from zapex.machine.disk import replace_whole
from zapex.machine.reading import open_regular, read_json, read_text, typed
from zapex.machine.resources import CORES_VARIABLE
from zapex.machine.supervisor import Died, Exited, GaveUp, ProcessSpec, Supervisor, status_in_words

SETTINGS, FACTS, KEYS = "run.toml", "launch.json", "keys"
URL, OVER = "replay.url", "over"
GRACE_S = 60.0
"""For a child to save and end, unless launch.json says otherwise."""
_LONGEST_NAME = 40  # with a role and a number it is still a valid name in Kubernetes
_TAIL_BYTES = 1 << 20
_POLL_S = 0.5
_REMINDER_S = 30.0
_REQUEUE_S = 60.0
_END_S = 60.0  # hosts learn from the replay that the run is over; this is for those that do not
_BAD_SETTINGS = 2  # the exit code of a mistake that no restart fixes


@dataclass(frozen=True)
class Group(HostTable):
    """Equal hosts of one role, numbered from 0.

    command: the words after `zapex`; each host fills in what is in braces.
    """

    name: str = ""
    hosts: int = setting(1, low=1, high=10_000)
    learns: bool = False
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placement(Table):
    """The hosts of a run, which launch.json stores: what each must know, and how to find them.

    on: the scheduler. ids: its names for what was submitted. grace_s: how long a host may take to
    save and end. The rest depends on the scheduler: url and advertise are addresses, runs is where
    the run directories are, echo means that it keeps what hosts print, and stays is the role that
    it would restart at its end.
    """

    on: str = ""
    name: str = ""
    groups: Mapping[str, Group] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)
    shards: int = setting(1, low=1, high=128)
    port: int = setting(0, low=0)
    grace_s: float = setting(GRACE_S, low=0.0)
    url: str = ""
    advertise: str = ""
    runs: str = ""
    echo: bool = False
    stays: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on not in TABLES:
            raise ConfigError(f"--on must be one of {', '.join(TABLES)}, got {self.on!r}")
        fits = re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name)
        if not fits or len(self.name) > _LONGEST_NAME:
            raise ConfigError(
                f"--name must start with a letter and have at most {_LONGEST_NAME} lower-case "
                f"letters, digits and '-', got {self.name!r}"
            )

    @classmethod
    def read(cls, home: Path) -> "Placement":
        """launch.json of a launch. Raises ConfigError."""
        try:
            placement: Placement = typed(cls, read_json(home / FACTS), FACTS)
        except ConfigError as error:
            raise ConfigError(f"{home} is not a launched run: {error}") from None
        return placement

    def write(self, home: Path) -> None:
        """Write launch.json."""
        text = json.dumps(dataclasses.asdict(self), indent=2)
        replace_whole(home / FACTS, [text.encode()])
        (home / FACTS).chmod(0o600)

    def group(self, role: str) -> Group:
        """The group of a role. Raises ConfigError for an unknown one."""
        if role not in self.groups:
            raise ConfigError(
                f"a role of this run is one of {', '.join(self.groups)}, got {role!r}"
            )
        return self.groups[role]

    @property
    def ends(self) -> str:
        """The role whose end is the run's: the one with the learner."""
        return next((group.name for group in self.groups.values() if group.learns), "")


class PlacedHost:
    """See the module's docstring."""

    def __init__(self, home: Path, role: str, index: int, requeue: Sequence[str] = ()) -> None:
        self.home, self.role, self.index, self.requeue = home, role, index, requeue
        self.placement = Placement.read(home)
        self.log = home / "logs" / f"{role}-{index}.log"
        self.over = home / OVER
        self._port = self.placement.port
        self._requeuing = False  # since a SIGUSR1
        self._starts = self._echoed = 0
        self._child = self._url = ""  # the child's name, and the replay's address that it has
        self._remind_s = 0.0

    def run(self) -> int:
        """Until the run is over (0), a signal (143), or an error that stays (1 or 2)."""
        self.log.parent.mkdir(mode=0o700, exist_ok=True)
        signal.signal(signal.SIGUSR1, self._on_sigusr1)
        moved = True
        while moved:
            code, moved = self._run_child()
        if self._requeuing and self.requeue:
            _report(f"saved before the time limit; {' '.join(self.requeue)}")
            subprocess.run(self.requeue, timeout=_REQUEUE_S, check=False)
        if code is None:
            return 0 if self.over.exists() else 128 + signal.SIGTERM
        if code == 0 and self.role == self.placement.ends:
            replace_whole(self.over, [b"the learner's command has ended\n"])
        return code

    def _on_sigusr1(self, number: int, frame: Any) -> None:
        self._requeuing = True

    def _run_child(self) -> tuple[int | None, bool]:
        """Run the child for one address of the replay.

        Returns:
            An exit code, or None after a signal; and whether the replay has moved.
        """
        self._child, code, moved = "", None, False
        with Supervisor() as supervisor:
            supervisor.install_signal_handlers()
            while code is None and supervisor.stop_signal is None and not self._requeuing:
                code = self._poll(supervisor)
                self._echo()
                if moved := code is None and self._has_moved():
                    _report(f"the replay is at {self._replay_url()} now: rejoining there")
                    break
            for event in supervisor.shutdown(self.placement.grace_s):
                _report(str(event))
            moved = moved and supervisor.stop_signal is None
        self._echo()
        return code, moved

    def _poll(self, supervisor: Supervisor) -> int | None:
        """Start the child once the replay has an address, then watch it. Returns an exit code."""
        if not self._child:
            if self.over.exists():
                return self._end(supervisor)
            url = self._listen() if self.role == "replay" else self._replay_url()
            if url:
                self._start(supervisor, url)
            elif time.monotonic() >= self._remind_s:
                self._remind_s = time.monotonic() + _REMINDER_S
                _report(f"waiting for the replay's host to write {self.home / URL}")
        for event in supervisor.poll(_POLL_S):
            _report(str(event))
            if isinstance(event, Died) and event.how == status_in_words(_BAD_SETTINGS):
                return _BAD_SETTINGS
            if isinstance(event, GaveUp):
                return 1
            if isinstance(event, Exited):
                return self._end(supervisor)
        overdue = self.over.exists() and time.time() - self.over.stat().st_mtime > _END_S
        return 0 if overdue else None

    def _end(self, supervisor: Supervisor) -> int:
        """The run is over. Some schedulers restart whatever ends; there the replay's host waits."""
        _report("the run is over")
        if self.placement.stays == self.role:
            _report("this host waits to be stopped")
            replace_whole(self.over, [b"the replay's command has ended\n"])
            while supervisor.stop_signal is None:
                supervisor.poll(_REMINDER_S)
                self._echo()
        return 0

    def _start(self, supervisor: Supervisor, url: str) -> None:
        self._url, self._starts = url, self._starts + 1
        again = f" ({self._starts})" if self._starts > 1 else ""
        self._child = f"{self.role} {self.index}{again}"
        run_dir = Path(self.placement.runs or self.home) / f"{self.role}-{self.index}"
        filled = {"url": url, "home": self.home, "run": run_dir, "index": self.index}
        group = self.placement.group(self.role)
        words = [word.format(**filled) for word in group.command]
        argv = [sys.executable, "-P", "-m", "zapex", "--child", self._child, *words]
        env = {CORES_VARIABLE: str(group.cores)}
        supervisor.start(
            ProcessSpec(name=self._child, argv=argv, log_path=self.log, restart=True, env=env)
        )
        _report(f"zapex {' '.join(words)}")

    def _replay_url(self) -> str:
        return self.placement.url or published(self.home, self.placement.shards)

    def _has_moved(self) -> bool:
        started = bool(self._child) and self.role != "replay"
        return started and self._replay_url() not in ("", self._url)

    def _listen(self) -> str:
        """Publish the address of this replay. Returns where it listens."""
        if not self._port:
            with socket.create_server(("", 0)) as probe:
                self._port = int(probe.getsockname()[1])
        if not self.placement.url:
            host = self.placement.advertise or socket.gethostname()
            publish(self.home, self.index, f"tcp://{host}:{self._port}")
        return f"tcp://0.0.0.0:{self._port}"

    def _echo(self) -> None:
        """Print the child's output if the scheduler keeps what this process prints."""
        if not self.placement.echo:
            return
        try:
            with self.log.open("rb") as file:
                file.seek(self._echoed)
                text = file.read()
        except OSError:
            return
        self._echoed += len(text)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()


def _url_file(home: Path, shard: int) -> Path:
    return home / (f"replay-{shard}.url" if shard else URL)


def publish(home: Path, shard: int, url: str) -> None:
    """Write the address of a shard."""
    replace_whole(_url_file(home, shard), [f"{url}\n".encode()])


def published(home: Path, shards: int, first: int = 0) -> str:
    """The addresses of these shards, as `--replay` takes them; "" while one is missing."""
    files = [_url_file(home, shard) for shard in range(first, first + shards)]
    try:
        urls = [read_text(path).strip() for path in files]
    except ConfigError:
        return ""
    return ",".join(urls) if all(urls) else ""


def tail(path: Path, lines: int) -> str:
    """The last lines of a log. Raises OSError."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def host_words(home: Path, role: str) -> list[str]:
    """The command of a host, to which its index is added."""
    return [sys.executable, "-P", "-m", "zapex.clusters.host", str(home), role]


def _report(text: str) -> None:
    print(f"zapex host: {text}", flush=True)


def main(args: Sequence[str]) -> int:
    """HOME ROLE INDEX [REQUEUE ...]; returns the exit code."""
    os.umask(0o077)
    # A host without a supervisor keeps its name: SLURM's proctrack/linuxproc needs it as it is.
    if PARENT_VARIABLE in os.environ:
        child_setup(f"host of {args[1]} {args[2]}")
    return PlacedHost(Path(args[0]), args[1], int(args[2]), args[3:]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
