"""A discrete-event model of a run on many hosts: who waits for whom, and how old things get.

It is the run's own protocol with sleeps for work: a replay's duty cycle takes in all chunks that
have come, then priorities, then answers requests; actors play on while they have credit; a learner
asks for batches ahead.

Its cost does not grow with the actors: of more than `_GROUPS` actors, several that are alike
act as one, in step, and hand over all their chunks at once. So a queue is longer than a real one by
at most the chunks of one such group, which are 1/_GROUPS of what all hand over in a round.
"""

import math
import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import simpy

from zapex.studies import bounds
from zapex.studies.cluster import Cluster
from zapex.studies.outcome import Outcome, limits
from zapex.studies.stations import Station, through

_GROUPS = 128
_AT_MOST = 256  # messages that a duty cycle takes in
_ROUNDS = 4  # of all actors, and as many before it counts
_LEAST_BATCHES, _MOST_BATCHES, _MOST_BURSTS = 60, 4_000, 20_000
_LONG_S = 5.0  # parameters that are published more rarely are not waited for
Steps = Generator[Any, Any, None]


@dataclass
class _Host:
    """So many actor hosts that are alike. version, made_s: of the parameters that they have."""

    hosts: int
    relay: Station = field(default_factory=Station)
    up: Station = field(default_factory=Station)
    down: Station = field(default_factory=Station)
    version: int = 0
    made_s: float = 0.0


@dataclass
class _Batch:
    asked_at: int  # batches learned
    missing: int  # shards
    drawn_s: float = 0.0


