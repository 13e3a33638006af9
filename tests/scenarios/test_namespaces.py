"""One run on four hosts, each in a network namespace with a cable that can be cut."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import netns
from tests.support.netns import Namespaces
from tests.support.parts import Cluster, Part, cluster_in, memory_of, settled
from zapex.net import keys as curve_keys

_WHY_NOT = netns.can_have_namespaces()
pytestmark = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)

HOSTS = ("replay", "actors-a", "actors-b", "learner")
PORT = 7711


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with Namespaces(HOSTS, rate="1gbit") as made:
        yield made


@pytest.fixture
def cluster(tmp_path: Path, hosts: Namespaces) -> Iterator[Cluster]:
    curve_keys.make(tmp_path / "keys")
    config = ["--keys", str(tmp_path / "keys"), "--preset", "smoke", "--max-frames", "0"]
    with cluster_in(tmp_path, config, f"tcp://{hosts.address('replay')}:{PORT}") as made:
        yield made


def start_all(cluster: Cluster, hosts: Namespaces, *flags: str) -> list[Part]:
    """Replay, two actor hosts and a learner, each in its namespace."""
    cluster.config += flags
    commands = {"replay": ["replay", "--actors", "2"], "learner": ["learner"]}
    return [
        cluster.start(*commands.get(name, ["actor"]), name=name, prefix=hosts.prefix(name))
        for name in HOSTS
    ]


def wait_until(parts: list[Part], part: Part, name: str, more: int) -> None:
    """Wait until a part's counter has grown by so much; the others must live."""
    before = part.snapshot()["totals"][name]
    part.wait_for(lambda: part.snapshot()["totals"][name] >= before + more, f"{more} more {name}")
    assert all(p.popen.poll() is None for p in parts)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_atari_trains_on_four_hosts_while_roles_are_killed_and_cables_are_pulled_out(
    cluster: Cluster, hosts: Namespaces
) -> None:
    rng = random.Random(7)
    parts = start_all(cluster, hosts, "--env", "ALE/Breakout-v5", "--publish-period-s", "0.5")
    replay, first, second, learner = parts
    roles = [(first, "relay"), (second, "actor 0"), (replay, "replay"), (learner, "learner")]
    audit = memory_of(replay, cluster.url)
    wait_until(parts, learner, "batches", 20)
    rounds = 0
    while learner.snapshot()["totals"]["steps"] < 4_000 or rounds < 4:
        part, role = roles[rounds % len(roles)]
        lives = part.output.count(f"{role} died")
        part.kill_child(role)
        cut = rng.choice(HOSTS)
        hosts.cut(cut)
        until = time.monotonic() + rng.uniform(1, 8)
        while time.monotonic() < until:
            audit.look()
            time.sleep(0.2)
        hosts.heal(cut)
        part.wait_to_say(f"{role} died", lives + 1)
        part.wait_for(lambda part=part, role=role: role in part.children(), f"another {role}")
        wait_until(parts, learner, "batches", 20)
        wait_until(parts, learner, "steps", 200)
        settled(audit)
        rounds += 1
    for part in (first, second, learner, replay):
        assert part.ends(60, signal.SIGINT) == 0
        assert part.is_gone()
    # A killed role's counts may lack its last duty cycle: the memory was looked at instead.
    assert all(host.snapshot()["relay"]["transitions"] > 0 for host in (first, second))
