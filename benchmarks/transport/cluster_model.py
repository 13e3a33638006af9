"""A model of a run on many hosts: how fast 1 to 10,000 actors are, and what limits them.

    python -m benchmarks.transport.cluster_model [--figure FILE] [--learner-ms 20] [--shards 4] ...

Three kinds of message circulate through queues: bursts of chunks from an actor to a replay, until
they are acknowledged; batches from the replays to the learner; parameters from a replay to the
actor hosts. The time of each piece of work was measured, and varies little. So a queue delays
nothing until it is full, and then delays all messages by the time that brings its load to 1.

First the model predicts the measured points of benchmarks/results/simulate.json, to which it was
not fitted: paced roles that moved real chunks to 1 to 4 replays over links of given rate and delay.
Then it prints the curve.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "simulate.json"
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_AT_MOST = 256  # chunks that a replay takes in before it answers requests
PARAMETER_BYTES = 4 * 3_292_837


@dataclass(frozen=True)
class Link:
    """gbit: rate of each direction; 0: no limit. rtt_ms: there and back."""

    gbit: float = 0.0
    rtt_ms: float = 0.0

    @property
    def byte_s(self) -> float:
        """Seconds for a byte."""
        return 8e-9 / self.gbit if self.gbit else 0.0


@dataclass(frozen=True)
class Times:
    """Seconds of one core for one piece of work.

    insert_s: the replay takes in a chunk. sample_s, row_s: it draws and packs a batch, and, for
    each of its rows, so much more. update_s: it applies a batch's priorities. serve_s: it sends
    parameters to one host. move_s, byte_s: its I/O thread moves a chunk, or a byte of another
    message. push_s: a relay sends a chunk. unpack_s: the learner has a batch in its memory. hop_s:
    from a message's end on the line until its reader works on it.
    """

    insert_s: float
    sample_s: float
    row_s: float
    update_s: float
    serve_s: float
    move_s: float
    byte_s: float
    push_s: float
    unpack_s: float
    hop_s: float


@dataclass(frozen=True)
class Cluster:
    """A run on many hosts.

    actors: all of them. per_host: of one actor host. burst: chunks that an actor hands over at a
    time. ahead: bursts under way while it plays on; 0: it waits for each one's acknowledgement.
    rows: transitions of a burst. play_s: seconds an actor plays for a burst. chunk_bytes,
    batch_bytes: of a message. batch: rows. prefetch: batches asked for ahead. learn_s: seconds of a
    learner's step. publish_s: between two versions of the parameters.

    host, replay, learner: the link of each such host. site: one link that all actor hosts share.
    The round trip to the replay is that of `site` for actors, and that of `learner` for it.
    """

    actors: int
    per_host: int
    rows: int
    play_s: float
    chunk_bytes: float
    batch: int
    batch_bytes: float
    learn_s: float
    times: Times
    burst: int = 1
    ahead: int = 1
    prefetch: int = 2
    publish_s: float = 1.0
    shards: int = 1
    host: Link = Link()
    site: Link = Link()
    replay: Link = Link()
    learner: Link = Link()


@dataclass(frozen=True)
class Circulation:
    """One kind of message. count: under way at most. delay_s: where nothing queues.

    works: by queue, the seconds of one message there and the share of messages that pass this one
    of several like queues. overlaps: queues that one message passes at once, as its first bytes run
    ahead of its last: together they take as long as the slowest. most_wait_s: in queues that serve
    kinds in turns.
    """

    count: float
    delay_s: float
    works: dict[str, tuple[float, float]]
    overlaps: frozenset[str] = frozenset()
    most_wait_s: Mapping[str, float] = field(default_factory=dict)


def circulate(
    kinds: Sequence[Circulation],
) -> tuple[list[float], dict[str, float], dict[str, float]]:
    """Messages a second by kind, and by queue the seconds that messages wait and its load.

    A queue that could do more than what comes delays nothing. One that could not delays all
    messages by the same time, which makes its load 1.
    """
    waits = {queue: 0.0 for kind in kinds for queue in kind.works}

    def trip_s(kind: Circulation) -> float:
        alone_s = {queue: work_s for queue, (work_s, _) in kind.works.items()}
        side_by_side = [alone_s.pop(queue) for queue in kind.overlaps]
        waits_s = (min(waits[queue], kind.most_wait_s.get(queue, 1e9)) for queue in kind.works)
        together_s = max(side_by_side, default=0.0)
        return kind.delay_s + sum(alone_s.values()) + together_s + sum(waits_s)

    def load(queue: str) -> float:
        passing = [(kind, *kind.works[queue]) for kind in kinds if queue in kind.works]
        return sum(kind.count / trip_s(kind) * share * work_s for kind, work_s, share in passing)

    for _ in range(200):  # until no queue's wait changes those of the others any more
        before = dict(waits)
        for queue in list(waits):
            waits[queue] = low = 0.0
            if load(queue) <= 1:
                continue
            high = 1e-6
            waits[queue] = high
            while load(queue) > 1 and high < 1e6:
                low, high = high, 2 * high
                waits[queue] = high
            for _ in range(40):
                waits[queue] = (low + high) / 2
                low, high = (waits[queue], high) if load(queue) > 1 else (low, waits[queue])
        if all(abs(waits[queue] - before[queue]) <= 1e-6 * waits[queue] for queue in waits):
            break
    return [k.count / trip_s(k) for k in kinds], waits, {queue: load(queue) for queue in waits}


@dataclass(frozen=True)
class Outcome:
    """What a run does. push_s: from a burst's end to its acknowledgement.

    loads: the share of time that each resource works.
    """

    actors: int
    steps_per_s: float
    batches_per_s: float
    push_s: float
    loads: dict[str, float]


def predict(c: Cluster) -> Outcome:
    """The rates of a run."""
    t, hosts, shards = c.times, -(-c.actors // c.per_host), min(c.shards, c.actors)
    nbytes, part = c.burst * c.chunk_bytes, c.batch_bytes / shards
    bursts = Circulation(
        c.actors * (1 + c.ahead),
        c.site.rtt_ms / 1e3 + 2 * t.hop_s,
        {
            "actors": (c.play_s, 1 / c.actors),
            "relays": (c.burst * t.push_s, 1 / hosts),
            "actor hosts' links": (nbytes * c.host.byte_s, 1 / hosts),
            "site's link": (nbytes * c.site.byte_s, 1),
            "replay's link, in": (nbytes * c.replay.byte_s, 1 / shards),
            "replay's I/O thread": (c.burst * t.move_s, 1 / shards),
            "replay's core": (c.burst * t.insert_s, 1 / shards),
        },
        frozenset(("relays", "actor hosts' links", "site's link", "replay's link, in",
                   "replay's I/O thread")),
    )  # fmt: skip
    # A thread of its own unpacks batches of one replay; those of several, the learner's own.
    beside = c.prefetch >= 3 and shards == 1
    batches = Circulation(
        c.prefetch,
        c.learner.rtt_ms / 1e3 + 2 * t.hop_s,
        {
            "replay's core": (
                t.sample_s + (c.batch * t.row_s + t.update_s) / shards, 1
            ),
            "replay's I/O thread": (part * t.byte_s, 1),
            "replay's link, out": (part * c.replay.byte_s, 1),
            "learner's link": (c.batch_bytes * c.learner.byte_s, 1),
            "unpacking": (t.unpack_s if beside else 0.0, 1),
            "learner": (c.learn_s + (0.0 if beside else t.unpack_s), 1),
        },
        frozenset(("replay's I/O thread", "replay's link, out", "learner's link")),
        {"replay's core": _AT_MOST * t.insert_s},
    )  # fmt: skip
    parameters = Circulation(
        hosts,
        c.publish_s + c.site.rtt_ms / 1e3 + 2 * t.hop_s,
        {
            "replay's core": (t.serve_s, 1),
            "replay's I/O thread": (PARAMETER_BYTES * t.byte_s, 1),
            "replay's link, out": (PARAMETER_BYTES * c.replay.byte_s, 1),
            "site's link, down": (PARAMETER_BYTES * c.site.byte_s, 1),
        },
        frozenset(("replay's I/O thread", "replay's link, out", "site's link, down")),
    )
    (pushed, learned, _), waits, loads = circulate([bursts, batches, parameters])
    push_s = bursts.count / pushed - c.play_s - waits["actors"]
    return Outcome(c.actors, pushed * c.rows, learned, push_s, loads)


def predicted(row: dict[str, Any], times: Times) -> Outcome:
    """What the model says of a measured point. Of its result only message sizes are used."""
    point, found = row["point"], row["measured"]
    rows, burst = 800, 13  # of a push, arXiv 2110.13506
    links = {
        name: Link(point[line]["mbit"] / 1e3, point[line]["rtt_ms"])
        for name, line in (("site", "site"), ("learner", "far"))
    }
    cluster = Cluster(
        actors=point["actors"],
        per_host=1,
        rows=rows,
        play_s=point["actor_s"],
        chunk_bytes=found["push_bytes"] / burst,
        batch=512,
        batch_bytes=found["batch_bytes"],
        learn_s=point["learner_s"],
        times=times,
        burst=burst,
        ahead=0,
        publish_s=2.0,
        shards=point["shards"],
        **links,
    )
    return predict(cluster)


def check(results: dict[str, Any]) -> float:
    """Print each measured point with the model's error. Returns the worst of a rate."""
    times, errors = Times(**results["times"]), []
    print("actors shards    steps/s   model  batches/s   model")
    for row in results["points"]:
        point, found, said = row["point"], row["measured"], predicted(row, times)
        steps = said.steps_per_s / found["steps_per_s"] - 1
        batches = said.batches_per_s / found["batches_per_s"] - 1
        errors += [abs(steps), abs(batches)] if row["counts"] else []
        print(
            f"{point['actors']:6} {point['shards']:6} {found['steps_per_s']:10,.0f}  {steps:+6.1%} "
            f"{found['batches_per_s']:10.2f}  {batches:+6.1%}"
            + ("" if row["counts"] else "  busy cores: does not count")
        )
    print(f"worst error of a rate: {max(errors):.1%}")
    return max(errors)


