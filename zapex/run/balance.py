"""How many actors this machine's learner needs: both measured alone and together, and the advice.

Workers, a process each, run the real actor (without a replay: its chunks are dropped) or the real
learner's steps (on one batch of random numbers). They are held on their hardware threads. A result
is kept by environment, network and machine, so that `zapex train --actors auto` finds it.
"""

import hashlib
import itertools
import json
import os
import random
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.builder import ChunkBuilder
from zapex.chunks.layout import BatchLayout
from zapex.chunks.store import ChunkStore
from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.errors import PeerDied, PeerTimeout
from zapex.host.metrics import RoleMetrics
from zapex.machine.child import PARENT_VARIABLE, child_setup, thread_environment
from zapex.machine.disk import replace_whole
from zapex.machine.power import Meter
from zapex.machine.resources import Machine, cpu_name, hardware_threads
from zapex.replay.core import ReplayLayout
from zapex.run.run import Run

USUAL_REUSE = 8.0
"""Samples per insert where the settings set no limit: a usual value for DQN."""
GROWTH = 0.10
"""The knee is where twice the environments, or one core more, gain less than this share."""
MOST_ENVS = 64
_MOST_THREADS = 4096
_BESIDE_A_GPU = 2  # hardware threads: the replay, and the learner's own
_PREPARED_S = 300.0  # torch, the games and kernels to compile, for many at the same time
_LATE_S = 60.0  # after the end of its work
_LEAD_S = 0.05  # from the last "ready" to the common beginning

Rates = dict[int, float]
"""A rate by the number of environments, actors or threads that it was measured with."""


# --- the parent: measuring -----------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """seconds: of each measurement. rounds: how often each is made; the median counts."""

    seconds: float
    rounds: int
    quick: bool


QUICK, FULL = Effort(0.5, 1, True), Effort(1.5, 5, False)


