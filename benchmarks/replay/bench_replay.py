"""The replay on Atari-sized transitions, against memcpy of the same bytes and against peers.

    python -m benchmarks.replay.bench_replay [--quick] [--peers] [--json FILE]

batch     sample(512) and update_priorities for n-step returns of 1, 3 and 5; caches swept before
          each. What everybody does, and the roofs: benchmarks/peers/replays.py
sequences sample_sequences(64, 80), against memcpy of the same bytes and TorchRL's slices
memory    bytes a transition: what a process holds more when its replay has twice the capacity
add       writer.add of 64 streams, so that each call completes 64 transitions; memcpy: the bytes of
          a chunk of 64 transitions, into touched memory
extend    64 successive rows of one stream; memcpy: the input's bytes, into touched memory. The
          inputs of both rotate over more memory than the caches have, as the roofs' sources do

sb3       steps a second of Stable-Baselines3's DQN with its own buffer and with zapex's
          (benchmarks/peers/sb3_steps.py); only with --peers

All memory of the replay has been written before (touched) when the clock runs.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.peers import sb3_steps
from benchmarks.peers.replays import CONTENDERS, N_STEPS, OURS, SEQUENCES, SIDE, STACK
from benchmarks.support.contenders import Contenders, add_peer_arguments
from benchmarks.support.harness import (
    arguments,
    clock_ns,
    interleaved,
    percentiles,
    write_json,
)
from zapex import Column, PrioritizedReplay, Schema

BATCH, ROWS = 512, 64
SEQUENCE_BATCH = 64
_SB3_STEPS = 400
FRAMES = 4096
_ROTATING = 64  # inputs of 3.6 MB (extend) and 1.8 (add): more than any cache of ours
REUSES = ("zapex", "roof")
"""Contenders that fill a given batch; the others make new arrays."""


def timed(work: Callable[[], Any]) -> float:
    start = clock_ns()
    work()
    return clock_ns() - start


def atari(n_step: int) -> Schema:
    columns = {"obs": Column((SIDE, SIDE), np.uint8, STACK), "action": Column((), np.int64)}
    return Schema(columns, n_step=n_step)


def insert_cases(rounds: int, calls: int) -> dict[str, Any]:
    """add and extend against memcpy, after `calls` of each: 1,280 write every slot once."""
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
        next_obs = steps[clock % _ROTATING]
        clock += 1
        return timed(lambda: writer.add(next_obs=next_obs, **step))

    whole = PrioritizedReplay(16_384, atari(1), seed=0)
    rows = {"action": step["action"], "reward": step["reward"], "terminated": step["terminated"]}
    inputs = [(stacks(61 * i, ROWS), stacks(61 * i + 1, ROWS)) for i in range(_ROTATING)]
    steps = [frames[(i + starts) % FRAMES] for i in range(1, _ROTATING + 1)]
    extends = 0

    def extend() -> float:
        nonlocal extends
        obs, next_obs = inputs[extends % _ROTATING]
        extends += 1
        return timed(lambda: whole.extend(obs=obs, next_obs=next_obs, **rows))

    chunk_bytes = replay.core.layout.chunk_layout.body_bytes * ROWS // replay.core.layout.chunk
    ring = np.ones((_ROTATING, 2 * ROWS * STACK * SIDE * SIDE), np.uint8)
    turn = 0

    def memcpy(nbytes: int) -> Callable[[], float]:
        def work() -> float:
            nonlocal turn
            turn += 1
            source, target = ring[turn % _ROTATING], ring[(turn + _ROTATING // 2) % _ROTATING]
            return timed(lambda: np.copyto(target[:nbytes], source[:nbytes]))

        return work

    for _ in range(calls):
        add()
        extend()
    cases = {
        "add": add, "add_memcpy": memcpy(chunk_bytes),
        "extend": extend, "extend_memcpy": memcpy(ring.shape[1]),
    }  # fmt: skip
    times = interleaved(cases, rounds)
    found = {name: percentiles(values, 1e3) for name, values in times.items()}
    used = whole.core.ledger.counts["live"] * whole.core.store.layout.body_bytes
    facts = {"extend_bytes_a_transition": round(used / len(whole)),
             "writer_bytes_a_transition": round(atari_chunk_bytes(3) / 64)}  # fmt: skip
    return {"microseconds": found, **facts}


def atari_chunk_bytes(n_step: int) -> int:
    return PrioritizedReplay(1024, atari(n_step), chunk=64).core.layout.chunk_layout.body_bytes


def batches(
    pythons: dict[str, str], n_step: int, capacity: int, rounds: int, quick: bool
) -> dict[str, Any]:
    """The batch's case by each contender, by its interpreter, in turns."""
    named = {f"{name}@{n_step}": python for name, python in pythons.items()}
    with Contenders("benchmarks.peers.replays", named, capacity, quick) as contenders:
        results = contenders.missing
        for name, times in contenders.in_turns(rounds, BATCH, 3).items():
            results[name] = {
                "version": contenders.versions[name],
                "sample": percentiles(times[:, 0], 1e6),
                "update": percentiles(times[:, 1], 1e6),
                "pair": percentiles(times.sum(1), 1e6),
            }
    return {name.partition("@")[0]: result for name, result in results.items()}


