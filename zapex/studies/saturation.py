"""How actors' throughput grows with environments and cores, and where it stops growing.

The model of X, steps a second of `a` actors with `e` environments each on `c` hardware threads:

    x(e) = e / (t0 + e t1)                   one actor with a core to itself
    n = min(a, c)                            actors that run at the same time
    k = min(n, p) + s max(0, n - p)          in cores: p there are, a second thread adds s of one
    w = min(a / n, 1 / (1 - i))              more actors than cores fill what these leave idle
    X(a, e, c) = w k x(e) / (1 + m (k - 1))  cores disturb each other: memory, caches, clock rate

t0: seconds of a step that do not depend on e (calls, weights read). t1: seconds of one environment.
i: idle share of the cores where each has one of several actors, which wait for inference elsewhere.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

GROWTH = 0.10
"""Growth has stopped where twice the environments, or one core more, gain less than this share."""
MOST_ENVS = 64
_MOST_IDLE = 0.9


@dataclass(frozen=True)
class Point:
    """One measurement. cores: hardware threads. busy: share of their time in which they worked."""

    actors: int
    envs: int
    cores: int
    steps_per_s: float
    busy: float = 1.0


@dataclass(frozen=True)
class Model:
    """The fitted numbers, named as above: t0, t1, m, s, p, i."""

    fixed_s: float
    each_s: float
    contention: float
    sibling: float
    physical: int
    idle: float = 0.0

    def actor(self, envs: int) -> float:
        """x(e), steps a second."""
        return envs / (self.fixed_s + envs * self.each_s)

    def rate(self, actors: int, envs: int, cores: int) -> float:
        """X(a, e, c), steps a second."""
        n = min(actors, cores)
        k = min(n, self.physical) + self.sibling * max(0, n - self.physical)
        filled = min(actors / n, 1 / (1 - self.idle))
        return filled * k * self.actor(envs) / (1 + self.contention * (k - 1))

    def enough_envs(self) -> int:
        """The smallest power of two of environments of which twice as many gain too little."""
        envs = 1
        while envs < MOST_ENVS and self.actor(2 * envs) / self.actor(envs) >= 1 + GROWTH:
            envs *= 2
        return envs

    def enough_cores(self, envs: int, cores: int) -> int:
        """How many of `cores` hardware threads, one actor each, gain something."""
        least = GROWTH * self.rate(1, envs, 1)
        for n in range(1, cores):
            if self.rate(n + 1, envs, n + 1) - self.rate(n, envs, n) < least:
                return n
        return cores

    def cores_for(self, steps_per_s: float, envs: int, most: int = 4096) -> int | None:
        """The fewest hardware threads that make so many steps a second; None: no number does."""
        wanted = (n for n in range(1, most + 1) if self.rate(n, envs, n) >= steps_per_s)
        return next(wanted, None)


def fit(points: Sequence[Point], physical: int) -> Model:
    """Fit the model: relative errors count. At least one point must be of one actor.

    physical: cores; of more hardware threads than that, some are second threads of a core.
    """
    alone = [p for p in points if p.actors == 1]
    fixed_s, each_s = _line([(p.envs, p.envs / p.steps_per_s) for p in alone])
    model = Model(fixed_s, each_s, 0.0, 1.0, physical)
    many = [p for p in points if 1 < min(p.actors, p.cores) <= physical]
    weights = sum((min(p.actors, p.cores) - 1) ** 2 for p in many)
    if weights:
        lost = [(min(p.actors, p.cores), _linear(model, p) / p.steps_per_s - 1) for p in many]
        contention = max(0.0, sum((n - 1) * share for n, share in lost) / weights)
        model = replace(model, contention=contention)
    beyond = [p for p in points if min(p.actors, p.cores) > physical]
    if beyond:
        sibling = median(_sibling(model, p) for p in beyond)
        model = replace(model, sibling=min(1.0, max(0.0, sibling)))
    idle = [1 - p.busy for p in points if 1 < p.actors <= p.cores]
    return replace(model, idle=min(_MOST_IDLE, max(0.0, median(idle)))) if idle else model


def error(model: Model, point: Point) -> float:
    """The prediction's error, as a share of what was measured."""
    return model.rate(point.actors, point.envs, point.cores) / point.steps_per_s - 1


def _linear(model: Model, point: Point) -> float:
    return min(point.actors, point.cores) * model.actor(point.envs)


def _sibling(model: Model, point: Point) -> float:
    """What a second thread adds, from one point: X = k x / (1 + m (k - 1)), solved for k."""
    rate, one, m = point.steps_per_s, model.actor(point.envs), model.contention
    k = rate * (1 - m) / max(one - m * rate, 1e-9)
    return (k - model.physical) / (min(point.actors, point.cores) - model.physical)


def _line(pairs: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(t0, t1) >= 0 of seconds = t0 + envs t1, by least squares of the relative errors."""
    if len({envs for envs, _ in pairs}) < 2:
        return 0.0, median(seconds / envs for envs, seconds in pairs)
    a = [(1 / seconds, envs / seconds) for envs, seconds in pairs]
    uu, uv, vv = (sum(x[i] * x[j] for x in a) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = (sum(x[i] for x in a) for i in (0, 1))
    whole = uu * vv - uv * uv
    fixed, each = (u * vv - v * uv) / whole, (v * uu - u * uv) / whole
    if fixed < 0:
        return 0.0, v / vv
    return (u / uu, 0.0) if each < 0 else (fixed, each)


def powers(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    found = list(itertools.takewhile(lambda n: n < most, (2**i for i in range(32))))
    return [*found, most]
