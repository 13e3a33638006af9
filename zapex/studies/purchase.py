"""What to buy for a wanted rate: actor hosts, shards, links."""

import math
from dataclasses import dataclass, replace
from typing import Any

from zapex.errors import ConfigError
from zapex.studies import bounds
from zapex.studies.cluster import Cluster, Link
from zapex.studies.outcome import Outcome
from zapex.studies.simulation import Simulation

GBIT = (1.0, 2.5, 10.0, 25.0, 40.0, 100.0, 200.0, 400.0)
SHARDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MOST_LOAD = 0.8
"""Of what is bought: above it, queues grow."""
_ENOUGH = 0.98  # of the wanted rate
_TRIES = 12
_MOST_PREFETCH = 64
_LINKS = {
    "host": (bounds.HOST_UP, bounds.HOST_DOWN),
    "site": (bounds.SITE_UP, bounds.SITE_DOWN),
    "replay": (bounds.REPLAY_IN, bounds.REPLAY_OUT),
    "learner": (bounds.LEARNER_IN, bounds.LEARNER_OUT),
}


@dataclass(frozen=True)
class Purchase:
    """What reaches the wanted rates, and what it does in the model."""

    cluster: Cluster
    outcome: Outcome

    def lines(self, before: Cluster) -> list[str]:
        """In words. before: what the run's settings say."""
        c, links = self.cluster, []
        for name, what in (
            ("host", "each actor host"), ("site", "all actor hosts together"),
            ("replay", "each replay host"), ("learner", "the learner"),
        ):  # fmt: skip
            gbit = getattr(c, name).gbit
            if gbit:
                links.append(f"{what} {gbit:g} Gbit/s")
        text = [
            f"buy: {c.hosts:,} actor hosts of {c.per_host} actors, {c.shards} replay shard(s)",
            f"links, at least: {', '.join(links)}",
            f"it then does {self.outcome.steps_per_s:,.0f} steps/s and "
            f"{self.outcome.batches_per_s:,.3g} batches/s; "
            f"what is busiest there: {self._busiest()}",
        ]
        if c.prefetch != before.prefetch:
            text.append(f"set: --prefetch {c.prefetch}, or the learner waits for round trips")
        if c.publish_s != before.publish_s:
            text.append(
                f"set: --publish-period-s {c.publish_s:g}, or parameters for {c.hosts:,} hosts "
                "are too much for the first shard"
            )
        return text

    def _busiest(self) -> str:
        loads = self.outcome.loads
        shared = {k: v for k, v in loads.items() if k not in (bounds.ACTORS, bounds.LEARNER)}
        name = max(shared, key=lambda kind: shared[kind])
        return f"{name}, {shared[name]:.0%}"


def advise(c: Cluster, steps_per_s: float, batches_per_s: float) -> Purchase:
    """The fewest hosts and shards and the slowest links of `GBIT` that reach both rates.

    0 steps: any rate. 0 batches: as many as the learner makes by itself. Nothing but actors and
    learner is then busier than `MOST_LOAD` in the closed form, and the model reaches the rates.
    Raises ConfigError if the learner cannot, or if no purchase would do.
    """
    own_s = c.step_s
    if c.reuse:
        steps_per_s = max(steps_per_s, batches_per_s * c.batch / c.reuse)
        batches_per_s = max(batches_per_s, steps_per_s * c.reuse / c.batch)
    elif not batches_per_s:
        batches_per_s = 1 / (c.learn_s + c.times.unpack_s)  # also with several shards
    if batches_per_s * own_s > 1 + 1e-9:
        raise ConfigError(
            f"the learner makes at most {1 / own_s:.3g} batches a second, and {batches_per_s:.3g} "
            f"are needed: its step must take at most {1e3 / batches_per_s:.3g} ms (a faster GPU, "
            "a smaller batch or network), whatever else is bought"
        )
    actors = max(c.per_host, math.ceil(steps_per_s / c.own_steps_per_s * c.actors))
    tried = replace(c, actors=actors)
    for _ in range(_TRIES):
        tried = _fitted(tried, steps_per_s, batches_per_s)
        found = Simulation(tried).run()
        if found.batches_per_s < _ENOUGH * batches_per_s and tried.prefetch < _MOST_PREFETCH:
            tried = replace(tried, prefetch=min(_MOST_PREFETCH, max(4, 2 * tried.prefetch)))
        elif found.steps_per_s < _ENOUGH * steps_per_s:
            more = max(c.per_host, round(tried.actors * 0.03))
            tried = replace(tried, actors=tried.actors + more)
        elif found.batches_per_s < _ENOUGH * batches_per_s:
            raise ConfigError(
                f"{batches_per_s:.3g} batches a second are too many even with --prefetch "
                f"{_MOST_PREFETCH}: the limit is {found.learner_limit}"
            )
        else:
            return Purchase(tried, found)
    raise ConfigError(
        f"no number of hosts up to {tried.hosts:,} reaches {steps_per_s:,.0f} steps a second: "
        f"the limit is {found.limit}"
    )


def _fitted(c: Cluster, steps_per_s: float, batches_per_s: float) -> Cluster:
    """The fewest shards and slowest links below `MOST_LOAD`."""
    fastest = Link(GBIT[-1])

    def fits(one: Cluster, *kinds: str) -> bool:
        needed = bounds.demands(one, batches_per_s)
        return all(needed[k].load(steps_per_s, batches_per_s) <= MOST_LOAD for k in kinds)

    def always(one: Cluster) -> float:
        needed = bounds.demands(one, batches_per_s)
        return max(needed[k].always for k in (bounds.CORES, bounds.THREADS, bounds.REPLAY_OUT))

    best = replace(c, replay=fastest)
    while always(best) > MOST_LOAD / 2:
        best = replace(best, publish_s=2 * max(best.publish_s, 0.5))
    kinds = (bounds.CORES, bounds.THREADS, *_LINKS["replay"])
    for shards in SHARDS:
        best = replace(best, shards=shards)
        if fits(best, *kinds):
            break
    else:
        raise ConfigError(
            f"{steps_per_s:,.0f} steps and {batches_per_s:,.3g} batches a second need more than "
            f"{SHARDS[-1]} shards"
        )
    for name, ways in _LINKS.items():
        former = getattr(c, name)
        if name == "site" and not former.gbit:
            continue  # there is no shared link
        for gbit in GBIT:
            link: Any = {name: Link(gbit, former.rtt_ms)}
            best = replace(best, **link)
            if fits(best, *ways):
                break
        else:
            raise ConfigError(f"the link of the {name} would need more than {GBIT[-1]:g} Gbit/s")
    return best
