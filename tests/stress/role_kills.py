"""`zapex train`, its real roles killed at random times: losses, torn rows, seconds until all works.

    python -m tests.stress.role_kills [--kills 30] [--atari] [--central] [--seed 1] [--json FILE]

Looks on from outside, through the memory that the run's parent holds. The memory is large enough
that nothing is evicted, so that after every kill each chunk that was ever seen live must be there,
bit for bit; each of its transitions must be what was played; and of each stream's life they must be
all, from its first step on, without a gap and none twice.

--atari: Breakout with the laptop's settings, and an evaluator. Its seconds are those of a real run,
but its transitions do not say who made them: whole chunks are checked, and not their contents.
--central: the actors ask an inference role, which is killed too.
"""

import argparse
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.harness import add_json, evidence, percentiles
from benchmarks.support.machine import Watch
from benchmarks.train.whole_run import START_S, TrainRun
from tests.stress.marked_env import check_row, game_of
from tests.support.audit import ChunkAudit, attach
from tests.support.fake_system import Moment
from zapex.chunks.layout import COUNT, LIVE, STATE

ENV = "tests.stress.marked_env:marked"
RUN = (
    "--preset smoke --actors 2 --envs-per-actor 4 --max-chunk-age-steps 8 --capacity 2M --hidden 16"
    " --learning-starts 500 --batch-size 32 --samples-per-insert 8 --eval-period-s 0"
    " --checkpoint-minutes 0.2 --max-frames 0 --max-minutes 0"
)
ATARI_ENV = "ALE/Breakout-v5"
ATARI = (
    "--preset laptop --actors 2 --envs-per-actor 4 --max-chunk-age-steps 64 --capacity 600k"
    " --learning-starts 2k --samples-per-insert 8 --eval-period-s 5 --eval-episodes 1"
    " --checkpoint-minutes 0.2 --max-frames 0 --max-minutes 0"
)
ROLES = ("actor 0", "actor 1", "replay", "learner", "evaluator", "inference")
_SHORT_S = 10.5  # of the supervisor's ten: a death after that is followed by 0.1 s, not more
_STUCK_S = 180.0  # Atari on a crowded machine takes one
_WORK = {"actor": "steps", "learner": "batches", "evaluator": "steps", "inference": "answers"}


class Auditor(ChunkAudit):
    """All transitions of a run in which nothing is evicted, as they lie in its memory."""

    def __init__(self, run: TrainRun, env: str) -> None:
        run.blocks()
        self.run = run.inside
        self.contents = env == ENV
        host = attach(run.process.pid, self.run)
        assert host is not None
        self.host = host
        super().__init__(host.store())
        self.moments: dict[tuple[int, int], dict[Moment, None]] = defaultdict(dict)

    def check(self) -> int:
        """Look at every chunk and every stream; returns how many transitions there are."""
        if not self.look():
            raise RuntimeError(f"{self.lost} lost, {self.torn} torn, {self.doubled} doubled chunks")
        live = int((self.store.header_rows[:, STATE] == LIVE).sum())
        if live < self.chunks:
            raise RuntimeError(f"lost: {self.chunks} chunks were seen, {live} are there")
        for who, moments in self.moments.items():
            self._check_stream(who, list(moments))
        return self.transitions

    def taken(self, slot: int) -> None:
        if not self.contents:
            return
        store, config = self.store, self.run.config.replay
        frames = store.column(slot, "obs")
        ends = [store.column(slot, name)[:, 0] for name in ("obs_frames", "next_obs_frames")]
        reward, discount = store.column(slot, "reward"), store.column(slot, "discount")
        for row in range(int(store.header_rows[slot, COUNT])):
            before, after = (frames[int(end[row])] for end in ends)
            moment = check_row(
                before, float(reward[row]), float(discount[row]), after, config.n_step, config.gamma
            )
            stream = self.moments[moment[:2]]
            if moment in stream:
                raise RuntimeError(f"doubled: {moment} again, in slot {slot}")
            stream[moment] = None

    @staticmethod
    def _check_stream(who: tuple[int, int], moments: list[Moment]) -> None:
        """Every step from the first one on."""
        expected = (0, 0)
        for _, _, episode, step in sorted(moments):
            if (episode, step) != expected:
                raise RuntimeError(f"lost: of stream {who} step {expected}, then {episode, step}")
            over = step + 1 == game_of(*who, episode).length
            expected = (episode + 1, 0) if over else (episode, step + 1)


