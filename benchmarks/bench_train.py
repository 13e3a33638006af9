"""A whole run: where the cores' time goes, how fast it acts, starts, learns, and against a peer.

    python -m benchmarks.bench_train shares    [--minutes 10]      what all cores do
    python -m benchmarks.bench_train acting    [--rounds 10]       beside its two parts alone
    python -m benchmarks.bench_train startup   [--rounds 3]        until the first step and batch
    python -m benchmarks.bench_train ratio     --peer-python PATH  steps/s at 8 samples a step
    python -m benchmarks.bench_train cartpole  [--rounds 5]        seconds to a return of 475

Each runs `zapex train` as anybody does and looks at it from outside. Beside the goal of each stands
what came out: nothing here fails because a machine is slow.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import arguments, machine_facts, write_json
from benchmarks.core_shares import (
    IDLE,
    OUTSIDE,
    STOLEN,
    overhead_of,
    phases_between,
    shares_between,
)
from benchmarks.train_run import Look, TrainRun
from zapex import environments
from zapex.environments import EnvironmentSpec

Result = dict[str, Any]

_START_S = 600.0  # compiling every kernel on a busy machine, and then some
_SETTLE_S = 10.0


def goal(text: str, value: float, limit: float, unit: str = "", least: bool = False) -> str:
    """One line: what was wanted, what came out."""
    met = value >= limit if least else value <= limit
    sign = "at least" if least else "at most"
    verdict = "met" if met else "MISSED"
    return f"  goal {verdict}: {text} {value:.4g}{unit}, wanted {sign} {limit:g}{unit}"


# --- shares of both cores ------------------------------------------------------------------------


def shares(options: Namespace, spec: EnvironmentSpec) -> Result:
    """What the cores do from a while after learning began, for `minutes`."""
    seconds = 20.0 if options.quick else 60 * options.minutes
    cores = len(os.sched_getaffinity(0))
    with TrainRun(spec, options.train) as run:
        run.wait_until(lambda: run.count("learner", "batches") >= 20, _START_S)
        run.wait_until(lambda: len(run.look().roles) == len(run.blocks()), _START_S)
        time.sleep(_SETTLE_S)
        before = run.look()
        time.sleep(seconds)
        after = run.look()
        config = run.config
    result: Result = {
        "window_s": after.time_s - before.time_s,
        "began_s": before.time_s - run.began_s,
        "cores": cores,
        "rates_per_s": _rates(before, after),
        "batch_size": config.learner.batch_size,
        "replay_fill": [
            look.roles["replay"]["live"] / config.replay.capacity for look in (before, after)
        ],
        "populated": [before.populated, after.populated],
        "shares": shares_between(before, after, cores),
        "roles": {name: _role_facts(before, after, name) for name in after.cpu_s},
    }
    _print_shares(result)
    return result


def _rates(before: Look, after: Look) -> dict[str, float]:
    counters = {"actor": ("frames", "steps"), "learner": ("batches", "samples")}
    elapsed_s = after.time_s - before.time_s
    return {
        counter: sum(
            after.roles[name][counter] - before.roles[name][counter]
            for name in after.roles
            if name.split()[0] == role
        )
        / elapsed_s
        for role, names in counters.items()
        for counter in names
    }


def _role_facts(before: Look, after: Look, name: str) -> dict[str, Any]:
    """Cores that a process used, wanted and did not get, and its phases' shares of the wall."""
    elapsed_s = after.time_s - before.time_s
    facts: dict[str, Any] = {
        "cores_used": (after.cpu_s[name] - before.cpu_s[name]) / elapsed_s,
        "cores_queued_for": (after.queued_s.get(name, 0.0) - before.queued_s.get(name, 0.0))
        / elapsed_s,
    }
    if name in after.roles:
        phases = phases_between(before, after, name)
        facts["wall_shares"] = {phase: value / elapsed_s for phase, value in phases.items()}
    return facts


