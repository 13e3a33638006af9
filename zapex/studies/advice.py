"""What follows from a balance: the ratio of CPU to GPU, and how many actors to use.

A result is kept by environment, network and machine, so that `zapex train --actors auto` finds it.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.machine.disk import replace_whole
from zapex.machine.power import NOT_READABLE
from zapex.machine.resources import Machine, cpu_name
from zapex.studies.saturation import GROWTH, Model

USUAL_REUSE = 8.0
"""Samples per insert where the settings set no limit: a usual value for DQN."""
_FOREIGN = 0.05  # a share of the cores
_OTHER_ROLES = 2  # beside a GPU: the replay, and the learner's own thread


@dataclass(frozen=True)
class Advice:
    """What to use, and why.

    inference: where actors compute. cores: hardware threads that actors get. limit: "actors" or
    "learner", whoever keeps the other one waiting. threads_needed: hardware threads whose actors
    keep the learner busy; None: no number does.
    """

    inference: str
    actors: int
    envs_per_actor: int
    cores: int
    learner_threads: int
    batches_per_s: float
    frames_per_s: float
    limit: str
    threads_needed: int | None
    cores_per_learner: float | None
    threads_per_sm: float | None
    machine_threads_per_sm: float | None
    samples_per_insert: float
    frames_per_joule: float | None


class _Option:
    """Where actors compute, and how many threads the learner has."""

    def __init__(
        self, model: Model, where: str, learner_threads: int, batches_per_s: float, threads: int,
        device: str,
    ) -> None:  # fmt: skip
        self.model, self.where, self.batches_per_s = model, where, batches_per_s
        self.learner_threads = learner_threads
        taken = learner_threads if device == "cpu" else _OTHER_ROLES
        self.fits = threads - taken >= 1 or learner_threads <= 1
        self.free = max(1, threads - taken)
        self.envs = model.enough_envs()
        self.steps_per_s = model.rate(self.free, self.envs, self.free)


def advise(
    result: dict[str, Any], config: Config, spec: EnvironmentSpec, machine: Machine, threads: int
) -> Advice:
    """From what `Balance.run` found. threads: hardware threads that may be used."""
    learner, models = result["learner"], result["models"]
    reuse = config.replay.samples_per_insert or USUAL_REUSE
    steps_a_batch = learner["batch_size"] / reuse
    options = [
        _Option(Model(**models[where]), where, int(n), rate, threads, learner["device"])
        for where in models
        for n, rate in learner["batches_per_s_by_threads"].items()
    ]
    # The most batches that both sides can make; of equals the one with more steps a second.
    best = max(
        options, key=lambda o: (o.fits, min(o.batches_per_s, o.steps_per_s / steps_a_batch),
                                o.steps_per_s)
    )  # fmt: skip
    model, where, envs, wanted = best.model, best.where, best.envs, best.batches_per_s
    wanted *= steps_a_batch
    needed = model.cores_for(wanted, envs)
    cores = min(best.free, model.enough_cores(envs, best.free), needed or best.free)
    rate = model.rate(cores, envs, cores)
    smt = max(1, round(threads / machine.cores))
    sms = machine.gpu.multiprocessors if machine.gpu and learner["device"] == "cuda" else 0
    watts = _watts(result)
    return Advice(
        inference=where,
        actors=cores,
        envs_per_actor=envs,
        cores=cores,
        learner_threads=best.learner_threads,
        batches_per_s=best.batches_per_s,
        frames_per_s=rate * spec.frames_per_step,
        limit="actors" if rate < wanted else "learner",
        threads_needed=needed,
        cores_per_learner=needed / smt if needed else None,
        threads_per_sm=needed / sms if needed and sms else None,
        machine_threads_per_sm=threads / sms if sms else None,
        samples_per_insert=reuse,
        frames_per_joule=rate * spec.frames_per_step / watts if watts else None,
    )


def _watts(result: dict[str, Any]) -> float | None:
    """Of the busiest trial of actors and learner together; None if the CPU's cannot be read."""
    found = [p for p in result["points"] if p["do"] == "together"] or result["points"]
    watts = [p["cpu_watts"] + (p["gpu_watts"] or 0.0) for p in found if p["cpu_watts"] is not None]
    return max(watts, default=None)


