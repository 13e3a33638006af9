"""What no model can exceed: how busy each resource is at given rates, in closed form.

load = steps/s x (its seconds for a step) + batches/s x (for a batch) + what is always there

A resource is full at load 1 (the utilisation law). Waiting is not in here: `simulation` has it.
"""

from dataclasses import dataclass

from zapex.studies.cluster import Cluster

MOST = 1e12  # a rate that nothing limits


@dataclass(frozen=True)
class Demand:
    """Seconds of the busiest resource of a kind: for a step, for a batch, and in each second."""

    step_s: float = 0.0
    batch_s: float = 0.0
    always: float = 0.0

    def load(self, steps_per_s: float, batches_per_s: float) -> float:
        """The share of time that it is busy."""
        return steps_per_s * self.step_s + batches_per_s * self.batch_s + self.always


ACTORS, LEARNER = "actors", "learner"
RELAYS, HOST_UP, HOST_DOWN = "relays", "actor hosts' links, up", "actor hosts' links, down"
SITE_UP, SITE_DOWN = "site's link, up", "site's link, down"
CORES, THREADS = "replay's core", "replay's I/O thread"
REPLAY_IN, REPLAY_OUT = "replay's link, in", "replay's link, out"
LEARNER_IN, LEARNER_OUT = "learner's link, in", "learner's link, out"


def demands(c: Cluster, batches_per_s: float) -> dict[str, Demand]:
    """Of the busiest resource of each kind. batches_per_s: how often parameters can be new."""
    t, share, pushed = c.times, c.share, max(c.placed) / c.actors
    chunk_s = c.burst / c.rows  # chunks of a step
    versions = min(1 / c.publish_s if c.publish_s else MOST, batches_per_s)  # a second
    up, down = chunk_s * c.chunk_bytes, versions * c.parameter_bytes
    sent = versions * c.hosts
    update = 12 * c.batch
    return {
        ACTORS: Demand(c.play_s / c.rows / c.actors),
        LEARNER: Demand(0.0, c.step_s),
        RELAYS: Demand(chunk_s * t.push_s / c.hosts),
        HOST_UP: Demand(up * c.host.byte_s / c.hosts),
        HOST_DOWN: Demand(always=down * c.host.byte_s),
        SITE_UP: Demand(up * c.site.byte_s),
        SITE_DOWN: Demand(always=down * c.hosts * c.site.byte_s),
        CORES: Demand(
            pushed * chunk_s * t.insert_s,
            t.sample_s + share * (c.batch * t.row_s + t.update_s),
            sent * t.serve_s,
        ),
        THREADS: Demand(
            pushed * chunk_s * t.move_s,
            share * (c.batch_bytes + update) * t.byte_s,
            (sent + versions) * c.parameter_bytes * t.byte_s,
        ),
        REPLAY_IN: Demand(pushed * up * c.replay.byte_s, share * update * c.replay.byte_s,
                          down * c.replay.byte_s),
        REPLAY_OUT: Demand(0.0, share * c.batch_bytes * c.replay.byte_s,
                           sent * c.parameter_bytes * c.replay.byte_s),
        LEARNER_IN: Demand(0.0, c.batch_bytes * c.learner.byte_s),
        LEARNER_OUT: Demand(0.0, update * c.learner.byte_s, down * c.learner.byte_s),
    }  # fmt: skip


def most_batches(c: Cluster) -> float:
    """Batches a second if nothing but the learner and its round trips limits them."""
    t = c.times
    trip = c.learner.rtt_ms / 1e3 + 2 * t.hop_s + t.sample_s + c.batch * t.row_s
    trip += c.batch_bytes * max(c.learner.byte_s, c.replay.byte_s, t.byte_s)
    trip += t.unpack_s + c.learn_s  # a batch is asked for when one has been learned from
    return min(1 / max(c.step_s, 1e-9), c.prefetch / max(trip, 1e-9))


def most_steps(c: Cluster, batches_per_s: float = 0.0) -> tuple[float, str]:
    """Steps a second at which the first resource is full, and which. Beside so many batches."""
    found = MOST, ""
    for name, demand in demands(c, batches_per_s).items():
        if demand.step_s:
            left = max(0.0, 1 - batches_per_s * demand.batch_s - demand.always)
            found = min(found, (left / demand.step_s, name))
    return found


def queue_s(load: float, service_s: float) -> float:
    """Mean wait of Poisson arrivals of one service time (M/D/1, Pollaczek and Khinchine)."""
    return load * service_s / (2 * (1 - load)) if load < 1 else float("inf")
