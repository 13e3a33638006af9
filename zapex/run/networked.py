"""The roles of a run on several hosts: the same roles, with links over ZeroMQ."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from zapex.errors import Fenced, PeerTimeout, RunOver
from zapex.host.metrics import RoleMetrics
from zapex.host.parts import PARTS
from zapex.host.plan import OVER
from zapex.host.roster import Roster
from zapex.host.routes import Routes
from zapex.machine.mailbox import Mailbox
from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.net.replay_ends import ZmqExperienceSource, ZmqParameters, ZmqSampleSink
from zapex.net.sample_source import ZmqSampleSource
from zapex.net.server import End, LinkServer
from zapex.net.shard_samples import ShardedSampleSource
from zapex.net.sockets import listen
from zapex.net.statistics import SILENT_S, StatsHandler, StatsLink, StatsReader, StatsSender
from zapex.replay.shards import Shares
from zapex.run.run import NOT_ACTORS, Membership, Run
from zapex.run.topology import (
    LinkedRole,
    Notices,
    Start,
    make_learner,
    make_memory,
    make_replay,
)
from zapex.transport import ChunkLink, ParameterSink, ParameterSource, SampleSink, SampleSource
from zapex.wire.control import LEARNER, Bye, Welcome
from zapex.zmq_transport import (
    ChunkSender,
    ShardedChunkSender,
    ZmqParameterSink,
    ZmqParameterSource,
)

if TYPE_CHECKING:
    from zapex.roles.relay import Relay

_NEWS_PERIOD_S = 30.0  # between two reminders of the same problem
_LOOK_S = 0.5
_FAREWELL_S = 6.0  # relays learn with their next hello that the run is over, and send the rest
_OPEN_S = 5.0


def security_of(membership: Membership) -> Security:
    """How far this host trusts the network. Raises ConfigError."""
    key = PARTS[membership.part].linked or ""
    return Security.load(membership.keys, key, membership.insecure_network)


class Watched(Protocol):
    """A link that says how it is. over: why the run has ended; "" while it runs."""

    over: str

    @property
    def waiting(self) -> str:
        """What this end waits for, and for how long; "" while it is answered."""

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer."""


class LinkWatch:
    """Reports whom this host waits for and since when, when that ends, and when the run ends."""

    def __init__(self, link: Watched, notices: Notices, whom: str = "the replay") -> None:
        self._whom = whom
        self._link, self._notices = link, notices
        self._said = ""
        self._since_s = self._due_s = 0.0
        self._told = False

    def __call__(self) -> None:
        if self._link.over and not self._told:
            # The parent ends this role in order, so what is committed still arrives.
            self._told = True
            self._notices.tell(self._link.over, OVER)
        waiting, now_s = self._link.waiting, time.monotonic()
        if waiting and (not self._said or now_s >= self._due_s):
            self._since_s = self._since_s if self._said else now_s - self._link.silent_s
            self._due_s = now_s + _NEWS_PERIOD_S
            self._notices.tell(waiting)
        elif self._said and not waiting:
            self._notices.tell(f"{self._whom} answers again, after {now_s - self._since_s:.0f} s")
        self._said = waiting


def _open(link: ZmqLink, watch: LinkWatch) -> None:
    """Wait for the replay without a limit; the user is told, and SIGTERM ends the wait."""
    while True:
        try:
            link.open(_OPEN_S)
            return
        except PeerTimeout:
            watch()


def _make_links(start: Start, actors: int = 0) -> list[ZmqLink]:
    """A link to each shard of the run, shard 0 first."""
    run, form = start.run, start.run.form
    membership = _membership(run)
    security = security_of(membership)
    return [
        ZmqLink(
            url, start.name, membership.host, start.incarnation, form, run.settings_at(shard),
            security, schema_hash=form.schema.hash, actors=actors,
            compressed=membership.compress,
        )
        for shard, url in enumerate(membership.all_urls)
    ]  # fmt: skip


def _watches(links: Sequence[ZmqLink], notices: Notices) -> list["LinkWatch"]:
    if len(links) == 1:
        return [LinkWatch(links[0], notices)]
    return [LinkWatch(link, notices, f"shard {shard}") for shard, link in enumerate(links)]


def _close(links: Sequence[ZmqLink]) -> None:
    for link in links:
        link.close(bye=Bye())


