"""One placed host: runs the ordinary command as a child, for as long as the run lasts.

    python -m zapex.clusters.host HOME ROLE INDEX [COMMAND ...]

HOME is a directory of mode 0700 with run.toml, launch.json and keys/; what is started here comes
from launch.json. The replay's host writes its address to HOME/replay.url (shard 1 to replay-1.url,
and so on), the others wait for it and follow it when the replay is placed elsewhere. SIGTERM ends
the child, which saves. SIGUSR1 does too, and then COMMAND asks the scheduler to start this host
again.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zapex.errors import ConfigError
from zapex.machine.child import PARENT_VARIABLE, child_setup
from zapex.machine.disk import replace_whole
from zapex.machine.resources import CORES_VARIABLE
from zapex.run.supervisor import Died, Exited, GaveUp, ProcessSpec, Supervisor, status_in_words

SETTINGS, FACTS, KEYS = "run.toml", "launch.json", "keys"
URL, OVER = "replay.url", "over"
_POLL_S = 0.5
GRACE_S = 60.0  # for a child to save and end; launch.json may say more
_REMINDER_S = 30.0
_AGAIN_S = 60.0
_FAREWELL_S = 60.0  # hosts learn from the replay that the run is over; this is only if they do not
_STOPPED = 128 + signal.SIGTERM
_NO_SUCH_SETTINGS = 2  # the exit code of a mistake that no other start would mend


class PlacedHost:
    """See the module's docstring."""

    def __init__(self, home: Path, role: str, index: int, again: Sequence[str] = ()) -> None:
        self.home, self.role, self.index, self.again = home, role, index, again
        self.facts = facts_of(home)
        self.runs = Path(self.facts.get("runs") or home)
        self.log = home / "logs" / f"{role}-{index}.log"
        self.asked_again = False
        self._lives = self._read = 0
        self._name = self._url = ""
        self._moves = False  # the replay has another address
        self._remind_s = 0.0
        self._port = int(self.facts.get("port") or 0)

    def run(self) -> int:
        """Until the run is over (0), a signal (143), or an error that stays (1 or 2)."""
        self.log.parent.mkdir(mode=0o700, exist_ok=True)
        signal.signal(signal.SIGUSR1, self._ask_again)
        code = self._live()
        while self._moves:
            code = self._live()
        if self.asked_again and self.again:
            _tell(f"saved before the time limit; {' '.join(self.again)}")
            subprocess.run(self.again, timeout=_AGAIN_S, check=False)
        if code is None:
            return 0 if self._is_over() else _STOPPED
        if code == 0 and self.role == self.facts["ends"]:
            replace_whole(self.home / OVER, [b"the learner's command has ended\n"])
        return code

    def _live(self) -> int | None:
        """One life, with one address of the replay: an exit code, or None if it was ended."""
        self._name, self._moves, code = "", False, None
        with Supervisor() as supervisor:
            supervisor.install_signal_handlers()
            while code is None and supervisor.stop_signal is None:
                code = self._look(supervisor)
                self._echo()
                if self.asked_again or self._moves:
                    break
            for event in supervisor.shutdown(self.facts.get("grace_s", GRACE_S)):
                _tell(str(event))
            self._moves = self._moves and supervisor.stop_signal is None
        self._echo()
        return code

    def _ask_again(self, number: int, frame: Any) -> None:
        self.asked_again = True

    def _is_over(self) -> bool:
        return (self.home / OVER).exists()

    def _look(self, supervisor: Supervisor) -> int | None:
        """One round; an exit code ends the host."""
        if not self._name:
            if self._is_over():
                return self._end(supervisor)
            url = self._listen() if self.role == "replay" else self._published()
            if url:
                self._start(supervisor, url)
            elif time.monotonic() >= self._remind_s:
                self._remind_s = time.monotonic() + _REMINDER_S
                _tell(f"waiting for the replay's host to write {self.home / URL}")
        for event in supervisor.poll(_POLL_S):
            _tell(str(event))
            if isinstance(event, Died) and event.how == status_in_words(_NO_SUCH_SETTINGS):
                return _NO_SUCH_SETTINGS
            if isinstance(event, GaveUp):
                return 1
            if isinstance(event, Exited):
                return self._end(supervisor)
        if self._name and self._moved():
            _tell(f"the replay is at {self._published()} now: joining there")
            self._moves = True
        return 0 if self._is_over() and self._told_late() else None

    def _told_late(self) -> bool:
        """The run was over a while ago, and the child still runs."""
        return time.time() - (self.home / OVER).stat().st_mtime > _FAREWELL_S

    def _end(self, supervisor: Supervisor) -> int:
        """The run is over. A scheduler that starts again whatever ends must not start it again."""
        _tell("the run is over")
        if self.facts.get("stays") == self.role:
            _tell("this host waits to be stopped")
            replace_whole(self.home / OVER, [b"the replay's command has ended\n"])
            while supervisor.stop_signal is None:
                supervisor.poll(_REMINDER_S)
                self._echo()
        return 0

    def _start(self, supervisor: Supervisor, url: str) -> None:
        self._url, self._lives = url, self._lives + 1
        self._name = f"{self.role} {self.index}" + (f" ({self._lives})" if self._lives > 1 else "")
        own = {"url": url, "home": self.home, "run": self.runs / f"{self.role}-{self.index}"}
        own["index"] = self.index
        words = [word.format(**own) for word in self.facts["commands"][self.role]]
        argv = [sys.executable, "-P", "-m", "zapex.cli.as_child", self._name, ".", *words]
        cores = self.facts.get("cores", {}).get(self.role)
        env = {CORES_VARIABLE: str(cores)} if cores else {}
        supervisor.start(
            ProcessSpec(name=self._name, argv=argv, log_path=self.log, restart=True, env=env)
        )
        _tell(f"zapex {' '.join(words)}")

    def _published(self) -> str:
        return str(self.facts.get("url") or published(self.home, self.facts))

    def _moved(self) -> bool:
        return self.role != "replay" and self._published() not in ("", self._url)

    def _listen(self) -> str:
        if not self._port:
            with socket.create_server(("", 0)) as probe:
                self._port = int(probe.getsockname()[1])
        if not self.facts.get("url"):
            host = self.facts.get("advertise") or socket.gethostname()
            replace_whole(
                self.home / url_name(self.index), [f"tcp://{host}:{self._port}\n".encode()]
            )
        return f"tcp://0.0.0.0:{self._port}"

    def _echo(self) -> None:
        """Print what the child has printed, where the scheduler keeps what this process prints."""
        if not self.facts.get("echo"):
            return
        try:
            with self.log.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError:
            return
        self._read += len(text)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()


