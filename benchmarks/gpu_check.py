"""The GPU path on a machine with a GPU, in at most eight minutes.

    make gpu-check PYTHON=python3 [WHEELS=FOLDER] [OUT=build/gpu]
    python3 -m benchmarks.gpu_check --dry      the same on a CPU, some seconds a step

Needs a Python that has torch. What else is missing is installed from WHEELS into OUT/site, without
a package index. Each step is a process with a time limit, and writes OUT/STEP.json as it goes, so
that a run that is cut off still tells something:

    tests     those that are marked `gpu`
    learner   batches/s of the learner alone: the paper's network with 512 rows and the laptop
              preset's with 64, frames on the host or on the GPU, with and without CUDA graphs; time
              of kernels by class, use of the GPU
    copies    gather of a batch on the host and its copy to the GPU, against a pinned memcpy
    host      a whole run with the replay's frames on the host: frames/s, batches/s, how much of its
              time the learner waits
    device    the same with the frames on the GPU
    central   the same, and one process computes the actions of all actors there
    pong      Pong for the rest of the time: return against the clock
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMITS_S = {
    "tests": 130, "learner": 110, "copies": 30, "host": 75, "device": 75, "central": 75,
    "pong": 400,
}  # fmt: skip
ALL_S = 480.0
PACKAGES = (
    "zmq", "gymnasium", "ale_py", "rich", "tensorboard", "matplotlib", "safetensors", "zlib_ng",
    "shtab", "setproctitle", "pytest", "pytest_timeout", "psutil",
)  # fmt: skip
NETWORKS = {"paper": (512, 32, 512), "laptop": (64, 16, 256)}
"""batch, channels, hidden"""


def main(argv: list[str] | None = None) -> int:
    """Run all steps, or one. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu", metavar="DIR")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="what is missing, as wheels")
    parser.add_argument("--dry", action="store_true", help="on a CPU, some seconds a step")
    parser.add_argument("--step", choices=LIMITS_S, action="append", help="only these")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    if options.here:
        (step,) = options.step
        _STEPS[step](options.out / f"{step}.json", options.dry, options.seconds)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    environment = _environment(options)
    began_s, failed = time.monotonic(), []
    for step in options.step or LIMITS_S:
        left_s = ALL_S - (time.monotonic() - began_s)
        if left_s < 20:
            failed.append(f"{step}: no time left")
            continue
        limit_s = min(left_s, LIMITS_S[step])
        words = ["--here", "--step", step, "--seconds", str(limit_s - 15), "--out", options.out]
        command = [sys.executable, "-m", "benchmarks.gpu_check", *map(str, words)]
        try:
            done = subprocess.run(
                command + ["--dry"] * options.dry,
                cwd=ROOT, env=environment, timeout=limit_s, check=False,
            )  # fmt: skip
            why = f"exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            why = f"not done after {limit_s:.0f} s; {step}.json has what there is"
        print(f"{step}: {why or 'done'}, {time.monotonic() - began_s:.0f} s in all", flush=True)
        failed += [f"{step}: {why}"] if why else []
    for path in sorted(options.out.glob("*.json")):
        print(path.name, json.dumps(json.loads(path.read_text()))[:600])
    print("\n".join(failed) or "all steps done")
    return int(bool(failed))


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """With what is missing, from wheels."""
    site = options.out / "site"
    if options.wheels is not None:
        names = sorted(map(str, options.wheels.glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
        subprocess.run([*pip, "--upgrade", "--target", str(site), *names], check=True)
    paths = [str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    look = (
        "import importlib.util as u; "
        f"print(' '.join(n for n in {PACKAGES!r} if u.find_spec(n) is None))"
    )
    found = subprocess.run(
        [sys.executable, "-c", look], env=environment, capture_output=True, text=True, check=True
    )
    if missing := found.stdout.split():
        sys.exit(f"missing here: {', '.join(missing)}: put their wheels into a folder, --wheels")
    return environment


@cache
def _facts() -> dict[str, Any]:
    """Where it is from. Asked once: a child imports torch for it."""
    import torch

    from zapex.machine import gpu

    return {"torch": torch.__version__, "cores": os.cpu_count(), "gpu": asdict(gpu.look())}


def write(path: Path, found: Any) -> None:
    """Write what there is so far, with where it is from."""
    facts = _facts()
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"machine": facts, "results": found}, indent=1) + "\n")
    new.replace(path)


# Steps


def tests(path: Path, dry: bool, seconds: float) -> None:
    """Those marked `gpu`; dry: those of the device's stand-in."""
    chosen = ["-m", "gpu"] if not dry else ["-k", "late_device"]
    words = [
        "tests/agent/test_device.py",
        "tests/chunks/test_batch.py",
        "tests/scenarios/test_inline.py",
        *chosen,
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )
    write(path, {"code": done.returncode, "said": done.stdout[-6000:]})
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-1000:])


