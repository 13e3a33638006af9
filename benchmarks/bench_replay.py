"""The replay on Atari-sized transitions, against memcpy of the same bytes and against peers.

    python -m benchmarks.bench_replay [--quick] [--peers] [--json FILE]

batch     sample(512) into memory that was used before, and update_priorities; caches swept before
          each. memcpy: the batch's bytes, from memory that is not in the caches
add       writer.add of 64 streams, so that each call completes 64 transitions; memcpy: the bytes of
          a chunk of 64 transitions, into touched memory
extend    64 successive rows of one stream; memcpy: the input's bytes, into touched memory
tiny      microseconds a call on CartPole-sized rows: what Python costs
import    seconds in a fresh process, kernels cached

All memory of the replay has been written before (touched) when the clock runs.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import (
    ROOT,
    CacheSweeper,
    arguments,
    cache_bytes,
    clock_ns,
    interleaved,
    percentiles,
    write_json,
)
from benchmarks.peer_replays import CONTENDERS, SIDE, STACK
from zapex import Column, PrioritizedReplay, Schema

BATCH, ROWS = 512, 64
FRAMES = 4096


def timed(work: Callable[[], Any]) -> float:
    start = clock_ns()
    work()
    return clock_ns() - start


def atari(n_step: int) -> Schema:
    columns = {"obs": Column((SIDE, SIDE), np.uint8, STACK), "action": Column((), np.int64)}
    return Schema(columns, n_step=n_step)


def insert_cases(rounds: int) -> dict[str, Any]:
    """add and extend against memcpy; the replay is full, so that each chunk evicts another."""
    rng = np.random.default_rng(0)
    frames = rng.integers(1, 255, (FRAMES, SIDE, SIDE), np.uint8)
    replay = PrioritizedReplay(16 * ROWS * 64, atari(1), seed=0, streams=ROWS)  # chunks of 64
    writer = replay.writer(ROWS)
    clock = 0

    def stacks(first: int, rows: int) -> np.ndarray:
        return frames[(first + np.arange(rows)[:, None] + np.arange(STACK)) % FRAMES]

    step = {
        "action": np.zeros(ROWS, np.int64), "reward": np.zeros(ROWS),
        "terminated": np.zeros(ROWS, bool), "truncated": np.zeros(ROWS, bool),
    }  # fmt: skip
    # Stream i is at frame clock + 61 i: different frames, one after the other in each stream.
    starts = 61 * np.arange(ROWS)[:, None] + np.arange(STACK)
    writer.reset(frames[starts % FRAMES])

    def add() -> float:
        nonlocal clock
        clock += 1
        next_obs = frames[(clock + starts) % FRAMES]
        return timed(lambda: writer.add(next_obs=next_obs, **step))

    whole = PrioritizedReplay(16_384, atari(1), seed=0)
    rows = {"action": step["action"], "reward": step["reward"], "terminated": step["terminated"]}

    def extend() -> float:
        first = int(rng.integers(FRAMES))
        obs, next_obs = stacks(first, ROWS), stacks(first + 1, ROWS)
        return timed(lambda: whole.extend(obs=obs, next_obs=next_obs, **rows))

    chunk_bytes = replay.layout.chunk_layout.body_bytes * ROWS // replay.layout.chunk
    ring = np.ones((64, 2 * ROWS * STACK * SIDE * SIDE), np.uint8)
    turn = 0

    def memcpy(nbytes: int) -> Callable[[], float]:
        def work() -> float:
            nonlocal turn
            turn += 1
            source, target = ring[turn % 64], ring[(turn + 32) % 64]
            return timed(lambda: np.copyto(target[:nbytes], source[:nbytes]))

        return work

    for _ in range(16 * 64 + 256):  # every slot has been written before the clock runs
        add()
        extend()
    cases = {
        "add": add, "add_memcpy": memcpy(chunk_bytes),
        "extend": extend, "extend_memcpy": memcpy(ring.shape[1]),
    }  # fmt: skip
    times = interleaved(cases, rounds)
    found = {name: percentiles(values, 1e3) for name, values in times.items()}
    used = whole.ledger.counts["live"] * whole.store.layout.body_bytes
    facts = {"extend_bytes_a_transition": round(used / len(whole)),
             "writer_bytes_a_transition": round(atari_chunk_bytes(3) / 64)}  # fmt: skip
    return {"microseconds": found, **facts}


def atari_chunk_bytes(n_step: int) -> int:
    return PrioritizedReplay(1024, atari(n_step), chunk=64).layout.chunk_layout.body_bytes


def tiny_cases(rounds: int, calls: int = 200) -> dict[str, Any]:
    """What a call costs where there is next to nothing to do."""
    schema = Schema({"obs": Column((4,), np.float32), "action": Column((), np.int64)}, n_step=1)
    replay = PrioritizedReplay(4096, schema, seed=0)
    writer = replay.writer(1)
    obs = np.zeros((1, 4), np.float32)
    writer.reset(obs)
    step = {
        "action": np.zeros(1, np.int64), "reward": np.zeros(1), "next_obs": obs,
        "terminated": np.zeros(1, bool), "truncated": np.zeros(1, bool),
    }  # fmt: skip
    for _ in range(5000):
        writer.add(**step)
    out = replay.empty_batch(1)
    keys, priorities = replay.sample(1, out=out).keys.copy(), np.ones(1)
    whole = {"obs": obs, "next_obs": obs, "action": step["action"], "reward": step["reward"],
             "terminated": step["terminated"]}  # fmt: skip

    def many(work: Callable[[], Any]) -> Callable[[], float]:
        def case() -> float:
            start = clock_ns()
            for _ in range(calls):
                work()
            return (clock_ns() - start) / calls

        return case

    cases = {
        "sample": many(lambda: replay.sample(1, 0.4, out)),
        "sample_new_batch": many(lambda: replay.sample(1)),
        "update_priorities": many(lambda: replay.update_priorities(keys, priorities)),
        "add": many(lambda: writer.add(**step)),
        "extend": many(lambda: replay.extend(**whole)),
    }
    times = interleaved(cases, rounds)
    return {name: percentiles(values, 1e3) for name, values in times.items()}


FIRST_SAMPLE = """
import time
start = time.perf_counter()
import numpy as np
from zapex import Column, PrioritizedReplay, Schema
schema = Schema({"obs": Column((4,), np.float32), "action": Column((), np.int64)}, n_step=1)
replay = PrioritizedReplay(4096, schema)
obs = np.zeros((8, 4), np.float32)
replay.extend(obs=obs, next_obs=obs, action=np.zeros(8, np.int64), reward=np.zeros(8),
              terminated=np.zeros(8, bool))