def lines(result: dict[str, Any], advice: Advice) -> list[str]:
    """The result in words."""
    learner, power = result["learner"], result["power"]
    paced = ": its time was given, not measured" if learner["paced"] else ""
    if learner["device"] == "cpu":
        paced = f", {advice.learner_threads} thread(s)"
    model = result["models"][advice.inference]
    what = "GPU" if learner["device"] == "cuda" else "learner"
    text = [
        f"learner ({learner['device']}{paced}): {advice.batches_per_s:,.4g} batches of "
        f"{learner['batch_size']} a second",
        f"an actor with a core to itself: {_ms(model['fixed_s'])} a step + {_ms(model['each_s'])} "
        f"for each environment; cores take {model['contention']:.1%} from each other",
    ]
    if result["held_out_error"] is not None:
        verdict = "within" if result["held_out_error"] <= 0.10 else "NOT within"
        text.append(
            f"predictions at points that the model had not seen: {verdict} 10 %, the worst is "
            f"{result['held_out_error']:.1%} off"
        )
    needed = advice.threads_needed
    ratio = f"{advice.cores_per_learner:.3g} cores per {what}" if needed else "no number of cores"
    if advice.threads_per_sm is not None:
        ratio += (
            f", {advice.threads_per_sm:.3g} hardware threads per SM "
            f"(this machine has {advice.machine_threads_per_sm:.3g})"
        )
    text.append(
        f"in balance at {advice.samples_per_insert:g} samples per insert: {ratio}"
        + ("" if needed else f" keeps this {what} busy")
    )
    text.append(f"the limit here: the {advice.limit}")
    if result["foreign_share"] > _FOREIGN:
        text.append(
            f"WARNING: other processes took up to {result['foreign_share']:.0%} of the cores: "
            "measure again on a quiet machine"
        )
    joule = advice.frames_per_joule
    unread = f"{NOT_READABLE} ({power['cpu']})"
    text.append(f"frames per joule: {f'{joule:,.3g}' if joule else unread}")
    text.append(
        f"use: --actors {advice.actors} --envs-per-actor {advice.envs_per_actor}"
        + (f" --inference {advice.inference}" if advice.inference != "cpu" else "")
        + f"  ({advice.frames_per_s:,.0f} frames/s; twice the environments or one core more gain "
        f"less than {GROWTH:.0%} of one actor, or the learner has enough)"
    )
    return text


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def kept_at(cache: Path, config: Config, spec: EnvironmentSpec, machine: Machine) -> Path:
    """Where the result of this environment, network and machine is kept."""
    env, learner = config.env, config.learner
    key = {
        "env": [env.env, env.env_kwargs, list(spec.observation_shape), spec.num_actions],
        "network": [learner.hidden, learner.channels, learner.batch_size, learner.device],
        "machine": [cpu_name(), machine.cores, machine.smt, machine.gpu and machine.gpu.name],
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return (
        cache / "zapex" / "balance" / f"{env.env.replace('/', '-').replace(':', '-')}-{name}.json"
    )


def keep(path: Path, report: dict[str, Any]) -> None:
    """Store a result; a quick one never takes the place of a whole one."""
    if report["quick"] and (before := kept(path)) is not None and not before["quick"]:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_whole(path, [(json.dumps(report, indent=1) + "\n").encode()])


def kept(path: Path) -> dict[str, Any] | None:
    """A stored result; None if there is none that can be used."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        numbers = [report["advice"][name] for name in ("actors", "envs_per_actor")]
        inference, when = report["advice"]["inference"], report["time"]
        fits = all(isinstance(n, int) and 1 <= n <= 4096 for n in numbers)
        told = inference in ("cpu", "gpu", "central") and isinstance(when, str) and len(when) < 40
        return report if fits and told and isinstance(report["quick"], bool) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def report_of(
    result: dict[str, Any], advice: Advice, config: Config, machine: Machine, when: str, quick: bool
) -> dict[str, Any]:
    """All of a balance, as its file has it."""
    facts = {
        "cpu": cpu_name(), "cores": machine.cores, "smt": machine.smt,
        "memory_gib": round(machine.memory_bytes / 2**30, 1), "gpu": str(machine.gpu or "none"),
    }  # fmt: skip
    network = {
        "hidden": config.learner.hidden,
        "channels": config.learner.channels,
        "batch_size": config.learner.batch_size,
    }
    said = {name: _finite(value) for name, value in asdict(advice).items()}
    about = {"time": when, "quick": quick, "env": config.env.env, "network": network}
    return {**about, "machine": facts, **result, "advice": said}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
