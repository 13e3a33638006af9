"""A model of a run on many hosts: how fast 1 to 10,000 actors are, and what limits them.

    python -m benchmarks.transport.cluster_model [--figure FILE] [--learner-ms 20] [--shards 4] ...

It is a discrete-event simulation of the run's own protocol, with sleeps for work: a replay's duty
cycle takes in all chunks that have come, then priorities, then answers requests; actors play on
while they have credit; a learner asks for batches ahead; messages share links and threads. The time
of each piece of work was measured. Of more than 128 actors, several act as one, so that 10,000
take about as long as 200; a queue is then longer than a real one by the chunks of one such group.

First it predicts the measured points of benchmarks/results/simulate.json, which it was not fitted
to: paced roles that moved real chunks to 1 to 4 replays over links of given rate and delay. Then it
prints the curve. Above 80 % load of a resource, queues depend on details that are not modelled.
"""

import argparse
import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "simulate.json"
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_GROUPS = 128
_AT_MOST = 256  # messages that a duty cycle takes in
_ROUNDS, _LEAST_BATCHES = 4, 60  # before it counts, and while it counts
_MOST_BATCHES, _MOST_BURSTS = 4_000, 20_000
_VERSIONS, _LONG_S = 3, 5.0  # parameters that are published more rarely are not waited for

# --- events --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Event:
    """Something that happens once. A process waits for it with `yield`."""

    loop: "Loop"
    done: bool = False
    waiting: list[Callable[[], object]] = field(default_factory=list)

    def happen(self) -> None:
        """Let all that wait go on."""
        self.done = True
        for resume in self.waiting:
            self.loop.at(self.loop.now_s, resume)


Steps = Iterator[Event]