def learner(path: Path, dry: bool, seconds: float) -> None:
    """Batches/s by network, place of the frames and use of graphs."""
    import torch

    device = "cpu" if dry else "cuda"
    found: dict[str, Any] = {}
    cells = [(n, p, g) for n in NETWORKS for p in ("host", device) for g in (True, False)]
    end_s = time.monotonic() + seconds
    memory = _memory(200 if dry else 20_000)
    for number, (network, place, graphs) in enumerate(cells):
        each_s = 0.3 if dry else (end_s - time.monotonic()) / (2 * len(cells) - number)
        step = _Stepping(memory, network, device, graphs, frames_there=place == device)
        step.run(0.0)  # compiles, records
        batches, spent_s = step.run(each_s)
        found[f"{network}, frames on {place}, {'graphs' if graphs else 'no graphs'}"] = {
            "batches_per_s": batches / spent_s,
            "phases_ms": step.phases,
            **_gpu_use(step, dry),
        }
        write(path, found)
    step = _Stepping(memory, "paper", device, graphs=False, frames_there=True)
    step.run(0.0)
    kinds = [torch.profiler.ProfilerActivity.CPU if dry else torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        step.run(0.2)
    total = "self_cpu_time_total" if dry else "self_device_time_total"
    events = sorted(profile.key_averages(), key=lambda e: -getattr(e, total))[:25]
    found["kernels_us"] = {e.key[:90]: [getattr(e, total), e.count] for e in events}
    write(path, found)


def copies(path: Path, dry: bool, seconds: float) -> None:
    """GB/s of the host's gather, of its copy to the device, and of a pinned memcpy."""
    import torch

    from zapex.chunks.batch import Batch
    from zapex.replay.draw import Gatherer

    memory, found = _memory(200 if dry else 20_000), {}
    for network, (rows, _, _) in NETWORKS.items():
        batch = Batch.empty(memory.layout(rows, channels_last=dry), pin_memory=not dry)
        block, device = batch.block, torch.device("cpu" if dry else "cuda")
        there, pinned = torch.empty_like(block, device=device), torch.empty_like(block)
        if not dry:
            pinned = pinned.pin_memory()

        def gather(gatherer: Gatherer, rows: int = rows, batch: Any = batch) -> None:
            gatherer.begin(memory.core.draw(rows), batch)
            gatherer.finish(batch)

        def copy(there: Any = there, block: Any = block) -> None:
            there.copy_(block, non_blocking=True)
            if not dry:
                torch.cuda.synchronize()

        works: dict[str, Callable[[], object]] = {
            f"gather by {n} threads": partial(gather, Gatherer(memory.store, 0.4, n))
            for n in (1, 2, 4)
        }
        works |= {"copy to the device": copy, "memcpy": partial(pinned.copy_, block)}
        for name, work in works.items():
            found[f"{name}, {network}"] = block.numel() / _each_s(work, dry) / 1e9
        write(path, found)


def whole_run(path: Path, dry: bool, seconds: float, place: str) -> None:
    """A run on Breakout: its rates over the last part of its time. place: flags."""
    actors = max(1, (os.cpu_count() or 2) - 2)
    flags = [*place.split(), "--max-minutes", str(max(0.2, seconds - 25) / 60), "--actors",
             str(actors), "--eval-period-s", "0", "--learning-starts", "20k"]  # fmt: skip
    if dry:
        flags = ["--preset", "smoke", "--max-frames", "6k"]
    lines = list(_train("ALE/Breakout-v5", path.with_suffix(""), flags, seconds))
    last = lines[len(lines) // 2 :]
    names = ("charts/FPS", "learner/batches_per_s", "phases/learner_wait", "system/gpu_share")
    write(path, {name: _mean(last, name) for name in names} | {"lines": len(lines)})


def pong(path: Path, dry: bool, seconds: float) -> None:
    """Pong with sticky actions and one seed: [seconds, frames, return] as it goes."""
    flags = ["--max-minutes", str(max(0.2, seconds - 20) / 60), "--eval-period-s", "30"]
    if dry:
        flags = ["--preset", "smoke", "--max-frames", "6k"]
    points = []
    for line in _train("ALE/Pong-v5", path.with_suffix(""), flags, seconds):
        if "mean" in line or "charts/episodic_return_last100" in line:
            score = line.get("mean", line.get("charts/episodic_return_last100"))
            points.append([line["wall_s"], line["frames"], score, "mean" in line])
            write(path, {"points": points})
    write(path, {"points": points})


_STEPS: dict[str, Callable[[Path, bool, float], None]] = {
    "tests": tests, "learner": learner, "copies": copies,
    "host": partial(whole_run, place="--replay-device cpu"),
    "device": partial(whole_run, place="--replay-device cuda"),
    "central": partial(whole_run, place="--replay-device cuda --inference central"), "pong": pong,
}  # fmt: skip


# What they share


def _train(env: str, directory: Path, flags: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """The lines that a run records, as they come."""
    command = [sys.executable, "-m", "zapex", "train", "--env", env, "--seed", "1", "--plain",
               "--run-dir", str(directory), *flags]  # fmt: skip
    file, read = directory / "metrics.jsonl", 0
    deadline = time.monotonic() + seconds
    with subprocess.Popen(command, cwd=ROOT) as process:
        while (over := process.poll()) is None or read < (file.stat().st_size if over == 0 else 0):
            if time.monotonic() > deadline:
                process.terminate()
            time.sleep(0.5)
            if file.exists():
                with file.open() as lines:
                    lines.seek(read)
                    for line in lines:
                        if not line.endswith("\n"):
                            break
                        read += len(line.encode())
                        yield json.loads(line)
    if process.returncode:
        sys.exit(f"zapex train ended with {process.returncode}")


def _mean(lines: list[dict[str, Any]], name: str) -> float | None:
    found = [line[name] for line in lines if isinstance(line.get(name), int | float)]
    return sum(found) / len(found) if found else None


def _each_s(work: Callable[[], object], dry: bool) -> float:
    work()
    turns, began_s = 2 if dry else 200, time.perf_counter()
    for _ in range(turns):
        work()
    return (time.perf_counter() - began_s) / turns


class _Memory:
    """A replay of noise, in chunks as an actor writes them."""

    def __init__(self, replay: Any) -> None:
        self.core, self.store = replay.core, replay.core.store

    def layout(self, rows: int, channels_last: bool, frames_apart: bool = False) -> Any:
        from zapex.chunks.layout import BatchLayout

        return BatchLayout(self.core.layout.schema, rows, channels_last, frames_apart)


def _memory(rows: int) -> _Memory:
    import numpy as np

    import zapex
    from zapex.chunks.schema import Column

    columns = {"obs": Column((84, 84), np.uint8, stack=4), "action": Column((), np.int64)}
    replay = zapex.PrioritizedReplay(
        max(rows, 4096), zapex.Schema(columns, n_step=3, gamma=0.99), seed=1
    )
    rng, writer = np.random.default_rng(1), replay.writer(8)
    played = rng.integers(0, 256, (8, 68, 84, 84), np.uint8)  # (streams, steps, ...)
    writer.reset(played[:, :4])
    no, first = np.zeros(8, bool), 0
    for _ in range(rows // 8 + 8):
        first = (first + 1) % 64
        if not first:
            writer.reset(played[:, :4])
            first = 1
        writer.add(
            action=rng.integers(4, size=8), reward=rng.normal(size=8).astype(np.float32),
            next_obs=played[:, first : first + 4], terminated=no, truncated=no,
        )  # fmt: skip
    writer.flush()
    return _Memory(replay)


class _Stepping:
    """The learner's steps over batches that are drawn and gathered as in a run."""

    def __init__(
        self, memory: _Memory, network: str, device: str, graphs: bool, frames_there: bool
    ) -> None:
        import numpy as np
        import torch

        from zapex.agent import networks
        from zapex.agent.learning import DQN
        from zapex.chunks.batch import Batch
        from zapex.chunks.device_frames import DeviceFrames
        from zapex.replay.draw import Gatherer
        from zapex.roles.learner import AtOnce
        from zapex.run.topologies import pipeline

        self.rows, channels, hidden = NETWORKS[network]
        self._memory = memory
        net = networks.build(
            (4, 84, 84), np.uint8, 4, channels=channels, hidden=hidden, device=device
        )
        dqn = DQN(net)
        frames = DeviceFrames(memory.store, torch.device(device)) if frames_there else None
        layout = memory.layout(self.rows, dqn.channels_last, frames_there)
        if device == "cuda":
            self._trainer = pipeline(dqn, layout, frames, graphs)
        else:
            columns = (lambda batch: frames.complete(batch.torch())) if frames else None
            self._trainer = AtOnce(dqn, columns) if columns else AtOnce(dqn)
        self._on_cpu = frames if device == "cpu" else None
        pinned = device == "cuda"
        self._least = 8 if pinned else 2
        self._batches = [Batch.empty(layout, pin_memory=pinned) for _ in range(3)]
        self._gatherer = Gatherer(memory.store, 0.4, 2, frames)
        self.phases: dict[str, float] = {}

    def run(self, seconds: float) -> tuple[int, float]:
        """Learn for so long, but some batches at least. Returns batches and seconds."""
        began_s, batches, late = time.perf_counter(), 0, self._trainer.late
        self._begin_gather(0)
        while batches < self._least or time.perf_counter() - began_s < seconds:
            batch = self._batches[batches % 3]
            self._gatherer.finish(batch)
            batches += 1
            self._begin_gather(batches)  # beside the step
            if self._on_cpu is not None:
                self._on_cpu.put_in_place(batch)
            self._trainer.begin(batch, lambda phase: None)
            if batches > late:
                _, _, self.phases = self._trainer.finish()
        self._gatherer.finish(self._batches[batches % 3])
        for _ in range(late):
            self._trainer.finish()
        return batches, time.perf_counter() - began_s

    def _begin_gather(self, number: int) -> None:
        self._gatherer.begin(self._memory.core.draw(self.rows), self._batches[number % 3])


def _gpu_use(step: _Stepping, dry: bool) -> dict[str, float]:
    """Of the card while it learns, where NVML is there."""
    import torch

    if dry:
        return {}
    step.run(0.5)
    try:
        return {"gpu_use": torch.cuda.utilization() / 100}
    except (RuntimeError, ImportError):
        return {}


if __name__ == "__main__":
    sys.exit(main())
