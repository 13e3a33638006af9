"""The learner's whole step against the sum of its kernels' own times.

    python -m benchmarks.train.bench_learner [--quick] [--rounds N] [--precision P] [--json FILE]

Everything runs on one thread and is timed by that thread's CPU clock; figures are medians over
interleaved rounds. A step is `DQN.learn` with centred RMSProp on 84x84x4 observations that lie in
channels_last memory, as the replay's gather writes them.

    kernels    each layer forward (three times: s, and s' in both networks) and backward, the bytes
               turned into floats, and the optimiser; each alone, on warm caches, in the step's own
               dtype and memory layout
    ratio      the step over the sum of its kernels
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.support.harness import arguments, interleaved, percentiles, write_json
from zapex.agent import fused, networks
from zapex.agent.learning import DQN

SHAPE, ACTIONS = (4, 84, 84), 4
BATCHES = [32, 64, 128, 256, 512]
clock_ns = time.thread_time_ns  # other processes' turns on the core are not ours


def timed(work: Callable[[], object], repeat: int = 1) -> Callable[[], float]:
    """A case for `interleaved`: one run to warm the caches, then the mean of `repeat`."""

    def case() -> float:
        work()
        start = clock_ns()
        for _ in range(repeat):
            work()
        return (clock_ns() - start) / repeat

    return case


def frames(count: int, layout: str = "channels_last") -> np.ndarray:
    rng = np.random.default_rng(count)
    if layout == "channels_first":
        return rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    pixels = rng.integers(0, 256, (count, *SHAPE[1:], SHAPE[0]), dtype=np.uint8)
    return pixels.transpose(0, 3, 1, 2)


def batch_of(size: int, layout: str = "channels_last") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(size)
    return {
        "obs": frames(size, layout),
        "next_obs": frames(size, layout),
        "action": rng.integers(ACTIONS, size=size),
        "reward": rng.normal(size=size).astype(np.float32),
        "discount": np.full(size, 0.97, np.float32),
        "weights": np.ones(size, np.float32),
    }


def kernels(learner: DQN, size: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """{name: (how often in a step, the call)}, over tensors as the step has them."""
    network = learner.online
    batch = frames(size)
    x = network.to_input(batch)
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "bytes to floats": (2, lambda: network.to_input(batch)),
        "optimiser": (1, partial(learner.optimiser.step, torch.ones(()), torch.tensor(True))),
    }
    for name, stride in (("conv1", 4), ("conv2", 2), ("conv3", 1), ("streams", 0)):
        weight = network.leaves[f"{name}.weight"].detach()
        bias = network.leaves[f"{name}.bias"].detach()
        if not stride:
            x = x.permute(0, 2, 3, 1).flatten(1)
        with torch.no_grad():
            y = fused.layer(x, weight, bias, stride)
        cases[f"{name} forward"] = (3, _forward(x, weight, bias, stride))
        cases[f"{name} backward"] = (1, _backward(x, weight, torch.rand_like(y), stride))
        x = y
    return cases


def _forward(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Callable[[], object]:
    def work() -> object:
        with torch.no_grad():
            return fused.layer(x, weight, bias, stride)

    return work


def _backward(x: Tensor, weight: Tensor, dy: Tensor, stride: int) -> Callable[[], object]:
    if not stride:
        return lambda: (fused.product(dy, weight.t()), fused.product(dy.t(), x.t()))
    mask = [x.shape[1] != SHAPE[0], True, True]  # nobody asks for the gradient of the images
    steps, out = [stride, stride], [weight.shape[0]]
    return lambda: torch.ops.aten.convolution_backward(
        dy, x, weight, out, steps, [0, 0], [1, 1], False, [0, 0], 1, mask
    )


def measure_step(size: int, precision: str, rounds: int) -> dict[str, Any]:
    """One batch size: the step, its kernels, their sum and the ratio."""
    learner = DQN(networks.build(SHAPE, np.uint8, ACTIONS, precision=precision, device="cpu"))
    batch = batch_of(size)
    parts = kernels(learner, size)
    cases = {name: timed(work) for name, (_, work) in parts.items()}
    cases["step"] = timed(lambda: learner.learn(batch))
    times = interleaved(cases, rounds)
    steps = times.pop("step")
    each = {name: float(np.median(t)) / 1e6 for name, t in times.items()}
    shares = {name: round(parts[name][0] * each[name], 3) for name in each}
    total, step = sum(shares.values()), float(np.median(steps)) / 1e6
    return {
        "precision": str(learner.online.dtype).removeprefix("torch."),
        "step_ms": percentiles(steps, 1e6),
        "samples_per_s": round(size / step * 1e3),
        "kernels_ms": {**shares, "sum": round(total, 3)},
        "ratio": round(step / total, 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """A learner's step beside the sum of its kernels."""
    parser = arguments(main.__doc__ or "", pins=True)
    parser.add_argument("--precision", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15, help="medians are over so many")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rounds = 2 if options.quick else options.rounds
    step = {}
    for size in [32] if options.quick else BATCHES:
        step[str(size)] = found = measure_step(size, options.precision, rounds)
        print(
            f"batch {size:5}: step {found['step_ms']['p50']:8.2f} ms, "
            f"kernels {found['kernels_ms']['sum']:8.2f} ms, ratio {found['ratio']:.3f}, "
            f"{found['samples_per_s']:,} samples/s in {found['precision']}"
        )
    for name, share in found["kernels_ms"].items():
        print(f"    {name:18} {share:8.2f} ms of a batch of {size}")
    write_json(options, "learner", {"step": step}, clock="thread CPU time", rounds=rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
