"""Kills a training process at each step of a save; the run that is resumed must not step back.

    python -m tests.stress.checkpoint_kills [--kills 600] [--seed 1] [--json FILE]

Each incarnation resumes the run as `zapex train --resume` does, then plays, records and saves. Its
parameters all hold the number of the save, so that it is known which save they are from.
"""

import argparse
import contextlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.harness import add_json, evidence
from benchmarks.support.machine import Watch
from zapex.agent import networks
from zapex.agent.learning import DQN
from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.machine import disk
from zapex.machine.segment import Segment
from zapex.run import checkpoints, directory
from zapex.run.checkpoints import BestNetwork, RunCheckpoints
from zapex.run.run import Run

STEPS = {
    "begun": (disk, "write_whole", "before"),
    "written": (os, "fsync", "before"),
    "on the disk": (os, "replace", "before"),
    "renamed": (os, "replace", "after"),
    "name on the disk": (disk, "sync_directory", "after"),
    "older one removed": (Path, "unlink", "after"),
}
"""Step of a save -> the function that is called there, and whether the kill is before or after."""

PASSAGES = 8  # a kill is at one of the first so many passages: of settings, a checkpoint, a best
STARTED, SAVED, STEPS_SAVED, BEST, VERSION = range(5)  # words of the account
SPEC = EnvironmentSpec("Toy-v0", {}, (3,), "float32", 1, 2, 4, False, "a toy")


def arm(step: str, passage: int) -> None:
    """From now on this process kills itself at the n-th passage of a step."""
    module, name, when = STEPS[step]
    real: Callable[..., Any] = getattr(module, name)
    left = passage

    def passed(*args: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if not left and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **more)
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, passed)
    if module is disk:  # the other module has taken the function over by its name
        checkpoints.replace_whole.__globals__[name] = passed


def live(run_dir: Path, life: int, account: Any, rng: random.Random) -> None:
    """One incarnation: it resumes, and saves until it is killed."""
    # Other limits in each incarnation, so that the settings are written anew, too.
    resume = str(run_dir) if life else ""
    config = Config().replace(env=SPEC.env_id, run_dir=str(run_dir), resume=resume, max_frames=life)
    run = Run(config, SPEC, run_dir)
    with contextlib.redirect_stdout(io.StringIO()), directory.opened(run) as (run, base):
        totals = {"steps": 0.0, "frames": 0.0, "batches": 0.0, "wall_s": 0.0, **base}
        network = networks.build((3,), np.float32, 2, hidden=4, device="cpu")
        dqn = DQN(network)
        saves = RunCheckpoints(run_dir, SPEC, 1, lambda: 0.0, 0.0, lambda: totals, str)
        saves.restore(dqn)
        best = BestNetwork(run_dir, SPEC, network, str)
        mark = int(network.flat[0]) if saves.version else 0
        version = max(saves.version, int(totals.get("params_version", 0)))
        check_resumed(account, mark, totals, version)
        account[STARTED] += 1
        while True:
            mark, version = max(mark, account[SAVED]) + 1, version + 1
            steps = rng.randint(1, 1000)
            totals |= {name: totals[name] + steps for name in ("steps", "frames", "batches")}
            network.flat.fill_(mark)
            if rng.random() < 0.7:  # metrics are behind the checkpoint, or ahead of it
                line = {"kind": "metrics", **totals, "learner/params_version": version}
                with (run_dir / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if rng.random() < 0.5:
                best.offer([float(mark)], version, totals)
                account[BEST] = mark
            saves.save(dqn, version)
            account[SAVED], account[STEPS_SAVED] = mark, int(totals["steps"])
            account[VERSION] = version


def check_resumed(account: Any, mark: int, totals: dict[str, float], version: int) -> None:
    """What an incarnation begins with is not older than what a former one had saved."""
    assert mark >= account[SAVED], f"parameters of save {mark}, but {account[SAVED]} was saved"
    assert totals["steps"] >= account[STEPS_SAVED], (totals, account)
    assert version >= account[VERSION], (version, account)


def check_left(run_dir: Path, account: Any) -> None:
    """What a killed incarnation has left behind is whole, and the best is not older."""
    path = checkpoints.best(run_dir)
    mean = checkpoints.load(path).state["mean_return"] if path is not None else 0
    assert mean >= account[BEST], f"the best is {mean}, but {account[BEST]} was saved"
    assert max((e.mean for e in directory.evaluations(run_dir)), default=0) >= account[BEST]
    for kept in checkpoints.listing(run_dir):
        found = checkpoints.load(kept).tensors
        marks = {float(x) for name, t in found.items() if name.startswith("online") for x in t.flat}
        assert len(marks) == 1, f"{kept} is of several saves: {marks}"


def run(kills: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rng, killed_at = random.Random(seed), Counter[str]()
    account: Any = Segment.create("checkpoint-kills", 4096).buffer.view(np.int64)
    with tempfile.TemporaryDirectory() as parent:
        run_dir, life = Path(parent) / "run", 0
        while sum(killed_at.values()) < kills:
            step = list(STEPS)[life % len(STEPS)]
            passage = rng.randint(1, PASSAGES)
            pid = os.fork()
            if pid == 0:
                try:
                    resumed = life and checkpoints.latest(run_dir) is not None
                    if resumed:
                        arm(step, passage)
                    else:
                        arm(step, PASSAGES * 3)  # not before there is something to resume from
                    live(run_dir, life, account, random.Random(seed + life))
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                os._exit(70)
            _, status = os.waitpid(pid, 0)
            if not os.WIFSIGNALED(status):
                raise RuntimeError(f"incarnation {life} ended by itself, status {status}")
            check_left(run_dir, account)
            killed_at[step] += 1
            life += 1
    return {
        "kills": kills,
        "seed": seed,
        "killed_at": dict(killed_at),
        "resumed": int(account[STARTED]),
        "saves": int(account[SAVED]),
        "steps": int(account[STEPS_SAVED]),
        "best": int(account[BEST]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills at each step of a save.")
    parser.add_argument("--kills", type=int, default=100 * len(STEPS), help="of all steps, in turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    watch = Watch()
    result = run(chosen.kills, chosen.seed)
    print(json.dumps(result))
    if chosen.json:
        add_json(chosen.json, "kills", "checkpoint_kills", result, evidence(watch, None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
