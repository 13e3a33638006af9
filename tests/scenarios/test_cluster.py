"""One run on several hosts, its commands as real processes on this machine."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.parts import (
    Cluster,
    check_account,
    cluster_in,
    memory_of,
    settled,
)
from zapex.cli import main as cli
from zapex.net import keys as curve_keys

SMALL = ["--env", "CartPole-v1", "--preset", "smoke", "--max-frames", "0", "--prefetch", "3"]
GRACE_S = 30.0  # of five: a busy machine is no failure


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_in(tmp_path, SMALL) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("scheme", ["tcp", "zmtp"])
def test_hosts_come_and_go_and_every_transition_that_was_sent_is_there_when_the_run_is_over(
    cluster: Cluster, tmp_path: Path, scheme: str
) -> None:
    cluster.scheme = scheme
    keys = tmp_path / "keys"
    curve_keys.make(keys)
    cluster.config += ["--keys", str(keys)]
    # The learner and the actors first: they say whom they wait for.
    learner = cluster.start("learner")
    stays = cluster.start("actor", "--actors", "1")
    leaves = cluster.start("actor", "--actors", "1")
    learner.wait_to_say(f"waiting for the replay at {cluster.url} for")
    replay = cluster.start("replay", "--actors", "2")
    replay.wait_to_say("the learner joined")
    replay.wait_to_say("a host with actor", times=2)
    # All numbers are taken until one host leaves.
    comes = cluster.start("actor", "--actors", "1")
    # Acknowledged: then whatever had to be compiled is.
    leaves.wait_for(lambda: leaves.snapshot()["relay"].get("acknowledged", 0) > 9, "chunks")
    comes.wait_to_say("all 2 actor numbers are in use")
    assert leaves.ends(GRACE_S, signal.SIGINT) == 0
    assert leaves.is_gone()
    replay.wait_to_say(" left; ")
    comes.wait_for(lambda: comes.snapshot()["totals"]["frames"] > 0, "frames")
    # Frames are told it by the replay, every second.
    for what in ("batches", "frames"):
        learner.wait_for(lambda what=what: learner.snapshot()["totals"][what] > 0, what)
    # Ctrl-C of the learner ends nobody else. When it goes on, it is over: that ends everybody.
    assert learner.ends(GRACE_S, signal.SIGINT) == 0
    assert learner.is_gone()
    replay.wait_to_say("the learner left")
    assert stays.popen.poll() is None
    first = learner.snapshot()["totals"]
    limit = str(int(first["frames"]) + 100)
    learner = cluster.start("learner", "--resume", str(learner.run), "--max-frames", limit)
    learner.run = cluster.parts[0].run

    for part in (learner, replay, stays, comes):
        assert part.ends(100) == 0, part.output
        assert part.is_gone()
        assert "Traceback" not in part.output + part.logs()
    for part in (replay, stays, comes):
        assert re.search(r"the run is over: [\d,]+ frames are played", part.output)
    hosts = [stays, leaves, comes]
    check_account(replay, hosts)
    # The replay's view and the learner's are of the whole run.
    played = sum(host.snapshot()["totals"]["frames"] for host in hosts)
    assert 0 < first["frames"] <= learner.snapshot()["totals"]["frames"] <= played
    assert replay.snapshot()["totals"]["episodes"] > 0
    assert first["batches"] > 0
    assert (learner.run / "learning_curve.png").exists()
    assert list(learner.run.glob("**/*.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("scheme", ["zmtp", "fstack"])
def test_a_replay_that_is_killed_without_libzmq_loses_and_doubles_nothing_that_was_acknowledged(
    cluster: Cluster, tmp_path: Path, scheme: str
) -> None:
    cluster.scheme, keys = scheme, tmp_path / "keys"
    curve_keys.make(keys)
    cluster.config += ["--keys", str(keys)]
    replay = cluster.start("replay", "--actors", "1")
    host = cluster.start("actor", "--actors", "1")
    learner = cluster.start("learner")
    # A killed role's counts may lack its last duty cycle: the memory is looked at instead.
    audit = memory_of(replay, cluster.url)

    def goes_on() -> None:
        before = host.snapshot()["relay"].get("acknowledged", 0)
        host.wait_for(lambda: host.snapshot()["relay"]["acknowledged"] > before + 9, "chunks")
        batches = learner.snapshot()["totals"]["batches"]
        learner.wait_for(lambda: learner.snapshot()["totals"]["batches"] > batches, "a batch")
        settled(audit)

    learner.wait_for(lambda: learner.snapshot()["totals"]["batches"] > 0, "a batch")
    host.wait_for(lambda: "acknowledged" in host.snapshot()["relay"], "a relay's counts")
    settled(audit)
    for times in (1, 2):
        replay.kill_child("replay")
        replay.wait_to_say("replay died", times)
        goes_on()
    for part in (learner, host, replay):  # the replay last: it has what the host was told of
        assert part.ends(GRACE_S, signal.SIGINT) in (0, 130)
        assert part.is_gone()
        assert "Traceback" not in part.output + part.logs()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_that_is_joining_again_ends_at_ctrl_c_as_one_that_plays(cluster: Cluster) -> None:
    replay = cluster.start("replay", "--actors", "1")
    actor = cluster.start("actor", "--actors", "1")
    replay.wait_to_say("joined from")
    replay.popen.kill()
    replay.popen.wait(10)
    anew = cluster.start("replay", "--actors", "1")
    actor.wait_to_say("the replay was restarted with a new memory; joining again")
    anew.popen.kill()  # the actor waits for it, unless it was quicker
    assert actor.ends(60, signal.SIGINT) == 0, actor.output
    assert actor.is_gone()


@pytest.mark.slow  # a minute
@pytest.mark.timeout(400)
def test_a_killed_relay_replay_or_learner_comes_back_and_the_run_goes_on(cluster: Cluster) -> None:
    replay = cluster.start("replay", "--actors", "2")
    host = cluster.start("actor", "--actors", "2")
    learner = cluster.start("learner")
    learner.wait_for(lambda: learner.snapshot()["totals"]["batches"] > 0, "a batch")

    def goes_on(what: str) -> None:
        before = learner.snapshot()["totals"]
        for name in ("frames", "batches"):
            learner.wait_for(
                lambda name=name: learner.snapshot()["totals"][name] > before[name] + 100,
                f"{name} after {what}",
            )

    for part, role in ((host, "relay"), (replay, "replay"), (learner, "learner")):
        part.kill_child(role)
        part.wait_to_say(f"{role} died")
        part.wait_for(lambda part=part, role=role: role in part.children(), f"another {role}")
        goes_on(f"the {role}")
    # The whole replay host: its memory is gone, and the others begin anew with another.
    replay.children()
    replay.popen.kill()
    replay.popen.wait(10)
    deadline = time.monotonic() + 10
    while not replay.is_gone():
        assert time.monotonic() < deadline, "a child outlives its parent"
        time.sleep(0.05)
    replay = cluster.start("replay", "--actors", "2")
    host.wait_for(lambda: "relay" in host.children(), "a relay of the new run")
    goes_on("the replay's parent")
    # Each host writes its own snapshot when it is time: the replay's may be the older one.
    replay.wait_for(lambda: replay.snapshot()["replay"].get("inserted", 0) > 0, "transitions")
    for part in (learner, host, replay):
        assert part.ends(GRACE_S, signal.SIGTERM) == 0
        assert part.is_gone()


@pytest.mark.slow
def test_other_settings_are_refused_and_the_refusal_names_them(cluster: Cluster) -> None:
    cluster.start("replay", "--actors", "1", "--gamma", "0.95")
    # The number of actors, and whatever else is a host's own business, may differ.
    host = cluster.start("actor", "--actors", "3", "--actor-threads", "2")
    other = cluster.start("learner", "--env", "Acrobot-v1", "--n-step", "2")
    assert host.ends(60) == 2
    line = host.output.splitlines()[-1]
    assert line.startswith("zapex: the replay at")
    assert "gamma is 0.95 at the replay and 0.99 here; give all commands" in line
    assert not host.run.exists()
    assert other.ends(60) == 2
    assert "env is 'CartPole-v1' at the replay and 'Acrobot-v1' here" in other.output
    assert "n_step is 3 at the replay and 2 here" in other.output


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The line on stderr of a command that must end with exit code 2, before anything starts."""
    assert cli.main([*args, *SMALL]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.usefixtures("in_an_empty_directory")
def test_mistakes_are_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = "must be tcp://HOST:PORT or ipc:///PATH, got 'tcp:/127.0.0.1:1'"
    assert f"--listen {url}" in refusal(capsys, "replay", "--listen", "tcp:/127.0.0.1:1")
    assert f"--replay {url}" in refusal(capsys, "actor", "--replay", "tcp:/127.0.0.1:1")
    for command, flag in (("replay", "--listen"), ("actor", "--replay"), ("learner", "--replay")):
        line = refusal(capsys, command, flag, "tcp://192.0.2.1:7711")
        assert "there are no keys" in line
        assert "--insecure-network" in line
    assert "`zapex keygen` makes keys" in refusal(capsys, "replay", "--keys", "nowhere")
    curve_keys.make(tmp_path / "keys")
    (tmp_path / "keys" / "relay.key").chmod(0o644)
    assert "chmod 600" in refusal(capsys, "actor", "--keys", "keys")
    (tmp_path / "keys").chmod(0o755)
    assert "chmod 700" in refusal(capsys, "learner", "--keys", "keys")
    assert "needs a fixed port" in refusal(capsys, "replay", "--listen", "tcp://127.0.0.1:0")
    assert "--inline" in refusal(capsys, "learner", "--inline")
    assert "takes only --resume auto" in refusal(capsys, "actor", "--resume", "old")
    assert not [path for path in tmp_path.iterdir() if path.name in ("runs", "run")]


@pytest.mark.usefixtures("in_an_empty_directory")
def test_an_address_that_is_taken_is_told_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        line = refusal(capsys, "replay", "--listen", url, "--run-dir", "second")
    assert line.startswith(f"zapex: --listen {url} cannot be used: Address already in use; another")
    assert not os.path.exists("second")


@pytest.mark.slow
def test_whoever_finds_nobody_says_whom_it_waits_for_and_ends_at_ctrl_c(cluster: Cluster) -> None:
    host = cluster.start("actor")
    host.wait_to_say(f"waiting for the replay at {cluster.url} for 3 s")
    began_s = time.monotonic()
    assert host.ends(GRACE_S, signal.SIGINT) == 130
    assert time.monotonic() - began_s < GRACE_S
    assert not host.run.exists()