class Crew:
    """Worker processes, numbered from 0; started when they are first needed."""

    def __init__(self, config: Config, spec: EnvironmentSpec) -> None:
        self._config, self._spec = config, spec
        self._workers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
            worker.communicate()

    def work(
        self, orders: Sequence[Mapping[str, Any]], seconds: float, begun: Callable[[], object]
    ) -> list[dict[str, float]]:
        """Give an order to each of the first workers; they begin and end together.

        begun: called when all have prepared and begin.

        Raises:
            PeerDied: a worker failed.
            PeerTimeout: a worker did not answer.
        """
        while len(self._workers) < len(orders):
            self._start(len(self._workers))
        workers = self._workers[: len(orders)]
        for worker, order in zip(workers, orders, strict=True):
            self._send(worker, json.dumps({**order, "seconds": seconds}))
        for worker in workers:
            self._answer(worker, _PREPARED_S)
        begin_s = time.monotonic() + _LEAD_S
        for worker in workers:
            self._send(worker, str(begin_s))
        begun()
        return [self._answer(worker, seconds + _LATE_S) for worker in workers]

    def _start(self, number: int) -> None:
        about = {"config": self._config.to_dict(), "spec": asdict(self._spec), "number": number}
        threads = max(self._config.actor.actor_threads, self._config.learner.learner_threads, 1)
        environment = thread_environment(threads) | {PARENT_VARIABLE: str(os.getpid())}
        self._workers.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "zapex.run.balance", json.dumps(about)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, **environment},
            )
        )

    def _send(self, worker: subprocess.Popen[str], line: str) -> None:
        assert worker.stdin is not None
        try:
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
        except BrokenPipeError:
            raise PeerDied(f"a worker ended with status {worker.wait(_LATE_S)}") from None

    def _answer(self, worker: subprocess.Popen[str], timeout_s: float) -> Any:
        assert worker.stdout is not None
        if not select.select([worker.stdout], [], [], timeout_s)[0]:
            raise PeerTimeout(f"a worker has not answered within {timeout_s:g} s")
        line = worker.stdout.readline()
        if not line:
            raise PeerDied(f"a worker ended with status {worker.wait(_LATE_S)}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerDied(f"a worker failed: {answer['error']}")
        return answer


@dataclass(frozen=True)
class Trial:
    """One measurement, of actors, of a learner, or of both at the same time.

    inference: where the actors compute. learner_threads: 0 for no learner; it has the last
    hardware threads, and the actors the first, one each while there are enough.
    """

    actors: int = 0
    envs: int = 0
    inference: str = "cpu"
    learner_threads: int = 0

    def __str__(self) -> str:
        where = " on the GPU" if self.inference == "gpu" else ""
        both = []
        if self.actors:
            both.append(f"{self.actors} actor(s) x {self.envs} environments{where}")
        if self.learner_threads:
            both.append(f"a learner with {self.learner_threads} thread(s)")
        return " beside ".join(both)


class Balance:
    """The measurements.

    Args:
        config: the run's settings.
        spec: its environment.
        machine: this machine.
        effort: how long and how often each point is measured.
        step_s: seconds of a learner's step that is not measured; 0 measures it.
        say: takes a line of progress after each point.
    """

    def __init__(
        self,
        config: Config,
        spec: EnvironmentSpec,
        machine: Machine,
        effort: Effort,
        *,
        step_s: float = 0.0,
        say: Callable[[str], object] = print,
    ) -> None:
        self._config, self._spec, self._machine = config, spec, machine
        self._effort, self._say, self._step_s = effort, say, step_s
        self._meter, self._threads = Meter(), hardware_threads()
        self._gpu = machine.learns_on_gpu and config.learner.device != "cpu"
        self._points: dict[Trial, dict[str, Any]] = {}

    def run(self) -> dict[str, Any]:
        """Measure everything, and both together as advised. Returns the report, as JSON has it."""
        threads = len(self._threads)
        with Crew(self._config, self._spec) as crew:
            envs = [1, 8, 32] if self._effort.quick else powers(MOST_ENVS)
            places = ("cpu", "gpu") if self._gpu else ("cpu",)
            self._measure(crew, [Trial(1, e, where) for where in places for e in envs])
            by_envs = {
                w: {e: self._points[Trial(1, e, w)]["steps_per_s"] for e in envs} for w in places
            }
            enough = {where: knee(rates) for where, rates in by_envs.items()}
            counts = powers(threads)
            self._measure(crew, [Trial(n, enough[w], w) for w in places for n in counts[1:]])
            by_actors = {
                w: {n: self._points[Trial(n, enough[w], w)]["steps_per_s"] for n in counts}
                for w in places
            }
            learned = {0: 1 / self._step_s} if self._step_s else {}
            if not learned:
                trials = [Trial(learner_threads=n) for n in ([1] if self._gpu else counts)]
                self._measure(crew, trials)
                learned = {t.learner_threads: self._points[t]["batches_per_s"] for t in trials}
            device = "paced" if self._step_s else "cuda" if self._gpu else "cpu"
            advice = advise(
                by_actors, enough, learned, device, self._config, self._machine, threads
            )
            both = Trial(
                advice.actors, advice.envs_per_actor, advice.inference, advice.learner_threads
            )
            if both not in self._points:
                self._measure(crew, [both])
        return self._report(by_envs, by_actors, learned, device, advice, self._points[both])

    def _measure(self, crew: Crew, trials: Sequence[Trial]) -> None:
        """Every trial once a round, in a new order each time, so that disturbances are spread."""
        rounds: dict[Trial, list[dict[str, Any]]] = {trial: [] for trial in trials}
        shuffler = random.Random(0)
        for _ in range(self._effort.rounds):
            for trial in shuffler.sample(trials, len(trials)):
                rounds[trial].append(self._once(crew, trial))
        for trial, found in rounds.items():
            point: dict[str, Any] = {}
            for name in found[0]:
                values = [one[name] for one in found if one[name] is not None]
                point[name] = median(values) if values else None
            self._points[trial] = point
            units = {"steps_per_s": "steps/s", "batches_per_s": "batches/s"}
            text = ", ".join(f"{point[n]:,.5g} {unit}" for n, unit in units.items() if n in point)
            self._say(f"{trial}: {text}")

    def _once(self, crew: Crew, trial: Trial) -> dict[str, Any]:
        threads, learner = self._threads, trial.learner_threads
        free = threads[:-learner] if 0 < learner < len(threads) else threads
        mine = free[: trial.actors]
        orders: list[dict[str, Any]] = [
            {
                "do": "play",
                "envs": trial.envs,
                "inference": trial.inference,
                "cores": [mine[i]] if trial.actors <= len(mine) else mine,
                "threads": self._config.actor.actor_threads,
            }
            for i in range(trial.actors)
        ]
        if learner:
            orders.append({"do": "learn", "cores": threads[-learner:], "threads": learner})
        cores = sorted({core for order in orders for core in order["cores"]})
        seconds = self._effort.seconds
        answers = crew.work(orders, seconds, lambda: self._meter.begin(cores))
        found: dict[str, Any] = dict(self._meter.end())
        own_s = sum(answer["cpu_s"] for answer in answers)
        found["foreign_share"] = max(0.0, found["cpu_share"] - own_s / (seconds * len(cores)))
        rates = [answer["done"] / answer["seconds"] for answer in answers]
        if learner:
            found["batches_per_s"] = rates.pop()
        if rates:
            found["steps_per_s"] = sum(rates)
        return found

    def _report(
        self,
        by_envs: dict[str, Rates],
        by_actors: dict[str, Rates],
        learned: Rates,
        device: str,
        advice: "Advice",
        together: dict[str, Any],
    ) -> dict[str, Any]:
        machine, learner = self._machine, self._config.learner
        watts = together["cpu_watts"]
        frames = together["steps_per_s"] * self._spec.frames_per_step
        whole = watts + (together["gpu_watts"] or 0.0) if watts else None
        return {
            "quick": self._effort.quick,
            "env": self._config.env.env,
            "network": {
                "hidden": learner.hidden,
                "channels": learner.channels,
                "batch_size": learner.batch_size,
            },
            "machine": {
                "cpu": cpu_name(),
                "cores": machine.cores,
                "smt": machine.smt,
                "gpu": str(machine.gpu or "none"),
            },
            "points": [{**asdict(t), **point} for t, point in self._points.items()],
            "steps_per_s_by_envs": by_envs,
            "steps_per_s_by_actors": by_actors,
            "learner": {"device": device, "batches_per_s_by_threads": learned},
            "together": {**together, "frames_per_joule": frames / whole if whole else None},
            "foreign_share": max(point["foreign_share"] for point in self._points.values()),
            "power": {"cpu": self._meter.rapl.why, "gpu": self._meter.nvml.why},
            "advice": asdict(advice),
        }


# --- what follows --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """What to use, and why.

    limit: "actors" or "learner": the side that keeps the other one waiting. threads_needed:
    hardware threads whose actors keep the learner busy, also more than there are; None: no number
    does. cores_per_learner: the same in cores. threads_per_sm: the same for each multiprocessor of
    the GPU, the ratio of Inci et al. (arXiv 2012.04210), beside what the machine has.
    """

    inference: str
    actors: int
    envs_per_actor: int
    learner_threads: int
    batches_per_s: float
    steps_per_s: float
    limit: str
    samples_per_insert: float
    threads_needed: int | None
    cores_per_learner: float | None
    threads_per_sm: float | None
    machine_threads_per_sm: float | None


def advise(
    by_actors: Mapping[str, Rates],
    envs: Mapping[str, int],
    learned: Rates,
    device: str,
    config: Config,
    machine: Machine,
    threads: int,
) -> Advice:
    """The split of this machine with which both sides make the most batches.

    Args:
        by_actors: steps a second by the number of actors, for each place where they compute.
        envs: environments of each of these actors, by place.
        learned: batches a second by the learner's threads; 0 is a learner that was not measured.
        device: of the learner, "cpu", "cuda" or "paced".
        config: the run's settings.
        machine: this machine.
        threads: hardware threads that may be used.
    """
    reuse = config.replay.samples_per_insert or USUAL_REUSE
    steps_a_batch = config.learner.batch_size / reuse

    def free(learner_threads: int) -> int:
        return max(1, threads - (learner_threads if device == "cpu" else _BESIDE_A_GPU))

    def value(option: tuple[str, int]) -> tuple[bool, float, float]:
        where, n = option
        steps = rate_at(by_actors[where], free(n))
        return threads > n or n <= 1, min(learned[n], steps / steps_a_batch), steps

    where, learner_threads = max(((w, n) for w in by_actors for n in learned), key=value)
    rates, batches = by_actors[where], learned[learner_threads]
    needed = count_for(rates, batches * steps_a_batch)
    most = free(learner_threads)
    actors = min(most, needed or most, knee_of_counts(rates, most))
    steps = rate_at(rates, actors)
    smt = max(1, round(threads / machine.cores))
    sms = machine.gpu.multiprocessors if machine.gpu and device == "cuda" else 0
    return Advice(
        inference=where,
        actors=actors,
        envs_per_actor=envs[where],
        learner_threads=learner_threads,
        batches_per_s=batches,
        steps_per_s=steps,
        limit="actors" if steps < batches * steps_a_batch else "learner",
        samples_per_insert=reuse,
        threads_needed=needed,
        cores_per_learner=needed / smt if needed else None,
        threads_per_sm=needed / sms if needed and sms else None,
        machine_threads_per_sm=threads / sms if sms else None,
    )


def powers(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return [*itertools.takewhile(lambda n: n < most, (2**i for i in range(32))), most]


def knee(rates: Rates) -> int:
    """The number of environments after which doubling them gains less than GROWTH."""
    counts = sorted(rates)
    for n, more in itertools.pairwise(counts):
        if rates[more] < rates[n] * (1 + GROWTH) ** np.log2(more / n):
            return n
    return counts[-1]


def knee_of_counts(rates: Rates, most: int) -> int:
    """The number of actors, at most `most`, after which one more gains less than GROWTH of one."""
    one = rate_at(rates, 1)
    for n in range(1, most):
        if rate_at(rates, n + 1) - rate_at(rates, n) < GROWTH * one:
            return n
    return most


def rate_at(rates: Rates, count: int) -> float:
    """The rate at a count between the measured ones, or beyond them, with the last slope."""
    counts = sorted(rates)
    if count <= counts[-1]:
        return float(np.interp(count, counts, [rates[n] for n in counts]))
    before = counts[-2] if len(counts) > 1 else 0
    slope = (rates[counts[-1]] - rates.get(before, 0.0)) / (counts[-1] - before)
    return rates[counts[-1]] + max(0.0, slope) * (count - counts[-1])


def count_for(rates: Rates, wanted: float) -> int | None:
    """The smallest count with this rate; None if there is none up to _MOST_THREADS."""
    found = (n for n in range(1, _MOST_THREADS + 1) if rate_at(rates, n) >= wanted)
    return next(found, None)


def kept_at(cache: Path, config: Config, spec: EnvironmentSpec, machine: Machine) -> Path:
    """Where the result of this environment, network and machine is kept."""
    env, learner = config.env, config.learner
    key = {
        "env": [env.env, env.env_kwargs, list(spec.observation_shape), spec.num_actions],
        "network": [learner.hidden, learner.channels, learner.batch_size, learner.device],
        "machine": [cpu_name(), machine.cores, machine.smt, machine.gpu and machine.gpu.name],
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    readable = env.env.replace("/", "-").replace(":", "-")
    return cache / "zapex" / "balance" / f"{readable}-{name}.json"


def keep(path: Path, report: dict[str, Any]) -> None:
    """Store a report; a quick one never takes the place of a whole one."""
    if report["quick"] and (before := kept(path)) is not None and not before["quick"]:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_whole(path, [(json.dumps(report, indent=1) + "\n").encode()])


def kept(path: Path) -> dict[str, Any] | None:
    """A stored report; None if there is none that can be used."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        advice, when = report["advice"], report["time"]
        numbers = [advice["actors"], advice["envs_per_actor"]]
        fits = all(isinstance(n, int) and 1 <= n <= 4096 for n in numbers)
        fits &= advice["inference"] in ("cpu", "gpu", "central")
        fits &= isinstance(when, str) and len(when) < 40 and isinstance(report["quick"], bool)
        return report if fits else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- the workers ---------------------------------------------------------------------------------


class _NoReplay:
    """An ExperienceSink that drops what it takes."""

    def __init__(self, layout: ReplayLayout, streams: int) -> None:
        slots, chunk = 4 * streams, layout.chunk_layout
        memory = aligned_zeros(ChunkStore.required_bytes(chunk, slots))
        self.store = ChunkStore(memory, chunk, slots)
        self._streams, self._free = streams, deque(range(slots))

    def ready(self) -> bool:
        """Always: there is no limit."""
        return True

    def try_claim(self) -> NDArray[np.int64] | None:
        """(S,) free slots."""
        return np.array([self._free.popleft() for _ in range(self._streams)], np.int64)

    def commit(self, slots: NDArray[np.int64]) -> None:
        """Free them."""
        self._free.extend(slots.tolist())


class _Zeros:
    """A ParameterSource with one version of the parameters, all 0."""

    version = 1

    def newer_than(self, version: int, out: NDArray[np.uint8]) -> int:
        """Give version 1 once."""
        out[:] = 0
        return int(version < 1)


class _Worker:
    """Makes actors and the learner, and keeps them for the next order of the same kind."""

    def __init__(self, config: Config, spec: EnvironmentSpec, number: int) -> None:
        self._config, self._spec, self._number = config, spec, number
        self._made: dict[tuple[Any, ...], Callable[[float], dict[str, float]]] = {}

    def prepare(self, order: dict[str, Any]) -> Callable[[float], dict[str, float]]:
        """Make ready for an order. Returns what to call with the time of its end."""
        import torch

        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), order["cores"])
        torch.set_num_threads(order["threads"])
        kind = order["do"], order.get("inference"), order.get("envs")
        if kind not in self._made:
            make = self._actor if order["do"] == "play" else self._learner
            self._made[kind] = make(order)
        work = self._made[kind]
        work(time.monotonic() + order["seconds"] / 4)  # warm up
        return work

    def _actor(self, order: dict[str, Any]) -> Callable[[float], dict[str, float]]:
        from zapex.agent.policy import epsilon_ladder
        from zapex.envs import streams
        from zapex.roles.actor import Actor
        from zapex.roles.values import OwnValues, Pull
        from zapex.run.topologies import make_policy

        envs = order["envs"]
        changes = {"inference": order["inference"], "actors": 1, "envs_per_actor": envs}
        config = self._config.replace(**changes)
        run = Run(config, self._spec, Path())
        played = streams.make(
            self._spec, envs, seed=self._number, num_threads=config.actor.env_threads
        )
        metrics = RoleMetrics(aligned_zeros(RoleMetrics.required_bytes()), "actor", create=True)
        plan, policy = run.plan, make_policy(run)
        sink, nbytes = _NoReplay(plan.replay, envs), plan.parameter_bytes
        pull = Pull(policy, _Zeros(), metrics, period=run.param_steps, parameter_bytes=nbytes)
        age = config.actor.max_chunk_age_steps
        actor = Actor(
            played,
            OwnValues(policy, pull, metrics),
            sink,
            ChunkBuilder(sink.store, envs, actor=0, incarnation=1, max_chunk_age_steps=age),
            metrics,
            lambda records: None,
            epsilons=epsilon_ladder(envs),
            first_stream=0,
            reward_clip=config.env.reward_clip,
            priorities=True,
            rng=np.random.default_rng(self._number),
            clock_ns=time.perf_counter_ns,
        )

        for _ in range(2 * age):  # kernels are compiled, also those of a chunk's end
            actor.do_work()

        def play(until_s: float) -> dict[str, float]:
            before, began_s = metrics.value("steps"), time.monotonic()
            while time.monotonic() < until_s:
                actor.do_work()
            return {
                "done": metrics.value("steps") - before,
                "seconds": time.monotonic() - began_s,
            }

        return play

    def _learner(self, order: dict[str, Any]) -> Callable[[float], dict[str, float]]:
        from zapex.roles.learner import AtOnce, Trainer
        from zapex.run.topologies import make_dqn, pipeline

        config, spec = self._config, self._spec
        dqn = make_dqn(Run(config, spec, Path()))
        cuda = dqn.online.device.type == "cuda"
        schema = spec.schema(config.replay.n_step, config.replay.gamma)
        layout = BatchLayout(schema, config.learner.batch_size, channels_last=dqn.channels_last)
        trainer: Trainer = AtOnce(dqn)
        if cuda:
            trainer = pipeline(dqn, layout, None, config.learner.cuda_graphs)
        batches = [Batch.empty(layout, pin_memory=cuda) for _ in range(2)]
        rng = np.random.default_rng(0)
        for batch in batches:
            for name in ("obs", "next_obs"):
                shape, image = batch[name].shape, batch[name].dtype == np.uint8
                batch[name][...] = rng.integers(0, 256, shape) if image else rng.random(shape)
            batch.action[...] = rng.integers(spec.num_actions, size=batch.action.shape)
            batch.weights[...] = 1.0

        def learn(until_s: float) -> dict[str, float]:
            began_s, begun, finished = time.monotonic(), 0, 0
            while time.monotonic() < until_s or not finished:
                trainer.begin(batches[begun % 2], lambda phase: None)
                begun += 1
                if begun - finished > trainer.late:
                    trainer.finish()
                    finished += 1
            for _ in range(begun - finished):
                trainer.finish()
            return {"done": begun, "seconds": time.monotonic() - began_s}

        return learn


def main(text: str) -> None:
    """A worker: serve orders, a line each, until the parent closes the pipe or ends."""
    about = json.loads(text)
    child_setup(f"balance {about['number']}")
    config, spec = Config.from_dict(about["config"]), EnvironmentSpec(**about["spec"])
    worker = _Worker(config, spec, about["number"])
    for line in sys.stdin:
        order = json.loads(line)
        try:
            work = worker.prepare(order)
            print(json.dumps({"ready": True}), flush=True)
            begin_s = float(sys.stdin.readline() or "inf")
            time.sleep(max(0.0, min(60.0, begin_s - time.monotonic())))
            before_s = time.process_time()
            done = work(begin_s + order["seconds"])
            print(json.dumps({**done, "cpu_s": time.process_time() - before_s}), flush=True)
        except Exception as error:  # reported to the parent, which shows it to the user
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            return


if __name__ == "__main__":
    main(sys.argv[1])
