"""A relay's chunks to several replays: each actor has a shard, and moves when that one goes."""

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import ACTOR, INCARNATION, SEQUENCE
from zapex.chunks.store import ChunkStore
from zapex.host.routes import Routes
from zapex.net.link import ZmqLink
from zapex.wire.control import Welcome
from zapex.zmq_transport import ChunkSender

_LOOK_S = 1.0  # who looks less often was busy, and knows nothing of a silence
GONE_S = 10.0  # longer than the process of a replay takes to start again


def preferences(number: int, shards: int) -> list[int]:
    """The shards in the order in which an actor prefers them, by its number in the run.

    The first is in turn, so that few actors are spread evenly; then by rendezvous hashing, so that
    a lost shard's actors are spread over all others.
    """
    first = number % shards

    def score(shard: int) -> bytes:
        return hashlib.blake2b(f"{number} {shard}".encode(), digest_size=8).digest()

    return [first, *sorted((s for s in range(shards) if s != first), key=score)]


class ShardedChunkSender:
    """The ChunkLink of a relay with several replays.

    Args:
        links: one to each shard; each asks for numbers of all of the host's actors.
        store: where the slots are.
        routes: of the host's actors.
        numbers: the actors' numbers in the run.
        tell: takes a line about actors that move.
        clock_s: monotonic, in seconds; for tests.

    Attributes:
        moved: chunks that were sent to another shard than before.
    """

    def __init__(
        self,
        links: Sequence[ZmqLink],
        store: ChunkStore,
        routes: Routes,
        numbers: Sequence[int],
        tell: Callable[[str], object],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._links, self._store, self._tell, self._clock_s = links, store, tell, clock_s
        self._routes = routes
        self._preferred = [preferences(number, len(links)) for number in numbers]
        self._looked_s = clock_s()
        self._there_s = [self._looked_s] * len(links)  # a pause of this process moves it on
        self._gone = [False] * len(links)
        self.moved = 0
        # Before the senders' own: a shard with another memory gives other numbers.
        for shard, link in enumerate(links):
            link.on_welcome.append(partial(self._welcome, shard))
        self._senders = [ChunkSender(link, store, clock_s) for link in links]

    @property
    def counts(self) -> dict[str, int]:
        """As of ChunkSender, of all shards; chunks that moved count as sent again."""
        names = self._senders[0].counts
        total = {name: sum(s.counts[name] for s in self._senders) for name in names}
        return {**total, "again": total["again"] + self.moved}

    @property
    def unacknowledged(self) -> int:
        """How many chunks no shard may have yet."""
        return sum(sender.unacknowledged for sender in self._senders)

    def offer(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Take whole chunks to send; they stay in their slots until `take_freed` returns these."""
        for slot in np.asarray(slots, np.int64).tolist():
            header = self._store.header_rows[slot]
            actor, incarnation, sequence = header[[ACTOR, INCARNATION, SEQUENCE]].tolist()
            shard = self._shard_of(actor)
            wire = self._routes.place(actor, shard, incarnation, sequence)
            self._senders[shard].offer_as(slot, *wire)

    def _shard_of(self, actor: int) -> int:
        """The first shard in the actor's order that is there, or its first if none is."""
        preferred = self._preferred[actor]
        return next((shard for shard in preferred if not self._gone[shard]), preferred[0])

    def take_freed(self) -> list[int]:
        """Slots whose chunks are acknowledged and that libzmq no longer reads."""
        return [slot for sender in self._senders for slot in sender.take_freed()]

    def do_work(self) -> int:
        """Receive, move what is at a shard that is gone, send. Returns how many chunks."""
        now_s = self._clock_s()
        pause_s, self._looked_s = now_s - self._looked_s, now_s
        for shard, link in enumerate(self._links):
            link.do_work()
            if pause_s > _LOOK_S:
                self._there_s[shard] += pause_s
            if link.is_open and link.silent_s < GONE_S:
                self._there_s[shard] = max(self._there_s[shard], now_s - link.silent_s)
            gone = now_s - self._there_s[shard] > GONE_S
            if gone != self._gone[shard]:
                self._gone[shard] = gone
                self._leave(shard) if gone else self._come_back(shard)
        return sum(sender.do_work() for sender in self._senders)

    def _leave(self, shard: int) -> None:
        if all(self._gone):
            return  # there is no other: wait here
        slots = self._senders[shard].take_back()
        self.moved += len(slots)
        self._tell(
            f"shard {shard} at {self._links[shard].url} has not answered for {GONE_S:.0f} s: its "
            f"actors go to the others, with {len(slots)} chunks that it had not acknowledged"
        )
        self.offer(slots)

    def _come_back(self, shard: int) -> None:
        self._tell(f"shard {shard} answers again: its actors go back to it")

    def _welcome(self, shard: int, welcome: Welcome, channel: int) -> None:
        if self._routes.is_new_memory(shard, welcome.epoch):
            # What the former memory had is gone; what it had not is sent to this one.
            slots = self._senders[shard].take_back()
            self._senders[shard].forget_numbers()
            self.offer(slots)
