"""A run on several hosts: how a host joins it, and the roles with links to other hosts.

The roles are those of a run on one host; only their links are over ZeroMQ.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.errors import ConfigError, Fenced, PeerError, PeerTimeout, Refused, RunOver
from zapex.host.metrics import RoleMetrics
from zapex.host.parts import PARTS
from zapex.host.plan import OVER
from zapex.host.roster import Roster, Routes
from zapex.machine.child import DutyCycle
from zapex.machine.mailbox import Mailbox
from zapex.net import addresses
from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.net.replay_ends import ZmqExperienceSource, ZmqParameters, ZmqSampleSink
from zapex.net.sample_source import ZmqSampleSource
from zapex.net.server import End, LinkServer
from zapex.net.shard_samples import ShardedSampleSource
from zapex.net.sockets import listen
from zapex.net.statistics import SILENT_S, StatsHandler, StatsReader, StatsSender
from zapex.replay.shards import Shares
from zapex.roles.intake import Intake
from zapex.roles.relay import Outbox, Relay
from zapex.roles.replay_server import ReplayServer
from zapex.run import directory, preflight
from zapex.run.keeping import Keeper
from zapex.run.parent import run_processes
from zapex.run.run import NOT_ACTORS, Membership, Run
from zapex.run.topologies import (
    Attended,
    KeptReplay,
    Notices,
    Start,
    make_learner,
    make_memory,
    make_replay,
)
from zapex.shm_transport import HostMemory
from zapex.transport import ChunkLink, ParameterSink, SampleSink, SampleSource
from zapex.wire.messages import LEARNER, Bye, Welcome
from zapex.zmq_transport import (
    ChunkSender,
    ShardedChunkSender,
    ZmqParameterSink,
    ZmqParameterSource,
)

_FIRST_NEWS_S = 3.0  # until the first message about what this host waits for
_BYE_S = 5.0
_PROBE_S = 1.0
_NEWS_PERIOD_S = 30.0  # between two reminders of the same problem
_LOOK_S = 0.5
_FAREWELL_S = 6.0  # relays learn with their next hello that the run is over, and send the rest
_OPEN_S = 5.0


def security_of(membership: Membership) -> Security:
    """How far this host trusts the network. Raises ConfigError."""
    key = PARTS[membership.part].linked or ""
    return Security.load(membership.keys, key, membership.insecure_network)


class LinkWatch:
    """Reports what this host waits for and since when, when that ends, and when the run ends."""

    def __init__(self, link: ZmqLink, notices: Notices, peer: str = "the replay") -> None:
        self._link, self._notices, self._peer = link, notices, peer
        self._reported = ""
        self._since_s = self._due_s = 0.0
        self._over = False

    def do_work(self) -> None:
        """Report what is new."""
        if self._link.over and not self._over:
            # The parent ends this role in order, so what is committed still arrives.
            self._over = True
            self._notices.send(self._link.over, OVER)
        waiting, now_s = self._link.waiting, time.monotonic()
        if waiting and (not self._reported or now_s >= self._due_s):
            self._since_s = self._since_s if self._reported else now_s - self._link.silent_s
            self._due_s = now_s + _NEWS_PERIOD_S
            self._notices.send(waiting)
        elif self._reported and not waiting:
            waited_s = now_s - self._since_s
            self._notices.send(f"{self._peer} answers again, after {waited_s:.0f} s")
        self._reported = waiting


class LinkedRole(Attended):
    """A relay or learner, with its links to the replay or to all shards.

    Args:
        role: the role.
        links: shard 0's first.
        chores: called after each duty cycle.
        saves: whether the role has something to save when the run is over.
    """

    def __init__(
        self,
        role: DutyCycle,
        links: Sequence[ZmqLink],
        chores: Sequence[Callable[[], object]],
        *,
        saves: bool,
    ) -> None:
        self._role, self._links, self._chores, self._saves = role, links, chores, saves
        self.fds = [fd for link in links for fd in link.fds]

    def do_work(self) -> int:
        """One duty cycle of the role; then the chores."""
        work = self._role.do_work()
        for chore in self._chores:
            chore()
        return work

    def ready(self) -> bool:
        """Whether the role has something to do."""
        return self._role.ready()

    def close(self) -> None:
        """Close the role, which saves what it has; then leave the run."""
        self._role.close()
        self._say_bye()

    def leave(self) -> None:
        """Save a learner's checkpoint, and free this host's actor numbers: it will not return."""
        if self._saves:
            self._role.close()
        self._say_bye()

    def _say_bye(self) -> None:
        for link in self._links:
            link.close(bye=Bye())


def _make_links(
    start: Start, actors: int = 0, epochs: Sequence[int] = ()
) -> tuple[list[ZmqLink], list[LinkWatch]]:
    """A link to each shard of the run, shard 0 first, and what reports about it."""
    run, form = start.run, start.run.form
    membership = _membership(run)
    security = security_of(membership)
    links = [
        ZmqLink(
            url,
            start.name,
            membership.host,
            start.incarnation,
            form,
            run.settings_at(shard),
            security,
            schema_hash=form.schema.hash,
            actors=actors,
            compressed=membership.compress,
            epoch=epochs[shard] if epochs else 0,
        )
        for shard, url in enumerate(membership.all_urls)
    ]
    peers = ["the replay"] if len(links) == 1 else [f"shard {i}" for i in range(len(links))]
    pairs = zip(links, peers, strict=True)
    return links, [LinkWatch(link, start.notices, peer) for link, peer in pairs]


def _membership(run: Run) -> Membership:
    assert run.membership is not None, "a role with a link belongs to a run on several hosts"
    return run.membership


# An actor host.


def make_relay(start: Start) -> LinkedRole:
    """Make the relay. What a former incarnation did not send is in the slots."""
    run, host, membership = start.run, start.host, _membership(start.run)
    plan, store, source = host.plan, host.store(), host.experience_source()
    routes = Routes(host.part_of("routes"), plan.actors)
    epochs = membership.epoch, *routes.epochs[1:]
    links, watches = _make_links(start, plan.actors, epochs)
    link = links[0]

    def check(welcome: Welcome, channel: int) -> None:
        if welcome.epoch != membership.epoch:
            raise Fenced("the replay was restarted with a new memory")

    link.register(on_welcome=check)
    sender: ChunkLink
    if len(links) == 1:
        sender = ChunkSender(link, store)
    else:
        sender = ShardedChunkSender(links, store, routes, membership.numbers, start.notices.send)
    outbox = Outbox(store, plan.replay, sender)
    intake = Intake(
        source,
        outbox,
        run.relay_limiter,
        streams_per_actor=plan.envs_per_actor,
    )
    blocks = {n: host.metrics(f"actor {i}") for i, n in enumerate(membership.numbers)}
    relay = Relay(
        intake,
        outbox,
        source,
        ZmqParameterSource(link),
        host.mailbox(),
        host.metrics("relay"),
        parameter_bytes=plan.parameter_bytes,
        link_ready=lambda: any(one.ready() for one in links),
        report=StatsSender(link, blocks, _take_finished(host, membership)).do_work,
        ended=lambda: not any(host.incarnation(f"actor {i}") for i in range(plan.actors)),
    )
    return LinkedRole(relay, links, [watch.do_work for watch in watches], saves=False)


def _take_finished(host: HostMemory, membership: Membership) -> Callable[[int], NDArray[np.void]]:
    """What takes an actor's finished episodes for the replay, and shows them to the parent."""
    finished = [host.ring(f"episodes {i}").consumer() for i in range(host.plan.actors)]
    episodes = host.ring("episodes").producer()

    def take(number: int) -> NDArray[np.void]:
        consumer = finished[membership.numbers.index(number)]
        records = consumer.take(consumer.ring.capacity)
        if len(records):
            episodes.try_offer(records)
        return records

    return take


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