def _fds(links: Sequence[ZmqLink]) -> list[int]:
    return [fd for link in links for fd in link.fds]


def _membership(run: Run) -> Membership:
    assert run.membership is not None, "a role with a link is of a run on several hosts"
    return run.membership


# An actor host.


def make_relay(start: Start) -> LinkedRole:
    """Make the relay. What a former incarnation did not send is in the slots."""
    host, membership = start.host, _membership(start.run)
    links = _make_links(start, host.plan.actors)
    link = links[0]

    def check(welcome: Welcome, channel: int) -> None:
        numbers = tuple(welcome.actors["actor"].tolist())
        if welcome.epoch != membership.epoch:
            raise Fenced("the replay was started anew")
        if numbers != membership.numbers:
            raise Fenced(f"another host now has the actor numbers {membership.numbers} of this one")

    link.on_welcome.append(check)
    sender: ChunkLink
    if len(links) == 1:
        sender = ChunkSender(link, host.store())
    else:
        routes = Routes(host.part_of("routes"), host.plan.actors)
        sender = ShardedChunkSender(
            links, host.store(), routes, membership.numbers, start.notices.tell
        )
    role = relay_over(
        start, sender, ZmqParameterSource(link), link, lambda: any(one.ready() for one in links)
    )
    chores = _watches(links, start.notices)
    return LinkedRole(role, chores, lambda: _close(links), _fds(links))


def relay_over(
    start: Start, sender: ChunkLink, parameters: ParameterSource, statistics: StatsLink,
    link_ready: Callable[[], object],
) -> "Relay":  # fmt: skip
    """Make the relay of this host's actors over the ends of any link."""
    from zapex.roles.intake import Intake
    from zapex.roles.relay import Outbox, Relay

    run, host, membership = start.run, start.host, _membership(start.run)
    plan, store, source = host.plan, host.store(), host.experience_source()
    outbox = Outbox(store, plan.replay, sender)
    intake = Intake(
        source,
        outbox,
        run.relay_limiter,
        actors=plan.actors,
        streams_per_actor=plan.envs_per_actor,
    )
    finished = [host.ring(f"episodes {i}").consumer() for i in range(plan.actors)]
    episodes = host.ring("episodes").producer()

    def take_finished(number: int) -> NDArray[np.void]:
        consumer = finished[membership.numbers.index(number)]
        records = consumer.take(consumer.ring.capacity)
        if len(records):
            episodes.try_offer(records)
        return records

    blocks = {n: host.metrics(f"actor {i}") for i, n in enumerate(membership.numbers)}
    return Relay(
        intake,
        outbox,
        source,
        parameters,
        host.mailbox(),
        host.metrics("relay"),
        parameter_bytes=plan.parameter_bytes,
        link_ready=link_ready,
        report=StatsSender(statistics, blocks, take_finished).do_work,
        ended=lambda: not any(host.incarnation(f"actor {i}") for i in range(plan.actors)),
    )


# The learner's host.


class BothSinks:
    """Parameters for this host's evaluator, and for all other hosts."""

    def __init__(self, here: Mailbox, there: ParameterSink) -> None:
        self._here, self._there = here, there

    @property
    def version(self) -> int:
        """The largest version that any learner of the run published; 0: none."""
        return max(self._here.version, self._there.version)

    def publish(self, version: int, parameters: NDArray[np.uint8]) -> None:
        """Make these parameters the newest."""
        self._here.publish(version, parameters)
        self._there.publish(version, parameters)


def make_learner_there(start: Start) -> LinkedRole:
    """Make the learner, once the replay has answered with the newest version's number."""
    host, links = start.host, _make_links(start)
    link, watches = links[0], _watches(links, start.notices)
    source = _sample_source(start, links)
    sink = ZmqParameterSink(link)
    StatsReader(link, host)
    sender = StatsSender(link, {LEARNER: host.metrics("learner")})
    _open(link, watches[0])
    role = make_learner(start, source, BothSinks(host.mailbox(), sink))
    chores: list[Callable[[], object]] = [one.do_work for one in links]
    chores += [sender.do_work, *watches]
    if isinstance(source, ShardedSampleSource):
        metrics = host.metrics("learner")
        metrics.set("shards", len(links))
        chores.append(partial(count_shares, source.shares, metrics))
    return LinkedRole(role, chores, lambda: _close(links), _fds(links), save=role.close)


