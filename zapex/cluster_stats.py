"""Statistics between the hosts of a run: every role's metrics and finished episodes, each second.

A relay sends its actors', the learner its own; the replay keeps all, and sends all to the learner.
So the replay's parent and the learner's see the whole run. The counts of an actor number go on
when another host takes it over.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.errors import SharedMemoryError
from zapex.message_header import Kind, as_part
from zapex.messages import LEARNER, MAX_EPISODES, REPLAY, SMALL, Stats, Welcome
from zapex.metrics import EPISODE, RoleMetrics
from zapex.shm_transport import Host
from zapex.zmq_client import ZmqLink
from zapex.zmq_server import Session, ZmqServer

PERIOD_S = 1.0
SILENT_S = 10.0  # whoever was not heard for so long is gone, as far as one can see from here
_AT_MOST = 32  # messages at once: there is other work, and half a connection's queue
_WAITING = 64  # messages of episodes kept for a learner that is not there


def role_name(number: int) -> str:
    """Whose statistics a message brings."""
    return {LEARNER: "learner", REPLAY: "replay"}.get(number, f"actor {number}")


def _now(number: int, block: RoleMetrics, episodes: NDArray[np.void] | None = None) -> Stats:
    """A block as it is now, as a message that needs no more of this host's memory."""
    data = episodes.tobytes() if episodes is not None else b""
    return Stats(number, time.perf_counter_ns(), as_part(block.as_bytes()), as_part(data))


class _Round:
    """Everybody once a second, and no more at a time than a connection takes."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s, self._due_s = clock_s, 0.0
        self._left: deque[int] = deque()

    def go_on(self, numbers: Iterable[int], send: Callable[[int], bool]) -> int:
        """Send what is due, in order, as far as it goes now; how many."""
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


class StatsSender:
    """This host's blocks, by the number that they have in the run; and its actors' episodes."""

    def __init__(
        self,
        link: ZmqLink,
        blocks: Mapping[int, RoleMetrics],
        episodes: Callable[[int], NDArray[np.void]] | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """episodes: takes what an actor (by its number) has finished since the last call."""
        self._link, self._blocks, self._episodes = link, blocks, episodes
        self._round = _Round(clock_s)
        self._kept: dict[int, NDArray[np.void]] = {}

    def do_work(self) -> int:
        """Send what it is time for; how many messages."""
        return self._round.go_on(self._blocks, self._send)

    def _send(self, number: int) -> bool:
        finished = self._kept.pop(number, np.empty(0, EPISODE))
        if self._episodes is not None:
            finished = np.concatenate([finished, self._episodes(number)])[-MAX_EPISODES:]
        if self._link.send(SMALL, _now(number, self._blocks[number], finished)) is not None:
            return True
        self._kept[number] = finished
        return False


class _Keeper:
    """One role of another host, as this host knows it."""

    def __init__(self, host: Host, name: str) -> None:
        self.block = host.metrics(name)
        self._last = host.part_of(f"last metrics {name}")
        names = [known for known, _ in host.plan.elsewhere]
        self._sources = host.part_of("sources").view(np.int64)
        self._index = names.index(name)

    @property
    def known(self) -> bool:
        """Somebody was heard."""
        return bool(self._sources[self._index])

    def take(self, stats: Stats, source: int, *, from_now: bool = False) -> int:
        """Add what is new; returns what this host's clock is ahead of the sender's, in ns.

        source: who counts; another one began with nothing. from_now: what was counted before the
        first look is not this run's.
        """
        clock_ns = time.perf_counter_ns() - stats.time_ns
        known = int(self._sources[self._index])
        if from_now and known == 0:
            self._last[:] = np.frombuffer(stats.metrics, np.uint8)
            known = source
        self.block.take_over(stats.metrics, self._last, fresh=known != source, clock_ns=clock_ns)
        self._sources[self._index] = source
        return clock_ns


def _episodes_of(stats: Stats, clock_ns: int) -> NDArray[np.void]:
    records = np.frombuffer(stats.episodes, EPISODE).copy()
    records["time_ns"] += clock_ns
    return records


class StatsDesk:
    """The replay's end: keeps what came, and sends it on to the learner."""

    def __init__(
        self, server: ZmqServer, host: Host, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._server, self._clock_s = server, clock_s
        self._own = host.metrics("replay")
        self._actors = {i: _Keeper(host, f"actor {i}") for i in range(host.plan.actors)}
        self._learner = _Keeper(host, "learner")
        self._episodes = host.ring("episodes").producer()
        self._waiting: deque[NDArray[np.void]] = deque(maxlen=_WAITING)
        self._round = _Round(clock_s)
        self.counts = {"foreign": 0}
        server.handlers[Kind.STATS] = self._take
        server.chores.append(self.do_work)

    def _take(self, session: Session, stats: Stats) -> None:
        if stats.number == LEARNER and session.role == "learner":
            keeper = self._learner
        elif stats.number in session.actors and stats.number in self._actors:
            keeper = self._actors[stats.number]
        else:
            self.counts["foreign"] += 1
            return
        try:
            clock_ns = keeper.take(stats, session.host)
        except SharedMemoryError:
            self.counts["foreign"] += 1
            return
        records = _episodes_of(stats, clock_ns)
        if len(records):
            self._episodes.try_offer(records)  # the parent is slow: it is only a picture
            self._waiting.append(records)

    def do_work(self) -> int:
        """Once a second: who is gone, and everything to the learner; how many messages."""
        return self._round.go_on([*self._actors, REPLAY], self._send)

    def _send(self, number: int) -> bool:
        learner = next(self._server.sessions("learner"), None)
        if learner is None or self._is_silent(learner):
            self._learner.block.is_gone()
            learner = None
        if number == REPLAY:
            # Last of a round: who reads it has seen everybody who had begun before.
            records = self._waiting[0] if self._waiting else np.empty(0, EPISODE)
            if learner is None or not self._offer(learner, _now(REPLAY, self._own, records)):
                return learner is None
            if self._waiting:
                self._waiting.popleft()
            return not self._waiting
        block = self._actors[number].block
        session = self._server.session_of(number)
        if session is None or self._is_silent(session):
            block.is_gone()
        begun = learner is not None and block.heartbeat_ns > 0
        return not begun or self._offer(learner, _now(number, block))

    def _is_silent(self, session: Session) -> bool:
        return self._clock_s() - session.heard_s > SILENT_S

    def _offer(self, learner: Session | None, stats: Stats) -> bool:
        return learner is not None and self._server.send(learner, SMALL, stats) is not None


class StatsReader:
    """The learner's end: the whole run's statistics into this host's memory.

    What was counted before this learner's parent came is not its run's.
    """

    def __init__(self, link: ZmqLink, host: Host) -> None:
        self._keepers = {name: _Keeper(host, name) for name, _ in host.plan.elsewhere}
        self._episodes = host.ring("episodes").producer()
        self._epoch = 0
        link.handlers[Kind.STATS] = self._take
        link.on_welcome.append(self._welcome)

    def _welcome(self, welcome: Welcome, channel: int) -> None:
        self._epoch = welcome.epoch

    def _take(self, stats: Any) -> None:
        keeper = self._keepers.get(role_name(stats.number))
        if keeper is None:
            return
        try:
            clock_ns = keeper.take(stats, self._epoch, from_now=not self._keepers["replay"].known)
        except SharedMemoryError:
            return
        records = _episodes_of(stats, clock_ns)
        if len(records):
            self._episodes.try_offer(records)
