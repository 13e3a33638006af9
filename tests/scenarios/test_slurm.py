"""`zapex launch --on slurm` with a real SLURM on this machine."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import slurm
from tests.support.launches import SETTINGS, Launch
from tests.support.parts import settled

pytestmark = pytest.mark.xdist_group("scheduler")  # one cluster at a time on this machine

TABLE = """
[slurm]
minutes = 30
options = "--partition=low"
replay = { cores = 1, options = "--partition=high" }
learner = { cores = 1, options = "--partition=high" }
actor = { hosts = 1, actors = 1, cores = 5 }
"""


@pytest.fixture(scope="module")
def real_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if why := slurm.why_not():
        pytest.skip(why)
    with slurm.cluster(tmp_path_factory.mktemp("slurm")):
        yield


@pytest.mark.scenario
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("real_slurm")
def test_slurm_places_a_run_and_requeued_jobs_lose_nothing_that_was_acknowledged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zapex.clusters import placement as launched

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(launched.Launched.wait_for_start, "__defaults__", (5.0,))
    file, directory = tmp_path / "run.toml", tmp_path / "launch"
    file.write_text(launched.settings_of(SETTINGS) + TABLE)
    run = Launch(capsys, directory)
    said = run.zapex("launch", str(file), "--name", "cartpole", "--dir", str(directory))
    assert "replay 0: running" in said
    jobs = json.loads((directory / "launch.json").read_text())["ids"]
    checkpoints = directory / "learner-0" / "checkpoints"
    run.wait_for(lambda: list(checkpoints.glob("*.safetensors")), "a checkpoint")
    run.wait_for(lambda: run.snapshot("actor-0")["relay"].get("acknowledged", 0) > 5, "chunks")
    audit = run.account()
    settled(audit)

    # More important work takes the actors' place: their job is preempted, queued again, and joins.
    words = ["--partition=high", "--cpus-per-task=6", "--mem=1G", "--output=/dev/null"]
    slurm.run("sbatch", *words, "--wrap=sleep 2")
    run.wait_for((directory / "actor-0.1").is_dir, "another life of the actors' host")
    assert "nothing to resume from" in run.log("actor")
    # What SLURM sends before the time limit: the learner saves, and asks for another place.
    slurm.run("scancel", "--batch", "--signal=USR1", jobs["learner"])
    run.wait_for(lambda: "resuming at" in run.log("learner"), "a resumed learner")
    assert f"saved before the time limit; scontrol requeue {jobs['learner']}" in run.log("learner")
    batches = run.snapshot("learner-0")["totals"]["batches"]
    run.wait_for(lambda: run.snapshot("actor-0")["relay"].get("acknowledged", 0) > 5, "chunks")
    run.wait_for(
        lambda: run.snapshot("learner-0")["totals"]["batches"] > batches + 100, "more batches"
    )
    settled(audit)

    run.zapex("stop", "cartpole")
    assert run.log("learner").count("stopped by SIGTERM") == 2  # it saves then: roles/learner
    status = run.zapex("status", "cartpole")
    assert "running" not in status
    assert "pending" not in status
    sent = [run.snapshot(life)["relay"]["transitions"] for life in ("actor-0", "actor-0.1")]
    assert 0 < sum(sent) <= run.snapshot("replay-0")["replay"]["inserted"]
    secret = json.loads((directory / "keys" / "learner.key").read_text())["secret"]
    printed = "".join(path.read_text() for path in (directory / "logs").iterdir())
    assert secret not in printed
    assert secret not in slurm.run("scontrol", "show", "job", "--details")
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("real_slurm")
def test_what_slurm_has_no_room_for_is_said_with_its_reason_and_stop_takes_it_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zapex.clusters import placement as launched

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(launched.Launched.wait_for_start, "__defaults__", (3.0,))
    file, directory = tmp_path / "run.toml", tmp_path / "launch"
    run = Launch(capsys, directory)
    other = ["--partition=high", "--cpus-per-task=4", "--mem=1G", "--output=/dev/null"]
    job = slurm.run("sbatch", "--parsable", *other, "--wrap=sleep 200").strip()
    run.wait_for(lambda: "RUNNING" in slurm.run("squeue", "--format=%T", f"--jobs={job}"), "it")
    table = "[slurm]\nreplay = { cores = 6 }\nactor = { hosts = 3, cores = 5 }\n"
    file.write_text(launched.settings_of(SETTINGS) + table)
    said = run.zapex("launch", str(file), "--name", "waits", "--dir", str(directory))
    assert "it asks for 6 cores, 1 GiB" in said
    assert "actor 0: pending" in said
    assert "(and 2 more of actor)" in said
    run.zapex("stop", "waits")
    assert "pending" not in run.zapex("status", "waits")
    assert "running" not in run.zapex("status", "waits")
    slurm.run("scancel", job)
    # What sbatch refuses is told in its words, and nothing of the run stays.
    wrong = '[slurm]\nlearner = { options = "--partition=nowhere" }\n'
    file.write_text(launched.settings_of(SETTINGS) + wrong)
    with pytest.raises(AssertionError, match=r"zapex: sbatch refuses: .*[Ii]nvalid partition"):
        run.zapex("launch", str(file), "--name", "never", "--dir", str(tmp_path / "never"))
    assert "zapex-never" not in slurm.run("squeue", "--format=%j", "--states=PENDING,RUNNING")
