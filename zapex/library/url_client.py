"""Replays served by `zapex replay --schema`, on any host, with the names of PrioritizedReplay.

A client uses the links of a run: chunks are sent as a relay's are, batches come as a learner's do,
from one replay or from several that are used as one. What a run does not ask is a call and its
reply. All of these are sent again until they are answered, and the replay takes nothing twice. So
when the replay's process dies and is started again, the client only waits.
"""

import itertools
import json
import math
import secrets
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.arguments import MOST_TIMEOUT_S, magnitudes
from zapex.chunks.batch import Batch, SequenceBatch, aligned_zeros
from zapex.chunks.keys import NO_KEY, by_shard, with_shard, without_shard
from zapex.chunks.layout import ACTOR, INCARNATION, SEQUENCE
from zapex.chunks.schema import Schema
from zapex.chunks.store import ChunkStore
from zapex.errors import ConfigError, NotEnoughData, PeerDied, PeerError, PeerTimeout, told
from zapex.library.client import ProcessLock, ReplayClient
from zapex.library.interface import Extender, Rows
from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.net.sample_source import ZmqSampleSource
from zapex.net.shard_samples import ShardedSampleSource
from zapex.replay.core import ReplayLayout
from zapex.replay.draw import Draw
from zapex.replay.sequences import Sequences, weigh
from zapex.replay.shards import MOST_SHARDS, Shares, share_out
from zapex.sumtree_numba import Method
from zapex.wire.batches import PackedSequences
from zapex.wire.compression import check_installed
from zapex.wire.messages import PRESENT, SMALL, Bye, Call, Reply, Request, Welcome, most_rows
from zapex.wire.protocol import Form, Kind
from zapex.zmq_transport import ChunkSender

CONFIG = {"library": 1}
"""The settings that both ends must share, besides the schema."""
_LOOK_S = 0.2  # period of the thread that says hello for idle links
_AGAIN_S = 2.0  # without a reply for this long, the call is sent again
_FRESH_S = 1.0  # what several replays have said of themselves is asked again after this time
_LEAST_TIMEOUT_S = 1.5
_LARGEST = {"chunk"}  # statistics that are not added up
_T = TypeVar("_T")


def form_of(layout: ReplayLayout) -> Form:
    """The Form of a library's messages."""
    return Form(layout.chunk_layout, most_rows(layout.schema), 1)


