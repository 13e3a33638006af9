"""SLURM: one job for the replay, one for the learner, an array of jobs for the actors' hosts.

The jobs are independent: any number of actor hosts plays as soon as it has its place. The launch
directory is on a file system that all nodes share. A job that is preempted, or whose node fails, or
whose time is over, is queued again (--requeue), and `--resume auto` goes on.
"""

import shlex
import time
from collections.abc import Iterable, Mapping
from typing import Any

from zapex.clusters.placement import Group, Host, Placement, host_words, tool
from zapex.errors import ConfigError, ZapexError

_STATES = {
    "PENDING": "pending", "CONFIGURING": "pending", "REQUEUED": "pending",
    "REQUEUE_HOLD": "pending", "SUSPENDED": "pending", "RUNNING": "running",
    "COMPLETING": "running",
}  # fmt: skip
_POLL_S = 1.0
_FIELDS = "%i|%T|%r|%N|%V"
_LIMITS = "%Y-%m-%dT%H:%M:%S"


class Slurm:
    """The jobs of one placement; see Adapter."""

    def __init__(self, placement: Placement) -> None:
        self.placement, self.table = placement, placement.table

    def script(self, group: Group) -> str:
        """The batch script of a group's jobs."""
        where = self.placement.directory
        is_array = group.name == "actor" or group.hosts > 1
        lines = {
            "job-name": f"zapex-{self.placement.name}-{group.name}",
            "output": where / "logs" / f"{group.name}-{'%a' if is_array else 0}.job",
            "open-mode": "append",
            "nodes": 1,
            "ntasks": 1,
            "cpus-per-task": group.cores,
            "mem": f"{group.memory_gb}G",
        }
        lines |= {"array": f"0-{group.hosts - 1}"} if is_array else {}
        lines |= {"gres": f"gpu:{group.gpus}"} if group.gpus else {}
        lines |= {"time": self.table.minutes} if self.table.minutes else {}
        head = [f"#SBATCH --{name}={value}" for name, value in lines.items()]
        head += ["#SBATCH --requeue", f"#SBATCH --signal=B:USR1@{self.table.signal_s}"]
        head += [f"#SBATCH {word}" for word in _words(self.table.options, group.options)]
        index = '"${SLURM_ARRAY_TASK_ID:-0}"'
        words = shlex.join(host_words(where, group.name, "INDEX")).replace("INDEX", index)
        # Before the time limit SLURM signals the shell, whose place the host has taken.
        run = f'exec {words} scontrol requeue "$SLURM_JOB_ID"'
        setup = [self.table.setup] if self.table.setup else []
        return "\n".join(["#!/bin/bash", *head, "umask 077", *setup, run, ""])

    def text(self) -> str:
        """Every script, as sbatch gets it; bash has read each."""
        scripts = []
        for group in self.placement.groups:
            script = self.script(group)
            _check_syntax(script)
            scripts.append(f"# sbatch --parsable, from standard input: {group.name}\n{script}")
        return "\n".join(scripts)

    def submit(self) -> dict[str, Any]:
        """sbatch for each group; if one is refused, those before it are cancelled."""
        jobs: dict[str, str] = {}
        try:
            for group in self.placement.groups:
                said = tool("sbatch", "--parsable", given=self.script(group))
                jobs[group.name] = said.strip().partition(";")[0]
        except ZapexError:
            if jobs:
                tool("scancel", *jobs.values())
            raise
        return {"jobs": jobs}

    def states(self, ids: Mapping[str, Any]) -> list[Host]:
        """squeue knows waiting, running and just ended jobs, sacct those before."""
        roles = {job: role for role, job in ids["jobs"].items()}
        rows = _queue(list(roles))
        gone = roles.keys() - {_job(row[0]) for row in rows}
        rows += _accounted(gone) if gone else []
        hosts = []
        for name, state, reason, where, submitted in rows:
            job, _, index = name.partition("_")
            if _job(name) not in roles:
                continue
            plain = _STATES.get(state.split()[0], "over")
            why = reason if plain == "pending" and reason != "None" else ""
            hosts.append(
                Host(
                    roles[job], int(index) if index.isdigit() else 0, plain, where,
                    self._explained(roles[job], why) if plain == "pending" else
                    state.lower() if plain == "over" else "",
                    _age(submitted),
                )
            )  # fmt: skip
        return sorted(hosts, key=lambda host: (host.role, host.index))

    def _explained(self, role: str, reason: str) -> str:
        group = self.placement.group(role)
        asked = f"it asks for {group.cores} cores, {group.memory_gb} GiB"
        asked += f", {group.gpus} GPUs" if group.gpus else ""
        return f"SLURM's reason is {reason or 'not given yet'}; {asked}"

    def log(self, ids: Mapping[str, Any], role: str, lines: int) -> str:
        """The files that the jobs write."""
        found = sorted((self.placement.directory / "logs").glob(f"{role}-*"))
        texts = []
        for path in found:
            tail = path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
            texts.append("\n".join([f"--- {path}", *tail]))
        return "\n".join(texts)

    def stop(self, ids: Mapping[str, Any], grace_s: float) -> None:
        """Jobs that wait are cancelled, those that run save and end; after `grace_s` all end."""
        jobs = list(ids["jobs"].values())
        _quietly("scancel", "--state=PENDING", *jobs)
        _quietly("scancel", "--batch", "--signal=TERM", *jobs)
        deadline_s = time.monotonic() + grace_s
        while time.monotonic() < deadline_s:
            if all(host.state == "over" for host in self.states(ids)):
                return
            time.sleep(_POLL_S)
        _quietly("scancel", *jobs)


def _words(*options: str) -> list[str]:
    try:
        words = [word for text in options for word in shlex.split(text)]
    except ValueError as error:
        raise ConfigError(f"[slurm] options {options} cannot be read: {error}") from None
    wrong = next((word for word in words if not word.startswith("--") or "\n" in word), None)
    if wrong is not None:
        raise ConfigError(f"[slurm] options must be like --name or --name=value, got {wrong!r}")
    return words


def _check_syntax(script: str) -> None:
    try:
        tool("bash", "-n", given=script)
    except ZapexError as error:
        raise ConfigError(f"[slurm] setup is no shell script: {error}") from None


def _job(name: str) -> str:
    return name.partition("_")[0]


def _queue(jobs: list[str]) -> list[list[str]]:
    try:
        said = tool(
            "squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(jobs)}",
            f"--format={_FIELDS}",
        )  # fmt: skip
    except ZapexError as error:
        if "Invalid job id" in str(error):  # all ended long ago
            return []
        raise
    return [row for line in said.splitlines() if len(row := line.split("|")) == 5]


def _accounted(jobs: Iterable[str]) -> list[list[str]]:
    """From sacct, where the cluster keeps accounts; else the jobs are over, and no more is said."""
    try:
        said = tool(
            "sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(jobs)}",
            "--format=JobID,State,Reason,NodeList,Submit",
        )  # fmt: skip
    except ZapexError:
        said = ""
    rows = [row for line in said.splitlines() if len(row := line.split("|")) == 5]
    known = {_job(row[0]) for row in rows}
    lost = "GONE from SLURM's memory; its log may say how it ended"
    return rows + [[job, lost, "", "", ""] for job in jobs if job not in known]


def _age(submitted: str) -> float:
    try:
        return max(0.0, time.time() - time.mktime(time.strptime(submitted, _LIMITS)))
    except ValueError:
        return 0.0


def _quietly(*words: str) -> None:
    """A job that has ended in between is no error."""
    try:
        tool(*words)
    except ConfigError:
        raise
    except ZapexError:
        pass
