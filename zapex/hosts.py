"""The roles of a run on several hosts: the same ones, with the network's faces in their hands."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zapex.cluster_stats import SILENT_S, StatsDesk, StatsReader, StatsSender
from zapex.curve_keys import KEY_OF
from zapex.errors import Fenced, PeerTimeout, Refused, RunOver
from zapex.host_plan import FENCED, NEWS, NOTICE, OVER, REFUSED
from zapex.message_header import Form
from zapex.messages import LEARNER, Bye, Welcome
from zapex.metrics import EPISODE, RoleMetrics
from zapex.roster import Roster
from zapex.run import Clock, DutyCycle, Place, Run
from zapex.shm_mailbox import Mailbox
from zapex.shm_transport import Host, ShmParameters
from zapex.topology import make_learner, make_memory, make_replay
from zapex.zmq_client import ZmqLink
from zapex.zmq_replay import ZmqExperienceSource, ZmqParameters, ZmqSampleSink
from zapex.zmq_samples import ZmqSampleSource
from zapex.zmq_server import ZmqServer
from zapex.zmq_socket import Security
from zapex.zmq_transport import (
    ChunkSender,
    ZmqParameterSink,
    ZmqParameterSource,
)

_NEWS_PERIOD_S = 30.0  # between two reminders of the same trouble
_LOOK_S = 0.5
_FAREWELL_S = 6.0  # relays hear with their next hello that the run is over, and send the rest
_OPEN_S = 5.0


def form_of(run: Run) -> Form:
    """What messages of this run look like."""
    plan = run.plan
    return Form(
        plan.replay.chunk_layout,
        plan.batch_size,
        plan.parameter_bytes,
        RoleMetrics.required_bytes(),
        EPISODE.itemsize,
    )


def security_of(place: Place) -> Security:
    """How far this host trusts the network. Raises ConfigError."""
    return Security.load(place.keys, KEY_OF[place.part], place.insecure_network)


class Notices:
    """What the user should know, from a role to its parent."""

    def __init__(self, host: Host) -> None:
        self._ring = host.ring("notices").producer()

    def tell(self, text: str, kind: int = NEWS) -> None:
        """One line; lost where the parent has not read for long."""
        record = np.zeros(1, NOTICE)
        record["kind"], record["text"] = kind, text.encode()[: NOTICE["text"].itemsize]
        self._ring.try_offer(record)

    def verdict(self, error: RunOver | Fenced | Refused) -> None:
        """Why this role ends."""
        kinds = {RunOver: OVER, Fenced: FENCED, Refused: REFUSED}
        self.tell(str(error), kinds[type(error)])


@dataclass
class Networked:
    """A role whose link needs looking after, and what its process waits on."""

    role: DutyCycle
    chores: Sequence[Callable[[], object]]
    hang_up: Callable[[], object]
    fds: Sequence[int]
    save: Callable[[], object] = lambda: None  # where the replay wants this host no more

    def do_work(self) -> int:
        """The role's duty cycle, and the link's chores."""
        work = self.role.do_work()
        for chore in self.chores:
            chore()
        return work

    def ready(self) -> bool:
        """The role has something to do."""
        return self.role.ready()

    def close(self) -> None:
        """The role saves what it has, then the link says goodbye."""
        self.role.close()
        self.hang_up()


class _LinkWatch:
    """Says whom this host waits for and since when, when that is over, and when the run is."""

    def __init__(self, link: ZmqLink, notices: Notices) -> None:
        self._link, self._notices = link, notices
        self._said = ""
        self._since_s = self._due_s = 0.0
        self._told = False

    def __call__(self) -> None:
        if self._link.over and not self._told:
            # The parent ends this role in good order: what is committed still arrives.
            self._told = True
            self._notices.tell(self._link.over, OVER)
        waiting, now_s = self._link.waiting, time.monotonic()
        if waiting and (not self._said or now_s >= self._due_s):
            self._since_s = self._since_s if self._said else now_s - self._link.silent_s
            self._due_s = now_s + _NEWS_PERIOD_S
            self._notices.tell(waiting)
        elif self._said and not waiting:
            self._notices.tell(f"the replay answers again, after {now_s - self._since_s:.0f} s")
        self._said = waiting


def _open(link: ZmqLink, watch: _LinkWatch) -> None:
    """Wait for the replay as long as it takes: SIGTERM ends it, and the user is told."""
    while True:
        try:
            link.open(_OPEN_S)
            return
        except PeerTimeout:
            watch()


def _make_link(run: Run, place: Place, role: str, incarnation: int, actors: int = 0) -> ZmqLink:
    form = form_of(run)
    return ZmqLink(
        place.url, role, place.host, incarnation, form, run.config.shared(), security_of(place),
        schema_hash=form.schema.hash, actors=actors,
    )  # fmt: skip


# An actor host.


def make_relay(run: Run, place: Place, host: Host, incarnation: int) -> Networked:
    """The relay; what a former life was about to send lies in the slots."""
    from zapex.intake import Intake
    from zapex.roles.relay import Outbox, Relay

    plan, notices = host.plan, Notices(host)
    link = _make_link(run, place, "relay", incarnation, plan.actors)

    def check(welcome: Welcome, channel: int) -> None:
        numbers = tuple(welcome.actors["actor"].tolist())
        if welcome.epoch != place.epoch:
            raise Fenced("the replay began anew, with an empty memory")
        if numbers != place.numbers:
            raise Fenced(f"actors {place.numbers} of this host were given to another meanwhile")

    link.on_welcome.append(check)
    store, source = host.store(), host.experience_source()
    outbox = Outbox(store, plan.replay, ChunkSender(link, store))
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
        consumer = finished[place.numbers.index(number)]
        records = consumer.take(consumer.ring.capacity)
        if len(records):
            episodes.try_offer(records)
        return records

    blocks = {n: host.metrics(f"actor {i}") for i, n in enumerate(place.numbers)}
    role = Relay(
        intake,
        outbox,
        source,
        ZmqParameterSource(link),
        host.parameter_sink(),
        host.metrics("relay"),
        parameter_bytes=plan.parameter_bytes,
        link_ready=link.ready,
        report=StatsSender(link, blocks, take_finished).do_work,
        ended=lambda: not any(host.life(f"actor {i}") for i in range(plan.actors)),
    )
    chores = [_LinkWatch(link, notices)]
    return Networked(role, chores, lambda: link.close(bye=Bye()), link.fds)


# The learner's host.


class BothSinks:
    """Parameters for this host's evaluator, and for everybody else."""

    def __init__(self, here: ShmParameters, there: ZmqParameterSink) -> None:
        self._here, self._there = here, there

    @property
    def version(self) -> int:
        """The largest version published by any life of the learner, on any host; 0: none."""
        return max(self._here.version, self._there.version)

    def publish(self, version: int, parameters: NDArray[np.uint8]) -> None:
        """Make these the newest."""
        self._here.publish(version, parameters)
        self._there.publish(version, parameters)


