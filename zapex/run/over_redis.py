"""A run through a Redis: relays push pairs there, and the learner keeps the replay itself.

The learner's parent writes the settings of its run; actor hosts wait for them, compare, and take
actor numbers. Every key is in redis_transport.py.
"""

import json
import os
import secrets
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.errors import BadMessage, ConfigError, Fenced
from zapex.host.metrics import EPISODE
from zapex.net.redis_link import (
    EXPERIENCE,
    EXPIRES_S,
    HOST_KEY,
    LEARNER,
    NUMBERS,
    OVER,
    PARAMETERS,
    PASSWORD,
    RUN,
    SETTINGS,
    STATISTICS,
    VERSION,
    RedisLink,
    most_waiting,
)
from zapex.net.sessions import differences
from zapex.net.statistics import SILENT_S, remote_roles
from zapex.redis_transport import (
    RedisChunkSender,
    RedisExperienceSource,
    RedisParameterSink,
    RedisParameterSource,
)
from zapex.run.networked import BothSinks, LinkWatch, relay_over
from zapex.run.run import Membership, Run
from zapex.run.topology import LinkedRole, Start, make_learner, make_memory
from zapex.shm_transport import HostMemory
from zapex.wire.control import ACTOR_STATE, MAX_CONFIG_BYTES, SMALL, Hello, Stats, Welcome, encode
from zapex.wire.header import Form, joined, split

_MOST_BYTES = MAX_CONFIG_BYTES + 256
_START_S = 60  # until the processes of a host that has joined are there
_LEARNER_S = 20  # a learner that is started again has its place still
_OVER_S = 60  # how long the reason of a run's end stays
_TRY_S = 0.5
_PATIENCE_S, _REMINDER_S = 3.0, 30.0
_AT_MOST = 64  # statistics at once
_LOOK_S = 0.5


def link_of(run: Run, form: Form | None = None) -> RedisLink:
    """A connection of this host."""
    membership = _membership(run)
    return RedisLink(membership.url, os.environ.get(PASSWORD, ""), form, membership.host)


def _membership(run: Run) -> Membership:
    assert run.membership is not None
    return run.membership


def _run_messages(run: Run) -> dict[str, bytes]:
    """What the learner says of its run, by key."""
    membership, plan = _membership(run), run.plan
    schema = plan.replay.schema.hash
    hello = Hello("learner", membership.host, 1, SMALL, schema, plan.actors, run.config.shared())
    welcome = Welcome(
        1, schema, membership.epoch, 0, plan.actors, plan.replay.chunk, True,
        np.empty(0, ACTOR_STATE),
    )  # fmt: skip
    return {SETTINGS: joined(encode(hello)), RUN: joined(encode(welcome))}


# Before the processes of a host start.


def joined_run(run: Run) -> Run:
    """The run with this host's membership: begun by a learner, joined by an actor host.

    Waits for Redis and for the run without a limit, and says so. Raises ConfigError.
    """
    membership = replace(_membership(run), host=secrets.randbits(62) + 1)
    if run.part.learns:
        membership = replace(membership, epoch=secrets.randbits(62) + 1)
    run = replace(run, membership=membership)
    link = link_of(run)
    began_s, due_s = time.monotonic(), _PATIENCE_S
    try:
        while True:
            found = _begin(link, run) if run.part.learns else _join(link, run)
            if found is not None:
                return found
            if link.refused:
                raise ConfigError(f"Redis at {link.url}: {link.problem}")
            waited_s = time.monotonic() - began_s
            if waited_s >= due_s:
                due_s = waited_s + _REMINDER_S
                print(f"{link.waiting or 'waiting'}, for {waited_s:.0f} s", flush=True)
            time.sleep(_TRY_S)
    finally:
        link.close()


def _begin(link: RedisLink, run: Run) -> Run | None:
    """Take the learner's place, and write the settings of a new run. None: not yet."""
    membership = _membership(run)

    def begin(client: Any) -> bool:
        free = {} if membership.take_over else {"nx": True}
        if not client.set(LEARNER, membership.host, ex=_START_S, **free):
            return False
        with client.pipeline() as all_of_it:
            all_of_it.delete(EXPERIENCE, PARAMETERS, VERSION, STATISTICS, NUMBERS, OVER)
            all_of_it.mset(_run_messages(run))
            all_of_it.execute()
        return True

    begun = link.attempt(begin, None)
    if begun is False:
        raise ConfigError(
            f"another learner trains with Redis at {link.url}: end it (a dead one is forgotten "
            f"within {_LEARNER_S} s), choose another database, or give --take-over to replace it"
        )
    return run if begun else None


