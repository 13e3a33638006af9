"""The relay: closed chunks of a host's actors on to the replay, the newest parameters back."""

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from zapex.chunk_store import ChunkStore
from zapex.intake import Intake
from zapex.metrics import RoleMetrics
from zapex.replay import ReplayLayout
from zapex.schema import COUNT
from zapex.slot_ledger import SlotLedger
from zapex.transport import ChunkLink, ParameterSink, ParameterSource

_DRAIN_S = 2.5  # of the five seconds within which everything is over
_PAUSE_S = 0.005


class Outbox:
    """What an Intake sees instead of a replay: a chunk taken over is on its way.

    A slot stays committed until the replay has its chunk, so a relay that dies has lost nothing:
    its next life finds the slot and sends it again, which does no harm.
    """

    def __init__(self, store: ChunkStore, layout: ReplayLayout, link: ChunkLink) -> None:
        self.store, self.layout, self.link = store, layout, link
        self.ledger = SlotLedger(store)
        self.arrived = self.arrived_chunks = 0  # transitions and chunks that the replay has
        self.on_their_way = 0  # chunks whose slots are not free yet

    def __len__(self) -> int:
        """Nothing can be drawn here."""
        return 0

    def accept(self, slot: int) -> int:
        """Send a committed slot's chunk on; how many transitions it holds."""
        self.link.offer([slot])
        self.on_their_way += 1
        return int(self.store.header_rows[slot, COUNT])

    def evict_excess(self, issued: int = 0) -> int:
        """Free the slots whose chunks the replay has."""
        freed = self.link.take_freed()
        self.arrived += int(self.store.header_rows[freed, COUNT].sum())
        self.arrived_chunks += len(freed)
        self.on_their_way -= len(freed)
        self.ledger.reclaim(freed)
        return 0


class Actors(Protocol):
    """What the relay asks of the actors' links besides the chunks."""

    def ready(self) -> bool:
        """Something was committed, or somebody came or went."""


class Relay:
    """One duty cycle: chunks out, slots back to actors, parameters in, statistics out.

    link_ready: something has come from the replay. report: sends statistics when it is time.
    ended: all actors are gone for sure, and what they committed can be seen.
    """

    def __init__(
        self,
        intake: Intake,
        outbox: Outbox,
        actors: Actors,
        source: ParameterSource,
        mailbox: ParameterSink,
        metrics: RoleMetrics,
        *,
        parameter_bytes: int,
        link_ready: Callable[[], object],
        report: Callable[[], int],
        ended: Callable[[], bool],
    ) -> None:
        self._intake, self._outbox, self._actors = intake, outbox, actors
        self._source, self._mailbox, self._metrics = source, mailbox, metrics
        self._received = np.empty(parameter_bytes, np.uint8)
        self._version = mailbox.version  # a former life's
        self._link_ready, self._report, self._ended = link_ready, report, ended
        self._counted: dict[str, int] = {}
        metrics.enter("other")
        metrics.set("slots", outbox.store.slots)

    def do_work(self) -> int:
        """Everything that there is to do now; how much it was."""
        metrics = self._metrics
        metrics.enter("push")
        work = self._intake.do_work(0, 0)
        work += self._outbox.link.do_work()
        metrics.enter("pull")
        version = self._source.newer_than(self._version, self._received)
        if version:
            self._mailbox.publish(version, self._received)
            self._version = version
            metrics.add("versions")
            metrics.set("params_version", version)
            work += 1
        metrics.enter("report")
        work += self._report()
        self._publish_counts()
        metrics.enter("idle")
        return work

    def ready(self) -> bool:
        """There is something to do: for `wait(ready, timeout_s)`."""
        return bool(self._actors.ready() or self._link_ready())

    def close(self) -> None:
        """The actors' last chunks, as long as there is time; what is left is lost, and counted."""
        deadline = time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline:
            ended = self._ended()
            if not self.do_work() and ended and not self._outbox.on_their_way:
                break
            time.sleep(_PAUSE_S)
        self._publish_counts()
        self._metrics.leave()

    def _publish_counts(self) -> None:
        link, outbox, metrics = self._outbox.link, self._outbox, self._metrics
        counted = {
            "transitions": outbox.arrived,
            "acknowledged": outbox.arrived_chunks,
            **{name: link.counts[name] for name in ("chunks", "bytes", "again")},
        }
        for name, count in counted.items():
            # What a former life counted stays.
            metrics.add(name, count - self._counted.get(name, 0))
        self._counted = counted
        metrics.set("unacknowledged", outbox.on_their_way)
