"""Shares of time: an actor's host and a learner at work, and what they spend on communication.

The clients and the replay role are the real ones; the learner's step is one core's arithmetic of a
given length, the actor's a rest, so that both cores are not fully busy. A learner with a fast step
asks for three batches ahead and has memory for two, as `zapex learner` has with `--prefetch 3`: one
is then unpacked while it learns from the other. Communication is

    learner   assembling batches and sending priorities (gather, update), publishing once a second
    actor     its host's relay: handing chunks over until they are acknowledged, new parameters
    replay    all that the replay does (insert, sample, update): it has no other work
"""

import time
from typing import Any

import numpy as np
import psutil

from benchmarks.transport.rig import NetworkClient
from benchmarks.transport.server import PREFETCH, Setting
from zapex.chunks.batch import Batch
from zapex.host.metrics import RoleMetrics
from zapex.net.keys import Security

_TRANSITIONS_PER_S = 500
_WORK = ("insert", "sample", "update")
_DEADLINE_S = 60.0
_FAST_S, _AHEAD = 0.05, 3


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._phase, self._since = "other", time.perf_counter()

    def enter(self, phase: str) -> None:
        """From now on it is another phase."""
        now = time.perf_counter()
        self.spent[self._phase] = self.spent.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def share(self, *phases: str) -> float:
        """Of all time so far."""
        self.enter(self._phase)
        return sum(self.spent.get(phase, 0.0) for phase in phases) / sum(self.spent.values())


def learner(
    setting: Setting, url: str, security: dict[str, Security], step_s: float, seconds: float,
    words: Any, learned: Any,
) -> dict[str, float]:  # fmt: skip
    """Batches at a pace. learned: a shared word, 1 while the time is taken, 2 afterwards."""
    client = NetworkClient(setting, url, security, 0)
    while client.sender.counts["chunks"] * setting.chunk < setting.capacity:
        client.push_on()
    client.push()
    square = np.ones((128, 128), np.float32)
    batch, spare, prefetch = client.batch, None, PREFETCH
    if step_s < _FAST_S:
        spare, prefetch = Batch.empty(batch.layout), _AHEAD
    for _ in range(prefetch):
        client.samples.request()
    client.poll()
    client.samples.request()
    replay = RoleMetrics(words, "replay", create=False)
    steps_s: list[float] = []
    clock, before, start = Clock(), replay.snapshot(), time.perf_counter()
    psutil.cpu_percent()
    learned[0], published = 1, start
    while time.perf_counter() < start + seconds:
        sampled = None
        while sampled is None:
            clock.enter("wait")
            assert client.learner.wait(client.samples.ready, _DEADLINE_S)
            clock.enter("gather")
            sampled = client.samples.poll(batch, spare)
        clock.enter("learn")
        began = time.perf_counter()
        while time.perf_counter() < began + step_s:
            square @ square
        steps_s.append(time.perf_counter() - began)
        clock.enter("update")
        client.samples.update(batch.keys.copy(), client.priorities)
        client.samples.request()
        if spare is not None:
            batch, spare = spare, batch
        if time.perf_counter() > published + 1:
            clock.enter("publish")
            client.begin_publish()
            published = time.perf_counter()
    clock.enter("other")
    elapsed, after = time.perf_counter() - start, replay.snapshot()
    learned[0] = 2
    phases = {name: after[f"phase/{name}"] - before[f"phase/{name}"] for name in _WORK}
    scale = elapsed * _units(before, after, elapsed)
    return {
        "load": psutil.cpu_percent() / 100,
        "batches": len(steps_s),
        "step_s": min(steps_s),
        "learner_wait": clock.share("wait"),
        "learner_communication": clock.share("gather", "update", "publish"),
        "replay_communication": sum(phases.values()) / scale,
        **{f"replay_{name}": value / scale for name, value in phases.items()},
    }


def _units(before: dict[str, float], after: dict[str, float], elapsed: float) -> float:
    """Of a phase's counter in a second: all phases together are all the time."""
    total = sum(after[name] - before[name] for name in after if name.startswith("phase/"))
    return total / elapsed


def actor(
    setting: Setting, url: str, security: dict[str, Security], seconds: float, learned: Any
) -> dict[str, float]:
    """A relay whose actors play at a pace, while the learner's time is taken."""
    deadline = time.monotonic() + _DEADLINE_S
    while learned[0] != 1:
        time.sleep(0.01)
        assert time.monotonic() < deadline
    client = NetworkClient(setting, url, security, 1)
    for _ in range(2):
        client.push()
    client.pull_if_there()
    rest_s = sum(setting.rows) / _TRANSITIONS_PER_S
    clock = Clock()
    while learned[0] == 1:
        clock.enter("push")
        client.push()
        clock.enter("pull")
        client.pull_if_there()
        clock.enter("play")
        time.sleep(rest_s)
    return {"actor_communication": clock.share("push", "pull")}