def curve(cluster: Cluster, most: int) -> list[Outcome]:
    """From one actor to `most`, printed."""
    print("\nactors     steps/s  batches/s      push  busiest")
    found = [predict(replace(cluster, actors=n)) for n in (*(n for n in COUNTS if n < most), most)]
    for one in found:
        busiest = sorted(one.loads.items(), key=lambda item: -item[1])[:2]
        print(
            f"{one.actors:6,} {one.steps_per_s:11,.0f} {one.batches_per_s:10.2f} "
            f"{1e3 * one.push_s:7.1f} ms  "
            + ", ".join(f"{name} {load:.0%}" for name, load in busiest)
        )
    return found


def draw(found: Sequence[Outcome], own: float, path: Path) -> None:
    """Steps and batches a second by actors. own: an actor's steps a second without waiting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=150, layout="constrained")
    actors = [one.actors for one in found]
    for axes, name in zip(figure.subplots(1, 2), ("steps_per_s", "batches_per_s"), strict=True):
        axes.plot(actors, [getattr(one, name) for one in found], "o-", ms=4, label="model")
        if name == "steps_per_s":
            axes.plot(actors, [own * n for n in actors], ":", label="actors that never wait")
        axes.set(xscale="log", yscale="log", xlabel="actors", ylabel=name.replace("_per_", "/"))
        axes.legend(fontsize=8)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Check the model, then print its curve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--actor-steps", type=float, default=1650.0, help="a second, of one actor")
    parser.add_argument("--learner-ms", type=float, default=20.0, help="of a learner's step")
    parser.add_argument("--envs-per-actor", type=int, default=8)
    parser.add_argument("--per-host", type=int, default=32, help="actors of a host")
    parser.add_argument("--prefetch", type=int, default=3, help="batches asked for ahead")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--most-actors", type=int, default=COUNTS[-1])
    for name in ("host", "site", "replay", "learner"):
        parser.add_argument(f"--{name}-gbit", type=float, default=0.0, help="0: no limit")
    for name in ("site", "learner"):
        parser.add_argument(f"--{name}-rtt-ms", type=float, default=0.0)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the curve here")
    options = parser.parse_args(argv)
    results = json.loads(RESULTS.read_text())["results"]
    check(results)
    sizes = results["points"][0]["measured"]
    rows = 64  # of a chunk
    cluster = Cluster(
        actors=1,
        per_host=options.per_host,
        rows=rows,
        play_s=rows / options.actor_steps,
        chunk_bytes=sizes["push_bytes"] * rows / 800,
        batch=512,
        batch_bytes=sizes["batch_bytes"],
        learn_s=options.learner_ms / 1e3,
        times=Times(**results["times"]),
        ahead=options.envs_per_actor,
        prefetch=options.prefetch,
        shards=options.shards,
        host=Link(options.host_gbit),
        site=Link(options.site_gbit, options.site_rtt_ms),
        replay=Link(options.replay_gbit),
        learner=Link(options.learner_gbit, options.learner_rtt_ms),
    )
    found = curve(cluster, options.most_actors)
    if options.figure:
        draw(found, options.actor_steps, options.figure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
