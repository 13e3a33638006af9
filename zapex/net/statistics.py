"""Statistics between the hosts of a run: every role's metrics and finished episodes, each second.

A relay sends its actors' statistics, and the learner sends its own. The replay keeps all of them
and sends them to the learner. So the replay's parent and the learner's parent see the whole run.
The counts of an actor number continue when another host takes the number over.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.limits import Limits
from zapex.errors import SharedMemoryError
from zapex.host.metrics import EPISODE, TABLES, RoleMetrics
from zapex.host.plan import HostPlan
from zapex.net.link import ZmqLink
from zapex.net.server import LinkServer
from zapex.net.sessions import Session
from zapex.shm_transport import HostMemory
from zapex.wire.control import LEARNER, MAX_EPISODES, REPLAY, SMALL, Stats, Welcome
from zapex.wire.header import Kind, as_buffer

PERIOD_S = 1.0
_SLACK_S = 10.0  # of the times of phases
SILENT_S = 10.0  # a host that is silent for this long counts as gone
_AT_MOST = 32  # messages at once: half of a connection's queue, and other work must not wait
_WAITING = 64  # messages of episodes kept while no learner is connected
_NO_EPISODES = np.empty(0, EPISODE)


def _now(number: int, block: RoleMetrics, episodes: NDArray[np.void] = _NO_EPISODES) -> Stats:
    """A message with a copy of the block as it is now."""
    parts = as_buffer(block.as_bytes()), as_buffer(episodes.tobytes())
    return Stats(number, time.perf_counter_ns(), *parts)


class _Round:
    """Every role once per second, and at most as many at once as a connection accepts."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s, self._due_s = clock_s, 0.0
        self._left: deque[int] = deque()

    def begin_anew(self) -> None:
        """Drop what is left of a round; a new one is due now."""
        self._left.clear()
        self._due_s = 0.0

    def go_on(self, numbers: Iterable[int], send: Callable[[int], bool]) -> int:
        """Send what is due, in order, as far as possible now. Returns how many."""
        now_s = self._clock_s()
        if not self._left:
            if now_s < self._due_s:
                return 0
            self._due_s = now_s + PERIOD_S
            self._left.extend(numbers)
        sent = 0
        while self._left and sent < _AT_MOST and send(self._left[0]):
            self._left.popleft()
            sent += 1
        return sent


class StatsLink(Protocol):
    """What carries statistics."""

    def send(self, channel: int, message: Stats) -> object | None:
        """Send without waiting; None: not now."""


