"""The learner's whole step against the sum of its kernels' own times, and the actor's forward pass.

    python -m benchmarks.train.bench_learner [--quick] [--rounds N] [--precision P] [--json FILE]

Everything runs on one thread and is timed by that thread's CPU clock; figures are medians over
interleaved rounds. A step is `DQN.learn` with centred RMSProp on 84x84x4 observations that lie in
channels_last memory, as the replay's gather writes them.

    kernels    each layer forward (three times: s, and s' in both networks) and backward, the bytes
               turned into floats, and the optimiser; each alone, on warm caches, in the step's own
               dtype and memory layout
    ratio      the step over the sum of its kernels
    plain      the same step as it is usually written: torch.nn modules, the memory layout of the
               environment, torch's own optimiser; in float32 and under bfloat16 autocast.
               It comes first, because making a DQN tells the process to keep freed memory
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.support.harness import arguments, interleaved, percentiles, write_json
from zapex.agent import fused, networks
from zapex.agent.learning import DQN
from zapex.agent.policy import Policy

SHAPE, ACTIONS = (4, 84, 84), 4
BATCHES = [32, 64, 128, 256, 512]
HEADLINE = 512
HIDDEN = [128, 256, 512]
STREAMS = [8, 16, 32, 64]
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


class PlainNetwork(nn.Module):
    """The dueling network as it is usually written."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.value = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 1))
        self.advantage = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, ACTIONS))

    def forward(self, obs: Tensor) -> Tensor:
        x = self.trunk(obs.float() / 255.0)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(1, keepdim=True)


def plain_step(size: int, autocast: bool) -> Callable[[], object]:
    """A double-DQN step out of torch's own parts."""
    online, target = PlainNetwork(), PlainNetwork()
    target.load_state_dict(online.state_dict())
    optimiser = torch.optim.RMSprop(online.parameters(), lr=1e-4, alpha=0.95, centered=True)
    batch = {k: torch.from_numpy(v) for k, v in batch_of(size, "channels_first").items()}

    def work() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            with torch.no_grad():
                best = online(batch["next_obs"]).argmax(1, keepdim=True)
                bootstrap = target(batch["next_obs"]).gather(1, best).squeeze(1)
                goal = batch["reward"] + batch["discount"] * bootstrap
            q = online(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
            losses = F.smooth_l1_loss(q.float(), goal.float(), reduction="none")
            loss = (batch["weights"] * losses).mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 40.0)
        optimiser.step()

    return work


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


def measure_plain(size: int, rounds: int) -> dict[str, Any]:
    """The usual way, in a process where no DQN was made yet."""
    cases = {
        "float32": timed(plain_step(size, autocast=False)),
        "bfloat16 autocast": timed(plain_step(size, autocast=True)),
    }
    return {name: percentiles(t, 1e6) for name, t in interleaved(cases, rounds).items()}


def measure_widths(sizes: list[int], rounds: int) -> dict[str, dict[str, int]]:
    """{hidden: {batch: samples a second}}."""
    found: dict[str, dict[str, int]] = {}
    for hidden in HIDDEN:
        cases = {}
        for size in sizes:
            learner = DQN(networks.build(SHAPE, np.uint8, ACTIONS, hidden, device="cpu"))
            cases[str(size)] = timed(partial(learner.learn, batch_of(size)))
        times = interleaved(cases, rounds)
        found[str(hidden)] = {s: round(int(s) / np.median(t) * 1e9) for s, t in times.items()}
    return found


def measure_acting(rounds: int) -> dict[str, dict[str, Any]]:
    """{streams: {precision: milliseconds of Policy.q_values}}, frames as environments give them."""
    found = {}
    for streams in STREAMS:
        obs = frames(streams, "channels_first")
        cases = {}
        for precision in ("float32", "bfloat16"):
            network = networks.build(SHAPE, np.uint8, ACTIONS, precision=precision, device="cpu")
            cases[precision] = timed(partial(Policy(network).q_values, obs), repeat=20)
        times = interleaved(cases, rounds)
        found[str(streams)] = {name: percentiles(t, 1e6) for name, t in times.items()}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, pins=True)
    parser.add_argument("--precision", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15, help="medians are over so many")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rounds = 3 if args.quick else args.rounds
    sizes = [32] if args.quick else BATCHES
    headline = sizes[0] if args.quick else HEADLINE
    results: dict[str, Any] = {
        "plain": {str(headline): measure_plain(headline, rounds)},
        "step": {},
    }
    for name, found in results["plain"][str(headline)].items():
        print(f"plain {name}: {found['p50']:.1f} ms a batch of {headline}")
    for size in sizes:
        found = measure_step(size, args.precision, rounds)
        results["step"][str(size)] = found
        print(
            f"batch {size:5}: step {found['step_ms']['p50']:8.2f} ms, "
            f"kernels {found['kernels_ms']['sum']:8.2f} ms, ratio {found['ratio']:.3f}, "
            f"{found['samples_per_s']:,} samples/s in {found['precision']}"
        )
    for name, share in results["step"][str(headline)]["kernels_ms"].items():
        print(f"    {name:18} {share:8.2f} ms of a batch of {headline}")
    results["samples_per_s_by_hidden"] = measure_widths(sizes, rounds)
    for hidden, rates in results["samples_per_s_by_hidden"].items():
        print(f"hidden {hidden}: samples/s by batch {rates}")
    results["acting_ms"] = measure_acting(rounds)
    for streams, found in results["acting_ms"].items():
        each = ", ".join(f"{name} {p['p50']:.3f} ms" for name, p in found.items())
        print(f"acting, {streams} streams: {each}")
    write_json(args, "learner", results, clock="thread CPU time", rounds=rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
