"""What the cores of a machine did while a run trained: phases and processor times in one sum.

A role's phases are wall time, a process's processor time is the kernel's count; where a role is
pushed off its core, or waits for its environment's thread, they differ. So each role's processor
time is divided among its working phases in proportion to their wall time. What the cores did
outside of the run is told apart, and so is what they did not do at all: the rows add up to all
cores, 1.0.
"""

from collections.abc import Mapping

from benchmarks.train_run import Look

IDLE, OUTSIDE, STOLEN = "idle", "not of this run", "taken by the hypervisor"
WORK = {
    "environment": "environment",
    "acting": "forward (acting)",
    "learning": "forward, backward, optimiser (learning)",
    "gather": "gather",
}
"""What a run is for, and how it is called in the table; all other rows of the run are overhead."""

_ROWS = {
    ("actor", "environment"): WORK["environment"],
    ("actor", "forward"): WORK["acting"],
    ("actor", "push"): "push",
    ("actor", "pull"): "pull parameters",
    ("learner", "gather"): WORK["gather"],
    ("learner", "forward"): WORK["learning"],
    ("learner", "backward"): WORK["learning"],
    ("learner", "optimiser"): WORK["learning"],
    ("learner", "update"): "update priorities",
    ("learner", "publish"): "publish parameters",
    ("learner", "checkpoint"): "checkpoint",
}
_WHOLE = {"replay": "replay server", "evaluator": "evaluation"}
_WAITING = ("wait", "idle")


def phases_between(before: Look, after: Look, name: str) -> dict[str, float]:
    """Wall seconds of each phase of one process between two looks."""
    then, now = before.roles[name], after.roles[name]
    return {
        key.removeprefix("phase/"): max(0.0, now[key] - then[key])
        for key in now
        if key.startswith("phase/")
    }


def shares_between(before: Look, after: Look, cores: int) -> dict[str, float]:
    """Row -> share of all cores' time between two looks; the rows add up to 1."""
    core_seconds = cores * (after.time_s - before.time_s)
    seconds: dict[str, float] = {}

    def add(row: str, value: float) -> None:
        seconds[row] = seconds.get(row, 0.0) + value

    for name in after.cpu_s:
        cpu_s = after.cpu_s[name] - before.cpu_s[name]
        role = name.split()[0]
        if name not in after.roles or role in _WHOLE:
            add(_WHOLE.get(role, name), cpu_s)
            continue
        working = {
            phase: value
            for phase, value in phases_between(before, after, name).items()
            if phase not in _WAITING
        }
        wall_s = sum(working.values())
        for phase, value in working.items():
            row = _ROWS.get((role, phase), f"{role}, {phase}")
            add(row, cpu_s * value / wall_s if wall_s else 0.0)
    add(IDLE, after.idle_s - before.idle_s)
    add(STOLEN, after.stolen_s - before.stolen_s)
    add(OUTSIDE, core_seconds - sum(seconds.values()))
    return {row: value / core_seconds for row, value in seconds.items()}


def overhead_of(shares: Mapping[str, float]) -> float:
    """The run's own rows that are neither work nor evaluation."""
    known = {*WORK.values(), IDLE, OUTSIDE, STOLEN, _WHOLE["evaluator"]}
    return sum(value for row, value in shares.items() if row not in known)
