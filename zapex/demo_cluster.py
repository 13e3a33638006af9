"""`zapex demo cluster`: replay, two actor hosts and a learner train CartPole, each on its own host.

As root, where there is `ip`, a host is a network namespace behind a cable of its own, and one cable
is pulled out for a while; otherwise all are on loopback. The commands are those that a user types.
What was handed over is accounted for in two ways: by what each host counted, and by looking into
the memory that the replay's parent holds.
"""

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zapex import curve_keys, netns, settings
from zapex.audit import ChunkAudit, attach
from zapex.environments import check
from zapex.errors import ConfigError
from zapex.flags import parse
from zapex.run import Place, Run
from zapex.screen import clock, count, size
from zapex.supervisor import Died, Exited, ProcessSpec, Supervisor, child_setup

ENV, TARGET = "CartPole-v1", 475.0
HOSTS = {"replay": "replay", "actors-a": "actor", "actors-b": "actor", "learner": "learner"}
"""Host -> its command."""
_SETTINGS = (
    f"--env {ENV} --preset laptop --envs-per-actor 4 --eval-period-s 10 --eval-episodes 20"
    " --samples-per-insert 4"  # so that actors do not take the core from the learner
)
_PORT = 7711
_POLL_S = 0.2
_LOOK_S = 1.0
_GRACE_S = 8.0
_FAREWELL_S = 20.0
_CUT_AFTER_S, _CUT_FOR_S = 12.0, 8.0  # once both hosts play
_COLOURS = {"replay": "36", "actors-a": "32", "actors-b": "33", "learner": "35"}


@dataclass(frozen=True)
class _Options:
    """How long, and where."""

    minutes: float = 3.0
    """It ends after so long, or when CartPole is solved."""
    run_dir: str = ""
    """Where everything is written; new."""
    rate: str = "1gbit"
    """Of each host's cable, as tc writes it; namespaces only."""
    loopback: bool = False
    """No namespaces, even where they can be had."""