replay.sample(4)
print(time.perf_counter() - start)
import sys
assert "torch" not in sys.modules and "gymnasium" not in sys.modules
"""
IMPORT = "import time; s = time.perf_counter(); import zapex; print(time.perf_counter() - s)"


def start_up(rounds: int) -> dict[str, Any]:
    found = {}
    for name, program in (("import", IMPORT), ("first_sample", FIRST_SAMPLE)):
        seconds = [
            float(subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True,
                                 capture_output=True, text=True).stdout)
            for _ in range(rounds + 1)
        ]  # fmt: skip
        found[name] = percentiles(seconds[1:])
    return found


class Contender:
    """A replay in a process of its own, asked for rounds over its standard input."""

    def __init__(self, name: str, python: str, capacity: int) -> None:
        sweep_bytes = 2 * max(cache_bytes().values(), default=32 << 20)
        script = Path(__file__).parent / "peer_replays.py"
        self._process = subprocess.Popen(
            [python, str(script), name, str(capacity), str(sweep_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.status, _, self.detail = self._answer().partition(" ")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip() or "missing its process died"

    def work(self, batch: int, calls: int) -> np.ndarray:
        """(calls, 3) nanoseconds of sample, update and memcpy."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch} {calls}\n")
        self._process.stdin.flush()
        return np.array(json.loads(self._answer()), float)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def batches(pythons: dict[str, str], capacity: int, rounds: int) -> dict[str, Any]:
    """The batch's case by each contender, by its interpreter, in turns."""
    contenders = {name: Contender(name, python, capacity) for name, python in pythons.items()}
    results: dict[str, Any] = {
        name: {"missing": c.detail} for name, c in contenders.items() if c.status != "ready"
    }
    present = {name: c for name, c in contenders.items() if name not in results}
    times: dict[str, list[np.ndarray]] = {name: [] for name in present}
    try:
        for turn in range(rounds + 1):
            for name in random.Random(turn).sample(sorted(present), len(present)):
                measured = present[name].work(BATCH, 3)
                if turn:
                    times[name].append(measured)
    finally:
        for contender in contenders.values():
            contender.close()
    for name, contender in present.items():
        all_times = np.concatenate(times[name])
        results[name] = {
            "version": contender.detail,
            "sample": percentiles(all_times[:, 0], 1e6),
            "update": percentiles(all_times[:, 1], 1e6),
            "pair": percentiles(all_times[:, :2].sum(1), 1e6),
            "memcpy": percentiles(all_times[:, 2], 1e6),
        }
    return results


