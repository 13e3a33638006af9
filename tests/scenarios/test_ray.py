"""`zapex launch --on ray` on a real Ray cluster of several nodes on this machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.launches import SETTINGS, Launch
from tests.support.parts import VARIABLES, settled

pytest.importorskip("ray", reason='pip install "zapex[ray]"')
pytest.importorskip("nacl", reason='pip install "zapex[ray]"')
pytestmark = pytest.mark.xdist_group("scheduler")  # one cluster at a time on this machine

TABLE = """
[ray]
address = "{address}"
wait_s = 100
most_hosts = 2
replay = {{ cores = 1 }}
learner = {{ cores = 1 }}
actor = {{ hosts = 1, actors = 1, cores = 3 }}
"""
NODE: dict[str, Any] = {"object_store_memory": 80 << 20, "memory": 8 << 30, "num_gpus": 0}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head, which has room for replay and learner; nodes for actors come later."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True, head_node_args={**NODE, "num_cpus": 2, "include_dashboard": False}
    )
    try:
        yield made
    finally:
        ray.shutdown()  # `zapex status` connects this process
        made.shutdown()


@contextlib.contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of zapex beside the test, until the block is left."""
    command = subprocess.Popen(
        [sys.executable, "-m", "zapex", *words],
        stderr=subprocess.STDOUT, env={**os.environ, **VARIABLES},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    try:
        yield command
    finally:
        command.kill()
        command.wait(10)


def hosts_of(directory: Path) -> list[psutil.Process]:
    """The processes of this run's hosts."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(directory) in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cartpole_is_solved_on_three_nodes_of_which_one_is_killed(
    cluster: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from zapex.clusters.placement import settings_of

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file, directory = tmp_path / "run.toml", tmp_path / "launch"
    settings = {
        "env": {"env": "CartPole-v1"},
        "run": {"preset": "laptop", "stop_at_return": 475.0, "max_minutes": 8.0},
        # It learns late: a second node has joined before it is solved.
        "replay": {"capacity": 100_000, "learning_starts": 40_000},
        "actor": {"envs_per_actor": 1},
        "learner": {"learner_threads": 1},
    }
    file.write_text(settings_of(settings) + TABLE.format(address=cluster.address))
    run = Launch(capsys, directory)

    def acknowledged(index: int) -> float:
        return float(run.snapshot(f"actor-{index}")["relay"].get("acknowledged", 0))

    with started("launch", str(file), "--name", "s", "--dir", str(directory)) as launcher:
        run.wait_for((directory / "learner-0").is_dir, "a learner", launcher)
        first = cluster.add_node(num_cpus=3, **NODE)
        run.wait_for(lambda: acknowledged(0) > 5, "chunks", launcher)
        cluster.add_node(num_cpus=3, **NODE)
        run.wait_for(lambda: acknowledged(1) > 5, "chunks of a second host", launcher)
        cluster.remove_node(first, allow_graceful=False)
        assert launcher.wait(500) == 0, run.log("learner")
    result = json.loads((directory / "learner-0" / "result.json").read_text())
    assert result["last"]["mean"] >= 475, result
    hosts = directory.glob("actor-*")
    sent = sum(run.snapshot(path.name)["relay"]["transitions"] for path in hosts)
    assert 0 < sent <= run.snapshot("replay-0")["replay"]["inserted"]
    run.wait_for(lambda: not hosts_of(directory), "the end of all hosts")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_rays_head_a_run_goes_on_for_a_while_and_attach_says_what_is_lost(
    cluster: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from zapex.clusters.placement import settings_of

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file, directory = tmp_path / "run.toml", tmp_path / "launch"
    file.write_text(settings_of(SETTINGS) + TABLE.format(address=cluster.address))
    run = Launch(capsys, directory)

    def batches() -> int:
        return int(run.snapshot("learner-0")["totals"]["batches"])

    with started("launch", str(file), "--name", "h", "--dir", str(directory)) as launcher:
        run.wait_for((directory / "learner-0").is_dir, "a learner", launcher)
        cluster.add_node(num_cpus=3, **NODE)
        run.wait_for(lambda: batches() > 100, "batches", launcher)
        cluster.head_node.kill_gcs_server()
        before = batches()
        run.wait_for(lambda: batches() > before + 100, "batches without the head")
        attach = subprocess.run(
            [sys.executable, "-m", "zapex", "launch", "--attach", str(directory)],
            env={**os.environ, **VARIABLES}, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert attach.returncode == 2, attach
        assert "Ray's head does not answer" in attach.stderr
        assert launcher.wait(200) != 0  # who watched is told by Ray
    run.wait_for(lambda: not hosts_of(directory), "the end of all hosts")


@pytest.mark.scenario
@pytest.mark.timeout(600)
def test_ray_places_a_run_that_outlives_a_node_and_whoever_launched_it(
    cluster: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from zapex.clusters.placement import settings_of

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file, directory = tmp_path / "run.toml", tmp_path / "launch"
    file.write_text(settings_of(SETTINGS) + TABLE.format(address=cluster.address))
    run = Launch(capsys, directory)

    def acknowledged(index: int) -> float:
        return float(run.snapshot(f"actor-{index}")["relay"].get("acknowledged", 0))

    with started("launch", str(file), "--name", "n", "--dir", str(directory)) as launcher:
        checkpoints = directory / "learner-0" / "checkpoints"
        run.wait_for((directory / "learner-0").is_dir, "a learner", launcher)
        first = cluster.add_node(num_cpus=3, **NODE)
        run.wait_for(lambda: list(checkpoints.glob("*.safetensors")), "a checkpoint", launcher)
        run.wait_for(lambda: acknowledged(0) > 5, "chunks", launcher)
        audit = run.account()
        settled(audit)
        # A node joins: the run grows by a host. Its first node is lost: what it sent is there.
        cluster.add_node(num_cpus=3, **NODE)
        run.wait_for(lambda: acknowledged(1) > 5, "a second host of actors", launcher)
        cluster.remove_node(first, allow_graceful=False)
        batches = run.snapshot("learner-0")["totals"]["batches"]
        run.wait_for(
            lambda: run.snapshot("learner-0")["totals"]["batches"] > batches + 100,
            "batches without that node", launcher,
        )  # fmt: skip
        settled(audit)
        # Ctrl-C ends who watches, and not the run.
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 0
    batches = run.snapshot("learner-0")["totals"]["batches"]
    run.wait_for(lambda: run.snapshot("learner-0")["totals"]["batches"] > batches + 100, "batches")
    with started("launch", "--attach", str(directory)) as watcher:
        # There is room again: Ray makes the lost host again, and who watches gives it its keys.
        cluster.add_node(num_cpus=3, **NODE)
        lives = directory.glob
        run.wait_for(lambda: list(lives("actor-?.1")), "a host that comes back", watcher)
        secret = json.loads((directory / "keys" / "relay.key").read_text())["secret"]
        run.wait_for(lambda: min(map(acknowledged, range(2))) > 5, "its chunks", watcher)
    settled(audit)
    sent = sum(run.snapshot(path.name)["relay"]["transitions"] for path in lives("actor-*"))
    status = run.zapex("status", "n")
    assert "replay 0: running" in status
    assert "actor 1: running" in status
    run.zapex("stop", str(directory))
    assert 0 < sent <= run.snapshot("replay-0")["replay"]["inserted"]
    run.wait_for(lambda: not hosts_of(directory), "the end of all hosts")
    session = Path(cluster.head_node.get_session_dir_path()) / "logs"
    logged = b"".join(path.read_bytes() for path in session.rglob("*") if path.is_file())
    assert secret.encode() not in logged
    assert secret not in "".join(path.read_text() for path in (directory / "logs").iterdir())