def _join(link: RedisLink, run: Run) -> Run | None:
    """Compare settings with the run's, and take actor numbers. None: not yet."""
    settings, about = link.get(SETTINGS, _MOST_BYTES), link.get(RUN, _MOST_BYTES)
    if not settings or not about:
        link.lack = "there is no run; `zapex learner --replay` with this URL begins one"
        return None
    hello, welcome = link.decode(settings, Hello), link.decode(about, Welcome)
    if hello is None or welcome is None:
        raise ConfigError(f"Redis at {link.url} holds a run of another version of zapex")
    ours = run.spec.schema(run.config.replay.n_step, run.config.replay.gamma).hash
    here = json.loads(json.dumps(run.config.shared()))
    different = differences(hello.config, here, "the learner")
    if different or hello.schema != ours:
        raise ConfigError(f"the settings of a run must be the same on all hosts{different}")
    count, membership = run.config.actor.actors, _membership(run)
    if count > welcome.total_actors:
        raise ConfigError(
            f"{count} actors are asked for, and the run has {welcome.total_actors}: lower "
            "--actors here, or raise it at the learner"
        )
    numbers = link.attempt(
        lambda client: _take_numbers(client, membership.host, count, welcome.total_actors), None
    )
    if not numbers:
        link.lack = f"all {welcome.total_actors} actor numbers are in use: raise --actors there"
        return None
    joined_now = replace(
        membership, numbers=tuple(numbers), total_actors=welcome.total_actors,
        chunk=welcome.chunk, epoch=welcome.epoch,
    )  # fmt: skip
    return replace(run, membership=joined_now)


def _take_numbers(client: Any, host: int, count: int, total: int) -> list[int]:
    """Free numbers, now of this host; none if there are too few, or others took some meanwhile."""
    from redis import WatchError

    with client.pipeline() as change:
        change.watch(NUMBERS)
        owners = {int(n): int(owner) for n, owner in change.hgetall(NUMBERS).items()}
        alive = {owner for owner in set(owners.values()) if change.exists(f"{HOST_KEY}{owner}")}
        free = [n for n in range(total) if owners.get(n) not in alive][:count]
        if len(free) < count:
            return []
        change.multi()
        change.hset(NUMBERS, mapping=dict.fromkeys(free, host))
        change.set(f"{HOST_KEY}{host}", 1, ex=_START_S)
        try:
            change.execute()
        except WatchError:
            return []
    return free


def tell_all(run: Run, reason: str) -> None:
    """End all hosts. The parent does this, because its learner may be dead at that moment."""
    link = link_of(run)

    def tell(client: Any) -> bool:
        client.set(OVER, reason.encode()[:400], ex=_OVER_S)
        client.delete(SETTINGS, RUN, EXPERIENCE, PARAMETERS, VERSION, STATISTICS, LEARNER)
        return True

    if not link.attempt(tell, False):
        print(f"Redis at {link.url} could not be told that the run is over: {link.problem}")
    link.close()


# An actor host.


