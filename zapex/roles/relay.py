"""The relay: sends closed chunks of a host's actors to the replay, and fetches parameters."""

import time
from collections.abc import Callable

import numpy as np

from zapex.chunks.layout import COUNT
from zapex.chunks.ledger import SlotLedger
from zapex.chunks.store import ChunkStore
from zapex.host.metrics import RoleMetrics
from zapex.replay.core import ReplayLayout
from zapex.roles.intake import Intake
from zapex.transport import ChunkLink, ExperienceSource, ParameterSink, ParameterSource

_DRAIN_S = 2.5  # of the five seconds within which all processes must end
_PAUSE_S = 0.005


class Outbox:
    """The Memory of a relay's Intake: it sends each chunk that the Intake takes over.

    A slot stays committed until the replay has its chunk, so a dead relay loses no chunk: its next
    incarnation finds the slot and sends the chunk again. The replay drops repeats.

    Attributes:
        arrived, arrived_chunks: transitions and chunks that the replay has.
        on_their_way: chunks whose slots are not free yet.
    """

    def __init__(self, store: ChunkStore, layout: ReplayLayout, link: ChunkLink) -> None:
        self.store, self.layout, self.link = store, layout, link
        self.ledger = SlotLedger(store)
        self.arrived = self.arrived_chunks = self.on_their_way = 0

    def __len__(self) -> int:
        """0: nothing can be drawn here."""
        return 0

    def accept(self, slot: int) -> int:
        """Send a committed slot's chunk. Returns how many transitions it holds."""
        self.link.offer([slot])
        self.on_their_way += 1
        return int(self.store.header_rows[slot, COUNT])

    def make_room(self, issued: int = 0) -> None:
        """Free the slots whose chunks the replay has."""
        freed = self.link.take_freed()
        self.arrived += int(self.store.header_rows[freed, COUNT].sum())
        self.arrived_chunks += len(freed)
        self.on_their_way -= len(freed)
        self.ledger.reclaim(freed)


class Relay:
    """Sends chunks, gives slots back to actors, receives parameters, and sends statistics.

    Args:
        intake: takes chunks of `actors` into `outbox`.
        outbox: sends them.
        actors: the links of this host's actors.
        source: parameters from the learner.
        mailbox: parameters for this host's actors.
        metrics: of the role.
        parameter_bytes: of all float32 parameters.
        link_ready: whether something has come from the replay.
        report: sends statistics when due; returns how much it was.
        ended: whether all actors are certainly dead, and all their commits are visible.
    """

    def __init__(
        self,
        intake: Intake,
        outbox: Outbox,
        actors: ExperienceSource,
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
        self._version = mailbox.version  # of a former incarnation, or 0
        self._link_ready, self._report, self._ended = link_ready, report, ended
        metrics.enter("other")
        metrics.set("slots", outbox.store.slots)

    def do_work(self) -> int:
        """Do all work that is due now. Returns how much it was."""
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
        """Whether there is something to do: for `wait(ready, timeout_s)`."""
        return bool(self._actors.ready() or self._link_ready())

    def close(self) -> None:
        """Send the actors' last chunks until the deadline; the rest is lost, and counted."""
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
        metrics.add_up(
            transitions=outbox.arrived,
            acknowledged=outbox.arrived_chunks,
            **{name: link.counts[name] for name in ("chunks", "bytes", "again")},
        )
        metrics.set("unacknowledged", outbox.on_their_way)
