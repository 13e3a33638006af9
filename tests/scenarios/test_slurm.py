"""`zapex launch --on slurm` with a real SLURM on this machine.

munged, slurmctld and slurmd run with files and ports of their own: one node that claims more cores
than there may be. Needs root, and Debian's slurm-wlm and munge.
"""

import contextlib
import json
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launches import SETTINGS, Launch
from tests.support.parts import ROOT, free_port, settled

pytestmark = pytest.mark.xdist_group("scheduler")  # one cluster at a time on this machine

TABLE = """
[slurm]
minutes = 30
options = "--partition=low"
replay = { cores = 1, options = "--partition=high" }
learner = { cores = 1, options = "--partition=high" }
actor = { hosts = 1, actors = 1, cores = 5 }
"""


PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_START_S = 60.0
_CONF = """
ClusterName=zapex
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
SlurmdPort={node_port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={where}/munge.socket,cred_expire=5
StateSaveLocation={where}/state
SlurmdSpoolDir={where}/spool
SlurmctldPidFile={where}/slurmctld.pid
SlurmdPidFile={where}/slurmd.pid
SlurmctldLogFile={where}/slurmctld.log
SlurmdLogFile={where}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=100000,sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=10
MailProg=/bin/true
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=64000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 State=UP
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 State=UP
"""


def why_not() -> str:
    """Why SLURM cannot be started here; "" if it can."""
    if os.geteuid() != 0:
        return "SLURM's daemons are started as root here"
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"apt-get install slurm-wlm munge: {', '.join(missing)} missing" if missing else ""


def slurm(*words: str) -> str:
    """A command of SLURM's, which must succeed; what it prints."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@contextlib.contextmanager
def slurm_in(where: Path) -> Iterator[None]:
    """Start it, and set SLURM_CONF for commands; at the end nothing of it stays."""
    for name in ("state", "spool"):
        (where / name).mkdir()
    where.chmod(0o755)
    key = where / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    conf, host = where / "slurm.conf", socket.gethostname().partition(".")[0]
    conf.write_text(_CONF.format(where=where, host=host, port=free_port(), node_port=free_port()))
    env = {**os.environ, "SLURM_CONF": str(conf), "PATH": _PATH, "PYTHONPATH": str(ROOT)}
    started = list[subprocess.Popen[bytes]]()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as held:
        for name in ("SLURM_CONF", "PATH", "PYTHONPATH"):
            patch.setenv(name, env[name])
        output = held.enter_context((where / "daemons.txt").open("wb"))
        held.callback(_end, started)
        for words in (
            ["munged", "--foreground", "--force", f"--socket={where}/munge.socket",
             f"--key-file={key}", f"--pid-file={where}/munged.pid", "--num-threads=2",
             f"--seed-file={where}/munge.seed", f"--log-file={where}/munged.log"],
            ["slurmctld", "-D", "-f", str(conf)],
            ["slurmd", "-D", "-f", str(conf), "-N", host],
        ):  # fmt: skip
            # Where pytest itself is killed, nothing of SLURM stays.
            argv = ["setpriv", "--pdeathsig", "TERM", *words]
            started.append(subprocess.Popen(argv, stdout=output, stderr=output, env=env))
            time.sleep(0.5)
        deadline_s = time.monotonic() + _START_S
        while "idle" not in _states():
            assert time.monotonic() < deadline_s, (where / "daemons.txt").read_text()
            assert all(one.poll() is None for one in started), (where / "daemons.txt").read_text()
            time.sleep(0.2)
        held.callback(_cancel_all)
        yield


def _states() -> str:
    done = subprocess.run(
        ["sinfo", "--noheader", "--format=%T"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    return done.stdout


def _cancel_all() -> None:
    slurm("scancel", f"--user={pwd.getpwuid(os.getuid()).pw_name}")
    deadline_s = time.monotonic() + _START_S
    while slurm("squeue", "--noheader") and time.monotonic() < deadline_s:
        time.sleep(0.3)


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    for one in reversed(started):
        one.terminate()
        try:
            one.wait(20)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait(10)


@pytest.fixture(scope="module")
def real_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if why := why_not():
        pytest.skip(why)
    with slurm_in(tmp_path_factory.mktemp("slurm")):
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
    slurm("sbatch", *words, "--wrap=sleep 2")
    run.wait_for((directory / "actor-0.1").is_dir, "another life of the actors' host")
    assert "nothing to resume from" in run.log("actor")
    # What SLURM sends before the time limit: the learner saves, and asks for another place.
    slurm("scancel", "--batch", "--signal=USR1", jobs["learner"])
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
    assert secret not in slurm("scontrol", "show", "job", "--details")
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
    job = slurm("sbatch", "--parsable", *other, "--wrap=sleep 200").strip()
    run.wait_for(lambda: "RUNNING" in slurm("squeue", "--format=%T", f"--jobs={job}"), "it")
    table = "[slurm]\nreplay = { cores = 6 }\nactor = { hosts = 3, cores = 5 }\n"
    file.write_text(launched.settings_of(SETTINGS) + table)
    said = run.zapex("launch", str(file), "--name", "waits", "--dir", str(directory))
    assert "it asks for 6 cores, 1 GiB" in said
    assert "actor 0: pending" in said
    assert "(and 2 more of actor)" in said
    run.zapex("stop", "waits")
    assert "pending" not in run.zapex("status", "waits")
    assert "running" not in run.zapex("status", "waits")
    slurm("scancel", job)
    # What sbatch refuses is told in its words, and nothing of the run stays.
    wrong = '[slurm]\nlearner = { options = "--partition=nowhere" }\n'
    file.write_text(launched.settings_of(SETTINGS) + wrong)
    with pytest.raises(AssertionError, match=r"zapex: sbatch refuses: .*[Ii]nvalid partition"):
        run.zapex("launch", str(file), "--name", "never", "--dir", str(tmp_path / "never"))
    assert "zapex-never" not in slurm("squeue", "--format=%j", "--states=PENDING,RUNNING")
