"""A real SLURM on this machine: munged, slurmctld and slurmd with files and ports of their own.

One node that claims more cores than there may be. Needs root, and Debian's slurm-wlm and munge.
"""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.parts import ROOT, free_port

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


def run(*words: str) -> str:
    """A command of SLURM's, which must succeed; what it prints."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@contextlib.contextmanager
def cluster(where: Path) -> Iterator[None]:
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
    run("scancel", f"--user={pwd.getpwuid(os.getuid()).pw_name}")
    deadline_s = time.monotonic() + _START_S
    while run("squeue", "--noheader") and time.monotonic() < deadline_s:
        time.sleep(0.3)


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    for one in reversed(started):
        one.terminate()
        try:
            one.wait(20)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait(10)