def make_learner_there(
    run: Run,
    place: Place,
    host: Host,
    incarnation: int,
    clock: Clock,
    totals: Callable[[], dict[str, float]],
) -> Networked:
    """The learner; it begins when the replay has answered, for the newest version's number."""
    link = _make_link(run, place, "learner", incarnation)
    watch = _LinkWatch(link, Notices(host))
    source, sink = ZmqSampleSource(link, host.plan.beta), ZmqParameterSink(link)
    StatsReader(link, host)
    sender = StatsSender(link, {LEARNER: host.metrics("learner")})
    _open(link, watch)
    role = make_learner(run, host, clock, totals, source, BothSinks(host.parameter_sink(), sink))
    chores: list[Callable[[], object]] = [link.do_work, sender.do_work, watch]
    return Networked(role, chores, lambda: link.close(bye=Bye()), link.fds, save=role.close)


# The replay's host.


class _Attendance:
    """Says who came and who left; ends the role when the run is over and everybody knows."""

    def __init__(self, server: ZmqServer, notices: Notices) -> None:
        self._server, self._notices = server, notices
        self._there: dict[tuple[str, int], str] = {}
        self._due_s = 0.0
        self._over_s: float | None = None
        notices.tell(f"listening at {server.url}; waiting for actors and a learner")

    def __call__(self) -> None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _LOOK_S
        there = {
            (s.role, s.host): _who(s.role, s.actors)
            for s in self._server.sessions("relay", "learner")
            if now_s - s.heard_s < SILENT_S
        }
        for place, who in there.items():
            if self._there.get(place) != who:
                self._notices.tell(f"{who} joined")
        for place, who in self._there.items():
            if place not in there:
                rest = sorted(there.values())
                self._notices.tell(f"{who} left; {', '.join(rest) or 'nobody'} there")
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


def make_replay_there(run: Run, place: Place, host: Host, incarnation: int) -> Networked:
    """The replay server behind a socket; it goes on with whatever the memory holds."""
    replay = make_memory(run, host)
    plan = host.plan
    roster = Roster(host.part_of("roster"), plan.actors, replay.store.header_rows)
    mailbox = Mailbox(host.part_of("parameters"), plan.parameter_bytes)
    server = ZmqServer(
        place.url, form_of(run), run.config.shared(), roster, security_of(place),
        incarnation=incarnation, params_version=lambda: mailbox.version,
        memory_bytes=place.network_memory_bytes,
    )  # fmt: skip
    source = ZmqExperienceSource(server, replay.store)
    sink = ZmqSampleSink(server, replay.store)
    ZmqParameters(server, mailbox)
    StatsDesk(server, host)
    role = make_replay(run, host, replay, source, sink)
    return Networked(role, [_Attendance(server, Notices(host))], server.close, server.fds)


def make_networked(
    name: str,
    run: Run,
    host: Host,
    incarnation: int,
    clock: Clock,
    totals: Callable[[], dict[str, float]],
) -> Networked:
    """The role of this host that has a link, or the socket that the links lead to."""
    assert run.place is not None
    if name == "relay":
        return make_relay(run, run.place, host, incarnation)
    if name == "replay":
        return make_replay_there(run, run.place, host, incarnation)
    return make_learner_there(run, run.place, host, incarnation, clock, totals)
