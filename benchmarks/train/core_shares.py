"""What the cores of a machine did while a run trained: processor time by phase, in one sum.

Phases of wall time would count a role as busy while another process has its core. So the roles
count their own thread's processor time by phase (zapex.host.metrics), and the kernel counts
that of the whole processes. What other threads use is the environment's in an actor
(AtariVectorEnv) and torch's in the learner. What the cores did outside of the run is told apart,
and so is what they did not do at all: the rows add up to all cores, 1.0.
"""

from collections.abc import Mapping

from benchmarks.train.whole_run import Look

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


def between(before: Look, after: Look, name: str, kind: str = "phase") -> dict[str, float]:
    """Seconds of each phase of one process between two looks; kind: "phase" for wall, or "cpu"."""
    then, now = before.roles[name], after.roles[name]
    return {
        key.removeprefix(f"{kind}/"): max(0.0, now[key] - then[key])
        for key in now
        if key.startswith(f"{kind}/")
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
        by_phase = between(before, after, name, "cpu")
        for phase, value in by_phase.items():
            add(_ROWS.get((role, phase), f"{role}, {phase}"), value)
        others = "environment" if role == "actor" else "learning"
        add(WORK[others], cpu_s - sum(by_phase.values()))
    add(IDLE, after.idle_s - before.idle_s)
    add(STOLEN, after.stolen_s - before.stolen_s)
    add(OUTSIDE, core_seconds - sum(seconds.values()))
    return {row: value / core_seconds for row, value in seconds.items()}


def overhead_of(shares: Mapping[str, float]) -> float:
    """The run's own rows that are neither work nor evaluation."""
    known = {*WORK.values(), IDLE, OUTSIDE, STOLEN, _WHOLE["evaluator"]}
    return sum(value for row, value in shares.items() if row not in known)
