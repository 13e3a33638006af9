"""SLURM: a job for the replay, a job for the learner, and an array of jobs for the actor hosts.

The jobs are independent: each actor host starts as soon as SLURM has room for it. The launch
directory is on a file system that all nodes share. A job that is preempted, reaches its time limit,
or whose node fails is queued again (--requeue), and `--resume auto` continues.
"""

import contextlib
import re
import shlex
import time
from collections.abc import Iterable
from typing import Any

from zapex.clusters.host import FACTS, Group, host_words, tail
from zapex.clusters.placement import Host, Launched, tool
from zapex.errors import ConfigError, ZapexError

_PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"}
_RUNNING = {"RUNNING", "COMPLETING"}
_POLL_S = 1.0
_TIME = "%Y-%m-%dT%H:%M:%S"


class Slurm(Launched):
    """The jobs of one placement."""

    def script(self, group: Group) -> str:
        """The batch script of a group's jobs. Raises ConfigError for options of a wrong form."""
        is_array = group.name == "actor" or group.hosts > 1
        logs = str(self.directory / "logs").replace("%", "%%")  # sbatch replaces %a and others
        options = [
            f"--job-name=zapex-{self.placement.name}-{group.name}",
            f"--output={logs}/{group.name}-{'%a' if is_array else 0}.job",
            "--open-mode=append",
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={group.cores}",
            f"--mem={group.memory_gb}G",
            *([f"--array=0-{group.hosts - 1}"] if is_array else []),
            *([f"--gres=gpu:{group.gpus}"] if group.gpus else []),
            *([f"--time={self.table.minutes}"] if self.table.minutes else []),
            "--requeue",
            f"--signal=B:USR1@{self.table.signal_s}",
            *_options(self.table.options, group.options),
        ]
        host = shlex.join(host_words(self.directory, group.name))
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {sbatch_word(option)}" for option in options),
            "umask 077",
            *([self.table.setup] if self.table.setup else []),
            # Before the time limit SLURM signals the shell, which `exec` makes the host.
            f'exec {host} "${{SLURM_ARRAY_TASK_ID:-0}}" scontrol requeue "$SLURM_JOB_ID"',
        ]
        return "\n".join([*lines, ""])

    def text(self) -> str:
        """Every script, as sbatch gets it, checked by `bash -n`."""
        scripts = []
        for group in self.placement.groups.values():
            script = self.script(group)
            try:
                tool("bash", "-n", given=script)
            except ZapexError as error:
                raise ConfigError(f"[slurm] setup is not a valid shell script: {error}") from None
            scripts.append(f"# sbatch --parsable, from standard input: {group.name}\n{script}")
        return "\n".join(scripts)

    def submit(self) -> dict[str, Any]:
        """sbatch for each group; if one is refused, the earlier ones are cancelled."""
        jobs: dict[str, str] = {}
        try:
            for group in self.placement.groups.values():
                said = tool("sbatch", "--parsable", given=self.script(group))
                jobs[group.name] = said.strip().partition(";")[0]
        except ZapexError:
            if jobs:
                tool("scancel", *jobs.values())
            raise
        return jobs

    @property
    def jobs(self) -> dict[str, str]:
        """Job number -> role. Raises ConfigError for what is no number, but may be an option."""
        wrong = [job for job in self.placement.ids.values() if not re.fullmatch(r"\d+", str(job))]
        if wrong:
            raise ConfigError(f"{self.directory / FACTS}: a job's id is a number, got {wrong[0]!r}")
        return {job: role for role, job in self.placement.ids.items()}

    def states(self) -> list[Host]:
        """From squeue (waiting, running and recent jobs), and sacct for older ones."""
        jobs = self.jobs
        rows = _queue(jobs)
        gone = jobs.keys() - {_job(row[0]) for row in rows}
        rows += _accounted(gone) if gone else []
        hosts = [self._host(jobs[_job(row[0])], *row) for row in rows if _job(row[0]) in jobs]
        return sorted(hosts, key=lambda host: (host.role, host.index))

    def _host(
        self, role: str, name: str, state: str, reason: str, where: str, submitted: str
    ) -> Host:
        index = name.partition("_")[2]
        number, word = int(index) if index.isdigit() else 0, state.split(maxsplit=1)[0]
        if word in _RUNNING:
            return Host(role, number, "running", where)
        if word not in _PENDING:
            return Host(role, number, "over", where, state.lower())
        group = self.placement.group(role)
        asked = f"it asks for {group.cores} cores, {group.memory_gb} GiB"
        asked += f", {group.gpus} GPUs" if group.gpus else ""
        known = "not given yet" if reason in ("", "None") else reason
        age_s = 0.0
        with contextlib.suppress(ValueError):
            age_s = max(0.0, time.time() - time.mktime(time.strptime(submitted, _TIME)))
        return Host(role, number, "pending", where, f"SLURM's reason is {known}; {asked}", age_s)

    def log(self, role: str, lines: int = 50) -> str:
        """The ends of the files that the jobs write."""
        self.placement.group(role)
        texts = []
        for path in sorted((self.directory / "logs").glob(f"{role}-*")):
            with contextlib.suppress(OSError):
                texts.append(f"--- {path}\n{tail(path, lines)}")
        return "\n".join(texts)

    def _stop(self, grace_s: float) -> None:
        """Cancel pending jobs, let running ones save and end, and cancel the rest."""
        _scancel("--state=PENDING", *self.jobs)
        _scancel("--batch", "--signal=TERM", *self.jobs)
        deadline_s = time.monotonic() + grace_s
        while time.monotonic() < deadline_s:
            if all(host.state == "over" for host in self.states()):
                return
            time.sleep(_POLL_S)
        _scancel(*self.jobs)


