"""The protocols between roles and whatever moves the bytes. A role knows these and no transport.

    actor   -- ExperienceSink -->   replay   <-- SampleSource --  learner
            <- ParameterSource --            <-- ParameterSink -

and, on the replay's side of the same links, ExperienceSource and SampleSink. Nothing here blocks:
a role that has nothing to do waits through its own `wait(ready, timeout_s)`, with a deadline.
Slots and keys are int64; every array is the caller's own unless it says otherwise.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zapex.batch import Batch
from zapex.chunk_store import ChunkStore
from zapex.replay import Draw

Wait = Callable[[Callable[[], object], float], bool]
"""wait(ready, timeout_s): True as soon as ready() is true, False at the deadline."""


class ExperienceSink(Protocol):
    """An actor's chunks go here.

    while builder.add(...) < streams:
        slots = sink.try_claim()          # as many free slots as the actor has streams, or None
        builder.provide(slots)
    sink.commit(builder.take_closed())
    """

    store: ChunkStore
    """Where claimed slots lie."""

    def ready(self) -> bool:
        """There may be slots to claim."""

    def try_claim(self) -> NDArray[np.int64] | None:
        """Free slots, one for each of the actor's streams; None while there is no credit."""

    def commit(self, slots: NDArray[np.int64]) -> None:
        """Hand over chunks that are whole (state COMMITTED), in their order."""


class ChunkLink(Protocol):
    """Where a relay sends what a host's actors have committed."""

    counts: dict[str, int]
    """chunks and bytes sent, acknowledged, again (sent a second time); of this life."""

    @property
    def unacknowledged(self) -> int:
        """Chunks that the replay may not have yet."""

    def offer(self, slots: Sequence[int]) -> None:
        """Whole chunks; they stay in their slots until `take_freed` names these."""

    def take_freed(self) -> list[int]:
        """Slots whose chunks have arrived and that nobody reads any more."""

    def do_work(self) -> int:
        """Send what may be sent; how many chunks."""


class ParameterSource(Protocol):
    """Where an actor or evaluator gets parameters."""

    @property
    def version(self) -> int:
        """The newest version there is; 0: none."""

    def newer_than(self, version: int, out: NDArray[np.uint8]) -> int:
        """Copy the newest parameters into `out` if their version is above `version`.

        Returns their version, or 0 when there are none newer.
        """


class ParameterSink(Protocol):
    """Where a learner publishes parameters."""

    @property
    def version(self) -> int:
        """The largest version published by any life of the learner; 0: none."""

    def publish(self, version: int, parameters: NDArray[np.uint8]) -> None:
        """Make these the newest; `version` must be above all before."""


@dataclass(frozen=True)
class Sampled:
    """What a SampleSource says about the batch that it just filled."""

    torn: int  # rows overwritten while they were copied: weight 0, key -1
    live: int  # transitions in the replay when it was drawn


class SampleSource(Protocol):
    """Where a learner's batches come from.

    for _ in range(source.outstanding, prefetch): source.request()
    while (sampled := source.poll(batch)) is not None:
        ...; source.update(batch.keys, td_errors); source.request()
    """

    @property
    def outstanding(self) -> int:
        """Requests without an answer polled, a former life's included."""

    def request(self) -> None:
        """Ask for one more batch."""

    def ready(self) -> bool:
        """A batch can be polled."""

    def poll(self, batch: Batch, following: Batch | None = None) -> Sampled | None:
        """Gather the oldest answered batch into `batch`, weights and keys included; or None.

        following: the batch of the next poll, whose memory may be written to from now on, so that
        what has come already is gathered while the learner learns from this one.
        """

    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.float32]) -> bool:
        """Send new priorities (signed TD errors), with the next request at the latest.

        False while the link is full: try again.
        """


@dataclass(frozen=True)
class Life:
    """Which actor lives: `incarnation` 0 says that it is gone."""

    actor: int
    incarnation: int


class ExperienceSource(Protocol):
    """The replay's side of all ExperienceSinks."""

    def ready(self) -> bool:
        """Something was committed, or somebody came or went."""

    def lives(self) -> Sequence[Life]:
        """Actors that came, went or were replaced since the last call; the first call says all.

        An actor that is gone is so for sure: what it was granted may be taken back.
        """

    def committed(self, actor: int) -> NDArray[np.int64]:
        """Slots that `actor` handed over since the last call, in order. Not yet checked."""

    def has_room(self, actor: int, count: int) -> bool:
        """The link takes a grant of `count` slots now."""

    def next_grant(self, actor: int) -> int:
        """The sequence of the next slot granted to `actor`; a link keeps it when the replay dies.

        A slot whose grant sequence is not below it was never given to anybody.
        """

    def grant(self, actor: int, incarnation: int, slots: NDArray[np.int64]) -> None:
        """Give free slots to that life of the actor, all of them or none."""


class SampleSink(Protocol):
    """The replay's side of a SampleSource."""

    @property
    def issued(self) -> int:
        """Answers given so far."""

    @property
    def released(self) -> int:
        """Answers that the learner has gathered and will not look at again."""

    def ready(self) -> bool:
        """There are updates that were not taken yet."""

    def requests(self) -> int:
        """Batches that are asked for."""

    def answer(self, draw: Draw) -> None:
        """Answer one request."""

    def updates(self) -> Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Priority updates since the last call: (keys, priorities), each good until the next.

        One that was not followed by a request for the next may come again after a death.
        """