def command(args: list[str]) -> int:
    """`zapex demo cluster [flags]`. Returns 0 where nothing was lost and all ended well."""
    what = "Train CartPole on four hosts: a replay, two hosts of actors, a learner."
    options = parse(_Options, _Options(), args, "demo cluster", what)
    if not options.minutes > 0:
        raise ConfigError(f"--minutes must be more than 0, got {options.minutes:g}")
    run_dir = Path(options.run_dir or time.strftime("runs/demo-cluster__%Y%m%d-%H%M%S")).absolute()
    if run_dir.exists():
        raise ConfigError(f"--run-dir must be new, and {run_dir} exists: choose another")
    why_not = "asked for" if options.loopback else netns.can_have_namespaces()
    run_dir.mkdir(parents=True)
    if why_not:
        print(f"all hosts on loopback: {why_not}", flush=True)
        return _Demo(run_dir, options, None, f"tcp://127.0.0.1:{_free_port()}").run()
    with netns.Hosts(list(HOSTS), options.rate) as hosts:
        print(f"four network namespaces, {options.rate} each way", flush=True)
        return _Demo(run_dir, options, hosts, f"tcp://{hosts.address('replay')}:{_PORT}").run()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Demo:
    """One run of the demo."""

    def __init__(
        self, run_dir: Path, options: _Options, hosts: netns.Hosts | None, url: str
    ) -> None:
        self.run_dir, self.options, self.hosts, self.url = run_dir, options, hosts, url
        self.resolved = settings.resolve(_SETTINGS.split(), "demo cluster", "")
        self.audit: ChunkAudit | None = None
        self._began_s = time.monotonic()
        self._read: dict[str, int] = {}
        self._cut_s: float | None = None
        self._is_cut = self._healed = False

    def run(self) -> int:
        """Start everybody, tell what they say, end with a table."""
        (self.run_dir / "run.toml").write_text(self.resolved.config.to_toml(), encoding="utf-8")
        curve_keys.make(self.run_dir / "keys")
        died: list[str] = []
        with Supervisor() as supervisor:
            supervisor.install_signal_handlers()
            pids = {}
            for name in HOSTS:
                print(self._painted(name, "$ zapex " + " ".join(self._words(name))), flush=True)
                pids[name] = supervisor.start(self._process(name)).pid
            died = self._watch(supervisor, pids)
            died += [str(e) for e in supervisor.shutdown(_GRACE_S) if isinstance(e, Died)]
            self._tell_news()
        print("\n".join(died), end="\n" if died else "")
        return int(self._account() or bool(died))

    def _words(self, name: str) -> list[str]:
        """A host's command, as a user types it."""
        part = HOSTS[name]
        where = "--listen" if part == "replay" else "--replay"
        words = [part, where, self.url, "--config", "run.toml", "--keys", "keys"]
        if part == "replay":
            words += ["--actors", "2"]
        if part == "learner":
            words += ["--stop-at-return", f"{TARGET:g}"]
            words += ["--max-minutes", f"{self.options.minutes:g}"]
        return words

    def _process(self, name: str) -> ProcessSpec:
        prefix = self.hosts.prefix(name) if self.hosts is not None else []
        words = [*self._words(name), "--plain", "--run-dir", name]
        argv = [sys.executable, "-m", "zapex.demo_cluster", name, str(self.run_dir), *words]
        return ProcessSpec(name=name, argv=[*prefix, *argv], log_path=self._log(name))

    def _log(self, name: str) -> Path:
        return self.run_dir / f"{name}.txt"

    def _watch(self, supervisor: Supervisor, pids: dict[str, int]) -> list[str]:
        """Until everybody has ended, or somebody wants it to; who died, and how."""
        died: list[str] = []
        ended: set[str] = set()
        look_s, end_s = 0.0, math.inf
        while supervisor.stop_signal is None and ended != set(HOSTS):
            if "learner" in ended:
                end_s = min(end_s, time.monotonic() + _FAREWELL_S)
            if time.monotonic() > end_s:
                break  # a host whose cable is out has not heard
            for event in supervisor.poll(_POLL_S):
                if isinstance(event, (Died, Exited)):
                    ended.add(event.name)
                if isinstance(event, Died):
                    died.append(str(event))
            if died:
                break  # the others would wait for it
            self._tell_news()
            if time.monotonic() >= look_s and "replay" not in ended:
                look_s = time.monotonic() + _LOOK_S
                self._look(pids["replay"])
            self._pull_the_cable()
        return died

    def _look(self, pid: int) -> None:
        """Every chunk in the replay's memory: is it there, and whole?"""
        if self.audit is None:
            config = self.resolved.config.replace(actors=2)
            place = Place("replay", self.url)
            run = Run(config, check(ENV), self.run_dir / "replay", place=place)
            host = attach(pid, run)
            self.audit = ChunkAudit(host.store()) if host is not None else None
        if self.audit is not None:
            self.audit.look()

    def _pull_the_cable(self) -> None:
        if self.hosts is None or self._healed:
            return
        now_s = time.monotonic()
        if self._cut_s is None:
            relays = [self._snapshot(name)["relay"] for name in ("actors-a", "actors-b")]
            if all(relay.get("acknowledged") for relay in relays):
                self._cut_s = now_s + _CUT_AFTER_S
        elif now_s >= self._cut_s + _CUT_FOR_S:
            self._healed = True
            self.hosts.heal("actors-b")
            self._say("the cable of actors-b is plugged in again")
        elif now_s >= self._cut_s and not self._is_cut:
            self._is_cut = True
            self.hosts.cut("actors-b")
            self._say(f"the cable of actors-b is pulled out for {_CUT_FOR_S:g} s")

    def _say(self, text: str) -> None:
        print(f"--- {clock(time.monotonic() - self._began_s)}  {text} ---", flush=True)

    def _tell_news(self) -> None:
        for name in HOSTS:
            for line in self._new_lines(name):
                print(self._painted(name, line), flush=True)

    def _new_lines(self, name: str) -> Iterator[str]:
        """What a host has said since the last look, without its settings and this demo's own."""
        with contextlib.suppress(FileNotFoundError), self._log(name).open("rb") as file:
            file.seek(self._read.get(name, 0))
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[name] = self._read.get(name, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if line.strip() and not line.startswith(("  --", "---", "Runs until")):
                    yield line

    def _painted(self, name: str, line: str) -> str:
        label = f"{name:>8} |"
        if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            label = f"\x1b[{_COLOURS[name]}m{label}\x1b[0m"
        return f"{label} {line}"

    def _snapshot(self, name: str) -> dict[str, Any]:
        try:
            facts = json.loads((self.run_dir / name / "snapshot.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            facts = {}
        empty: dict[str, Any] = {"totals": {}, "relay": {}, "replay": {}, "roles": []}
        return {**empty, **facts}

    def _account(self) -> bool:
        """The table; True where something was lost, torn or doubled."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        seen = {name: self._snapshot(name) for name in HOSTS}
        relays = {name: seen[name]["relay"] for name, part in HOSTS.items() if part == "actor"}
        table = Table(box=box.SIMPLE)
        for heading in ("host", "frames", "transitions", "chunks", "bytes", "again", "waited"):
            table.add_column(heading, justify="left" if heading == "host" else "right")
        for name, relay in relays.items():
            table.add_row(
                f"{name} played and sent",
                count(seen[name]["totals"].get("frames", 0)),
                *(f"{relay.get(key, 0):,.0f}" for key in ("transitions", "acknowledged")),
                size(relay.get("bytes", 0)),
                count(relay.get("again", 0)),
                _waited(seen[name], "actor"),
            )
        replay, learner = seen["replay"]["replay"], seen["learner"]
        sent = sum(relay.get("transitions", 0) for relay in relays.values())
        taken = replay.get("inserted", 0)
        unheard = sum(relay.get("unacknowledged", 0) for relay in relays.values())
        doubled = max(0, taken - sent - unheard * self.resolved.config.chunk_transitions)
        table.add_row(
            "replay took in", "", f"{taken:,.0f}", "", "", "", _waited(seen["replay"], "replay")
        )
        batches = learner["totals"].get("batches", 0)
        table.add_row(
            f"learner: {count(batches)} batches", "", "", "", "", "", _waited(learner, "learner")
        )
        Console(width=100, highlight=False).print(table)
        audit = self.audit
        looked = (
            f"in the replay's memory {count(audit.chunks)} chunks were looked at: "
            f"{audit.lost} lost, {audit.torn} torn, {audit.doubled} twice"
            if audit is not None
            else "the replay's memory was never seen"
        )
        evaluations = learner.get("evaluations") or [{"returns": [float("nan")]}]
        returns = evaluations[-1]["returns"]
        print(
            f"acknowledged {sent:,.0f}, taken in {taken:,.0f}: "
            f"{max(0, sent - taken):,.0f} lost, {doubled:,.0f} doubled; {looked}"
        )
        print(f"mean return {sum(returns) / len(returns):.1f} of 500; all is in {self.run_dir}")
        wrong = audit is None or audit.lost or audit.torn or audit.doubled
        return bool(wrong or sent > taken or doubled or not taken)


def _waited(snapshot: dict[str, Any], role: str) -> str:
    """The share of a role's time in which it had to wait, over the whole run."""
    shares = [r["shares_total"]["wait"] for r in snapshot["roles"] if r["role"] == role]
    return f"{shares[0]:.0%}" if shares else ""


def _part() -> int:
    """A host's own process: a child of the demo, so that it ends when that does."""
    name, directory, *args = sys.argv[1:]
    child_setup(f"demo cluster: {name}")
    os.chdir(directory)
    from zapex import cli

    return cli.main(args)


if __name__ == "__main__":
    sys.exit(_part())
