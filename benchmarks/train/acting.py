"""An actor alone, beside its environment and network in a bare loop: `bench_train acting`."""

import os
import signal
import statistics
import time
from argparse import Namespace
from collections.abc import Callable

import numpy as np

from benchmarks.support.harness import goal
from benchmarks.train.core_shares import between
from benchmarks.train.whole_run import START_S, Result, TrainRun, rates
from zapex.envs.environments import EnvironmentSpec


def acting(options: Namespace, spec: EnvironmentSpec) -> Result:
    """An actor whose learner never begins, against its environment and network in a bare loop.

    The two take turns on the same core time: while one is measured, the other one stands still.
    """
    round_s, rounds = 1.0 if options.quick else 6.0, options.rounds
    capacity = str(int(5_000 * (rounds + 6) * round_s))
    alone = ["--actors", "1", "--eval-period-s", "0", "--capacity", capacity]
    alone += ["--learning-starts", capacity, *options.train]
    speeds: list[tuple[float, float, float]] = []
    phases: list[dict[str, float]] = []
    with TrainRun(spec, alone) as run:
        run.wait_until(lambda: run.count("actor 0", "steps") > 0, START_S)
        run.wait_until(lambda: run.populated() > 0.999, START_S)
        bare = _bare_loop(run, spec)
        bare(round_s)
        time.sleep(2 * round_s)
        pid = run.blocks()["actor 0"].pid
        for _ in range(rounds):
            time.sleep(0.2)
            before = run.look()
            time.sleep(round_s)
            after = run.look()
            os.kill(pid, signal.SIGSTOP)
            step_s, forward_s = bare(round_s)
            os.kill(pid, signal.SIGCONT)
            mine = rates(before, after)["steps"]
            speeds.append((mine, 1 / (step_s + forward_s), mine * (step_s + forward_s)))
            seconds = between(before, after, "actor 0")
            elapsed_s = after.time_s - before.time_s
            phases.append({name: value / elapsed_s for name, value in seconds.items()})
        assert run.count("learner", "batches") == 0, "the learner was to stand still"
    result: Result = {
        "rounds": rounds,
        "round_s": round_s,
        "actor_steps_per_s": statistics.median(s[0] for s in speeds),
        "bare_steps_per_s": statistics.median(s[1] for s in speeds),
        "share_reached": statistics.median(s[2] for s in speeds),
        "shares_by_round": [s[2] for s in speeds],
        "wall_shares": {n: statistics.median(p[n] for p in phases) for n in phases[0]},
    }
    print(
        f"{result['actor_steps_per_s']:,.0f} steps/s acting; environment and forward alone would "
        f"make {result['bare_steps_per_s']:,.0f}"
    )
    print("  " + "  ".join(f"{n} {v:.2%}" for n, v in result["wall_shares"].items() if v > 5e-4))
    print(goal("acting reaches", 100 * result["share_reached"], 95, " %", least=True))
    return result


def _bare_loop(run: TrainRun, spec: EnvironmentSpec) -> Callable[[float], tuple[float, float]]:
    """Environment and forward of the same streams and network, and nothing in between.

    The function returned plays for so many seconds, and says the seconds of each for one step of
    one stream.
    """
    import torch

    from zapex.agent.exploration import epsilon_greedy, epsilon_ladder
    from zapex.agent.policy import Policy
    from zapex.envs import streams
    from zapex.run.run import Run

    config = run.config
    torch.set_num_threads(config.actor.actor_threads)
    size = config.actor.envs_per_actor
    envs = streams.make(spec, size, seed=1, num_threads=config.actor.env_threads)
    policy = Policy(Run(config, spec, run.path).acting_network())
    ladder = epsilon_ladder(size, config.actor.eps_base, config.actor.eps_alpha)
    rng = np.random.default_rng(0)
    q = policy.q_values(envs.reset())

    def play(seconds: float) -> tuple[float, float]:
        nonlocal q
        step_s = forward_s = 0.0
        steps = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            actions = epsilon_greedy(q, ladder, rng)
            began = time.perf_counter()
            step = envs.step(actions)
            stepped = time.perf_counter()
            q = policy.q_values(step.obs)
            step_s += stepped - began
            forward_s += time.perf_counter() - stepped
            steps += size - int(step.started.sum())
        return step_s / steps, forward_s / steps

    return play
