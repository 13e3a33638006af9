"""What `zapex balance` measures: which points the model is fitted to, and which check it."""

from dataclasses import dataclass

from zapex.machine.resources import Machine
from zapex.studies.saturation import MOST_ENVS, powers

INFERENCE = {"cpu": "on the CPU", "gpu": "on the GPU", "central": "by one role for all"}
"""Where actors compute, in words."""
_SHARED_ENVS = 16
"""Environments of each actor where several actors are measured."""


@dataclass(frozen=True)
class Trial:
    """One measurement. do: "play", "learn" or "together", of both at the same time.

    where: the actors compute on "cpu" or "gpu", or ask one more worker ("central"). cores: hardware
    threads of the actors (and of that worker).
    learner_threads: of the learner, on hardware threads of its own, if it is on the CPU.
    held_out: the model is not fitted to it, but checked with it.
    """

    do: str
    where: str = "cpu"
    actors: int = 0
    envs: int = 0
    cores: int = 0
    learner_threads: int = 0
    held_out: bool = False

    def __str__(self) -> str:
        learner = f"a learner with {self.learner_threads} thread(s)"
        if self.do == "learn":
            return learner
        there = f", inference {INFERENCE[self.where]}" if self.where != "cpu" else ""
        text = f"{self.actors} actor(s) x {self.envs} environments on {self.cores} core(s){there}"
        return f"{text} beside {learner}" if self.do == "together" else text


def trials(machine: Machine, threads: int, gpu: bool, quick: bool, paced: bool) -> list[Trial]:
    """All of them. threads: hardware threads that may be used. gpu: learner and actors may use one.

    paced: the learner is not measured, but its time is given.
    """
    found = []
    for where in ("cpu", "gpu", "central") if gpu else ("cpu", "central"):
        found += _acting(where, threads, machine.cores, quick)
    if not paced:
        found += [Trial("learn", learner_threads=n) for n in ([1] if gpu else powers(threads))]
        if threads > 1:
            rest = threads - 1
            found.append(Trial("together", "cpu", rest, _shared(quick), rest, learner_threads=1))
    return found


def _shared(quick: bool) -> int:
    return _SHARED_ENVS // 2 if quick else _SHARED_ENVS


def _acting(where: str, threads: int, physical: int, quick: bool) -> list[Trial]:
    shared, last = _shared(quick), threads
    fitted = [1, 8, 32] if quick else powers(MOST_ENVS)
    checks = [16] if quick else [12, 24, 48]
    found = [Trial("play", where, 1, envs, 1) for envs in fitted]
    found += [Trial("play", where, 1, envs, 1, held_out=True) for envs in checks]
    for n in powers(threads)[1:] if not quick else sorted({min(2, last), last} - {1}):
        found.append(Trial("play", where, n, shared, n))
    if last > 1:
        found.append(Trial("play", where, last, 2 * shared, last, held_out=True))
        found.append(Trial("play", where, 2 * last, shared, last, held_out=True))
        if last > 4 and not quick:
            found.append(Trial("play", where, last * 3 // 4, shared, last * 3 // 4, held_out=True))
    if physical < last:  # the last core of its own, before second threads begin
        found.append(Trial("play", where, physical, shared, physical))
    return list(dict.fromkeys(found))