@dataclass
class _Shard:
    wake: Any
    worked_s: float = 0.0
    into: Station = field(default_factory=Station)
    out: Station = field(default_factory=Station)
    receives: Station = field(default_factory=Station)  # its I/O thread
    sends: Station = field(default_factory=Station)  # the same
    chunks: deque[list[Any]] = field(default_factory=deque)  # [how many, rows of one, taken in]
    held: deque[tuple[float, Any]] = field(default_factory=deque)  # acks that the limiter holds
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
        self.env = simpy.Environment()
        self._random = random.Random(seed)
        self._shards = [_Shard(self.env.event()) for _ in c.placed]
        self._rows = c.share * c.batch  # of a batch, from each shard
        self._site = Station(), Station()
        self._learner_in, self._learner_out, self._unpacker = Station(), Station(), Station()
        self._groups = list(self._grouped())
        group = max(group.actors for group in self._groups) * c.rows * c.reuse
        self._slack = max(c.tolerance, 2 * (group + c.batch))
        self._late_s = c.site.rtt_ms / 2e3 + c.times.hop_s
        self._learner_late_s = c.learner.rtt_ms / 2e3 + c.times.hop_s
        self._ready: Any = simpy.Store(self.env)
        self._version, self._made_s, self._published_s = 0, 0.0, 0.0
        self._counts = dict.fromkeys(
            ("steps", "batches", "played_s", "computed_s", "waited_s", "turns", "held", "short"),
            0.0,
        )
        self._ages: dict[str, list[float]] = {
            name: [] for name in ("stale", "batch", "parameters", "push")
        }

    def _grouped(self) -> Generator[_Group, None, None]:
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

    # --- actors ----------------------------------------------------------------------------------

    def _play(self, group: _Group) -> Steps:
        c, env, counts = self.c, self.env, self._counts
        under_way: deque[Any] = deque()
        yield env.timeout(self._random.random() * c.play_s)
        while True:
            yield env.timeout(c.play_s)
            counts["played_s"] += c.play_s * group.actors
            self._ages["parameters"].append(env.now - group.host.made_s + c.look_s / 2)
            under_way.append(env.process(self._push(group)))
            while under_way and (under_way[0].triggered or len(under_way) > c.ahead):
                yield under_way.popleft()

    def _push(self, group: _Group) -> Steps:
        c, env, t, shard, host = self.c, self.env, self.c.times, group.shard, group.host
        began_s, chunks = env.now, group.actors * c.burst
        nbytes = chunks * c.chunk_bytes
        way = [
            (host.relay, chunks * t.push_s / host.hosts),
            (host.up, nbytes * c.host.byte_s / host.hosts),
            (self._site[0], nbytes * c.site.byte_s),
            (shard.into, nbytes * c.replay.byte_s),
            (shard.receives, chunks * t.move_s * self._slower(shard.sends)),
        ]
        yield env.timeout(through(env.now, way, self._late_s) - env.now)
        taken = env.event()
        shard.chunks.append([chunks, c.rows / c.burst, taken])
        self._wake(shard)
        yield taken
        yield env.timeout(self._late_s)
        self._counts["steps"] += group.actors * c.rows
        self._ages["push"].append(env.now - began_s)

    # --- the replay ------------------------------------------------------------------------------

    @staticmethod
    def _wake(shard: _Shard) -> None:
        if not shard.wake.triggered:
            shard.wake.succeed()

    def _slower(self, other: Station) -> int:
        """An I/O thread takes turns to send and receive: half as fast while both have work."""
        return 2 if other.free_s > self.env.now else 1

    def _serve(self, shard: _Shard) -> Steps:
        """A shard's duty cycle."""
        c, env, t, counts = self.c, self.env, self.c.times, self._counts

        def work(seconds: float) -> Any:
            shard.worked_s += seconds
            return env.timeout(seconds)

        while True:
            shard.wake = env.event()
            behind = [host for host in shard.asks if host.version < self._version]
            draws = shard.requests and self._may_draw(shard)
            if not (shard.chunks or shard.updates or behind or draws):
                yield shard.wake
                continue
            chunks, acks = self._take_in(shard)
            updates, shard.updates = shard.updates, 0
            yield work(chunks * t.insert_s + updates * c.share * t.update_s)
            shard.held.extend(acks)
            self._let_on(shard)
            for host in behind:
                shard.asks.remove(host)
                yield work(host.hosts * t.serve_s)
                env.process(self._send(shard, host))
            while shard.requests and self._may_draw(shard):
                batch = shard.requests.popleft()
                yield work(t.sample_s + self._rows * t.row_s)
                shard.sampled += self._rows
                env.process(self._answer(shard, batch))
            self._let_on(shard)
            counts["turns"] += 1
            counts["held"] += bool(shard.held)
            counts["short"] += bool(shard.requests)

    def _take_in(self, shard: _Shard) -> tuple[int, list[tuple[float, Any]]]:
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
        wanted = shard.sampled + self._rows
        return not c.reuse or wanted <= c.reuse * shard.inserted + self._slack

    def _let_on(self, shard: _Shard) -> None:
        """Acknowledge, with new credit, what the limiter allows."""
        c = self.c
        most = (shard.sampled + self._slack) / c.reuse if c.reuse else math.inf
        while shard.held and shard.held[0][0] <= most:
            shard.held.popleft()[1].succeed()

    def _send(self, shard: _Shard, host: _Host) -> Steps:
        """The newest parameters, to some hosts, which then ask for newer ones."""
        c, env, version, made_s = self.c, self.env, self._version, self._made_s
        nbytes = host.hosts * c.parameter_bytes
        way = [
            (shard.sends, nbytes * c.times.byte_s * self._slower(shard.receives)),
            (shard.out, nbytes * c.replay.byte_s),
            (self._site[1], nbytes * c.site.byte_s),
            (host.down, c.parameter_bytes * c.host.byte_s),
        ]
        yield env.timeout(through(env.now, way, self._late_s) - env.now)
        host.version, host.made_s = version, made_s
        yield env.timeout(self._late_s)
        shard.asks.append(host)
        self._wake(shard)

    def _answer(self, shard: _Shard, batch: _Batch) -> Steps:
        c, env, t = self.c, self.env, self.c.times
        nbytes = c.share * c.batch_bytes
        way = [
            (shard.sends, nbytes * c.times.byte_s * self._slower(shard.receives)),
            (shard.out, nbytes * c.replay.byte_s),
            (self._learner_in, nbytes * c.learner.byte_s),
        ]
        batch.drawn_s = batch.drawn_s or env.now
        yield env.timeout(through(env.now, way, self._learner_late_s) - env.now)
        batch.missing -= 1
        if batch.missing:
            return
        if c.unpacks_beside:
            yield env.timeout(through(env.now, [(self._unpacker, t.unpack_s)]) - env.now)
        self._ready.put(batch)

    # --- the learner -----------------------------------------------------------------------------

    def _request(self) -> Steps:
        batch = _Batch(int(self._counts["batches"]), len(self._shards))
        yield self.env.timeout(self._learner_late_s)
        for shard in self._shards:
            shard.requests.append(batch)
            self._wake(shard)

    def _update(self) -> Steps:
        c, env = self.c, self.env
        way = [(self._learner_out, 12 * c.batch * c.learner.byte_s)]
        yield env.timeout(through(env.now, way, self._learner_late_s) - env.now)
        for shard in self._shards:
            shard.updates += 1
            self._wake(shard)

    def _publish(self) -> Steps:
        c, env, shard, made_s = self.c, self.env, self._shards[0], self.env.now
        way = [
            (self._learner_out, c.parameter_bytes * c.learner.byte_s),
            (shard.into, c.parameter_bytes * c.replay.byte_s),
            (shard.receives, c.parameter_bytes * c.times.byte_s * self._slower(shard.sends)),
        ]
        yield env.timeout(through(env.now, way, self._learner_late_s) - env.now)
        self._version, self._made_s = self._version + 1, made_s
        self._wake(shard)

    def _learn(self) -> Steps:
        c, env, counts, ages = self.c, self.env, self._counts, self._ages
        for _ in range(c.prefetch):
            env.process(self._request())
        while True:
            began_s = env.now
            batch = yield self._ready.get()
            counts["waited_s"] += env.now - began_s
            yield env.timeout(c.step_s - c.learn_s)
            ages["stale"].append(counts["batches"] - batch.asked_at)
            ages["batch"].append(env.now - batch.drawn_s)
            yield env.timeout(c.learn_s)
            counts["computed_s"] += c.step_s
            counts["batches"] += 1
            env.process(self._update())
            env.process(self._request())
            if env.now - self._published_s >= c.publish_s:
                self._published_s = env.now
                env.process(self._publish())

    # --- the whole -------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Warm up, then measure."""
        env = self.env
        for shard in self._shards:
            env.process(self._serve(shard))
        for group in self._groups:
            env.process(self._play(group))
        env.process(self._learn())
        seconds = self._window_s()
        env.run(until=seconds)
        before, worked = dict(self._counts), [shard.worked_s for shard in self._shards]
        for values in self._ages.values():
            values.clear()
        stations = self._stations()
        threads = [end for shard in self._shards for end in (shard.receives, shard.sends)]
        for station in (*threads, *(one for kind in stations.values() for one in kind)):
            station.mark(env.now)
        env.run(until=2 * seconds)
        counts = {name: value - before[name] for name, value in self._counts.items()}
        loads = {
            bounds.ACTORS: counts["played_s"] / (self.c.actors * seconds),
            bounds.LEARNER: counts["computed_s"] / seconds,
            bounds.CORES: max(
                (shard.worked_s - was) / seconds
                for shard, was in zip(self._shards, worked, strict=True)
            ),
        }
        loads[bounds.THREADS] = max(
            one.receives.load(seconds, env.now) + one.sends.load(seconds, env.now)
            for one in self._shards
        )
        for kind, ones in stations.items():
            loads[kind] = max(one.load(seconds, env.now) for one in ones)
        return self._outcome(counts, {k: min(1.0, v) for k, v in loads.items()}, seconds)

    def _window_s(self) -> float:
        """Some rounds of all actors and enough batches, for warming up and for measuring each."""
        c = self.c
        steps, batches = min(c.own_steps_per_s, bounds.most_steps(c)[0]), bounds.most_batches(c)
        if c.reuse:
            steps = min(steps, batches * c.batch / c.reuse)
            batches = min(batches, steps * c.reuse / c.batch)
        a_round_s = c.actors * c.rows * (c.ahead + 1) / steps
        versions_s = 3 * min(c.publish_s, _LONG_S)
        enough_s = max(_ROUNDS * a_round_s, _LEAST_BATCHES / batches, versions_s)
        bursts = len(self._groups) * (c.ahead + 1) / a_round_s  # a second
        most_s = min(_MOST_BATCHES / batches, _MOST_BURSTS / bursts)
        return min(enough_s, max(2 * a_round_s, 8 / batches, versions_s, most_s))

    def _stations(self) -> dict[str, list[Station]]:
        hosts = list({id(group.host): group.host for group in self._groups}.values())
        return {
            bounds.RELAYS: [host.relay for host in hosts],
            bounds.HOST_UP: [host.up for host in hosts],
            bounds.HOST_DOWN: [host.down for host in hosts],
            bounds.SITE_UP: [self._site[0]],
            bounds.SITE_DOWN: [self._site[1]],
            bounds.REPLAY_IN: [shard.into for shard in self._shards],
            bounds.REPLAY_OUT: [shard.out for shard in self._shards],
            bounds.LEARNER_IN: [self._learner_in],
            bounds.LEARNER_OUT: [self._learner_out],
        }

    def _outcome(
        self, counts: dict[str, float], loads: dict[str, float], seconds: float
    ) -> Outcome:
        mean = {name: fmean(values) if values else 0.0 for name, values in self._ages.items()}
        batches_per_s, turns = counts["batches"] / seconds, max(1.0, counts["turns"])
        limit, learner_limit = limits(loads, counts["held"] / turns, counts["short"] / turns)
        return Outcome(
            self.c.actors, counts["steps"] / seconds, batches_per_s, mean["stale"], mean["batch"],
            min(1.0, counts["waited_s"] / seconds), mean["parameters"],
            mean["parameters"] * batches_per_s, mean["push"], loads, limit, learner_limit,
        )  # fmt: skip