def _print_shares(result: Result) -> None:
    rates, rows = result["rates_per_s"], result["shares"]
    print(
        f"{rates['frames']:,.0f} frames/s ({rates['steps']:,.0f} steps/s), "
        f"{rates['batches']:.2f} batches/s x {result['batch_size']} = "
        f"{rates['samples']:,.0f} samples/s; replay {result['replay_fill'][0]:.0%} to "
        f"{result['replay_fill'][1]:.0%} full, memory {result['populated'][0]:.0%} to "
        f"{result['populated'][1]:.0%} populated; {result['window_s']:.0f} s from "
        f"{result['began_s']:.0f} s after the command\n\nshare of {result['cores']} cores' time"
    )
    for row, value in sorted(rows.items(), key=lambda item: -item[1]):
        print(f"  {value:7.2%}  {row}")
    print("\nwall time of each process by phase, and the cores it used (and queued for)")
    for name, facts in result["roles"].items():
        phases = facts.get("wall_shares", {})
        said = "  ".join(f"{phase} {value:.1%}" for phase, value in phases.items() if value > 5e-4)
        print(f"  {name:10} {facts['cores_used']:.3f} ({facts['cores_queued_for']:.3f})  {said}")
    overhead, evaluation = overhead_of(rows), rows.get("evaluation", 0.0)
    result["everything_else"] = {"alone": overhead, "with_evaluation": overhead + evaluation}
    print(goal("everything else", 100 * overhead, 2, " %"))
    print(goal("... with evaluation", 100 * (overhead + evaluation), 2, " %"))
    print(goal("idle", 100 * rows[IDLE], 3, " %"))
    if rows[OUTSIDE] + rows[STOLEN] > 0.02:
        print("  other work had part of this machine: the shares are not to be trusted")


# --- acting alone --------------------------------------------------------------------------------


def acting(options: Namespace, spec: EnvironmentSpec) -> Result:
    """An actor whose learner never begins, against its environment and network in a bare loop.

    The two take turns on the same core time: while one is measured, the other one stands still.
    """
    round_s, rounds = (2.0, 3) if options.quick else (6.0, options.rounds or 10)
    capacity = str(int(5_000 * (rounds + 6) * round_s))
    alone = ["--actors", "1", "--eval-period-s", "0", "--capacity", capacity]
    alone += ["--learning-starts", capacity, *options.train]
    speeds: list[tuple[float, float, float]] = []
    phases: list[dict[str, float]] = []
    with TrainRun(spec, alone) as run:
        run.wait_until(lambda: run.count("actor 0", "steps") > 0, _START_S)
        run.wait_until(lambda: run.populated() > 0.999, _START_S)
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
            mine = _rates(before, after)["steps"]
            speeds.append((mine, 1 / (step_s + forward_s), mine * (step_s + forward_s)))
            seconds = phases_between(before, after, "actor 0")
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

    from zapex import streams
    from zapex.agent.exploration import epsilon_greedy, epsilon_ladder
    from zapex.agent.policy import Policy
    from zapex.topology import Run

    config = run.config
    torch.set_num_threads(config.actor.actor_threads)
    size = config.actor.envs_per_actor
    envs = streams.make(spec, size, seed=1, num_threads=config.actor.env_threads)
    policy = Policy(Run(config, spec, run.path).network())
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


# --- start-up ------------------------------------------------------------------------------------


def startup(options: Namespace, spec: EnvironmentSpec) -> Result:
    """Seconds from the command to what happens first, with kernels to compile and with them cached.

    The memory is populated beside it: once a small one, once the preset's.
    """
    rounds = 1 if options.quick else options.rounds or 3
    memories = {"small memory": ["--capacity", "20k"], "preset's memory": []}
    times: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="zapex-cache-") as cached:
        _start_once(spec, [*memories["small memory"], *options.train], cached)
        for _ in range(rounds):
            for memory, flags in memories.items():
                told = [*flags, *options.train]
                with tempfile.TemporaryDirectory(prefix="zapex-cache-") as empty:
                    cold = _start_once(spec, told, empty)
                times.setdefault(f"kernels compiled, {memory}", []).append(cold)
                warm = _start_once(spec, told, cached)
                times.setdefault(f"kernels cached, {memory}", []).append(warm)
    medians = {
        case: {mark: statistics.median(one.get(mark, 0.0) for one in runs) for mark in runs[0]}
        for case, runs in times.items()
    }
    for case, marks in medians.items():
        print(case)
        spent = {mark: marks[mark] for mark in marks if mark.startswith("cpu, ")}
        for mark, seconds in sorted(marks.items(), key=lambda item: item[1]):
            if mark not in spent and mark != "populated":
                print(f"  {seconds:7.2f} s  {mark}")
        print(f"  {marks['populated']:.0%} of the memory was populated by then")
        each = ", ".join(f"{mark[5:]} {seconds:.2f}" for mark, seconds in spent.items())
        print(f"  processor seconds until the first step: {each}")
    for kernels, limit in (("compiled", 40), ("cached", 8)):
        first = medians[f"kernels {kernels}, small memory"]["first step"]
        print(goal(f"first step with kernels {kernels}:", first, limit, " s"))
    return {"medians": medians, "runs": times}