def sequences(pythons: dict[str, str], capacity: int, rounds: int, quick: bool) -> dict[str, Any]:
    """Milliseconds of a batch of sequences by each contender, in turns."""
    named = {f"{name}@1": python for name, python in pythons.items()}
    with Contenders("benchmarks.peers.replays", named, capacity, quick) as contenders:
        results = contenders.missing
        for name, times in contenders.in_turns(rounds, SEQUENCE_BATCH, 3).items():
            sample = percentiles(times[:, 0], 1e6)
            results[name] = {"version": contenders.versions[name], "sample": sample}
    return {name.partition("@")[0]: result for name, result in results.items()}


def sb3(quick: bool) -> dict[str, Any]:
    """Steps a second of each DQN, in turns, under this interpreter."""
    pythons = dict.fromkeys(sb3_steps.CONTENDERS, sys.executable)
    capacity = 1_000 if quick else 20_000
    with Contenders("benchmarks.peers.sb3_steps", pythons, capacity, quick) as contenders:
        results = contenders.missing
        rounds, steps = (2, _SB3_STEPS // 4) if quick else (5, _SB3_STEPS)
        for name, times in contenders.in_turns(rounds, steps).items():
            rate = percentiles(1e9 / times[:, 0])
            results[name] = {"version": contenders.versions[name], "steps_per_s": rate}
    return results


def memory(pythons: dict[str, str], capacity: int) -> dict[str, float]:
    """Bytes a transition, n = 1, of each contender that keeps transitions."""
    held: dict[str, list[int]] = {}
    for size in (capacity, 2 * capacity):
        for name, python in pythons.items():
            one = {f"{name}@1": python}
            with Contenders("benchmarks.peers.replays", one, size, quick=True) as contenders:
                for resident in contenders.resident_bytes.values():
                    held.setdefault(name, []).append(resident)
    return {name: (two - one) / capacity for name, (one, two) in held.items()}


def show(results: dict[str, Any]) -> None:
    for n_step, contenders in results["batch"].items():
        print(f"batch, n = {n_step}: ms")
        for name, case in contenders.items():
            if "missing" in case:
                print(f"  {name:22} missing: {case['missing']}")
                continue
            roof = contenders["roof, new" if name not in REUSES else "roof"]["pair"]["p50"]
            print(
                f"  {name:22} sample {case['sample']['p50']:7.2f}   update "
                f"{case['update']['p50']:6.3f}   pair {case['pair']['p50']:7.2f}, "
                f"{case['pair']['p50'] / roof:5.2f} x the roof"
            )
    roof = results["sequences"]["roof, sequences"]["sample"]["p50"]
    for name, case in results["sequences"].items():
        took = case["sample"]["p50"] if "sample" in case else 0.0
        shown = f"{took:7.2f} ms, {took / roof:5.2f} x the roof"
        print(f"sequences  {name:24} {shown if took else 'missing: ' + case['missing']}")
    for name, case in results.get("sb3", {}).items():
        rate = case.get("steps_per_s")
        shown = f"{rate['p50']:7.1f} steps/s" if rate else f"missing: {case['missing']}"
        print(f"sb3  {name:24} {shown}")
    for name, found in results["memory"].items():
        print(f"memory  {name:22} {found:9,.0f} bytes a transition")
    inserts = results["insert"]["microseconds"]
    for name in ("add", "extend"):
        mine, memcpy = inserts[name]["p50"], inserts[f"{name}_memcpy"]["p50"]
        print(f"{name:7} {mine:8.0f} us   memcpy {memcpy:8.0f} us   ratio {mine / memcpy:5.2f}")
    for name in ("extend", "writer"):
        print(
            f"memory  {name}: {results['insert'][f'{name}_bytes_a_transition']} bytes a transition"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, pins=True)
    add_peer_arguments(parser, reverb=".peers-reverb")
    parser.add_argument("--capacity", type=int, default=16_384, help="of the batch's case")
    options = parser.parse_args(argv)
    rounds = 2 if options.quick else 30
    pythons = dict.fromkeys(OURS, sys.executable)
    if options.peers:
        peers = dict.fromkeys(CONTENDERS, options.peers_python) | pythons
        pythons = {**peers, "reverb": options.reverb_python}
    capacity = 2048 if options.quick else options.capacity
    keeping = {n: p for n, p in pythons.items() if not n.startswith(("roof", "zapex,"))}
    if options.quick:
        keeping = {"zapex": sys.executable}
    playing = {name: sys.executable for name in SEQUENCES if not name.startswith("torchrl")}
    if options.peers:
        playing = dict.fromkeys(SEQUENCES, options.peers_python) | playing
    results = {
        "batch": {
            str(n): batches(pythons, n, capacity, rounds, options.quick)
            for n in (N_STEPS[:1] if options.quick else N_STEPS)
        },
        "sequences": sequences(playing, capacity, rounds, options.quick),
        **({"sb3": sb3(options.quick)} if options.peers else {}),
        "memory": memory(keeping, capacity),
        "insert": insert_cases(rounds, 100) if options.quick else insert_cases(200, 1280),
    }
    show(results)
    write_json(options, "replay", results, rounds=rounds, batch=BATCH, capacity=capacity)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
