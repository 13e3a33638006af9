"""A child that plays or learns when it is told to, as an actor or the learner of a run would.

It reads an order as a line of JSON, prepares, answers "ready", reads the time to begin, works until
its end, and answers what it has done.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zapex.agent import kernel_classes
from zapex.agent.policy import Acting, epsilon_greedy, epsilon_ladder
from zapex.chunks.batch import Batch
from zapex.chunks.layout import BatchLayout
from zapex.config.settings import Config
from zapex.envs import streams
from zapex.envs.environments import EnvironmentSpec
from zapex.machine.child import child_setup
from zapex.machine.segment import Segment
from zapex.roles.learner import AtOnce, Trainer
from zapex.run.run import Run
from zapex.run.topologies import make_dqn, make_policy, pipeline
from zapex.studies.central import Answering, Desk

_PROFILED_STEPS = 5


@dataclass
class Played:
    """The environments and the policy of an actor."""

    envs: streams.Streams
    policy: Acting | None
    q: Any = None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def begin(self) -> None:
        """Look at the environments, newly reset."""
        assert self.policy is not None
        self.q = self.policy.q_values(self.envs.reset())

    def play(self, until_s: float) -> dict[str, float]:
        """Play, as an actor does, and count steps."""
        size = self.envs.num_streams
        ladder = epsilon_ladder(size)
        began_s = now_s = time.monotonic()
        steps, stepping_s = 0, 0.0
        policy = self.policy
        assert policy is not None
        while now_s < until_s:
            actions = epsilon_greedy(self.q, ladder, self.rng)
            before_s = time.monotonic()
            step = self.envs.step(actions)
            stepping_s += time.monotonic() - before_s
            self.q = policy.q_values(step.obs)
            steps += size - int(step.started.sum())
            now_s = time.monotonic()
        seconds = now_s - began_s
        return {"done": steps, "seconds": seconds, "environment_share": stepping_s / seconds}


class Worker:
    """Keeps what it has made for the next order of the same kind."""

    _answering: Answering | None

    def __init__(
        self, config: Config, spec: EnvironmentSpec, number: int, desk: Desk | None = None
    ) -> None:
        self._config, self._spec, self._number = config, spec, number
        self._played: dict[tuple[str, int], Played] = {}
        self._trainer: Trainer | None = None
        self._batches: list[Batch] = []
        self._device = torch.device("cpu")
        self._desk, self._answering = desk, None

    def prepare(self, order: dict[str, Any]) -> Any:
        """Make ready for an order. Returns what to call with the time of its end."""
        cores = set(order["cores"])
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
        torch.set_num_threads(order["threads"])
        if self._answering is not None:  # until now its actors may have asked
            self._answering.close()
            self._answering = None
        if order["do"] == "answer":
            return self._answer(order)
        if order["do"] == "play":
            played = self._player(order["where"], order["envs"])
            if order["where"] == "central":
                assert self._desk is not None
                played.policy = self._desk.asking(self._number, order["actors"], order["envs"])
            played.begin()
            played.play(time.monotonic() + order["warm_up_s"])
            return played.play
        self._learner()
        if order["do"] == "profile":
            return self._profile
        self._learn(time.monotonic() + order["warm_up_s"])
        return self._learn

    def _player(self, where: str, envs: int) -> Played:
        if (where, envs) not in self._played:
            run = Run(
                self._config.replace(inference=where, envs_per_actor=envs), self._spec, Path()
            )
            threads = self._config.actor.env_threads
            played = streams.make(self._spec, envs, seed=self._number, num_threads=threads)
            # Who asks another worker loads no network; `prepare` says whom it asks.
            policy = None if where == "central" else make_policy(run)
            self._played[where, envs] = Played(played, policy)
        return self._played[where, envs]

    def _answer(self, order: dict[str, Any]) -> Any:
        """Answer actors from now on, until the next order; count only until the time of its end."""
        assert self._desk is not None
        run = Run(self._config.replace(inference="central"), self._spec, Path())
        desk, actors, envs = self._desk, order["actors"], order["envs"]
        self._answering = answering = desk.answering(make_policy(run), actors, envs)

        def count(until_s: float) -> dict[str, float]:
            passes, answers, began_s = answering.passes, answering.answers, time.monotonic()
            time.sleep(max(0.0, until_s - began_s))
            passes = answering.passes - passes
            seconds = time.monotonic() - began_s
            batch = (answering.answers - answers) / max(1, passes)
            return {"done": passes, "seconds": seconds, "actors_a_pass": batch}

        return count

    def _learner(self) -> None:
        if self._trainer is not None:
            return
        run = Run(self._config, self._spec, Path())
        dqn = make_dqn(run)
        self._device = dqn.online.device
        cuda = self._device.type == "cuda"
        replay, learner = self._config.replay, self._config.learner
        schema = self._spec.schema(replay.n_step, replay.gamma)
        layout = BatchLayout(schema, learner.batch_size, channels_last=dqn.channels_last)
        self._trainer = pipeline(dqn, layout, None, learner.cuda_graphs) if cuda else AtOnce(dqn)
        self._batches = [Batch.empty(layout, pin_memory=cuda) for _ in range(2)]
        rng = np.random.default_rng(0)
        for batch in self._batches:
            for name in ("obs", "next_obs"):
                image = batch[name].dtype == np.uint8
                shape = batch[name].shape
                batch[name][...] = rng.integers(0, 256, shape) if image else rng.random(shape)
            batch.action[...] = rng.integers(self._spec.num_actions, size=batch.action.shape)
            batch.weights[...] = 1.0

    def _learn(self, until_s: float, most: int = 1 << 62) -> dict[str, float]:
        trainer = self._trainer
        assert trainer is not None
        began_s = now_s = time.monotonic()
        begun = finished = 0
        while now_s < until_s and finished < most:
            trainer.begin(self._batches[begun % len(self._batches)], lambda phase: None)
            begun += 1
            if begun - finished > trainer.late:
                trainer.finish()
                finished += 1
            now_s = time.monotonic()
        while finished < begun:
            trainer.finish()
            finished += 1
        return {"done": finished, "seconds": time.monotonic() - began_s}

    def _profile(self, until_s: float) -> dict[str, Any]:
        def step() -> None:
            self._learn(float("inf"), 1)

        step()
        found = kernel_classes.measure(step, _PROFILED_STEPS, self._device)
        return {"kernels": found, "device": self._device.type}


def main(text: str) -> None:
    """Serve orders until the parent closes the pipe, or ends."""
    about = json.loads(text)
    child_setup(f"balance {about['number']}")
    spec, desk = EnvironmentSpec(**about["spec"]), None
    if shared := about["desk"]:
        segment = Segment.attach(shared["fd"])
        kinds = [(actors, envs) for actors, envs in shared["kinds"]]
        desk = Desk(segment, spec, kinds, shared["eventfds"])
    worker = Worker(Config.from_dict(about["config"]), spec, about["number"], desk)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            work = worker.prepare(order)
            print(json.dumps("ready"), flush=True)
            begin_s = float(sys.stdin.readline() or "inf")
            time.sleep(max(0.0, min(60.0, begin_s - time.monotonic())))
            before_s = time.process_time()
            done = work(begin_s + order["seconds"])
            print(json.dumps({**done, "cpu_s": time.process_time() - before_s}), flush=True)
        except Exception as error:  # told to the parent, in whose words the user reads it
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            return


if __name__ == "__main__":
    main(sys.argv[1])
