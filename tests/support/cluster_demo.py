"""`make cluster-demo`: CartPole on four hosts of this machine, with every transition accounted for.

    python -m tests.support.cluster_demo [--minutes 3] [--rate 1gbit] [--loopback] [--run-dir DIR]

A replay, two hosts of actors and a learner run the commands that a user types. As root, each host
is a network namespace with a virtual cable, and one cable is cut for a while; otherwise all hosts
are on loopback. Committed chunks are checked in two ways: by each host's counters, and by reading
the memory that the replay's parent holds.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.support import netns
from tests.support.audit import ChunkAudit
from tests.support.parts import Cluster, Part, cluster_in, memory_of
from zapex.machine.child import PARENT_VARIABLE
from zapex.net import keys as curve_keys
from zapex.watch.terminal import clock, size

HOSTS = {
    "replay": ("replay", "--actors", "2"),
    "actors-a": ("actor",),
    "actors-b": ("actor",),
    "learner": ("learner", "--stop-at-return", "475"),
}
"""Host -> its command, without the address and what all share."""
ACTOR_HOSTS = ("actors-a", "actors-b")
_COLOURS = dict(zip(HOSTS, ("36", "32", "33", "35"), strict=True))
_SETTINGS = (
    "--env CartPole-v1 --preset laptop --envs-per-actor 4 --eval-period-s 10 --eval-episodes 20"
    " --samples-per-insert 4"  # so that actors do not displace the learner from its core
)
# Settings, and closing lines with paths and addresses that are of use only inside the demo.
_LEFT_OUT = ("  --", "---", "Runs until", " run ", " curve ", " watch ", " resume ", " inspect ")
_PORT = 7711
_POLL_S = 0.2
_END_S = 20.0  # for the other hosts to end once the learner has
_CUT_AFTER_S, _CUT_FOR_S = 12.0, 8.0  # once both actor hosts play


class Demo:
    """The four hosts of one run, from their start to the account."""

    def __init__(self, cluster: Cluster, hosts: netns.Namespaces | None, minutes: float) -> None:
        """hosts: the namespaces, None for loopback. minutes: the learner's limit."""
        self.url, self.hosts = cluster.url, hosts
        self._began_s = time.monotonic()
        self._read = dict.fromkeys(HOSTS, 0)
        self._audit: ChunkAudit | None = None
        self.parts: dict[str, Part] = {}
        for name, (command, *flags) in HOSTS.items():
            if command == "learner":
                flags += ["--max-minutes", f"{minutes:g}"]
            address = f"--{'listen' if command == 'replay' else 'replay'} {cluster.url}"
            _print_of(name, f"$ zapex {' '.join([command, address, *flags])}")
            prefix = hosts.prefix(name) if hosts is not None else ()
            module = ("zapex", "--child", f"cluster demo: {name}")
            self.parts[name] = cluster.start(
                command, *flags, name=name, prefix=prefix, module=module
            )

    def run(self) -> int:
        """Watch until all hosts have ended. Returns 0 if nothing was lost and no host failed."""
        with suppress(KeyboardInterrupt):
            self._watch()
        for part in self.parts.values():
            if part.popen.poll() is None:
                part.popen.terminate()
        codes = {name: part.ends(_END_S) for name, part in self.parts.items()}
        self._print_news()
        failed = {name: code for name, code in codes.items() if code not in (0, -signal.SIGTERM)}
        for name, code in failed.items():
            print(f"{name} ended with exit code {code}")
        return int(not self._account() or bool(failed))

    def _watch(self) -> None:
        """Print news, check the memory and cut a cable, until all or one that failed have ended."""
        replay, learner = self.parts["replay"], self.parts["learner"]
        cable = self._cut_a_cable()
        end_s = float("inf")
        while time.monotonic() < end_s:  # a host whose cable is cut never hears of the end
            codes = [part.popen.poll() for part in self.parts.values()]
            if None not in codes or any(codes):
                return
            if learner.popen.poll() is not None:
                end_s = min(end_s, time.monotonic() + _END_S)
            self._print_news()
            if self._audit is not None:
                self._audit.look()
            elif "listening at" in replay.output:
                self._audit = memory_of(replay, self.url)
            next(cable, None)
            time.sleep(_POLL_S)

    def _cut_a_cable(self) -> Iterator[None]:
        """Cut one cable for a while, once both actor hosts play; each step looks at the clock."""
        if self.hosts is None:
            return
        while not all(self._relay(name).get("acknowledged") for name in ACTOR_HOSTS):
            yield
        yield from _pause(_CUT_AFTER_S)
        self.hosts.cut("actors-b")
        self._log(f"the cable of actors-b is cut for {_CUT_FOR_S:g} s")
        yield from _pause(_CUT_FOR_S)
        self.hosts.heal("actors-b")
        self._log("the cable of actors-b is connected again")

    def _log(self, text: str) -> None:
        print(f"{clock(time.monotonic() - self._began_s)}  {text}", flush=True)

    def _print_news(self) -> None:
        """Print the lines that hosts have printed since the last call, without settings."""
        for name, part in self.parts.items():
            new = part.output[self._read[name] :]
            new = new[: new.rfind("\n") + 1]
            self._read[name] += len(new)
            for line in new.splitlines():
                if line.strip() and not line.startswith(_LEFT_OUT):
                    _print_of(name, line)

    def _relay(self, name: str) -> dict[str, float]:
        relay: dict[str, float] = self.parts[name].snapshot()["relay"]
        return relay

    def _account(self) -> bool:
        """Print what was sent and taken in. Returns whether all of it is there, once."""
        relays = {name: self._relay(name) for name in ACTOR_HOSTS}
        for name, relay in relays.items():
            print(
                f"{name} sent {relay.get('transitions', 0):,.0f} transitions in "
                f"{relay.get('acknowledged', 0):,.0f} chunks, {size(relay.get('bytes', 0))}; "
                f"{relay.get('again', 0):,.0f} chunks again"
            )
        if self._audit is None:
            print("the replay never listened")
            return False
        sent = sum(relay.get("transitions", 0) for relay in relays.values())
        taken = self.parts["replay"].snapshot()["replay"].get("inserted", 0)
        unheard = sum(relay.get("unacknowledged", 0) for relay in relays.values())
        doubled = max(0, taken - sent - unheard * self._audit.store.layout.chunk)
        print(
            f"acknowledged {sent:,.0f}, taken in {taken:,.0f}: {max(0, sent - taken):,.0f} lost, "
            f"{doubled:,.0f} doubled; in the replay's memory {self._audit}"
        )
        run = self.parts["learner"].run
        with suppress(OSError):
            result = json.loads((run / "result.json").read_text())
            mean = f", mean return {result['last']['mean']:g}" if result["last"] else ""
            print(f"ended because {result['reason']}{mean}; the run is in {run}")
        return bool(self._audit.whole and taken and sent <= taken and not doubled)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="end after this long at most")
    parser.add_argument("--rate", default="1gbit", help="of each host's cable, in namespaces")
    parser.add_argument("--loopback", action="store_true", help="use no namespaces")
    parser.add_argument("--run-dir", type=Path, help="for all output; it must be new")
    options = parser.parse_args(argv)
    run_dir = (
        options.run_dir or Path(time.strftime("runs/cluster-demo__%Y%m%d-%H%M%S"))
    ).absolute()
    if run_dir.exists():
        parser.error(f"--run-dir must be new, and {run_dir} exists")
    why_not = "asked for" if options.loopback else netns.can_have_namespaces()
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # hosts end with this process
    run_dir.mkdir(parents=True)
    curve_keys.make(run_dir / "keys")
    settings = [*_SETTINGS.split(), "--keys", str(run_dir / "keys")]
    with ExitStack() as stack:
        hosts, url = None, ""
        if why_not:
            print(f"all hosts on loopback: {why_not}", flush=True)
        else:
            hosts = stack.enter_context(netns.Namespaces(list(HOSTS), options.rate))
            url = f"tcp://{hosts.address('replay')}:{_PORT}"
            print(f"four network namespaces, {options.rate} each way", flush=True)
        cluster = stack.enter_context(cluster_in(run_dir, settings, url))
        return Demo(cluster, hosts, options.minutes).run()


if __name__ == "__main__":
    sys.exit(main())