def make_learner_host(start: Start) -> LinkedRole:
    """Make the learner, once the replay has answered with the newest version's number."""
    host, metrics = start.host, start.host.metrics("learner")
    links, watches = _make_links(start)
    link = links[0]
    source = _sample_source(start, links)
    sink = ZmqParameterSink(link)
    StatsReader(link, host)
    sender = StatsSender(link, {LEARNER: metrics})
    while not link.is_open:  # without a time limit: the user is informed, and SIGTERM ends it
        try:
            link.open(_OPEN_S)
        except PeerTimeout:
            watches[0].do_work()
    learner = make_learner(start, BothSinks(host.mailbox(), sink), source)
    chores: list[Callable[[], object]] = [link.do_work for link in links]
    chores += [sender.do_work, *(watch.do_work for watch in watches)]
    if isinstance(source, ShardedSampleSource):
        metrics.set("shards", len(links))
        chores.append(partial(count_shares, source.shares, metrics))
    return LinkedRole(learner, links, chores, saves=True)


def count_shares(shares: Shares, metrics: RoleMetrics) -> None:
    """Count the shards without a share in the batches, and how often one left and came back."""
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
    return ShardedSampleSource(sources, beta, method, seed, start.notices.send)


# The replay's host.


class PeerNews:
    """Reports which hosts join and leave; ends the role when the run is over and all know it."""

    def __init__(self, server: LinkServer, notices: Notices) -> None:
        self._server, self._notices = server, notices
        self._there: dict[tuple[str, int], str] = {}
        self._due_s = 0.0
        self._over_s: float | None = None
        missing = "actors and a learner" if server.sessions.takes_learner else "actors"
        notices.send(f"listening at {server.url}; waiting for {missing}")

    def do_work(self) -> None:
        """Report what is new. Raises RunOver once all hosts have left a run that is over."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _LOOK_S
        heard = [
            session
            for session in self._server.sessions.of_roles("relay", "learner")
            if now_s - session.heard_s < SILENT_S
        ]
        there = {(s.role, s.host): _describe(s.role, s.actors) for s in heard}
        for s in heard:
            peer = there[s.role, s.host]
            if self._there.get((s.role, s.host)) != peer:
                self._notices.send(f"{peer} joined from {s.address or 'this machine'}")
        for key, peer in self._there.items():
            if key not in there:
                rest = ", ".join(sorted(there.values())) or "none"
                self._notices.send(f"{peer} left; still connected: {rest}")
        self._there = there
        if not self._server.over:
            self._over_s = None
            return
        self._over_s = self._over_s or now_s
        if now_s - self._over_s > _FAREWELL_S or not there:
            raise RunOver(self._server.over)


def _describe(role: str, actors: Sequence[int]) -> str:
    if role == "learner":
        return "the learner"
    if not actors:
        return "a host that waits for actors to be free (or for a larger --actors here)"
    if len(actors) == 1:
        return f"a host with actor {actors[0]}"
    whole = len(actors) == actors[-1] - actors[0] + 1
    names = f"{actors[0]} to {actors[-1]}" if whole else ", ".join(map(str, actors))
    return f"a host with actors {names}"


class ReplayHost(KeptReplay):
    """The replay server, its keeper, and the socket that other hosts connect to."""

    def __init__(
        self, role: ReplayServer, keeper: Keeper, server: LinkServer, start: Start
    ) -> None:
        super().__init__(role, keeper)
        self._server, self._news = server, PeerNews(server, start.notices)
        self.fds = server.listener.fds
        # With the learner on this host, the parent ends the run, and other hosts learn it here.
        learns = start.run.part.learns
        self._endings = start.host.ring("endings").consumer() if learns else None

    def do_work(self) -> int:
        """One duty cycle; then report joins and leaves, and save if it is time."""
        work = super().do_work()
        if self._endings is not None:
            for record in self._endings.take(1):
                self._server.over = bytes(record["text"]).decode()
        self._news.do_work()
        return work

    def close(self) -> None:
        """Stop, close the socket, and save the memory if the run does that."""
        self._role.close()
        self._server.close()
        self._keeper.close()


def make_replay_host(start: Start) -> ReplayHost:
    """Make the replay server with a socket; it continues with what the memory holds."""
    run, host, membership = start.run, start.host, _membership(start.run)
    (replay, keeper), plan = make_memory(start), host.plan
    roster = Roster(host.part_of("roster"), plan.actors, replay.store.header_rows)
    mailbox = Mailbox(host.part_of("parameters"), plan.parameter_bytes)
    listener = listen(
        membership.url,
        security_of(membership),
        run.form.largest_request_bytes,
        fstack=membership.fstack,
    )
    server = LinkServer(
        listener,
        run.form,
        run.settings_at(membership.shard),
        roster,
        incarnation=start.incarnation,
        params_version=lambda: mailbox.version,
        takes_learner=not run.part.learns,
        memory_bytes=membership.network_memory_bytes,
        tell=start.notices.send,
    )
    ends: list[End] = [ZmqParameters(server, mailbox), StatsHandler(server, host)]
    sink: SampleSink
    if run.part.learns:
        sink = host.sample_sink()
    else:
        sink = ZmqSampleSink(server, replay.store)
        ends.append(sink)
    source = ZmqExperienceSource(server, replay.store, ends)
    return ReplayHost(make_replay(start, replay, source, sink), keeper, server, start)


# The parent on each host.


@preflight.limits_explained()
def run_part(config: Config, spec: EnvironmentSpec, membership: Membership, wrap: str = "") -> int:
    """Run this host's part until it is stopped or the run is over. Returns the exit code.

    The replay's host owns the memory and serves it. An actor host plays. If the replay was
    restarted with a new memory, or has given this host's actor numbers to another host, it joins
    again as a new host. The learner's host trains until a limit is reached, which ends the whole
    run. wrap: as in Run.
    """
    resume = config.run.resume
    run = Run(config, spec, Path(resume or config.run.run_dir), membership=membership, wrap=wrap)
    joins = not run.part.listens
    if joins and not resume:  # a refused host leaves no directory
        run = _joined(run)
    with directory.opened(run) as (opened, base):
        run = _joined(opened) if joins and resume else opened
        ending = run_processes(run, base)
        try:
            while ending.again:
                run = _joined(run)
                ending = run_processes(run, base)
        except KeyboardInterrupt:
            print("stopped while this host was joining again")
            return 0  # only actors join again, and they have nothing to save
    if ending.over and joins:
        _end_all_hosts(run, ending.reason)
    return int(ending.failed)


def _end_all_hosts(run: Run, reason: str) -> None:
    """End all hosts. The parent sends this, because its learner may be dead at that moment."""
    assert run.membership is not None
    for shard in range(run.membership.shards):
        link = _link_to_join(run, run.membership, shard)
        try:
            link.open(_BYE_S)
        except PeerError:
            print(f"the replay at {link.url} does not answer and may run on: stop it there")
            link.close()
        else:
            link.close(bye=Bye(over=reason))


def _joined(run: Run) -> Run:
    """The run, with what the replay says about it: numbers, chunk length, epoch.

    Waits for the replay without a limit, and says so; ends at once if the replay refuses.
    Raises ConfigError.
    """
    membership = run.membership
    assert membership is not None
    membership = replace(membership, host=secrets.randbits(62) + 1)
    link = _link_to_join(run, membership)
    try:
        welcome = _welcome(link, bool(membership.keys))
    except Fenced as error:
        raise ConfigError(f"{error}: is its clock ahead of this one's?") from None
    except Refused as error:
        raise ConfigError(str(error)) from None
    except RunOver as error:
        raise ConfigError(f"the run at {membership.url} is over: {error}") from None
    finally:
        link.close()
    return replace(
        run,
        membership=replace(
            membership,
            numbers=tuple(welcome.actors["actor"].tolist()),
            total_actors=welcome.total_actors,
            chunk=welcome.chunk,
            epoch=welcome.epoch,
        ),
    )


def _link_to_join(run: Run, membership: Membership, shard: int = 0) -> ZmqLink:
    """A link to ask about the run, or to end it. Shard 0 knows the run."""
    schema = run.spec.schema(run.config.replay.n_step, run.config.replay.gamma)
    return ZmqLink(
        membership.all_urls[shard],
        run.part.linked or "",
        membership.host,
        time.time_ns(),
        None,
        replace(run, membership=membership).settings_at(shard),
        security_of(membership),
        schema_hash=schema.hash,
        actors=run.config.actor.actors if "actor" in run.part.roles else int(membership.take_over),
    )


def _welcome(link: ZmqLink, encrypted: bool) -> Welcome:
    """The replay's first answer, without a time limit."""
    began_s, due_s = time.monotonic(), _FIRST_NEWS_S
    while True:
        try:
            return link.open(1.0)
        except PeerTimeout:
            waited_s = time.monotonic() - began_s
            if waited_s >= due_s:
                due_s = waited_s + _NEWS_PERIOD_S
                waiting = link.waiting or f"waiting for the replay at {link.url}"
                silent = link.silent_s >= _FIRST_NEWS_S  # otherwise the link has said what is wrong
                why = f": {_why(link.url, encrypted)}" if silent else ""
                print(waiting + why, flush=True)


def _why(url: str, encrypted: bool) -> str:
    """What is there instead of an answer."""
    try:
        found = addresses.mechanism(addresses.parse(url, "--replay"), _PROBE_S)
    except ConnectionError as error:
        return f"{error}; is `zapex replay` started there?"
    if encrypted != (found == "CURVE"):
        return "it has no keys: leave --keys out" if encrypted else "it has keys: give --keys DIR"
    return "a process listens there and does not answer yet: it may be starting" + (
        ", or its keys are of another `zapex keygen`" if encrypted else ""
    )