def sbatch_word(text: str) -> str:
    """One word of an #SBATCH line, quoted if need be: sbatch is no shell, but knows quotes and \\.

    Raises:
        ConfigError: a line break, which no such line can hold.
    """
    if "\n" in text or "\r" in text:
        raise ConfigError(f"[slurm] an option of sbatch cannot have a line break, got {text!r}")
    if re.fullmatch(r"[\w@%+=:,./-]+", text):
        return text
    return '"' + re.sub(r'(["\\#])', r"\\\1", text) + '"'


def _options(*texts: str) -> list[str]:
    """The words of the user's own options. Raises ConfigError."""
    try:
        words = [word for text in texts for word in shlex.split(text)]
    except ValueError as error:
        raise ConfigError(f"[slurm] options {texts} cannot be read: {error}") from None
    wrong = next((word for word in words if not word.startswith("--")), None)
    if wrong is not None:
        raise ConfigError(f"[slurm] options must be like --name or --name=value, got {wrong!r}")
    return words


def _job(name: str) -> str:
    return name.partition("_")[0]


def _rows(text: str) -> list[list[str]]:
    return [row for line in text.splitlines() if len(row := line.split("|")) == 5]


def _queue(jobs: Iterable[str]) -> list[list[str]]:
    chosen, fields = f"--jobs={','.join(jobs)}", "--format=%i|%T|%r|%N|%V"
    try:
        return _rows(tool("squeue", "--noheader", "--array", "--states=all", chosen, fields))
    except ZapexError as error:
        if "Invalid job id" in str(error):  # all ended long ago
            return []
        raise


def _accounted(jobs: Iterable[str]) -> list[list[str]]:
    """From sacct, if the cluster keeps accounts; otherwise the jobs are over, reason unknown."""
    fields = "--format=JobID,State,Reason,NodeList,Submit"
    rows: list[list[str]] = []
    with contextlib.suppress(ZapexError):
        chosen = f"--jobs={','.join(jobs)}"
        rows = _rows(tool("sacct", "--noheader", "--parsable2", "--allocations", chosen, fields))
    known = {_job(row[0]) for row in rows}
    lost = "GONE from SLURM's memory; its log may say how it ended"
    return rows + [[job, lost, "", "", ""] for job in jobs if job not in known]


def _scancel(*words: str) -> None:
    """scancel, for which a job that has ended meanwhile is no error."""
    try:
        tool("scancel", *words)
    except ConfigError:
        raise
    except ZapexError:
        pass