class _HostBeat:
    """Says each second that this host is alive, and looks whether the run is still the same."""

    def __init__(self, link: RedisLink, membership: Membership) -> None:
        self._link, self._membership = link, membership

    def __call__(self) -> None:
        link, membership = self._link, self._membership

        def beat(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as calls:
                calls.set(f"{HOST_KEY}{membership.host}", 1, ex=EXPIRES_S)
                for number in membership.numbers:  # Redis may have been restarted empty
                    calls.hsetnx(NUMBERS, number, membership.host)
                calls.hmget(NUMBERS, membership.numbers)
                calls.getrange(OVER, 0, 400)
                calls.getrange(RUN, 0, _MOST_BYTES)
                found: list[Any] = calls.execute()
            return found

        found: list[Any] = link.attempt(beat, [])
        if not found:
            return
        *_, owners, over, about = found
        if over:
            link.over = over.decode(errors="replace")
            return
        welcome = link.decode(about, Welcome) if about else None
        if welcome is not None and welcome.epoch != membership.epoch:
            raise Fenced("another learner has begun a run with this Redis")
        if any(owner != str(membership.host).encode() for owner in owners):
            raise Fenced(f"another host now has the actor numbers {membership.numbers} of this one")
        link.lack = "" if welcome is not None else "it has no run; is the learner there?"


def make_relay(start: Start) -> LinkedRole:
    """Make the relay of an actor host."""
    run, membership = start.run, _membership(start.run)
    link = link_of(run, run.form)
    link.on_beat.append(_HostBeat(link, membership))
    most = most_waiting(run.form, membership.total_actors)
    sender = RedisChunkSender(link, start.host.store(), membership.numbers, most)
    role = relay_over(start, sender, RedisParameterSource(link), link, lambda: False)

    def leave() -> None:
        def free(client: Any) -> None:
            client.hdel(NUMBERS, *membership.numbers)
            client.delete(f"{HOST_KEY}{membership.host}")

        if not link.over:
            link.attempt(free, None)
        link.close()

    return LinkedRole(role, [LinkWatch(link, start.notices, "Redis")], leave, ())


# The learner's host.


class _RunKeeper:
    """Keeps the learner's place, and writes the run again if Redis has lost it."""

    def __init__(self, link: RedisLink, start: Start, sink: RedisParameterSink) -> None:
        self._link, self._sink, self._notices = link, sink, start.notices
        self._host = _membership(start.run).host
        self._messages = _run_messages(start.run)
        self._about = self._messages[RUN]

    def __call__(self) -> None:
        def beat(client: Any) -> list[Any]:
            client.set(LEARNER, self._host, ex=_LEARNER_S, nx=True)
            with client.pipeline(transaction=False) as calls:
                calls.getrange(LEARNER, 0, 19)
                calls.getrange(RUN, 0, _MOST_BYTES)
                found: list[Any] = calls.execute()
            return found

        found: list[Any] = self._link.attempt(beat, [])
        if not found:
            return
        learner, about = found
        if learner != str(self._host).encode() or (about and about != self._about):
            raise Fenced("another learner has begun a run with this Redis")
        self._link.attempt(lambda client: client.expire(LEARNER, _LEARNER_S), None)
        if not about and self._link.attempt(lambda client: client.mset(self._messages), False):
            self._sink.again()
            self._sink.do_work()
            self._notices.tell(
                f"Redis at {self._link.url} was emptied: settings and parameters are written "
                "again; experience that waited there is lost"
            )


class StatisticsTaker:
    """The statistics of actor hosts, out of their list into this host's memory."""

    def __init__(self, link: RedisLink, host: HostMemory) -> None:
        self._link, self._roles = link, remote_roles(host)
        self._episodes = host.ring("episodes").producer()
        self._heard_s: dict[int, float] = {}
        self._due_s = 0.0

    def do_work(self) -> None:
        """Take what has come, twice a second."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _LOOK_S
        for value in self._link.attempt(lambda r: r.lpop(STATISTICS, _AT_MOST), None) or ():
            self._take(value, now_s)
        for number, heard_s in self._heard_s.items():
            if now_s - heard_s > SILENT_S:
                self._roles[number].block.is_gone()

    def _take(self, value: bytes, now_s: float) -> None:
        try:
            (source,) = struct.unpack_from("<q", value)
            split(value[8:])
        except (struct.error, BadMessage):
            return
        stats = self._link.decode(value[8:], Stats)
        role = self._roles.get(stats.number) if stats is not None else None
        if stats is None or role is None or source <= 0:
            return
        taken = role.take(stats, source)
        if taken is None:
            return
        self._heard_s[stats.number] = now_s
        records = _whole(taken.episodes)
        if len(records):
            self._episodes.try_offer(records)


def _whole(records: NDArray[np.void]) -> NDArray[np.void]:
    """The episodes whose numbers can be."""
    assert records.dtype == EPISODE
    fine = np.isfinite(records["game_return"]) & np.isfinite(records["epsilon"])
    fine &= (records["steps"] >= 1) & (records["frames"] >= 0) & (records["stream"] >= 0)
    found: NDArray[np.void] = records[fine]
    found["time_ns"] = np.minimum(found["time_ns"], time.perf_counter_ns())
    return found


def make_learner_itself(start: Start) -> LinkedRole:
    """Make a learner that pulls all experience, keeps it, and draws its own batches."""
    from zapex.roles.intake import Intake
    from zapex.roles.local_samples import LocalSampleSource

    run, host = start.run, start.host
    (replay, keeper), plan = make_memory(start), host.plan
    link = link_of(run, run.form)
    source = RedisExperienceSource(link, replay.store, start.incarnation)
    intake = Intake(
        source, replay, run.limiter, actors=1, streams_per_actor=plan.envs_per_actor
    )  # fmt: skip
    samples = LocalSampleSource(
        replay, intake, host.metrics("replay"), batch_size=plan.batch_size,
        method=run.config.replay.sampling, beta=plan.beta,
    )  # fmt: skip
    sink = RedisParameterSink(link)
    role = make_learner(start, samples, BothSinks(host.mailbox(), sink))
    link.on_beat.append(_RunKeeper(link, start, sink))
    chores: list[Callable[[], object]] = [
        link.do_work, StatisticsTaker(link, host).do_work, LinkWatch(link, start.notices, "Redis"),
        keeper.do_work,
    ]  # fmt: skip

    def leave() -> None:
        samples.close()
        link.attempt(lambda client: client.delete(LEARNER), None)
        link.close()
        keeper.close()

    def save() -> None:
        role.close()
        keeper.close()

    return LinkedRole(role, chores, leave, (), save=save)