def _start_once(spec: EnvironmentSpec, arguments: Sequence[str], cache: str) -> dict[str, float]:
    """Mark -> seconds from the command; "cpu, ..." -> a process's own until the first step;
    "populated" -> the share of memory that was by the first batch."""
    seen: dict[str, float] = {}
    used: dict[str, float] = {}
    with TrainRun(spec, arguments, {"XDG_CACHE_HOME": cache}) as run:

        def block(name: str) -> Any:
            return run.blocks().get(name)

        marks: dict[str, Callable[[], Any]] = {"memory is mapped": run.blocks}
        for name in ("actor 0", "replay", "learner"):
            marks[f"{name} is made"] = lambda name=name: block(name) and block(name).pid
        marks |= {
            "first parameters": lambda: run.count("learner", "params_version"),
            "first step": lambda: run.count("actor 0", "steps"),
            "first batch": lambda: run.count("learner", "batches"),
        }

        def all_seen() -> bool:
            for mark in [m for m in marks if m not in seen]:
                if marks[mark]():
                    seen[mark] = time.monotonic() - run.began_s
            if "first step" in seen and not used:
                used.update({f"cpu, {name}": value for name, value in run.look().cpu_s.items()})
            return len(seen) == len(marks)

        run.wait_until(all_seen, _START_S, poll_s=0.01)
        used["populated"] = run.populated()
    return seen | used


# --- against Stable-Baselines3 -------------------------------------------------------------------

_PEER, _SAME, _OWN = "stable-baselines3, batch 32", "zapex, batch 32", "zapex, its own batch"
_SAMPLES_A_STEP = 8


def ratio(options: Namespace, spec: EnvironmentSpec) -> Result:
    """Steps a second at 8 samples a step, each in a fresh process, round by round."""
    if not options.peer_python:
        raise SystemExit("ratio needs --peer-python: the Python that has stable-baselines3")
    seconds, rounds = (15.0, 1) if options.quick else (60.0, options.rounds or 3)
    ours = ["--samples-per-insert", str(_SAMPLES_A_STEP), "--eval-period-s", "0"]
    ours += ["--capacity", "100k", "--learning-starts", "4k", *options.train]
    contenders: dict[str, Callable[[], Result]] = {
        _PEER: lambda: _peer_speed(options.peer_python, spec, seconds),
        _SAME: lambda: _own_speed(spec, [*ours, "--batch-size", "32"], seconds),
        _OWN: lambda: _own_speed(spec, ours, seconds),
    }
    runs: dict[str, list[Result]] = {name: [] for name in contenders}
    for turn in range(rounds):
        order = list(contenders)
        for name in order[turn % 3 :] + order[: turn % 3]:
            runs[name].append(contenders[name]())
            print(f"  {runs[name][-1]['steps_per_s']:8.1f} steps/s  {name}", flush=True)
    medians = {
        name: statistics.median(run["steps_per_s"] for run in found) for name, found in runs.items()
    }
    for name, speed in medians.items():
        samples = statistics.median(run["samples_per_step"] for run in runs[name])
        times = speed / medians[_PEER]
        print(f"{speed:8.1f} steps/s  {times:5.2f} x  {samples:.2f} samples a step  {name}")
    print(goal("at our own batch", medians[_OWN] / medians[_PEER], 6, " x", least=True))
    return {"seconds": seconds, "medians": medians, "runs": runs}