class Nemesis:
    """Kills one role after the other; knows how long each has lived."""

    def __init__(self, run: TrainRun, auditor: Auditor, seed: int) -> None:
        self.run, self.auditor, self.host = run, auditor, auditor.host
        self.rng = random.Random(seed)
        self.roles = [name for name, _ in auditor.run.processes]
        self.short: Counter[str] = Counter()

    def children(self) -> dict[str, psutil.Process]:
        """The living roles by name, those too that have not yet begun."""
        found = {}
        for child in psutil.Process(self.run.process.pid).children():
            with contextlib.suppress(psutil.Error, IndexError, ValueError):
                line = child.cmdline()
                title = line[0].removeprefix("zapex: ")
                name = title if title in ROLES else json.loads(line[-1])["name"]
                if child.status() != psutil.STATUS_ZOMBIE:
                    found[name] = child
        return found

    def kill(self) -> tuple[str, dict[str, float]]:
        """Kill somebody at some time; who, and seconds until what was back."""
        time.sleep(self.rng.uniform(0.0, 3.0))
        children = self.wait(
            lambda: c if len(c := self.children()) == len(self.roles) else None, "all"
        )
        now = time.time()
        ages = {name: now - child.create_time() for name, child in children.items()}
        may = [name for name in self.roles if ages[name] > _SHORT_S or self.short[name] < 2]
        kinds = sorted({one.split()[0] for one in may})
        kind = self.rng.choice(kinds)
        name = self.rng.choice([one for one in may if one.startswith(kind)])
        self.short[name] = 0 if ages[name] > _SHORT_S else self.short[name] + 1
        role = name.split()[0]
        life = self.host.incarnation(name)
        block = self.run.blocks()[name]
        answers = self.host.ring("answers")
        began = time.monotonic()
        children[name].kill()
        times: dict[str, float] = {"lived_s": ages[name]}
        self.wait(lambda: self.host.incarnation(name) != life, f"death of {name}")
        times["seen_dead_s"] = time.monotonic() - began
        done = self.run.count(name, _WORK[role]) if role in _WORK else 0.0
        if role == "actor":
            self.wait(lambda: not self.auditor.granted(int(name.split()[1]), life), "slots back")
            times["slots_back_s"] = time.monotonic() - began
        self.wait(lambda: self.host.incarnation(name) > life, f"next life of {name}")
        times["started_s"] = time.monotonic() - began
        if role == "replay":
            answered = answers.tail
            self.wait(lambda: answers.tail > answered, "sampling again")
            times["sampling_s"] = time.monotonic() - began
        elif role == "learner":
            pid = self.children()[name].pid
            self.wait(lambda: block.pid == pid, "learner's networks")
            loaded = time.monotonic()
            times["loaded_s"] = loaded - began
            self.wait(lambda: self.run.count(name, "batches") > done, "learning again")
            times["learning_s"] = time.monotonic() - began
            times["learning_beside_loading_s"] = times["started_s"] + time.monotonic() - loaded
        else:  # an evaluator plays, too
            self.wait(lambda: self.run.count(name, _WORK[role]) > done, "playing again")
            times["playing_s"] = time.monotonic() - began
        return name, times

    def wait(self, ready: Callable[[], Any], what: str) -> Any:
        """What `ready` returns, as soon as it is true; RuntimeError if it never is."""
        deadline = time.monotonic() + _STUCK_S
        while not (found := ready()):
            if time.monotonic() > deadline or self.run.process.poll() is not None:
                raise RuntimeError(f"stuck: no {what} in {_STUCK_S:g} s\n{self.run.log[-4000:]}")
            time.sleep(0.001)
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, look, tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--atari", action="store_true", help="Breakout, and an evaluator")
    parser.add_argument("--central", action="store_true", help="with an inference role")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the result to this file")
    options = parser.parse_args(argv)
    watch = Watch()
    times: dict[str, list[float]] = defaultdict(list)
    killed: Counter[str] = Counter()
    env, flags = (ATARI_ENV, ATARI) if options.atari else (ENV, RUN)
    if options.central:
        flags += " --inference central --inference-device cpu"
    with TrainRun(env, flags.split(), {"PYTHONPATH": str(Path.cwd())}) as run:
        run.wait_until(lambda: run.count("learner", "batches") > 0, START_S)
        auditor = Auditor(run, env)
        nemesis = Nemesis(run, auditor, options.seed)
        for i in range(options.kills):
            name, found = nemesis.kill()
            killed[name.split()[0]] += 1
            for what, seconds in found.items():
                times[f"{name.split()[0]} {what}"].append(seconds)
            there = auditor.check()
            told = ", ".join(f"{what} {seconds:.2f}" for what, seconds in found.items())
            print(f"{i + 1}: {name}: {told}; {there:,} transitions whole", flush=True)
        batches = run.count("learner", "batches")
        run.wait_until(lambda: run.count("learner", "batches") > batches + 50, _STUCK_S)
        handed_over = sum(run.count(f"actor {i}", "chunks") for i in range(2))
        nemesis.wait(
            lambda: auditor.check() and auditor.chunks >= handed_over,
            f"of {handed_over:.0f} chunks handed over all",
        )
        there = auditor.check()
        torn = int(run.count("learner", "torn_rows"))
        run.process.send_signal(signal.SIGINT)
        code = run.process.wait(20)
        log = run.log
    deaths = log.count(" died after ")
    if code or deaths != options.kills:
        raise RuntimeError(f"exit code {code}, {deaths} deaths for {options.kills} kills\n{log}")
    result = {
        "kills": dict(killed),
        "transitions": there,
        "chunks": auditor.chunks,
        "lost": 0,
        "torn_or_foreign": 0,
        "doubled": 0,
        "stuck": 0,
        "rows_given_up_by_the_learner": torn,
        "seconds": {
            name: percentiles(values) | {"max": max(values)} for name, values in times.items()
        },
    }
    print(json.dumps(result, indent=1))
    if options.json:
        name = "role_kills" + "_atari" * options.atari + "_central" * options.central
        add_json(options.json, "kills", name, result, evidence(watch, None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
