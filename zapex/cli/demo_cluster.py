"""`zapex demo cluster`: replay, two actor hosts and a learner train CartPole, each on its own host.

As root, with `ip`, each host is a network namespace with a virtual cable, and one cable is cut for
a while; otherwise all hosts are on loopback. The commands are those that a user types. The
committed chunks are accounted for in two ways: by each host's counters, and by reading the memory
that the replay's parent holds.
"""

import contextlib
import math
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zapex.checkpoints.file import latest
from zapex.cli import netns
from zapex.cli import resolve as settings
from zapex.cli.demos import ENV, GRACE_S, TARGET, DemoOptions, Log, child_argv, outcome
from zapex.cli.flags import parse
from zapex.envs.environments import check
from zapex.errors import ConfigError
from zapex.host.parts import PARTS
from zapex.net import keys as curve_keys
from zapex.run.audit import ChunkAudit, attach
from zapex.run.run import Membership, Run
from zapex.run.supervisor import Died, Exited, ProcessSpec, Supervisor
from zapex.watch.recorders import read_snapshot
from zapex.watch.report import Snapshot
from zapex.watch.terminal import size

HOSTS = {"replay": "replay", "actors-a": "actor", "actors-b": "actor", "learner": "learner"}
"""Host -> its command."""
ACTOR_HOSTS = ("actors-a", "actors-b")
_COLOURS = {"replay": "36", "actors-a": "32", "actors-b": "33", "learner": "35"}
_SETTINGS = (
    f"--env {ENV} --preset laptop --envs-per-actor 4 --eval-period-s 10 --eval-episodes 20"
    " --samples-per-insert 4"  # so that actors do not displace the learner from its core
)
# Settings, and closing lines with paths and addresses that are of use only inside of the demo.
_LEFT_OUT = ("  --", "---", "Runs until", " run ", " curve ", " watch ", " go on ", " inspect ")
_PORT = 7711
_POLL_S = 0.2
_LOOK_S = 1.0
_FAREWELL_S = 20.0
_CUT_AFTER_S, _CUT_FOR_S = 12.0, 8.0  # once both actor hosts play


@dataclass(frozen=True)
class _Options(DemoOptions):
    """How long, and where."""

    rate: str = "1gbit"
    """Rate of each host's cable, such as 1gbit or 200mbit; namespaces only."""
    loopback: bool = False
    """Use no namespaces, even if they are possible."""