class StatsSender:
    """Sends this host's blocks, by their numbers in the run, and its actors' episodes."""

    def __init__(
        self,
        link: StatsLink,
        blocks: Mapping[int, RoleMetrics],
        episodes: Callable[[int], NDArray[np.void]] = lambda number: _NO_EPISODES,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """episodes: returns what an actor (by its number) has finished since the last call."""
        self._link, self._blocks, self._episodes = link, blocks, episodes
        self._round = _Round(clock_s)
        self._kept: dict[int, NDArray[np.void]] = {}

    def do_work(self) -> int:
        """Send what is due. Returns how many messages."""
        return self._round.go_on(self._blocks, self._send)

    def _send(self, number: int) -> bool:
        kept = self._kept.pop(number, _NO_EPISODES)
        finished = np.concatenate([kept, self._episodes(number)])[-MAX_EPISODES:]
        if self._link.send(SMALL, _now(number, self._blocks[number], finished)) is not None:
            return True
        self._kept[number] = finished
        return False


class _Taken(NamedTuple):
    """What was added, the largest rest that was not, and the episodes that came."""

    added: dict[str, int]
    left: int
    episodes: NDArray[np.void]


class RemoteRole:
    """One role of another host, as this host knows it."""

    def __init__(self, host: HostMemory, name: str) -> None:
        self.block = host.metrics(name)
        self._last = host.part_of(f"last metrics {name}")
        names = [known for known, _ in host.plan.elsewhere]
        self._sources = host.part_of("sources").view(np.int64)
        self._index = names.index(name)

    @property
    def known(self) -> bool:
        """Whether statistics of the role have come."""
        return bool(self._sources[self._index])

    def take(
        self,
        stats: Stats,
        source: int,
        *,
        from_now: bool = False,
        most: Mapping[str, int] | None = None,
    ) -> "_Taken | None":
        """Add the new counts. Returns None for an invalid block.

        source: the number of the counting process; another process started its counts at zero.
        from_now: counts from before the first message do not belong to this run. most: as
        `RoleMetrics.take_over` takes it. The episodes' times are of this host's clock.
        """
        clock_ns = time.perf_counter_ns() - stats.time_ns
        known = int(self._sources[self._index])
        if from_now and known == 0:
            self._last[:] = np.frombuffer(stats.metrics, np.uint8)
            known = source
        try:
            added, left = self.block.take_over(
                stats.metrics, self._last, fresh=known != source, clock_ns=clock_ns, most=most
            )
        except SharedMemoryError:
            return None
        self._sources[self._index] = source
        records = np.frombuffer(stats.episodes, EPISODE).copy()
        records["time_ns"] += clock_ns
        return _Taken(added, left, records)


def remote_roles(host: HostMemory) -> dict[int, RemoteRole]:
    """The roles of other hosts that this host knows, by their numbers in messages."""
    numbers = {f"actor {i}": i for i in range(host.plan.actors)}
    numbers |= {"learner": LEARNER, "replay": REPLAY}
    return {numbers[name]: RemoteRole(host, name) for name, _ in host.plan.elsewhere}


class _Account:
    """What one actor's statistics can be: no more than its chunks show, and the time that passed.

    An actor has made at most the steps whose transitions have come, and those of its host's slots.
    So counts that no run reaches do not count. A new server starts the account anew.
    """

    def __init__(self, plan: HostPlan, limits: Limits, actor: int, clock_s: float) -> None:
        streams, schema = plan.envs_per_actor, plan.replay.schema
        # Four slots of each stream on the actor's host (Run.plan), and steps that are not in one.
        self._ahead = streams * (4 * plan.replay.chunk + schema.n_step) + 8 * plan.replay.chunk
        self._frames_per_step, self._started_s = limits.frames_per_step, clock_s
        self._streams = range(actor * streams, (actor + 1) * streams)
        self._added: Counter[str] = Counter()

    def most(self, transitions: int, now_s: float) -> dict[str, int]:
        """How much may be added, by name. transitions: that have come from the actor."""
        steps = self._ahead + transitions
        passed_ns = int((now_s - self._started_s + _SLACK_S) * 1e9)
        table = TABLES["actor"]
        most = dict.fromkeys(table.counters, steps) | {"frames": self.reach(transitions)}
        for phase in table.phases:
            most[f"phase/{phase}"] = most[f"cpu/{phase}"] = passed_ns
        return {name: n - self._added[name] for name, n in most.items()}

    def reach(self, transitions: int) -> int:
        """The largest number of frames that the actor can have played."""
        return (self._ahead + transitions) * self._frames_per_step

    def add(self, added: Mapping[str, int]) -> None:
        """Some were added."""
        self._added.update(added)

    def possible(self, records: NDArray[np.void]) -> NDArray[np.void]:
        """The episodes that the actor can have finished."""
        steps = self._added["steps"] + self._ahead
        whole = np.isin(records["stream"], self._streams) & np.isfinite(records["game_return"])
        whole &= (records["epsilon"] >= 0) & (records["epsilon"] <= 1)
        whole &= (records["steps"] >= 1) & (records["steps"] <= steps)
        whole &= (records["frames"] >= 0) & (records["params_version"] >= 0)
        whole &= records["frames"] <= steps * self._frames_per_step
        left = self._added["episodes"] + MAX_EPISODES - self._added["records"]
        found: NDArray[np.void] = records[whole][: max(0, left)]
        self._added["records"] += len(found)
        return found


class StatsHandler:
    """The replay's handler of statistics: keeps them, and sends them on to the learner."""

    def __init__(
        self, server: LinkServer, host: HostMemory, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._server, self._clock_s = server, clock_s
        limits, now_s = server.form.limits, clock_s()
        self._accounts = [_Account(host.plan, limits, i, now_s) for i in range(host.plan.actors)]
        self._own = host.metrics("replay")
        self._roles = remote_roles(host)
        self._numbers = [*range(host.plan.actors), REPLAY]
        self._episodes = host.ring("episodes").producer()
        self._waiting: deque[NDArray[np.void]] = deque(maxlen=_WAITING)
        self._round = _Round(clock_s)
        self._reader: Session | None = None
        self.counts = {"foreign": 0}
        server.handlers[Kind.STATS] = self._take
        server.chores.append(self.do_work)

    def _take(self, session: Session, stats: Stats) -> None:
        number = stats.number
        if number == LEARNER and session.role == "learner":
            taken = self._roles[LEARNER].take(stats, session.host)
        elif number in session.actors:
            taken = self._take_actor(session, stats)
        else:
            taken = None
        if taken is None:
            self.counts["foreign"] += 1
            self._server.refuse(session, f"statistics that are not of its role, number {number}")
        elif len(taken.episodes):
            self._episodes.try_offer(taken.episodes)  # dropped if the parent is slow
            self._waiting.append(taken.episodes)

    def _take_actor(self, session: Session, stats: Stats) -> _Taken | None:
        """The statistics of an actor, as far as they can be."""
        account, transitions = self._accounts[stats.number], self._server.transitions(stats.number)
        most = account.most(transitions, self._clock_s())
        taken = self._roles[stats.number].take(stats, session.host, most=most)
        if taken is None:
            return None
        account.add(taken.added)
        if taken.left > account.reach(transitions):
            self._server.refuse(session, f"counts that actor {stats.number} cannot have reached")
        possible = account.possible(taken.episodes)
        if len(possible) < len(taken.episodes):
            self._server.refuse(session, f"episodes that actor {stats.number} cannot have played")
        possible["time_ns"] = np.minimum(possible["time_ns"], time.perf_counter_ns())
        return taken._replace(episodes=possible)

    def do_work(self) -> int:
        """Once per second: mark gone hosts, send all to the learner. Returns how many messages."""
        return self._round.go_on(self._numbers, self._send)

    def _send(self, number: int) -> bool:
        learner = next(self._server.sessions.of_roles("learner"), None)
        if learner is not self._reader:
            self._reader = learner
            self._round.begin_anew()  # it must get the replay's own last
            return False
        if learner is None or self._is_silent(learner):
            if LEARNER in self._roles:  # else it is on this host
                self._roles[LEARNER].block.is_gone()
            learner = None
        if number == REPLAY:
            # The replay's own is the last of a round: then the reader knows all roles that began.
            records = self._waiting[0] if self._waiting else _NO_EPISODES
            if learner is None or not self._offer(learner, _now(REPLAY, self._own, records)):
                return learner is None
            if self._waiting:
                self._waiting.popleft()
            return not self._waiting
        block = self._roles[number].block
        session = self._server.sessions.of_actor(number)
        if session is None or self._is_silent(session):
            block.is_gone()
        begun = learner is not None and block.heartbeat_ns > 0
        return not begun or self._offer(learner, _now(number, block))

    def _is_silent(self, session: Session) -> bool:
        return self._clock_s() - session.heard_s > SILENT_S

    def _offer(self, learner: Session | None, stats: Stats) -> bool:
        return learner is not None and self._server.send(learner, SMALL, stats) is not None


class StatsReader:
    """The learner's end: puts the whole run's statistics into this host's memory.

    Counts from before this learner's parent started do not belong to its run.
    """

    def __init__(self, link: ZmqLink, host: HostMemory) -> None:
        self._roles = remote_roles(host)
        self._episodes = host.ring("episodes").producer()
        self._epoch = 0
        link.handlers[Kind.STATS] = self._take
        link.on_welcome.append(self._welcome)

    def _welcome(self, welcome: Welcome, channel: int) -> None:
        self._epoch = welcome.epoch

    def _take(self, stats: Any) -> None:
        role = self._roles.get(stats.number)
        if role is None:
            return
        taken = role.take(stats, self._epoch, from_now=not self._roles[REPLAY].known)
        if taken is not None and len(taken.episodes):
            self._episodes.try_offer(taken.episodes)