class UrlLink:
    """One link, its lock, and how long to wait; `close()` may be called twice."""

    def __init__(
        self,
        url: str,
        schema: Schema,
        form: Form | None,
        security: Security,
        timeout_s: float,
        *,
        actors: int = 0,
        lock: ProcessLock | None = None,
        compress: bool = False,
    ) -> None:
        """form: None only asks for `welcome`. compress: what is pushed.

        Raises PeerTimeout, Refused, Fenced, ConfigError.
        """
        self.lock = lock or ProcessLock()
        self.timeout_s = timeout_s
        self.chores: list[Callable[[], object]] = []
        self._closed = False
        self.link = ZmqLink(
            url,
            "client",
            1 + secrets.randbits(62),
            1,
            form,
            CONFIG,
            security,
            schema_hash=schema.hash,
            actors=actors,
            compressed=compress,
        )
        try:
            self.link.open(timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def welcome(self) -> Welcome:
        """The replay's last answer to a hello."""
        assert self.link.welcome is not None
        return self.link.welcome

    def check(self) -> None:
        """Raises PeerDied if it is closed."""
        if self._closed:
            raise PeerDied("this client is closed")

    def wait(
        self, ready: Callable[[], object], for_what: str, others: Sequence[ZmqLink] = ()
    ) -> None:
        """Wait until `ready()`, with the lock held. Raises PeerTimeout, and the link's errors.

        others: more links that `ready` receives from.
        """
        self.check()

        def looked() -> object:
            self.link.do_work()
            return ready()

        also = tuple(fd for link in others for fd in link.fds)
        if not self.link.wait(looked, self.timeout_s, also=also):
            waiting = "; ".join(filter(None, (one.waiting for one in (self.link, *others))))
            raise PeerTimeout(
                waiting
                or f"{for_what} did not come from {self.link.url} within {self.timeout_s:g} s"
            )

    def look(self) -> bool:
        """Do an idle link's work, if no thread uses it now. Returns False if closed or unusable."""
        if not self.lock.acquire(blocking=False):
            return True
        try:
            if self._closed:
                return False
            self.link.do_work()
            for chore in self.chores:
                chore()
            return True
        except PeerError:  # the user's next call raises it
            return False
        finally:
            self.lock.release()

    def look_while_idle(self) -> None:
        """Start a thread that says hello, and receives messages, while no other uses the link."""

        def look() -> None:
            while self.look():
                time.sleep(_LOOK_S)

        threading.Thread(target=look, name="zapex client", daemon=True).start()

    def close(self) -> None:
        """Send a BYE and disconnect."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self.link.close(bye=Bye())


class UrlSlots:
    """Private slots; their chunks are sent over a separate link when they are closed.

    elsewhere: opens a link to another replay, with the lock that it is given, for what this one
    does not take in time.
    """

    shard = 0

    def __init__(
        self,
        link: UrlLink,
        layout: ReplayLayout,
        streams: int,
        elsewhere: Callable[[ProcessLock], UrlLink] | None = None,
    ) -> None:
        self.layout, self._elsewhere = layout, elsewhere
        self.lock = link.lock
        slots = 2 * streams + 4
        memory = aligned_zeros(ChunkStore.required_bytes(layout.chunk_layout, slots))
        self.store = ChunkStore(memory, layout.chunk_layout, slots)
        self._free = deque(range(slots))
        self._use(link)

    def _use(self, link: UrlLink) -> None:
        """Send over this link from now on."""
        self._link, self._memories = link, {link.welcome.epoch}  # those that it has met
        self._sequence = self._first = 0  # the next chunk's; that of the first since `mark`
        link.link.register(on_welcome=self._welcome)  # before the sender's
        self._sender = ChunkSender(link.link, self.store)
        link.chores.append(self._pump)

    def _welcome(self, welcome: Welcome, channel: int) -> None:
        if welcome.epoch in self._memories:
            return
        # What the former memory had is gone; what it had not is sent to this one.
        self._memories.add(welcome.epoch)
        left = self._sender.take_back()
        self._sequence = self._first = 0
        self._offer(left)

    @property
    def number(self) -> int:
        """Its actor number at the replay."""
        return int(self._link.welcome.actors["actor"][0])

    def mark(self) -> None:
        """`sent` begins here."""
        self._first = self._sequence

    @property
    def sent(self) -> range:
        """Sequences of the chunks since `mark` that the replay's present memory has, or gets."""
        return range(self._first, self._sequence)

    def _pump(self) -> None:
        self._sender.do_work()
        self._free.extend(self._sender.take_freed())

    def reserve_streams(self, streams: int) -> None:
        """Nothing to do: the slots were made for these streams."""

    def release_streams(self, streams: int, slots: NDArray[np.int64]) -> None:
        """Send the last chunks, and close the link of a closed writer."""
        self.settle()
        self.give_up()

    def give_up(self) -> None:
        """Close the link; chunks that were not acknowledged may be lost."""
        self._link.close()

    def admit(self, rows: int) -> None:
        """Nothing to wait for: the credit limits each chunk."""
        self._link.check()

    def open_slot(self) -> int:
        """Get a slot to fill. Raises PeerTimeout if the replay takes no chunk for too long."""

        def is_free() -> bool:
            self._pump()
            return bool(self._free)

        if not self._free:
            self._wait(is_free, "room for more chunks")
        return self._free.popleft()

    def _wait(self, ready: Callable[[], object], for_what: str) -> None:
        try:
            self._link.wait(ready, for_what)
        except PeerTimeout:
            if self._elsewhere is None:
                raise
            self._move(self._elsewhere(self.lock))
            self._link.wait(ready, for_what)

    def _move(self, link: UrlLink) -> None:
        """Send what is not acknowledged over another link, where all of it is new."""
        left, leaving = self._sender.take_back(), self._sender.leaving
        self._link.close()
        self._use(link)
        self._sender.leaving = leaving
        self._offer(left)

    def grown(
        self,
        indices: NDArray[np.int64],
        magnitudes: NDArray[np.float64],
        closed: NDArray[np.int64],
    ) -> None:
        """Send the `closed` slots; rows of open slots stay here."""
        if not len(closed):
            return
        self._link.check()
        self._offer(closed.tolist())
        self._link.link.do_work()
        self._pump()

    def _offer(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.store.header_rows[slot, [ACTOR, INCARNATION, SEQUENCE]] = 0, 1, self._sequence
            self._sequence += 1
        self._sender.offer(slots)

    def settle(self) -> None:
        """Wait until the replay has all closed chunks.

        Raises PeerTimeout if none is acknowledged for too long; each that is restarts the wait.
        """
        left = 0

        def fewer_are_left() -> bool:
            self._pump()
            return self._sender.unacknowledged < left

        self._pump()
        while left := self._sender.unacknowledged:
            self._wait(fewer_are_left, "an acknowledgement")


@dataclass(eq=False)
class _Asked:
    """A call, when it was last sent, and its reply once that has come."""

    call: Call
    sent_s: float
    reply: Reply | None = None


class Served:
    """One served replay: the link of a client, its batches, and its calls."""

    def __init__(
        self,
        url: str,
        schema: Schema,
        security: Security,
        timeout_s: float,
        lock: ProcessLock,
        compress: bool,
    ) -> None:
        """Raises PeerTimeout, Refused (another schema, no library), ConfigError."""
        self.url = url
        self._open = partial(UrlLink, url, schema, security=security, compress=compress)
        asking = self._open(None, timeout_s=timeout_s)
        chunk = asking.welcome.chunk  # only the replay knows it
        asking.close()
        self.layout = ReplayLayout(schema, max(1, chunk), 1, chunk)
        self.link = self.open(timeout_s, lock=lock)
        self.source = ZmqSampleSource(self.link.link, 0.0)
        self.source.epoch = self.link.welcome.epoch
        self._sequence = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self.link.link.register({Kind.REPLY: self._take}, on_welcome=self._welcome)

    def open(self, timeout_s: float, actors: int = 0, lock: ProcessLock | None = None) -> UrlLink:
        """One more link, which says hello by itself while it is idle."""
        link = self._open(form_of(self.layout), timeout_s=timeout_s, actors=actors, lock=lock)
        link.look_while_idle()
        return link

    def ask(self, what: Request, rows: int = 0, option: int = 0, **more: Any) -> _Asked:
        """Send a call. Raises PeerDied if this client is closed."""
        self.link.check()
        call = Call(next(self._sequence), what, rows, option, **more)
        asked = self._asked[call.sequence] = _Asked(call, 0.0)
        self._send(asked)
        return asked

    def waits(self, asked: _Asked) -> bool:
        """Whether the reply has not come; if that takes long, the call is sent again."""
        if asked.reply is None and time.monotonic() - asked.sent_s > _AGAIN_S:
            self._send(asked)
        return asked.reply is None

    def forget(self, asked: _Asked) -> None:
        """Expect no reply."""
        self._asked.pop(asked.call.sequence, None)

    def _send(self, asked: _Asked) -> None:
        asked.sent_s = time.monotonic()
        self.link.link.send(SMALL, asked.call)

    def _take(self, reply: Reply) -> None:
        if reply.sequence in self._asked:  # else it is a repeat
            self._asked[reply.sequence].reply = reply

    def _welcome(self, welcome: Welcome, channel: int) -> None:
        if welcome.fresh:
            for asked in self._asked.values():
                if asked.reply is None:
                    self._send(asked)


class UrlClient(ReplayClient):
    """A client of one served replay, or of several as one, made by `zapex.connect`. Thread-safe.

    Transitions of a writer can be drawn when their chunk is closed: it is full, or `flush` was
    called. `extend` closes its chunks, so give it many rows at once. Weights and priorities are the
    same as in the replay itself; priorities of new transitions are float32.

    With `prefetch`, `sample` also requests the next batches now. They are drawn by the priorities
    of now.

    Batches, weights and updates of several replays are those of one that holds everything. The
    place of a URL in the list is the shard in its keys, so give all clients the same list. What a
    client adds goes to the replays in turn, and past one that takes none in time; rows of a call
    of `extend` that it took before that are then in both. One that is waited for and has said
    nothing for `shard_timeout_s` (a living one does each second) has no share until it answers: its
    rows are drawn from the others. `stats()` are those of all replays, added up, with three more:
    shards_away, how many have no share now; shards_lost, how often a share went; shards_back, how
    often one came back.
    """

    _where = "over a network"

    def __init__(
        self,
        urls: Sequence[str],
        schema: Schema,
        *,
        timeout_s: float = 10.0,
        prefetch: int = 0,
        security: Security | None = None,
        shard_timeout_s: float = 2.0,
        compress: bool = False,
    ) -> None:
        """Raises PeerTimeout if one does not answer, Refused, ConfigError."""
        super().__init__(schema, timeout_s)
        _check(urls, prefetch, shard_timeout_s)
        if compress:
            check_installed("compress=True")
        self.urls, self.prefetch = tuple(urls), prefetch
        self.shard_timeout_s = shard_timeout_s
        self._most_rows = most_rows(schema)
        self._several = len(urls) > 1
        self._lock = ProcessLock()
        self._extending: dict[int, tuple[UrlSlots, Extender]] = {}
        self._extending_lock = ProcessLock()
        self._turn = itertools.count(secrets.randbelow(len(urls)))
        self._looked_s = -math.inf
        self._ahead: tuple[int, Method] = (0, "stratified")  # what is requested
        self._replays: list[Served] = []
        try:
            for url in urls:
                trusted = security or Security()
                served = Served(url, schema, trusted, timeout_s, self._lock, compress)
                self._replays.append(served)
        except BaseException:
            self.close()
            raise
        sources = [replay.source for replay in self._replays]
        self._source: ZmqSampleSource | ShardedSampleSource = sources[0]
        self._shares, self._rng = Shares(1), np.random.default_rng()
        if self._several:
            self._source = ShardedSampleSource(
                sources,
                0.0,
                "stratified",
                None,
                self._tell,
                silent_s=shard_timeout_s,
                late_s=max(shard_timeout_s, timeout_s / 2),
            )
            self._shares = self._source.shares

    # Calls and waits, with the lock held.

    def _wait(self, ready: Callable[[], object], for_what: str) -> None:
        """Wait until `ready()`, which receives. Raises PeerTimeout, and the links' errors."""
        first, *others = (replay.link for replay in self._replays)
        first.timeout_s = self.timeout_s
        first.wait(ready, for_what, [other.link for other in others])

    def _replies(self, asked: Sequence[tuple[int, _Asked]]) -> list[Reply | None]:
        """The replies to calls of these shards; None: of several, that one is away.

        Raises the replay's error.
        """

        def come() -> bool:
            self._source.do_work()
            late = {s for s, one in asked if self._replays[s].waits(one)}
            for shard in late:
                self._lose_if_silent(shard)
            return not any(not self._shares.is_away(shard) for shard in late)

        try:
            self._wait(come, "a reply")
        except PeerTimeout:
            if all(one.reply or not self._shares.is_away(shard) for shard, one in asked):
                raise  # it lives, and the limiter may hold it
        finally:
            for shard, one in asked:
                self._replays[shard].forget(one)
        for reply in (one.reply for _, one in asked):
            if reply is not None and reply.error:
                raise told(reply.error, reply.text)
        return [one.reply for _, one in asked]

    def _there(self) -> list[int]:
        """The shards that have not lost their share, after a look at what has come."""
        self._replays[0].link.check()
        self._source.do_work()
        return [s for s in range(len(self._replays)) if not self._shares.is_away(s)]

    def _look(self, rows: int = 1) -> list[tuple[bool, int]]:
        """Of each replay that answers: whether it would give `rows` at once, and what it holds."""
        self._looked_s = time.monotonic()
        asked = [(s, self._replays[s].ask(Request.CAN_SAMPLE, rows)) for s in self._there()]
        found = []
        for (shard, _), reply in zip(asked, self._replies(asked), strict=True):
            if reply is not None:
                self._learn(shard, reply, draws=bool(reply.a))
                found.append((bool(reply.a), PRESENT.unpack(reply.body)[1]))
        return found

    def _learn(self, shard: int, reply: Reply, draws: bool = True) -> None:
        """draws: whether the replay would answer a request at once."""
        if isinstance(self._source, ShardedSampleSource):
            total, count, smallest = PRESENT.unpack(reply.body)
            self._source.learn(shard, total * draws, count, smallest)

    def _lose(self, shard: int, why: str) -> None:
        if isinstance(self._source, ShardedSampleSource):
            self._source.lose(shard, why)

    def _lose_if_silent(self, shard: int) -> None:
        silent_s = self._replays[shard].source.silent_s
        if silent_s > self.shard_timeout_s:
            self._lose(shard, f"has said nothing for {silent_s:.1f} s")

    def _tell(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)

    # Batches and priorities.

    def _draw(self, batch: Batch, beta: float, method: Method, by_memory: bool) -> None:
        rows = batch.layout.batch_size
        if rows < 1:
            raise ConfigError(f"batch_size must be at least 1, got {rows}")
        with self._lock:
            self._replays[0].link.check()
            if self._ahead != (rows, method):
                self._source.forget_all()
                self._ahead = rows, method
            try:
                draw = self._drawn(batch, rows, method)
            except BaseException:  # an interrupt too
                self._source.forget_all()
                raise
        draw.weigh(batch.weights, beta, by_memory=by_memory)

    def _drawn(self, batch: Batch, rows: int, method: Method) -> Draw:
        source, draws = self._source, list[Draw]()

        def drawn() -> bool:
            draw = source.poll_draw(batch)
            if draw is not None:
                draws.append(draw)
            elif self._several and not self._shares.totals.any():
                raise self._lack(rows)
            return draw is not None

        if self._several and not source.outstanding:
            few = self._shares.counts.sum() < rows  # others may have added some
            if few or time.monotonic() - self._looked_s > _FRESH_S:
                self._look()
            if self._shares.counts.sum() < rows:
                raise self._lack(rows)
        while source.outstanding <= self.prefetch:
            source.request(rows, method)
        self._wait(drawn, "a batch")
        return draws[0]

    def _draw_sequences(self, batch: SequenceBatch, asked: Sequences, beta: float) -> None:
        rows, form = batch.layout.batch_size, form_of(self._replays[0].layout)
        most, leaves, done = PackedSequences.most(form, asked), np.empty(rows), 0
        with self._lock:
            self._replays[0].link.check()
            while done < rows:  # again for what a replay that went away has not drawn
                calls = self._ask_for_sequences(rows - done, most, asked)
                replies = self._replies([(shard, one) for shard, _, one in calls])
                for (shard, known, one), reply in zip(calls, replies, strict=True):
                    if reply is None:
                        continue
                    packed, end = PackedSequences(form, one.call.rows, asked), done + one.call.rows
                    found, total = packed.unpack(reply.body, batch, done)
                    leaves[done:end] = found * (known / total if self._several else 1.0)
                    batch.keys[done:end] = with_shard(batch.keys[done:end], shard)
                    replay = self._replays[shard]
                    replay.source.epoch = replay.link.welcome.epoch
                    done = end
        weigh(batch, leaves, beta)

    def _ask_for_sequences(
        self, rows: int, most: int, asked: Sequences
    ) -> list[tuple[int, float, _Asked]]:
        """Calls for so many, at most `most` in each: the shard, its known total, and the call."""
        counts, totals = np.array([rows]), np.zeros(1)
        if self._several:
            self._look()
            totals = self._shares.totals.copy()
            if not totals.any():
                raise self._lack(1)
            counts = share_out(totals, rows, self._rng, "stratified")
        calls = []
        for shard, count in enumerate(counts.tolist()):
            for first in range(0, count, most):
                some = min(most, count - first)
                one = self._replays[shard].ask(Request.SEQUENCES, some, asked.option)
                calls.append((shard, float(totals[shard]), one))
        return calls

    def _silence(self) -> PeerTimeout:
        return PeerTimeout(f"none of the replays answers: {', '.join(self.urls)}")

    def _lack(self, rows: int) -> PeerTimeout | NotEnoughData:
        """Why several replays have no batch of so many rows together."""
        away = [self.urls[shard] for shard in self._shares.away]
        if len(away) == len(self.urls):
            return self._silence()
        without = f" (without {', '.join(away)})" if away else ""
        count = int(self._shares.counts.sum())
        if count < rows:
            return NotEnoughData(
                f"the replays hold {count} transitions{without} and {rows} are needed to sample: "
                "add more first"
            )
        return NotEnoughData(
            f"the replays{without} have nothing to draw now: all priorities are 0, or samples per "
            "insert does not allow it"
        )

    def _update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> tuple[int, int]:
        magnitudes(priorities, len(keys))  # checked here, so that all parts are sent, or none
        applied = stale = 0
        with self._lock:
            asked, there = [], self._there()
            for shard, rows in by_shard(keys).items():
                if shard not in there:
                    stale += len(rows)
                    continue
                replay = self._replays[shard]
                for some in np.split(rows, range(self._most_rows, len(rows), self._most_rows)):
                    call = replay.ask(
                        Request.UPDATE,
                        len(some),
                        epoch=replay.source.epoch,
                        keys=without_shard(keys[some]),
                        priorities=priorities[some],
                    )
                    asked.append((shard, call))
            for (shard, one), reply in zip(asked, self._replies(asked), strict=True):
                if reply is None:
                    stale += one.call.rows
                    continue
                self._learn(shard, reply)
                applied, stale = applied + reply.a, stale + reply.b
        return applied, stale

    # What goes in.

    def _with_one(self, work: Callable[[int], _T]) -> _T:
        """The result of `work` with the next shard, or one after it if that is away or full."""
        if not self._several:
            return work(0)
        first = next(self._turn)
        order = [(first + i) % len(self._replays) for i in range(len(self._replays))]
        for shard in sorted(order, key=self._shares.is_away):
            try:
                return work(shard)
            except PeerTimeout as error:
                with self._lock:
                    self._source.do_work()
                    self._lose_if_silent(shard)
                last = error
        raise PeerTimeout(f"none of the replays takes more; the last: {last}") from None

    def _take(self, rows: Rows) -> NDArray[np.int64]:
        return self._with_one(lambda shard: self._extended(shard, rows))

    def _extended(self, shard: int, rows: Rows) -> NDArray[np.int64]:
        with self._extending_lock:
            if shard not in self._extending:
                replay = self._replays[shard]
                # It never moves: all rows of a call are at the replay that is asked for their keys.
                slots = UrlSlots(replay.open(self.timeout_s, 1), replay.layout, 1)
                self._extending[shard] = slots, Extender(slots)
            slots, extender = self._extending[shard]
            try:
                with slots.lock:
                    slots.mark()
                    extender.extend(rows)
                    extender.close()
                    slots.settle()
                    sent = slots.sent
                return with_shard(self._keys_of(shard, slots.number, sent, len(rows.reward)), shard)
            except PeerTimeout:
                if self._several:  # another replay gets these rows
                    del self._extending[shard]
                    slots.give_up()
                raise

    def _keys_of(self, shard: int, actor: int, sent: range, rows: int) -> NDArray[np.int64]:
        """Keys of the rows in these chunks, in order; -1 for a row whose chunk is evicted."""
        with self._lock:
            replay, found = self._replays[shard], [np.empty(0, np.int64)]
            asked = [(shard, replay.ask(Request.KEYS, actor, sequence)) for sequence in sent]
            for reply in self._replies(asked):
                if reply is None:
                    raise PeerTimeout(f"{replay.url} does not answer")
                found.append(np.frombuffer(reply.body, "<i8"))
            replay.source.epoch = replay.link.welcome.epoch
            self._looked_s = -math.inf
        keys = np.concatenate(found)
        # The first chunks are evicted first.
        return np.concatenate([np.full(rows - len(keys), NO_KEY, np.int64), keys])

    def _holds(self, key: int) -> bool:
        return key != NO_KEY

    def _writer_link(self, num_envs: int) -> UrlSlots:
        return self._with_one(lambda shard: self._slots(shard, num_envs))

    def _slots(self, shard: int, streams: int) -> UrlSlots:
        replay = self._replays[shard]
        link = replay.open(self.timeout_s, 1)
        return UrlSlots(link, replay.layout, streams, self._elsewhere if self._several else None)

    def _elsewhere(self, lock: ProcessLock) -> UrlLink:
        """A writer's link to the next shard, in place of one that did not answer."""
        return self._with_one(lambda shard: self._replays[shard].open(self.timeout_s, 1, lock))

    # Facts.

    def can_sample(self, batch_size: int) -> bool:
        """Whether `sample(batch_size)` would return at once."""
        if batch_size < 1:
            return False
        with self._lock:
            found = self._look(1 if self._several else min(batch_size, self._most_rows))
        enough = sum(count for _, count in found) >= batch_size
        return enough and any(allowed for allowed, _ in found)

    def __len__(self) -> int:
        with self._lock:
            found = self._look()
        if not found:
            raise self._silence()
        return sum(count for _, count in found)

    def stats(self) -> dict[str, float]:
        """Counters of all replays that answer, added up; see PrioritizedReplay.stats."""
        found: Counter[str] = Counter()
        largest: dict[str, float] = {}
        with self._lock:
            asked = [(s, self._replays[s].ask(Request.STATS)) for s in self._there()]
            for reply in self._replies(asked):
                of_one = json.loads(reply.text) if reply is not None else {}
                for name in _LARGEST & of_one.keys():
                    largest[name] = max(largest.get(name, 0), of_one.pop(name))
                found.update(of_one)
        if not found:
            raise self._silence()
        if self._several:
            shares = self._shares
            counts = {"away": len(shares.away), "lost": shares.lost, "back": shares.back}
            largest |= {f"shards_{name}": count for name, count in counts.items()}
        return {**found, **largest}

    def close(self) -> None:
        """Disconnect. Added transitions stay. Writers work until they are closed."""
        for replay in self._replays:
            replay.link.close()
        for slots, _ in self._extending.values():
            slots.give_up()


def _check(urls: Sequence[str], prefetch: int, shard_timeout_s: float) -> None:
    if not 0 <= prefetch <= 16:
        raise ConfigError(f"prefetch must be 0 to 16 batches, got {prefetch}")
    if not 1 <= len(urls) <= MOST_SHARDS:
        raise ConfigError(f"connect takes 1 to {MOST_SHARDS} URLs, got {len(urls)}")
    twice = [url for url, count in Counter(urls).items() if count > 1]
    if twice:
        raise ConfigError(f"each replay is named once, got {twice[0]} twice")
    if not _LEAST_TIMEOUT_S <= shard_timeout_s <= MOST_TIMEOUT_S:
        raise ConfigError(
            f"shard_timeout_s must be at least {_LEAST_TIMEOUT_S:g}, as a replay says something "
            f"once a second, and at most {MOST_TIMEOUT_S:g}, got {shard_timeout_s}"
        )