def command(args: list[str]) -> int:
    """`zapex demo cluster [flags]`. Returns 0 if nothing was lost and all ended normally."""
    what = "Train CartPole on four hosts: a replay, two hosts of actors, a learner."
    options = parse(_Options(), args, "demo cluster", what)
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]?bit", options.rate):
        raise ConfigError(f"--rate must be a rate such as 1gbit or 200mbit, got {options.rate!r}")
    run_dir = options.new_run_dir("cluster")
    why_not = "asked for" if options.loopback else netns.can_have_namespaces()
    run_dir.mkdir(parents=True)
    if why_not:
        print(f"all hosts on loopback: {why_not}", flush=True)
        return _Demo(run_dir, options, None, f"tcp://127.0.0.1:{_free_port()}").run()
    with netns.Namespaces(list(HOSTS), options.rate) as hosts:
        print(f"four network namespaces, {options.rate} each way", flush=True)
        return _Demo(run_dir, options, hosts, f"tcp://{hosts.address('replay')}:{_PORT}").run()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Demo:
    """One run of the demo."""

    def __init__(
        self, run_dir: Path, options: _Options, hosts: netns.Namespaces | None, url: str
    ) -> None:
        self.run_dir, self.options, self.hosts, self.url = run_dir, options, hosts, url
        self.config = settings.resolve(_SETTINGS.split(), "demo cluster", "").config
        self.audit: ChunkAudit | None = None
        self._log = Log()
        self._read = dict.fromkeys(HOSTS, 0)

    def run(self) -> int:
        """Start all hosts, print what they report, end with the account."""
        (self.run_dir / "run.toml").write_text(self.config.to_toml(), encoding="utf-8")
        curve_keys.make(self.run_dir / "keys")
        with Supervisor() as supervisor:
            supervisor.install_signal_handlers()
            pids = {}
            for name in HOSTS:
                _print_of(name, f"$ zapex {' '.join(self._words(name))}")
                pids[name] = supervisor.start(self._process(name)).pid
            died = self._watch(supervisor, pids["replay"])
            died += [str(e) for e in supervisor.shutdown(GRACE_S) if isinstance(e, Died)]
            self._tell_news()
        print("\n".join(died), end="\n" if died else "")
        is_right = self._account()
        return int(bool(died) or not is_right)

    def _words(self, name: str) -> list[str]:
        """A host's command, as a user types it."""
        part = PARTS[HOSTS[name]]
        words = [part.name, f"--{part.address}", self.url, "--config", "run.toml", "--keys", "keys"]
        if part.holds_replay:
            words += ["--actors", "2"]
        if part.learns:
            words += ["--stop-at-return", f"{TARGET:g}"]
            words += ["--max-minutes", f"{self.options.minutes:g}"]
        return words

    def _process(self, name: str) -> ProcessSpec:
        prefix = self.hosts.prefix(name) if self.hosts is not None else []
        words = [*self._words(name), "--plain", "--run-dir", name]
        argv = child_argv(f"demo cluster: {name}", str(self.run_dir), words)
        return ProcessSpec(name=name, argv=[*prefix, *argv], log_path=self.run_dir / f"{name}.txt")

    def _watch(self, supervisor: Supervisor, replay_pid: int) -> list[str]:
        """Run until all have ended, or until the user stops it. Returns who died, and how."""
        died: list[str] = []
        ended: set[str] = set()
        look_s, end_s = 0.0, math.inf
        cable = self._cut_a_cable()
        while supervisor.stop_signal is None and ended != set(HOSTS) and not died:
            if "learner" in ended:
                end_s = min(end_s, time.monotonic() + _FAREWELL_S)
            if time.monotonic() > end_s:
                break  # a host whose cable is cut has not been told
            events = supervisor.poll(_POLL_S)
            ended |= {event.name for event in events if isinstance(event, (Died, Exited))}
            # The others would wait for one that died.
            died += [str(event) for event in events if isinstance(event, Died)]
            self._tell_news()
            if time.monotonic() >= look_s and "replay" not in ended:
                look_s = time.monotonic() + _LOOK_S
                self._look(replay_pid)
            next(cable, None)
        return died

    def _look(self, pid: int) -> None:
        """Check every chunk in the replay's memory: is it there, and whole?"""
        if self.audit is None:
            config = self.config.replace(actors=2)
            membership = Membership("replay", self.url)
            run = Run(config, check(ENV), self.run_dir / "replay", membership=membership)
            host = attach(pid, run)
            self.audit = ChunkAudit(host.store()) if host is not None else None
        if self.audit is not None:
            self.audit.look()

    def _cut_a_cable(self) -> Iterator[None]:
        """Cut one cable for a while, once both actor hosts play; each step looks at the clock."""
        if self.hosts is None:
            return
        while not all(self._relay(name).get("acknowledged") for name in ACTOR_HOSTS):
            yield
        yield from _pause(_CUT_AFTER_S)
        self.hosts.cut("actors-b")
        self._log.tell(f"the cable of actors-b is cut for {_CUT_FOR_S:g} s")
        yield from _pause(_CUT_FOR_S)
        self.hosts.heal("actors-b")
        self._log.tell("the cable of actors-b is connected again")

    def _tell_news(self) -> None:
        """Print what the hosts have printed since the last call, without settings."""
        for name in HOSTS:
            with (self.run_dir / f"{name}.txt").open("rb") as file:
                file.seek(self._read[name])
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[name] += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if line.strip() and not line.startswith(_LEFT_OUT):
                    _print_of(name, line)

    def _snapshot(self, name: str) -> Snapshot | None:
        with contextlib.suppress(OSError, ValueError):
            return read_snapshot(self.run_dir / name)
        return None

    def _relay(self, name: str) -> dict[str, float]:
        snapshot = self._snapshot(name)
        return snapshot.relay if snapshot is not None else {}

    def _waited(self, name: str) -> str:
        """The share of the time in which a host's role had to wait, over the whole run."""
        snapshot, role = self._snapshot(name), HOSTS[name]
        views = snapshot.roles if snapshot is not None else ()
        return next((f"{v.shares_total['wait']:.0%}" for v in views if v.role == role), "unknown")

    def _account(self) -> bool:
        """Print what was sent and taken in. Returns whether all of it is there, once."""
        relays = {name: self._relay(name) for name in ACTOR_HOSTS}
        for name, relay in relays.items():
            print(
                f"{name} sent {relay.get('transitions', 0):,.0f} transitions in "
                f"{relay.get('acknowledged', 0):,.0f} chunks, {size(relay.get('bytes', 0))}; "
                f"{relay.get('again', 0):,.0f} chunks again; its actors waited {self._waited(name)}"
            )
        replay = self._snapshot("replay")
        sent = sum(relay.get("transitions", 0) for relay in relays.values())
        taken = replay.replay.get("inserted", 0) if replay is not None else 0
        unheard = sum(relay.get("unacknowledged", 0) for relay in relays.values())
        doubled = max(0, taken - sent - unheard * self.config.chunk_transitions)
        print(
            f"acknowledged {sent:,.0f}, taken in {taken:,.0f}: {max(0, sent - taken):,.0f} lost, "
            f"{doubled:,.0f} doubled; in the replay's memory {self.audit or 'nothing was seen'}"
        )
        waited = ", ".join(f"{name} {self._waited(name)}" for name in ("replay", "learner"))
        learner = self.run_dir / "learner"
        print(f"waited: {waited}", outcome(learner), sep="\n")
        if latest(learner) is not None:
            quoted = shlex.quote(str(learner))
            print(f"watch    zapex eval {quoted} --episodes 5 --video game.mp4")
            print(f"go on    zapex train --resume {quoted}")
        seen_whole = self.audit is not None and self.audit.whole
        return bool(seen_whole and sent <= taken and not doubled and taken)


def _print_of(name: str, line: str) -> None:
    """Print a line of a host, with its name in its colour where there is a terminal."""
    label = f"{name:>8} |"
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        label = f"\x1b[{_COLOURS[name]}m{label}\x1b[0m"
    print(label, line, flush=True)


def _pause(seconds: float) -> Iterator[None]:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        yield