def url_name(shard: int) -> str:
    """The file with the address of a shard."""
    return f"replay-{shard}.url" if shard else URL


def published(home: Path, facts: Mapping[str, Any]) -> str:
    """The addresses of all shards, as `--replay` takes them; "" while one is missing."""
    names = map(url_name, range(facts.get("shards", 1)))
    try:
        urls = [(home / name).read_text(encoding="utf-8").strip() for name in names]
    except OSError:
        return ""
    return ",".join(urls) if all(urls) else ""


def facts_of(home: Path) -> dict[str, Any]:
    """launch.json of a launch. Raises ConfigError."""
    try:
        facts = json.loads((home / FACTS).read_text(encoding="utf-8"))
        return {"on": str(facts["on"]), "name": str(facts["name"]), **facts}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{home} is not a launched run: {error}") from None


def _tell(text: str) -> None:
    print(f"zapex host: {text}", flush=True)


def main(args: Sequence[str]) -> int:
    """HOME ROLE INDEX [COMMAND ...]; the exit code."""
    os.umask(0o077)
    # Otherwise it keeps its name: SLURM's proctrack/linuxproc finds none with a space in it.
    if PARENT_VARIABLE in os.environ:
        child_setup(f"host of {args[1]} {args[2]}")
    return PlacedHost(Path(args[0]), args[1], int(args[2]), args[3:]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
