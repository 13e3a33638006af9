"""A run's settings as a cluster to simulate, and what came out, in words."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.studies.bounds import ACTORS, LEARNER
from zapex.studies.calibration import Sizes
from zapex.studies.cluster import Cluster, Link, Times
from zapex.studies.outcome import Outcome
from zapex.studies.simulation import Simulation
from zapex.wire.header import MAX_ACTORS

COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_KEPT = 0.95  # of an actor's own speed: fewer is "the actors wait"


@dataclass(frozen=True)
class Speeds:
    """steps_per_s: of one actor with all its environments. learn_s: of a learner's step."""

    steps_per_s: float
    learn_s: float


@dataclass(frozen=True)
class Links:
    """Each kind of link of the cluster."""

    host: Link
    site: Link
    replay: Link
    learner: Link


def cluster_of(
    config: Config, spec: EnvironmentSpec, speeds: Speeds, times: Times, sizes: Sizes, links: Links,
    *, shards: int, per_host: int, parameter_bytes: int,
) -> Cluster:  # fmt: skip
    """The cluster that these settings make, with one actor host.

    An actor commits the chunks of its streams one after the other, and has credit for two of each
    stream: one that it writes and one under way.
    """
    chunk, envs = config.chunk_transitions, config.actor.envs_per_actor
    stream_s = envs / speeds.steps_per_s  # a step of all streams
    return Cluster(
        actors=per_host, per_host=per_host, rows=chunk, play_s=chunk / speeds.steps_per_s,
        chunk_bytes=sizes.chunk_bytes, batch=config.learner.batch_size,
        batch_bytes=sizes.batch_bytes, parameter_bytes=parameter_bytes, learn_s=speeds.learn_s,
        times=times, burst=1, ahead=envs, prefetch=config.replay.prefetch,
        publish_s=config.learner.publish_period_s,
        look_s=config.actor.param_period / spec.frames_per_step * stream_s,
        reuse=config.replay.samples_per_insert,
        tolerance=config.limiter_tolerance if config.replay.samples_per_insert else 0.0,
        shards=shards, **vars(links),
    )  # fmt: skip


def sweep(cluster: Cluster, most: int) -> list[Outcome]:
    """From one actor to `most`."""
    counts = [n for n in COUNTS if n < most]
    return [Simulation(cluster.of(n)).run() for n in (*counts, most)]


def lines(cluster: Cluster, found: Sequence[Outcome]) -> list[str]:
    """A table, and where it stops."""
    text = [
        "actors   steps/s   play  batches/s  stale batches   parameters     push  busiest; limits"
    ]
    for one in found:
        own = one.steps_per_s / cluster.of(one.actors).own_steps_per_s
        shared = {k: v for k, v in one.loads.items() if k not in (ACTORS, LEARNER)}
        name = max(shared, key=lambda kind: shared[kind])
        text.append(
            f"{one.actors:6,} {_short(one.steps_per_s):>9} {min(own, 1):>6.0%} "
            f"{one.batches_per_s:10.3g} {one.staleness_batches:6.1f} {_seconds(one.batch_age_s):>8}"
            f" {_seconds(one.parameters_age_s):>12} {_seconds(one.push_s):>8}  "
            f"{name} {shared[name]:.0%}; actors: {one.limit}, learner: {one.learner_limit}"
        )
    text += [
        "play: the share of its time in which an actor plays. stale: batches learned between a "
        "batch's request and its use, and the time from its draw. parameters: their age while "
        "actors play with them. push: until the replay has a chunk"
    ]
    good = [x for x in found if x.steps_per_s >= _KEPT * cluster.of(x.actors).own_steps_per_s]
    if good and good[-1] is not found[-1]:
        after = found[found.index(good[-1]) + 1]
        text.append(
            f"up to {good[-1].actors:,} actors play at their own speed; with {after.actors:,} the "
            f"limit is {after.limit}"
        )
    if found[-1].actors > MAX_ACTORS:
        text.append(f"a replay numbers at most {MAX_ACTORS:,} actors: more is only the model's")
    return text


def _short(rate: float) -> str:
    return f"{rate / 1e6:.2f}M" if rate >= 1e6 else f"{rate / 1e3:.1f}k" if rate >= 1e4 else (
        f"{rate:,.0f}"
    )  # fmt: skip


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s"


def report_of(cluster: Cluster, found: Sequence[Outcome], about: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it; the file serves as --times, too."""
    sizes = Sizes(cluster.chunk_bytes, cluster.batch_bytes)
    return {
        **about, "times": asdict(cluster.times), "sizes": sizes._asdict(),
        "cluster": {k: v for k, v in asdict(cluster).items() if k not in ("times", "actors")},
        "points": [asdict(one) for one in found],
    }  # fmt: skip
