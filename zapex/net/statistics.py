"""Statistics between the hosts of a run: every role's metrics and finished episodes, each second.

A relay sends its actors' statistics, and the learner sends its own. The replay keeps all of them
and sends them to the learner. So the replay's parent and the learner's parent see the whole run.
The counts of an actor number continue when another host takes the number over.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.errors import SharedMemoryError
from zapex.host.metrics import EPISODE, RoleMetrics
from zapex.net.link import ZmqLink
from zapex.net.server import End, LinkServer
from zapex.net.sessions import Session
from zapex.shm_transport import HostMemory
from zapex.wire.messages import LEARNER, MAX_EPISODES, REPLAY, SMALL, Stats, Welcome
from zapex.wire.protocol import Kind, as_buffer

PERIOD_S = 1.0
_LEAST_S, _PER_ROLE_S = 0.25, 1 / 256  # with few roles more often: limits of the run depend on it
SILENT_S = 10.0  # a host that is silent for this long counts as gone
_AT_MOST = 32  # messages at once: half of a connection's queue, and other work must not wait
_WAITING = 64  # messages of episodes kept while no learner is connected
_NO_EPISODES = np.empty(0, EPISODE)


def _now(number: int, block: RoleMetrics, episodes: NDArray[np.void] = _NO_EPISODES) -> Stats:
    """A message with a copy of the block as it is now."""
    parts = as_buffer(block.as_bytes()), as_buffer(episodes.tobytes())
    return Stats(number, time.perf_counter_ns(), *parts)


class _Round:
    """Every role up to four times per second, at most as many at once as a connection accepts."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s, self._due_s = clock_s, 0.0
        self._left: deque[int] = deque()

    def restart(self) -> None:
        """Drop what is left of a round; a new one is due now."""
        self._left.clear()
        self._due_s = 0.0

    def go_on(self, numbers: Collection[int], send: Callable[[int], bool]) -> int:
        """Send what is due, in order, as far as possible now. Returns how many."""
        now_s = self._clock_s()
        if not self._left:
            if now_s < self._due_s:
                return 0
            self._due_s = now_s + min(PERIOD_S, max(_LEAST_S, _PER_ROLE_S * len(numbers)))
            self._left.extend(numbers)
        sent = 0
        while self._left and sent < _AT_MOST and send(self._left[0]):
            self._left.popleft()
            sent += 1
        return sent


class StatsSender:
    """Sends this host's blocks, by their numbers in the run, and its actors' episodes."""

    def __init__(
        self,
        link: ZmqLink,
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
    ) -> NDArray[np.void] | None:
        """Add the new counts. Returns the episodes, with times of this host's clock.

        source: the number of the counting process; another process started its counts at zero.
        from_now: counts from before the first message do not belong to this run. None: the block is
        invalid.
        """
        clock_ns = time.perf_counter_ns() - stats.time_ns
        known = int(self._sources[self._index])
        if from_now and known == 0:
            self._last[:] = np.frombuffer(stats.metrics, np.uint8)
            known = source
        try:
            self.block.take_over(
                stats.metrics, self._last, fresh=known != source, clock_ns=clock_ns
            )
        except SharedMemoryError:
            return None
        self._sources[self._index] = source
        records = np.frombuffer(stats.episodes, EPISODE).copy()
        records["time_ns"] += clock_ns
        return records


def remote_roles(host: HostMemory) -> dict[int, RemoteRole]:
    """The roles of other hosts that this host knows, by their numbers in messages."""
    numbers = {f"actor {i}": i for i in range(host.plan.actors)}
    numbers |= {"learner": LEARNER, "replay": REPLAY}
    return {numbers[name]: RemoteRole(host, name) for name, _ in host.plan.elsewhere}


def _possible(records: NDArray[np.void], streams: range) -> NDArray[np.void]:
    """The episodes whose values an actor with these streams can have sent."""
    fine = np.isin(records["stream"], streams) & np.isfinite(records["game_return"])
    fine &= (records["epsilon"] >= 0) & (records["epsilon"] <= 1) & (records["steps"] >= 1)
    fine &= (records["frames"] >= 0) & (records["params_version"] >= 0)
    found: NDArray[np.void] = records[fine]
    return found


class StatsHandler(End):
    """The replay's handler of statistics: keeps them, and sends them on to the learner."""

    def __init__(
        self, server: LinkServer, host: HostMemory, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._server, self._clock_s = server, clock_s
        self._streams = host.plan.envs_per_actor
        self._own = host.metrics("replay")
        self._roles = remote_roles(host)
        self._numbers = [*range(host.plan.actors), REPLAY]
        self._episodes = host.ring("episodes").producer()
        self._waiting: deque[NDArray[np.void]] = deque(maxlen=_WAITING)
        self._round = _Round(clock_s)
        self._reader: Session | None = None
        self.counts = {"foreign": 0}
        self.handlers = {Kind.STATS: self._take}

    def _take(self, session: Session, stats: Stats) -> None:
        number = stats.number
        episodes = None
        if number in session.actors or (number == LEARNER and session.role == "learner"):
            episodes = self._roles[number].take(stats, session.host)
        if episodes is None:
            self.counts["foreign"] += 1
            self._server.refuse(session, f"statistics that are not of its role, number {number}")
            return
        first = number * self._streams
        possible = _possible(episodes, range(first, first + self._streams))
        if len(possible) < len(episodes):
            self._server.refuse(session, f"episodes that actor {number} cannot have played")
        if len(possible):
            possible["time_ns"] = np.minimum(possible["time_ns"], time.perf_counter_ns())
            self._episodes.try_offer(possible)  # dropped if the parent is slow
            self._waiting.append(possible)

    def do_work(self) -> int:
        """Once per second: mark gone hosts, send all to the learner. Returns how many messages."""
        return self._round.go_on(self._numbers, self._send)

    def _send(self, number: int) -> bool:
        learner = self._server.sessions.learner
        if learner is not self._reader:
            self._reader = learner
            self._round.restart()  # it must get the replay's own last
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
        link.register({Kind.STATS: self._take}, on_welcome=self._welcome)

    def _welcome(self, welcome: Welcome, channel: int) -> None:
        self._epoch = welcome.epoch

    def _take(self, stats: Any) -> None:
        role = self._roles.get(stats.number)
        if role is None:
            return
        episodes = role.take(stats, self._epoch, from_now=not self._roles[REPLAY].known)
        if episodes is not None and len(episodes):
            self._episodes.try_offer(episodes)
