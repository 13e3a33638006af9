"""The protocols between roles and transports. Roles use these protocols and no transport.

    actor   -- ExperienceSink -->   replay   <-- SampleSource --  learner
            <- ParameterSource --            <-- ParameterSink -

ExperienceSource and SampleSink are the replay's ends of the same links. No call here blocks. A
role without work waits with its own `wait(ready, timeout_s)`, with a deadline. Slots and keys are
int64. Arrays belong to the caller if the text does not say otherwise.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.chunks.store import ChunkStore
from zapex.replay.draw import Draw


class ExperienceSink(Protocol):
    """Takes an actor's chunks.

    The caller's loop:

    while builder.add(...) < streams:
        slots = sink.try_claim()          # as many free slots as the actor has streams, or None
        builder.provide(slots)
    sink.commit(builder.take_closed())
    """

    store: ChunkStore
    """The store of the claimed slots."""

    def ready(self) -> bool:
        """Whether there may be slots to claim."""

    def try_claim(self) -> NDArray[np.int64] | None:
        """Claim one free slot for each of the actor's streams.

        Returns:
            (S,) slots, or None while there is no credit.
        """

    def commit(self, slots: NDArray[np.int64]) -> None:
        """Send whole chunks, in their order.

        Args:
            slots: (n,) slots whose state is COMMITTED.
        """


class ChunkLink(Protocol):
    """Sends what a host's actors have committed to the replay. A relay uses it."""

    @property
    def counts(self) -> dict[str, int]:
        """Of this incarnation: chunks and bytes sent, acknowledged, again (sent a second time)."""

    @property
    def unacknowledged(self) -> int:
        """How many chunks the replay has not acknowledged."""

    def offer(self, slots: Sequence[int]) -> None:
        """Take whole chunks to send. They stay in their slots until `take_freed` returns these."""

    def take_freed(self) -> list[int]:
        """Slots whose chunks have arrived and whose memory is no longer read."""

    def do_work(self) -> int:
        """Send chunks that may be sent now. Returns how many."""


class ParameterSource(Protocol):
    """Gives an actor or evaluator the newest parameters."""

    @property
    def version(self) -> int:
        """The newest version; 0 means none."""

    def newer_than(self, version: int, out: NDArray[np.uint8]) -> int:
        """Copy the newest parameters if they are newer than `version`.

        Args:
            version: the caller's version.
            out: the bytes of all float32 parameters are written here.

        Returns:
            Their version, or 0 if none are newer; `out` is then unchanged or partly written.
        """


class ValueSource(Protocol):
    """Gives an actor the Q values of its observations.

    The caller's loop, with one question at a time:

    values.ask(obs)
    while (answer := values.take()) is None:
        wait(values.answered, timeout_s)
    """

    phase: str
    """The actor's phase while it waits for an answer."""

    def ask(self, obs: NDArray[np.generic]) -> None:
        """Ask about observations (S, *observation_shape), which stay as they are meanwhile."""

    def answered(self) -> bool:
        """Whether `take` may return an answer."""

    def take(self) -> tuple[NDArray[np.float32], int] | None:
        """The values (S, num_actions) and the version of the parameters they are of; or None."""


class ParameterSink(Protocol):
    """Takes the parameters that a learner publishes."""

    @property
    def version(self) -> int:
        """The largest version that any incarnation of the learner published; 0 means none."""

    def publish(self, version: int, parameters: NDArray[np.uint8]) -> None:
        """Make these parameters the newest.

        Args:
            version: larger than all versions before.
            parameters: the bytes of all float32 parameters.
        """


@dataclass(frozen=True)
class Sampled:
    """The facts that a SampleSource returns about a filled batch."""

    torn: int  # rows overwritten while they were copied: weight 0, key -1
    live: int  # transitions in the replay when it was drawn


class SampleSource(Protocol):
    """Gives a learner its batches.

    The caller's loop:

    for _ in range(source.outstanding, prefetch): source.request()
    while (sampled := source.poll(batch)) is not None:
        ...; source.update(batch.keys, td_errors); source.request()
    """

    @property
    def outstanding(self) -> int:
        """Requests whose answer is not polled yet, with those of former incarnations."""

    def request(self) -> object:
        """Ask for one more batch."""

    def ready(self) -> bool:
        """Whether `poll` can do something: a batch has come, or over a network a piece of one."""

    def poll(self, batch: Batch, following: Batch | None = None) -> Sampled | None:
        """Gather the oldest answered batch.

        Args:
            batch: is filled, with weights and keys.
            following: the batch of the next poll. The source may write to its memory from now on,
                so that the next batch is gathered while the learner learns from this one.

        Returns:
            What was sampled, or None if not all of it has come. Then what has come may be in
            `batch`: give the same one again.
        """

    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.float32]) -> bool:
        """Send new priorities now, or with the next request.

        Args:
            keys: (B,) int64 keys of a batch.
            priorities: (B,) float32 TD errors; the sign is ignored.

        Returns:
            False while the link is full: call again later.
        """


@dataclass(frozen=True)
class Incarnation:
    """Which incarnation of an actor runs. `incarnation` 0 means that the actor is dead."""

    actor: int
    incarnation: int


class CommitSource(Protocol):
    """What actors have committed, and which of them live."""

    def take_in(self) -> Sequence[Incarnation]:
        """Read new messages. Returns actors that started, died or restarted since the last call.

        The first call returns all actors. An actor that is reported as dead is certainly dead: its
        granted slots may be reclaimed.
        """

    def committers(self) -> Sequence[int]:
        """Actors that have committed slots since their last `committed`."""

    def committed(self, actor: int) -> NDArray[np.int64]:
        """Slots that `actor` committed since the last call, in order; not checked yet."""


class ExperienceSource(CommitSource, Protocol):
    """The replay's end of all ExperienceSinks."""

    def ready(self) -> bool:
        """Whether chunks were committed, or an actor started or died."""

    def has_room(self, actor: int, count: int) -> bool:
        """Whether the link has room for a grant of `count` slots now."""

    def next_grant(self, actor: int) -> int:
        """The sequence of the next slot granted to `actor`. The link keeps it when the replay dies.

        A slot whose grant sequence is not below this number was not given to any actor.
        """

    def grant(self, actor: int, incarnation: int, slots: NDArray[np.int64]) -> None:
        """Give free slots to that incarnation of the actor, all of them or none."""


class SampleSink(Protocol):
    """The replay's end of a SampleSource."""

    @property
    def issued(self) -> int:
        """How many answers were given."""

    @property
    def released(self) -> int:
        """How many answers the learner has gathered; it does not read them again."""

    def ready(self) -> bool:
        """Whether there are new updates."""

    def requests(self) -> int:
        """How many batches are requested and not answered."""

    def rows(self) -> int:
        """The rows of the request that `answer` answers next."""

    def answer(self, draw: Draw) -> None:
        """Answer one request."""

    def updates(self) -> Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Priority updates since the last call: (keys, priorities), each valid until the next.

        If the replay dies, an update may come again if no request came after it.
        """
