"""Batches from several replays: each part from its shard, by the shards' totals.

A batch is asked of all shards at once. A shard of which nothing is known, or that was lost, has no
share. One request waits there, and its answer brings the share. A shard is lost when a batch waits
for it and it has been silent, when it was restarted with another memory, or when a batch has waited
too long for its rows and others have a share. Then its rows are drawn from the others.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.chunks.keys import by_shard, without_shard
from zapex.chunks.layout import BatchLayout
from zapex.errors import ZapexError
from zapex.net.sample_source import ZmqSampleSource
from zapex.replay.draw import Draw
from zapex.replay.shards import Part, Shares, check_method, share_out
from zapex.sumtree_numba import Method
from zapex.transport import Sampled
from zapex.wire.batches import BatchUnpacker
from zapex.wire.experience import BatchMessage

SILENT_S = 3.0  # a living replay says something each second
LATE_S = 10.0  # one that lives and cannot give its rows: its actors are too slow, or gone
_LOOK_S = 1.0  # a learner that looks less often was busy, and cannot judge a silence
_FRESH_S = 1.0  # a total that is older is asked for again
_DEADLINE_S = 60.0  # for the separate thread, whose work takes milliseconds


@dataclass(eq=False)
class _Part:
    """Rows of a batch that a shard was asked for. known: its total at that time."""

    shard: int
    rows: int
    known: float
    request: int
    message: BatchMessage | None = None


@dataclass(eq=False)
class _Wanted:
    """A batch that was asked for. missing: rows that no shard was asked for yet."""

    missing: int
    method: Method
    parts: list[_Part] = field(default_factory=list)
    since_s: float = 0.0

    @property
    def has_come(self) -> bool:
        return not self.missing and all(part.message is not None for part in self.parts)


class ShardedSampleSource:
    """The SampleSource of a learner, or of a library's client, with several replays.

    Args:
        sources: one for each shard, in the run's order.
        beta: of the weights.
        method: "stratified" or "independent", of a request that names none.
        seed: of what decides how a batch is shared out.
        tell: takes a line about a share that goes or comes back.
        silent_s: a shard that has said nothing for so long is lost.
        late_s: a shard that lives is lost if a batch has waited so long for its rows alone.
        clock_s: monotonic, in seconds; for tests.

    Attributes:
        shares: what is known of each shard, and how often a share was lost and came back.
        dropped: priorities of shards that were away.
    """

    def __init__(
        self,
        sources: Sequence[ZmqSampleSource],
        beta: float,
        method: Method,
        seed: int | None,
        tell: Callable[[str], object],
        clock_s: Callable[[], float] = time.monotonic,
        *,
        silent_s: float = SILENT_S,
        late_s: float = LATE_S,
    ) -> None:
        check_method(method)
        self._silence_s, self._late_s = silent_s, late_s
        self._sources, self._beta, self._method = sources, beta, method
        self._rng, self._tell, self._clock_s = np.random.default_rng(seed), tell, clock_s
        self._form = sources[0].form
        self.shares = Shares(len(sources))
        self.dropped = 0
        self._refused: ZapexError | None = None  # the last answer of a shard with nothing to draw
        self._wanted: deque[_Wanted] = deque()
        self._looked_s = self._awake_s = clock_s()
        self._probes: dict[int, int] = {}  # shard -> its request
        self._probe_rows = [1] * len(sources)
        self._learned_s = [-np.inf] * len(sources)
        self._memories = [0] * len(sources)
        self._unpackers: dict[BatchLayout, BatchUnpacker] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._job: tuple[Batch, _Wanted, Future[list[Part]]] | None = None

    @property
    def outstanding(self) -> int:
        """Requests whose batch was not polled yet."""
        return len(self._wanted)

    def request(self, rows: int = 0, method: Method | None = None) -> None:
        """Ask for one more batch. rows: 0: the run's batch size."""
        method = method or self._method
        check_method(method)
        self._wanted.append(_Wanted(rows or self._form.batch_size, method))
        self._share_out()

    def forget_all(self) -> None:
        """Expect no batch any more."""
        self._finish_job()
        for wanted in self._wanted:
            for part in wanted.parts:
                if part.message is None:
                    self._sources[part.shard].forget(part.request)
        self._wanted.clear()

    def do_work(self) -> None:
        """Receive, and share out what has to be."""
        self._receive()
        for wanted in self._wanted:
            for part in list(wanted.parts):
                self._take(wanted, part)
        self._look_for_shares()
        self._share_out()

    def ready(self) -> bool:
        """Whether a batch can be polled."""
        self.do_work()
        if not self._wanted:
            return False
        if not self._wanted[0].has_come:
            self._lose_late(self._wanted[0])
        return self._wanted[0].has_come

    def _receive(self) -> None:
        now_s = self._clock_s()
        if now_s - self._looked_s > _LOOK_S:
            self._awake_s = now_s
        self._looked_s = now_s
        for shard, source in enumerate(self._sources):
            source.do_work()
            known, self._memories[shard] = self._memories[shard], source.memory
            if known not in (0, source.memory):
                self.lose(shard, "was restarted with another memory")

    def silent_s(self, shard: int) -> float:
        """Seconds in which this end looked, and the shard said nothing."""
        return min(self._sources[shard].silent_s, self._clock_s() - self._awake_s)

    def _take(self, wanted: _Wanted, part: _Part) -> None:
        answer = self._answer(part.shard, part.request) if part.message is None else None
        if isinstance(answer, BatchMessage):
            part.message = answer
        elif answer is not None:
            wanted.parts.remove(part)
            wanted.missing += part.rows

    def _answer(self, shard: int, request: int) -> BatchMessage | ZapexError | None:
        """What a shard has answered, and learn from it."""
        answer = self._sources[shard].take(request)
        if isinstance(answer, BatchMessage):
            draw = answer.draw
            self.learn(shard, draw.total, draw.count, draw.smallest)
        elif answer is not None:  # a library's, that has nothing to draw
            self._refused = answer
            self.learn(shard, 0.0, 0, np.inf)
        return answer

    def learn(self, shard: int, total: float, count: int, smallest: float) -> None:
        """Note what a shard has said of itself: the sum of its leaves, how many, the smallest."""
        self._learned_s[shard] = self._clock_s()
        if self.shares.learn(shard, total, count, smallest):
            share = total / max(self.shares.totals.sum(), 1e-300)
            self._tell(
                f"shard {shard} answers again, with {count:,} transitions: {share:.0%} of the "
                "batches are its share"
            )

    def _look_for_shares(self) -> None:
        """Let one request wait at each shard of which nothing is known, or nothing new."""
        now_s = self._clock_s()
        for shard, source in enumerate(self._sources):
            if shard in self._probes:
                if self._answer(shard, self._probes[shard]) is not None:
                    del self._probes[shard]
            elif not source.outstanding and now_s - self._learned_s[shard] > _FRESH_S:
                self._probes[shard] = source.request(self._probe_rows[shard], part=True)
                self._probe_rows[shard] = 1

    def _share_out(self) -> None:
        """Ask the shards for all rows that none was asked for yet."""
        totals = self.shares.totals
        for wanted in self._wanted if totals.any() else ():
            if not wanted.missing:
                continue
            counts = share_out(totals, wanted.missing, self._rng, wanted.method)
            for shard, rows in enumerate(counts.tolist()):
                if rows:
                    request = self._sources[shard].request(rows, wanted.method, part=True)
                    wanted.parts.append(_Part(shard, rows, float(totals[shard]), request))
            wanted.missing, wanted.since_s = 0, self._clock_s()

    def _lose_late(self, wanted: _Wanted) -> None:
        late = {part.shard for part in wanted.parts if part.message is None}
        totals = self.shares.totals
        if not any(totals[shard] > 0.0 for shard in range(len(totals)) if shard not in late):
            wanted.since_s = self._clock_s()
        waited_s = self._clock_s() - wanted.since_s
        for shard in sorted(late):
            silent_s = self.silent_s(shard)
            if silent_s > self._silence_s:
                self.lose(shard, f"has been silent for {silent_s:.0f} s")
            elif waited_s > self._late_s:
                self.lose(shard, f"has not given its rows of a batch for {waited_s:.0f} s")

    def lose(self, shard: int, why: str) -> None:
        """Take the shard's share from it, and its rows of all batches."""
        shares, source = self.shares, self._sources[shard]
        share = shares.totals[shard] / max(shares.totals.sum(), 1e-300)
        self._learned_s[shard] = -np.inf
        if shares.lose(shard):
            url = self._sources[shard].url
            self._tell(
                f"shard {shard} at {url} {why}: its {share:.0%} of the batches are drawn from the "
                "others until it answers"
            )
        for wanted in self._wanted:
            for part in [p for p in wanted.parts if p.shard == shard and p.message is None]:
                source.forget(part.request)
                wanted.parts.remove(part)
                wanted.missing += part.rows
                self._probe_rows[shard] = max(self._probe_rows[shard], part.rows)
        self._share_out()

    def poll(self, batch: Batch, following: Batch | None = None) -> Sampled | None:
        """Unpack the oldest batch, of which all parts have come, with its weights; or None."""
        draw = self.poll_draw(batch)
        if draw is None:
            return None
        draw.weigh(batch.weights, self._beta)
        if following is not None and self._wanted and self._wanted[0].has_come:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "batches")
            after = self._wanted[0]
            work = self._thread.submit(self._unpack, after, following)
            self._job = following, after, work
        return Sampled(torn=0, live=draw.count)

    def poll_draw(self, batch: Batch) -> Draw | None:
        """As `poll`, without the weights: they are of this draw.

        Raises an error of the replays of a library if none has anything to draw.
        """
        job, done = self._finish_job()
        if not self.ready():
            refused, self._refused = self._refused, None
            if refused is not None and not self.shares.totals.any():
                raise refused
            return None
        wanted = self._wanted.popleft()
        if job is None or job[0] is not batch or job[1] is not wanted:
            done = self._unpack(wanted, batch)
        for part in wanted.parts:  # only now: keys of the batch before may be of a former memory
            assert part.message is not None
            self._sources[part.shard].epoch = part.message.epoch
        draw = self.shares.together(done)
        batch.keys[:] = draw.keys
        return draw

    def _finish_job(self) -> tuple[Any, list[Part]]:
        """Wait for the thread, which may be writing into a batch."""
        job, self._job = self._job, None
        return job, [] if job is None else job[2].result(_DEADLINE_S)

    def _unpack(self, wanted: _Wanted, batch: Batch) -> list[Part]:
        """Put all parts of a batch that has come into its memory, one behind another."""
        if batch.layout not in self._unpackers:
            self._unpackers[batch.layout] = BatchUnpacker(batch.layout, self._form.layout)
        unpacker, first, done = self._unpackers[batch.layout], 0, []
        for part in wanted.parts:
            assert part.message is not None
            draw: Draw = unpacker.unpack(part.message, batch, first)
            done.append(Part(part.shard, part.known, draw))
            first += part.rows
        return done

    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.float32]) -> bool:
        """Send new priorities to their shards; False while one has too many in flight.

        Those of a shard that is away are dropped: its transitions keep their priorities.
        """
        self._receive()
        parts = by_shard(keys)
        for shard in parts:
            if self._sources[shard].is_full and self.silent_s(shard) > self._silence_s:
                self.lose(shard, f"has been silent for {self.silent_s(shard):.0f} s")
        there = {s: rows for s, rows in parts.items() if not self.shares.is_away(s)}
        if any(self._sources[shard].is_full for shard in there):
            return False
        for shard, rows in there.items():
            self._sources[shard].update(without_shard(keys[rows]), priorities[rows])
        self.dropped += sum(map(len, parts.values())) - sum(map(len, there.values()))
        return True