class Loop:
    """Simulated time, and what happens when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, call: Callable[[], object]) -> None:
        """Call it at that time; calls of one time in the order in which they were given."""
        heapq.heappush(self._queue, (time_s, next(self._numbers), call))

    def at_time(self, time_s: float) -> Event:
        """An event that happens at that time."""
        event = Event(self)
        self.at(time_s, event.happen)
        return event

    def after(self, seconds: float) -> Event:
        """An event that happens so much later."""
        return self.at_time(self.now_s + seconds)

    def start(self, steps: Steps) -> Event:
        """Start a process, which yields what it waits for. Returns the event of its end."""
        over = Event(self)

        def resume() -> None:
            for event in steps:
                if not event.done:
                    event.waiting.append(resume)
                    return
            over.happen()

        self.at(self.now_s, resume)
        return over

    def turn(self) -> None:
        """Do what is next."""
        self.now_s, _, call = heapq.heappop(self._queue)
        call()


@dataclass(eq=False)
class Station:
    """A link or a thread that serves first come, first served. free_s: when all its work is done.

    A message passes several stations at once, as its first bytes run ahead of its last. So one
    event is enough for a whole way.
    """

    free_s: float = 0.0
    given_s: float = 0.0
    counted_s: float = 0.0

    def begin(self, first_s: float, work_s: float) -> float:
        """Take work that is there at `first_s`. Returns when it begins."""
        begins_s = max(first_s, self.free_s)
        self.free_s = begins_s + work_s
        self.given_s += work_s
        return begins_s

    def done_s(self, now_s: float) -> float:
        """Work done until now."""
        return self.given_s - max(0.0, self.free_s - now_s)


# --- what is modelled ----------------------------------------------------------------------------


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
    batch_bytes, parameter_bytes: of a message. batch: rows. prefetch: batches asked for ahead.
    learn_s: seconds of a learner's step. publish_s: between two versions of the parameters. reuse:
    samples per insert; 0: no limit.

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
    parameter_bytes: int
    learn_s: float
    times: Times
    burst: int = 1
    ahead: int = 1
    prefetch: int = 2
    publish_s: float = 1.0
    reuse: float = 0.0
    shards: int = 1
    host: Link = field(default_factory=Link)
    site: Link = field(default_factory=Link)
    replay: Link = field(default_factory=Link)
    learner: Link = field(default_factory=Link)

    @property
    def hosts(self) -> int:
        """Actor hosts."""
        return -(-self.actors // self.per_host)

    @property
    def used_shards(self) -> int:
        """Shards that any actor pushes to."""
        return min(self.shards, self.actors)

    @property
    def unpacks_beside(self) -> bool:
        """Whether a thread of its own unpacks batches while the learner learns, as with one replay.

        The parts of several shards are received and checked by the learner's own thread.
        """
        return self.prefetch >= 3 and self.used_shards == 1


@dataclass(frozen=True)
class Outcome:
    """What a simulated run does.

    push_s: from a burst's end to its acknowledgement. parameters_age_s: of those that actors play
    with. stale_batches: learned between a batch's request and its use. loads: the share of time
    that the busiest resource of each kind works.
    """

    actors: int
    steps_per_s: float
    batches_per_s: float
    push_s: float
    parameters_age_s: float
    stale_batches: float
    loads: dict[str, float]


# --- the simulation ------------------------------------------------------------------------------


@dataclass(eq=False)
class _Host:
    """So many actor hosts that are alike. version, made_s: of the parameters that they have."""

    hosts: int
    relay: Station = field(default_factory=Station)
    up: Station = field(default_factory=Station)
    down: Station = field(default_factory=Station)
    version: int = 0
    made_s: float = 0.0


@dataclass(eq=False)
class _Batch:
    asked_at: int  # batches learned
    missing: int  # shards


@dataclass(eq=False)
class _Shard:
    wake: Event
    core: Station = field(default_factory=Station)
    into: Station = field(default_factory=Station)
    out: Station = field(default_factory=Station)
    receives: Station = field(default_factory=Station)  # its I/O thread
    sends: Station = field(default_factory=Station)  # the same
    chunks: deque[list[Any]] = field(default_factory=deque)  # [how many, rows of one, taken in]
    held: deque[tuple[float, Event]] = field(default_factory=deque)  # acks that the limiter holds
    updates: int = 0
    asks: list[_Host] = field(default_factory=list)  # for newer parameters
    requests: deque[_Batch] = field(default_factory=deque)
    inserted: float = 0.0
    sampled: float = 0.0


@dataclass(frozen=True)
class _Group:
    """So many actors, in step."""

    actors: int
    host: _Host
    shard: _Shard


def _parts(total: int, parts: int) -> list[int]:
    """As equal as can be; none is 0."""
    sizes = [total * (i + 1) // parts - total * i // parts for i in range(parts)]
    return [size for size in sizes if size]


class Simulation:
    """One run of the model. seed: of the actors' first pauses."""

    def __init__(self, cluster: Cluster, seed: int = 1) -> None:
        self.c = c = cluster
        self.loop, self._random = Loop(), random.Random(seed)
        self._shards = [_Shard(Event(self.loop)) for _ in range(c.used_shards)]
        self._share = 1 / c.used_shards  # of a batch's rows from each shard
        self._rows = self._share * c.batch
        self._site = Station(), Station()
        self._learner_in, self._learner_out, self._unpacker = Station(), Station(), Station()
        self._learner, self._player = Station(), Station()
        self._groups = list(self._grouped())
        group = max(group.actors for group in self._groups) * c.rows * c.reuse
        self._slack = 2 * (group + c.batch)
        self._late_s = c.site.rtt_ms / 2e3 + c.times.hop_s
        self._learner_late_s = c.learner.rtt_ms / 2e3 + c.times.hop_s
        self._ready: deque[_Batch] = deque()
        self._came = Event(self.loop)
        self._version, self._made_s, self._published_s = 0, 0.0, 0.0
        self._counts = dict.fromkeys(("steps", "batches", "bursts"), 0.0)
        self._ages: dict[str, list[float]] = {"stale": [], "parameters": [], "push": []}

    def _grouped(self) -> Iterator[_Group]:
        c, shards, first = self.c, len(self._shards), 0
        most = max(1, _GROUPS // shards)  # groups of a shard
        together = -(-c.hosts // most)
        blocks = -(-c.hosts // together)
        for size in _parts(c.actors, blocks):
            host = _Host(together)
            self._shards[0].asks.append(host)
            for index, shard in enumerate(self._shards):
                here = len(range((index - first) % shards, size, shards))
                for part in _parts(here, max(1, min(here, most // blocks))):
                    yield _Group(part, host, shard)
            first += size

    def _through(self, way: Sequence[tuple[Station, float]], late_s: float = 0.0) -> Event:
        """A message that leaves now is through all stations of its way, each with its work."""
        first_s = last_s = self.loop.now_s
        for station, work_s in way:
            first_s = station.begin(first_s, work_s)
            last_s = max(last_s, first_s + work_s)
        return self.loop.at_time(last_s + late_s)

    # Actors.

    def _play(self, group: _Group) -> Steps:
        c, loop = self.c, self.loop
        under_way: deque[Event] = deque()
        yield loop.after(self._random.random() * c.play_s)
        while True:
            yield loop.after(c.play_s)
            self._player.given_s += c.play_s * group.actors
            self._ages["parameters"].append(loop.now_s - group.host.made_s)
            under_way.append(loop.start(self._push(group)))
            while under_way and (under_way[0].done or len(under_way) > c.ahead):
                yield under_way.popleft()

    def _push(self, group: _Group) -> Steps:
        c, loop, t, shard, host = self.c, self.loop, self.c.times, group.shard, group.host
        began_s, chunks = loop.now_s, group.actors * c.burst
        nbytes = chunks * c.chunk_bytes
        way = [
            (host.relay, chunks * t.push_s / host.hosts),
            (host.up, nbytes * c.host.byte_s / host.hosts),
            (self._site[0], nbytes * c.site.byte_s),
            (shard.into, nbytes * c.replay.byte_s),
            (shard.receives, chunks * t.move_s * self._slower(shard.sends)),
        ]
        yield self._through(way, self._late_s)
        taken = Event(loop)
        shard.chunks.append([chunks, c.rows / c.burst, taken])
        self._wake(shard)
        yield taken
        yield loop.after(self._late_s)
        self._counts["steps"] += group.actors * c.rows
        self._counts["bursts"] += 1
        self._ages["push"].append(loop.now_s - began_s)

    # The replay.

    @staticmethod
    def _wake(shard: _Shard) -> None:
        if not shard.wake.done:
            shard.wake.happen()

    def _slower(self, other: Station) -> int:
        """An I/O thread takes turns to send and receive: half as fast while both have work."""
        return 2 if other.free_s > self.loop.now_s else 1

    def _serve(self, shard: _Shard) -> Steps:
        """A shard's duty cycle."""
        loop, t = self.loop, self.c.times
        while True:
            shard.wake = Event(loop)
            behind = [host for host in shard.asks if host.version < self._version]
            draws = shard.requests and self._may_draw(shard)
            if not (shard.chunks or shard.updates or behind or draws):
                yield shard.wake
                continue
            chunks, acks = self._take_in(shard)
            updates, shard.updates = shard.updates, 0
            work_s = chunks * t.insert_s + updates * self._share * t.update_s
            yield self._through([(shard.core, work_s)])
            shard.held.extend(acks)
            self._acknowledge(shard)
            for host in behind:
                shard.asks.remove(host)
                yield self._through([(shard.core, host.hosts * t.serve_s)])
                loop.start(self._send(shard, host))
            while shard.requests and self._may_draw(shard):
                batch = shard.requests.popleft()
                yield self._through([(shard.core, t.sample_s + self._rows * t.row_s)])
                shard.sampled += self._rows
                loop.start(self._answer(shard, batch))
            self._acknowledge(shard)

    def _take_in(self, shard: _Shard) -> tuple[int, list[tuple[float, Event]]]:
        """Chunks that have come, at most so many. Returns how many, and whose acks are due."""
        room, acks = _AT_MOST, []
        while shard.chunks and room:
            first = shard.chunks[0]
            count = min(room, first[0])
            room -= count
            shard.inserted += count * first[1]
            first[0] -= count
            if not first[0]:
                acks.append((shard.inserted, shard.chunks.popleft()[2]))
        return _AT_MOST - room, acks

    def _may_draw(self, shard: _Shard) -> bool:
        c = self.c
        return not c.reuse or shard.sampled + self._rows <= c.reuse * shard.inserted + self._slack

    def _acknowledge(self, shard: _Shard) -> None:
        """Acknowledge, with new credit, what the limiter allows."""
        c = self.c
        most = (shard.sampled + self._slack) / c.reuse if c.reuse else float("inf")
        while shard.held and shard.held[0][0] <= most:
            shard.held.popleft()[1].happen()

    def _send(self, shard: _Shard, host: _Host) -> Steps:
        """The newest parameters, to some hosts, which then ask for newer ones."""
        c, version, made_s = self.c, self._version, self._made_s
        nbytes = host.hosts * c.parameter_bytes
        way = [
            (shard.sends, nbytes * c.times.byte_s * self._slower(shard.receives)),
            (shard.out, nbytes * c.replay.byte_s),
            (self._site[1], nbytes * c.site.byte_s),
            (host.down, c.parameter_bytes * c.host.byte_s),
        ]
        yield self._through(way, self._late_s)
        host.version, host.made_s = version, made_s
        yield self.loop.after(self._late_s)
        shard.asks.append(host)
        self._wake(shard)

    def _answer(self, shard: _Shard, batch: _Batch) -> Steps:
        c = self.c
        nbytes = self._share * c.batch_bytes
        way = [
            (shard.sends, nbytes * c.times.byte_s * self._slower(shard.receives)),
            (shard.out, nbytes * c.replay.byte_s),
            (self._learner_in, nbytes * c.learner.byte_s),
        ]
        yield self._through(way, self._learner_late_s)
        batch.missing -= 1
        if batch.missing:
            return
        if c.unpacks_beside:
            yield self._through([(self._unpacker, c.times.unpack_s)])
        self._ready.append(batch)
        if not self._came.done:
            self._came.happen()

    # The learner.

    def _request(self) -> Steps:
        batch = _Batch(int(self._counts["batches"]), len(self._shards))
        yield self.loop.after(self._learner_late_s)
        for shard in self._shards:
            shard.requests.append(batch)
            self._wake(shard)

    def _update(self) -> Steps:
        nbytes = 12 * self.c.batch
        way = [(self._learner_out, nbytes * self.c.learner.byte_s)]
        yield self._through(way, self._learner_late_s)
        for shard in self._shards:
            shard.updates += 1
            self._wake(shard)

    def _publish(self) -> Steps:
        c, shard, made_s = self.c, self._shards[0], self.loop.now_s
        way = [
            (self._learner_out, c.parameter_bytes * c.learner.byte_s),
            (shard.into, c.parameter_bytes * c.replay.byte_s),
            (shard.receives, c.parameter_bytes * c.times.byte_s * self._slower(shard.sends)),
        ]
        yield self._through(way, self._learner_late_s)
        self._version, self._made_s = self._version + 1, made_s
        self._wake(shard)

    def _learn(self) -> Steps:
        c, loop = self.c, self.loop
        unpack_s = 0.0 if c.unpacks_beside else c.times.unpack_s
        for _ in range(c.prefetch):
            loop.start(self._request())
        while True:
            while not self._ready:
                self._came = Event(loop)
                yield self._came
            batch = self._ready.popleft()
            self._ages["stale"].append(self._counts["batches"] - batch.asked_at)
            yield self._through([(self._learner, unpack_s + c.learn_s)])
            self._counts["batches"] += 1
            loop.start(self._update())
            loop.start(self._request())
            if loop.now_s - self._published_s >= c.publish_s:
                self._published_s = loop.now_s
                loop.start(self._publish())

    # The whole.

    def run(self) -> Outcome:
        """Warm up, then measure."""
        for steps in (
            *map(self._serve, self._shards),
            *map(self._play, self._groups),
            self._learn(),
        ):
            self.loop.start(steps)
        self._some_rounds()
        before, began_s, stations = dict(self._counts), self.loop.now_s, self._stations()
        for values in self._ages.values():
            values.clear()
        for station in (one for kind in stations.values() for one in kind):
            station.counted_s = station.done_s(began_s)
        self._some_rounds()
        now_s = self.loop.now_s
        seconds = now_s - began_s
        loads = {
            name: max((one.done_s(now_s) - one.counted_s) / seconds for one in ones)
            for name, ones in stations.items()
        }
        loads["actors"] /= self.c.actors
        steps, batches, _ = (self._counts[name] - before[name] for name in self._counts)
        ages = {name: fmean(values) if values else 0.0 for name, values in self._ages.items()}
        return Outcome(
            self.c.actors,
            steps / seconds,
            batches / seconds,
            ages["push"],
            ages["parameters"],
            ages["stale"],
            loads,
        )

    def _some_rounds(self) -> None:
        """Some rounds of all actors, enough batches, and some versions of the parameters."""
        before, loop, c = dict(self._counts), self.loop, self.c
        least_s = loop.now_s + _VERSIONS * min(c.publish_s, _LONG_S)
        rounds = _ROUNDS * (c.ahead + 1) * len(self._groups)
        while True:
            loop.turn()
            bursts, batches = (self._counts[n] - before[n] for n in ("bursts", "batches"))
            whole = bursts >= rounds and batches >= _LEAST_BATCHES and loop.now_s >= least_s
            if whole or bursts >= _MOST_BURSTS or batches >= _MOST_BATCHES:
                return

    def _stations(self) -> dict[str, list[Station]]:
        hosts = list({id(group.host): group.host for group in self._groups}.values())
        return {
            "actors": [self._player],
            "learner": [self._learner],
            "replay's core": [shard.core for shard in self._shards],
            "replay, receiving": [shard.receives for shard in self._shards],
            "replay, sending": [shard.sends for shard in self._shards],
            "relays": [host.relay for host in hosts],
            "actor hosts' links": [link for host in hosts for link in (host.up, host.down)],
            "site's link": list(self._site),
            "replay's link": [link for shard in self._shards for link in (shard.into, shard.out)],
            "learner's link": [self._learner_in, self._learner_out],
        }


# --- the study -----------------------------------------------------------------------------------


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
        parameter_bytes=4 * 3_292_837,
        learn_s=point["learner_s"],
        times=times,
        burst=burst,
        ahead=0,
        publish_s=2.0,
        shards=point["shards"],
        **links,
    )
    return Simulation(cluster).run()


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
    """From one actor to `most`, printed as it comes."""
    print("\nactors     steps/s  batches/s      push  parameters' age  stale batches  busiest")
    found = []
    for actors in (*(n for n in COUNTS if n < most), most):
        one = Simulation(replace(cluster, actors=actors)).run()
        busiest = sorted(one.loads.items(), key=lambda item: -item[1])[:2]
        print(
            f"{actors:6,} {one.steps_per_s:11,.0f} {one.batches_per_s:10.2f} "
            f"{1e3 * one.push_s:7.1f} ms {one.parameters_age_s:14.2f} s {one.stale_batches:14.1f}  "
            + ", ".join(f"{name} {load:.0%}" for name, load in busiest),
            flush=True,
        )
        found.append(one)
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
    parser.add_argument("--samples-per-insert", type=float, default=0.0, help="0: no limit")
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
        parameter_bytes=4 * 3_292_837,
        learn_s=options.learner_ms / 1e3,
        times=Times(**results["times"]),
        ahead=options.envs_per_actor,
        prefetch=options.prefetch,
        reuse=options.samples_per_insert,
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