def show(results: dict[str, Any]) -> None:
    for name, case in results["batch"].items():
        if "missing" in case:
            print(f"batch   {name:10} missing: {case['missing']}")
            continue
        ratio = case["pair"]["p50"] / case["memcpy"]["p50"]
        print(
            f"batch   {name:10} sample {case['sample']['p50']:7.2f} ms   update "
            f"{case['update']['p50']:6.3f} ms   memcpy {case['memcpy']['p50']:6.2f} ms   "
            f"pair / memcpy {ratio:5.2f}"
        )
    inserts = results["insert"]["microseconds"]
    for name in ("add", "extend"):
        mine, memcpy = inserts[name]["p50"], inserts[f"{name}_memcpy"]["p50"]
        print(f"{name:7} {mine:8.0f} us   memcpy {memcpy:8.0f} us   ratio {mine / memcpy:5.2f}")
    for name in ("extend", "writer"):
        print(
            f"memory  {name}: {results['insert'][f'{name}_bytes_a_transition']} bytes a transition"
        )
    for name, case in results["tiny"].items():
        print(f"tiny    {name:18} {case['p50']:7.2f} us a call")
    for name, case in results["start_up"].items():
        print(f"start   {name:18} {case['p50']:7.3f} s")


def main() -> None:
    parser = arguments(__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--peers", action="store_true", help="add other libraries' replays")
    own = ROOT / ".peers/bin/python"
    parser.add_argument(
        "--peers-python",
        metavar="PYTHON",
        default=str(own) if own.exists() else sys.executable,
        help="the interpreter that has them (default: .peers/ if it is there)",
    )
    apart = ROOT / ".peers-reverb/bin/python"
    parser.add_argument(
        "--reverb-python",
        metavar="PYTHON",
        default=str(apart) if apart.exists() else None,
        help="the interpreter that has dm-reverb (default: .peers-reverb/ if it is there)",
    )
    parser.add_argument("--capacity", type=int, default=16_384, help="of the batch's case")
    options = parser.parse_args()
    if options.pin is not None:
        os.sched_setaffinity(0, {options.pin})
    rounds = 3 if options.quick else 30
    CacheSweeper().sweep()
    pythons = {"zapex": sys.executable}
    if options.peers:
        peers = dict.fromkeys(CONTENDERS, options.peers_python)
        peers["reverb"] = options.reverb_python or options.peers_python
        pythons = {**peers, **pythons}
    results = {
        "batch": batches(pythons, options.capacity, rounds),
        "insert": insert_cases(rounds if options.quick else 200),
        "tiny": tiny_cases(rounds),
        "start_up": start_up(2 if options.quick else 5),
    }
    show(results)
    if options.json:
        write_json(options.json, "replay", results, batch=BATCH, capacity=options.capacity)


if __name__ == "__main__":
    main()