def _peer_speed(python: str, spec: EnvironmentSpec, seconds: float) -> Result:
    script = Path(__file__).parent / "peer_dqn.py"
    game = spec.env_id.removeprefix("ALE/").removesuffix("-v5")
    command = [python, str(script), game, str(seconds), "0"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    facts: Result = json.loads(said.stdout.splitlines()[-1])
    return facts


def _own_speed(spec: EnvironmentSpec, arguments: Sequence[str], seconds: float) -> Result:
    """Actors go on in leaps, a grant each: whole leaps are timed where there are some."""
    with TrainRun(spec, arguments) as run:
        run.wait_until(lambda: run.count("learner", "batches") >= 50, _START_S)
        time.sleep(_SETTLE_S)
        seen = [_progress(run)]
        leaps = []
        while seen[-1][0] - seen[0][0] < seconds:
            time.sleep(0.05)
            seen.append(_progress(run))
            if seen[-1][3] > seen[-2][3]:
                leaps.append(seen[-1])
        first, last = (leaps[0], leaps[-1]) if len(leaps) > 2 else (seen[0], seen[-1])
        batch_size = run.config.learner.batch_size
    elapsed_s, steps, samples, waits = (b - a for a, b in zip(first, last, strict=True))
    return {
        "steps_per_s": steps / elapsed_s,
        "samples_per_step": samples / steps,
        "batch_size": batch_size,
        "seconds": elapsed_s,
        "leaps": waits,
    }


def _progress(run: TrainRun) -> tuple[float, float, float, float]:
    """Time, steps, samples learned from, and how often actors had to wait."""
    actors = [name for name in run.blocks() if name.startswith("actor")]
    steps, waits = (
        sum(run.count(name, counter) for name in actors) for counter in ("steps", "credit_waits")
    )
    return time.monotonic(), steps, run.count("learner", "samples"), waits


# --- CartPole ------------------------------------------------------------------------------------

_SOLVED = 475.0


def cartpole(options: Namespace, spec: EnvironmentSpec) -> Result:
    """`make demo`, seed by seed: from the command until it has ended by itself."""
    seeds = range(1, (1 if options.quick else options.rounds or 5) + 1)
    runs = {str(seed): _solve(spec, seed, options.train) for seed in seeds}
    for seed, one in runs.items():
        print(
            f"  seed {seed}: {one['mean']:.1f} at {one['steps']:,} steps and {one['at_s']:.1f} s; "
            f"evaluated and ended after {one['command_s']:.1f} s"
        )
    solved = [one["command_s"] for one in runs.values() if one["mean"] >= _SOLVED]
    print(f"{len(solved)} of {len(runs)} seeds reached {_SOLVED:g}")
    print(goal("the slowest took", max(one["command_s"] for one in runs.values()), 120, " s"))
    return {"seeds": runs, "solved": len(solved)}


def _solve(spec: EnvironmentSpec, seed: int, more: Sequence[str]) -> Result:
    """mean, steps, at_s: of the first evaluation that reached it, or of the last one."""
    demo = ["--stop-at-return", str(_SOLVED), "--eval-episodes", "100", "--max-minutes", "5"]
    with TrainRun(spec, [*demo, "--seed", str(seed), *more]) as run:
        run.process.wait(6 * 60)
        command_s = time.monotonic() - run.began_s
        if run.process.returncode:
            raise RuntimeError(f"the run failed:\n{run.log[-4000:]}")
        outcome = json.loads((run.path / "result.json").read_text())
    evaluations = outcome["evaluations"]
    reached = [e for e in evaluations if e["mean"] >= _SOLVED]
    one = (reached or evaluations)[0 if reached else -1]
    return {
        "command_s": command_s,
        "at_s": one["wall_s"],
        "steps": one["steps"],
        "mean": one["mean"],
        "evaluations": [[e["wall_s"], e["steps"], e["mean"]] for e in evaluations],
    }


MEASUREMENTS: dict[str, Callable[[Namespace, EnvironmentSpec], Result]] = {
    "shares": shares,
    "acting": acting,
    "startup": startup,
    "ratio": ratio,
    "cartpole": cartpole,
}


def main(argv: Sequence[str] | None = None) -> int:
    """What a whole training run costs and brings, in five measurements."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("--env", default="", help="another environment (shares, acting, startup)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of shares' window")
    parser.add_argument("--rounds", type=int, default=0, help="rounds, runs or seeds")
    parser.add_argument("--peer-python", metavar="PYTHON", help="has stable-baselines3")
    parser.add_argument(
        "--train", nargs="*", default=[], help="further flags of `zapex train`, after all others"
    )
    own, found = (list(sys.argv[1:] if argv is None else argv), [])
    if "--train" in own:
        own, found = own[: own.index("--train")], own[own.index("--train") + 1 :]
    options = parser.parse_args(own)
    options.train = found
    # Ended from outside, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench_train: ended by SIGTERM"))
    load = os.getloadavg()
    solving = options.measurement == "cartpole"
    spec = environments.check(options.env or ("CartPole-v1" if solving else "ALE/Breakout-v5"))
    result = MEASUREMENTS[options.measurement](options, spec)
    if options.json:
        packages = ("numpy", "numba", "torch", "gymnasium", "ale-py")
        write_json(
            options.json,
            f"train {options.measurement}",
            result,
            machine=machine_facts(packages),
            load_average_before=load,
            command=sys.argv[1:],
            environment=spec.env_id,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