def count_shares(shares: Shares, metrics: RoleMetrics) -> None:
    """Which shards have no share in the batches, and how often one went and came back."""
    metrics.set("shards_away", len(shares.away))
    metrics.add_up(shards_lost=shares.lost, shards_back=shares.back)


def _sample_source(start: Start, links: Sequence[ZmqLink]) -> SampleSource:
    """The learner's batches, of one replay or of all shards."""
    beta = start.host.plan.beta
    if len(links) == 1:
        return ZmqSampleSource(links[0], beta)
    seed = int(start.run.seed(NOT_ACTORS + 2).generate_state(1)[0])
    method = start.run.config.replay.sampling
    sources = [ZmqSampleSource(link, beta) for link in links]
    return ShardedSampleSource(sources, beta, method, seed, start.notices.tell)


# The replay's host.


class _PeerNews:
    """Reports who came and who left; ends the role when the run is over and all hosts know."""

    def __init__(self, server: LinkServer, notices: Notices) -> None:
        self._server, self._notices = server, notices
        self._there: dict[tuple[str, int], str] = {}
        self._due_s = 0.0
        self._over_s: float | None = None
        whom = "actors and a learner" if server.sessions.takes_learner else "actors"
        notices.tell(f"listening at {server.url}; waiting for {whom}")

    def __call__(self) -> None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _LOOK_S
        heard = [
            s
            for s in self._server.sessions.of_roles("relay", "learner")
            if now_s - s.heard_s < SILENT_S
        ]
        there = {(s.role, s.host): _who(s.role, s.actors) for s in heard}
        for s in heard:
            who = there[s.role, s.host]
            if self._there.get((s.role, s.host)) != who:
                self._notices.tell(f"{who} joined from {s.address or 'this machine'}")
        for peer, who in self._there.items():
            if peer not in there:
                rest = sorted(there.values())
                self._notices.tell(f"{who} left; still connected: {', '.join(rest) or 'none'}")
        self._there = there
        if self._server.over:
            self._over_s = self._over_s or now_s
            if now_s - self._over_s > _FAREWELL_S or not there:
                raise RunOver(self._server.over)
        else:
            self._over_s = None


def _who(role: str, actors: Sequence[int]) -> str:
    if role == "learner":
        return "the learner"
    if not actors:
        return "a host that waits for actors to be free (or for a larger --actors here)"
    if len(actors) == 1:
        return f"a host with actor {actors[0]}"
    whole = len(actors) == actors[-1] - actors[0] + 1
    names = f"{actors[0]} to {actors[-1]}" if whole else ", ".join(map(str, actors))
    return f"a host with actors {names}"


def make_replay_there(start: Start) -> LinkedRole:
    """Make the replay server with a socket; it continues with what the memory holds."""
    run, host, membership = start.run, start.host, _membership(start.run)
    (replay, keeper), plan = make_memory(start), host.plan
    roster = Roster(host.part_of("roster"), plan.actors, replay.store.header_rows)
    mailbox = Mailbox(host.part_of("parameters"), plan.parameter_bytes)
    server = LinkServer(
        listen(
            membership.url, security_of(membership), run.form.largest_request_bytes,
            fstack=membership.fstack,
        ),
        run.form, run.settings_at(membership.shard), roster, incarnation=start.incarnation,
        params_version=lambda: mailbox.version, takes_learner=not run.part.learns,
        memory_bytes=membership.network_memory_bytes, tell=start.notices.tell,
    )  # fmt: skip
    ends: list[End] = [ZmqParameters(server, mailbox), StatsHandler(server, host)]
    chores: list[Callable[[], object]] = []
    sink: SampleSink
    if run.part.learns:
        sink, endings = host.sample_sink(), host.ring("endings").consumer()

        def look_for_ending() -> None:
            for record in endings.take(1):
                server.over = bytes(record["text"]).decode()

        chores.append(look_for_ending)
    else:
        sink = ZmqSampleSink(server, replay.store)
        ends.append(sink)
    source = ZmqExperienceSource(server, replay.store, ends)
    role = make_replay(start, replay, source, sink)
    chores += [_PeerNews(server, start.notices), keeper.do_work]

    def leave() -> None:
        server.close()
        keeper.close()

    return LinkedRole(role, chores, leave, server.listener.fds, save=keeper.close)
