"""Should the inference role wait for more actors once one has asked? A table.

    python -m benchmarks.train.inference_wait [--seconds 2] [--actors 8] [--envs 16]

The role, its memory and its wakers are the real ones. Environments and forward passes are paced
(they sleep), so that the rule is measured and not this machine's cores: a step of an actor takes
`--step-ms`, give or take a fifth, and a pass `fixed + each x rows`.
"""

import argparse
import os
import random
import threading
import time
from typing import Any

import numpy as np

from zapex.host.metrics import RoleMetrics
from zapex.machine.exchange import Exchange, ExchangeShape
from zapex.machine.segment import Segment
from zapex.machine.waiting import Waiter, Waker, rest_until
from zapex.roles.inference import Inference
from zapex.roles.values import Pull

ITEM, ACTIONS = (4, 84, 84), 4
DEVICES = {  # fixed seconds of a pass, and seconds of each row
    "GPU-like: 1 ms + 2 us a row": (1e-3, 2e-6),
    "CPU-like: 0.5 ms + 140 us a row": (0.5e-3, 140e-6),
}
WAITS_US = (0, 200, 1000, 5000)


class Paced:
    """A policy that takes the time of a device."""

    def __init__(self, fixed_s: float, each_s: float) -> None:
        self._fixed_s, self._each_s = fixed_s, each_s

    def load_flat(self, buffer: Any) -> None: ...

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        time.sleep(self._fixed_s + len(obs) * self._each_s)
        return np.zeros((len(obs), ACTIONS), np.float32)


class Version:
    version = 1

    def newer_than(self, version: int, out: np.ndarray) -> int:
        return int(version < 1)


def measure(
    actors: int, envs: int, step_s: float, device: str, wait_us: int, seconds: float
) -> tuple[float, float]:
    """Steps a second of all actors, and actors a pass."""
    shape = ExchangeShape(actors, envs, ITEM, "|u1", ACTIONS)
    with Segment.create("inference-wait", shape.nbytes) as segment:
        exchange = Exchange(segment.buffer, shape, create=True)
        words = np.zeros(16 * (actors + 1), np.int64)
        fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(actors + 1)]
        wakers = [Waker(words, 16 * i, fd) for i, fd in enumerate(fds)]
        memory = np.zeros(RoleMetrics.required_bytes(), np.uint8)
        metrics = RoleMetrics(memory, "inference", create=True)
        policy: Any = Paced(*DEVICES[device])
        role = Inference(
            exchange.answerer([waker.wake for waker in wakers[:-1]]), policy,
            Pull(policy, Version(), metrics, period=1 << 40, parameter_bytes=8), metrics,
            streams=envs,
        )  # fmt: skip
        until_s, steps = time.monotonic() + seconds, [0] * actors

        def play(i: int) -> None:
            rng, asker = random.Random(i), exchange.asker(i, wakers[-1].wake)
            waiter, obs = Waiter(words, 16 * i, fds[i]), np.zeros((envs, *ITEM), np.uint8)
            while time.monotonic() < until_s:
                time.sleep(step_s * rng.uniform(0.8, 1.2))
                asker.ask(obs)
                waiter.wait(asker.answered, 5.0)
                asker.take()
                steps[i] += envs

        threads = [threading.Thread(target=play, args=(i,)) for i in range(actors)]
        for thread in threads:
            thread.start()
        waiter = Waiter(words, 16 * actors, fds[-1])
        find = exchange.answerer([]).find  # it only looks
        while any(thread.is_alive() for thread in threads):
            if wait_us and len(find()):  # the rule that the role does not have
                rest_until(
                    lambda: len(find()) == actors,
                    wait_us / 1e6,
                    lambda left_s: time.sleep(min(100e-6, left_s)),
                )
            if not role.do_work():
                waiter.wait(role.ready, 0.01)
        for fd in fds:
            os.close(fd)
        counts = metrics.snapshot()
        return sum(steps) / seconds, counts["answers"] / counts["passes"]


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--actors", type=int, default=8)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=5.0)
    options = parser.parse_args()
    for device in DEVICES:
        print(f"{device}; {options.actors} actors x {options.envs}, {options.step_ms:g} ms a step")
        for wait_us in WAITS_US:
            rate, batch = measure(
                options.actors, options.envs, options.step_ms / 1e3, device, wait_us,
                options.seconds,
            )  # fmt: skip
            print(f"  wait {wait_us:5} us: {rate:9,.0f} steps/s, {batch:.1f} actors a pass")


if __name__ == "__main__":
    main()
