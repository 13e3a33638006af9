"""Several served replays as one: rows go to each in turn, batches come from all by their totals.

A replay that is waited for and has said nothing for `shard_timeout_s` (a living one does each
second) has no share until it answers: its rows of that batch are drawn from the others. One that
lives and only cannot give its rows yet is waited for as a single replay is.
"""

import itertools
import json
import secrets
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.arguments import MOST_TIMEOUT_S, magnitudes
from zapex.chunks.batch import Batch
from zapex.chunks.keys import NO_KEY, by_shard, with_shard, without_shard
from zapex.chunks.schema import Schema
from zapex.errors import ConfigError, NotEnoughData, PeerTimeout
from zapex.library.client import Answer, ProcessLock, ReplayClient
from zapex.library.interface import Rows
from zapex.library.url_client import UrlClient, UrlLink, UrlSlots
from zapex.net.keys import Security
from zapex.replay.draw import METHODS, Draw
from zapex.replay.shards import MOST_SHARDS, Part, Shares, check_method, share_out
from zapex.sumtree_numba import Method
from zapex.wire.messages import PRESENT, Call, Reply, Request

_FRESH_S = 1.0  # what a shard has said of itself is asked again after this time
_LEAST_TIMEOUT_S = 1.5
_LARGEST = ("chunk",)  # statistics that are not added up


@dataclass
class _Asked:
    """Rows that a shard was asked for. known: its total at that time."""

    shard: int
    rows: int
    known: float
    call: Call


@dataclass
class _Planned:
    """A batch that was asked for."""

    rows: int
    method: Method
    parts: list[_Asked]


class ShardedClient(ReplayClient):
    """Several replays, made by `zapex.connect([url, ...], schema=...)`. Thread-safe.

    Batches, weights and updates are those of one replay that holds everything. The place of a URL
    in the list is the shard in its keys, so give all clients the same list. What a client adds
    goes to the replays in turn, and past one that does not answer.

    `stats()` are those of all replays, added up, with three more: shards_away, how many have no
    share now; shards_lost, how often a share went; shards_back, how often one came back.
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
        seed: int | None = None,
        compress: bool = False,
    ) -> None:
        """Raises PeerTimeout if one does not answer, Refused, ConfigError."""
        super().__init__(schema, timeout_s)
        _check(urls, shard_timeout_s)
        if not 0 <= prefetch <= 16:
            raise ConfigError(f"prefetch must be 0 to 16 batches, got {prefetch}")
        self.urls, self.prefetch = tuple(urls), prefetch
        self.shard_timeout_s = shard_timeout_s
        self._lock = ProcessLock()
        self._rng = np.random.default_rng(seed)
        self._shares = Shares(len(urls))
        self._looked_s = [-np.inf] * len(urls)
        self._probes: dict[int, Call] = {}  # of shards that are away
        self._ahead: deque[_Planned] = deque()
        self._turn = itertools.count(secrets.randbelow(len(urls)))
        self._clients: list[UrlClient] = []
        try:
            for url in urls:
                self._clients.append(
                    UrlClient(
                        url, schema, timeout_s=timeout_s, security=security, compress=compress
                    )
                )
        except BaseException:
            self.close()
            raise
        self._most_rows = min(client._most_rows for client in self._clients)

    # What is known of each shard.

    def _look(self, again: bool = False) -> None:
        """Ask the shards of which nothing new is known; take what those that are away have said."""
        now_s = time.monotonic()
        asked = {}
        for shard, client in enumerate(self._clients):
            if self._shares.is_away(shard):
                self._look_for(shard)
            elif again or now_s - self._looked_s[shard] > _FRESH_S:
                asked[shard] = client.ask(Request.CAN_SAMPLE, 1)
        for shard, call in asked.items():
            reply = self._taken(shard, call)
            if reply is not None:
                self._learn(shard, reply, draws=reply.a > 0)

    def _look_for(self, shard: int) -> None:
        client = self._clients[shard]
        if shard not in self._probes:
            self._probes[shard] = client.ask(Request.CAN_SAMPLE, 1)
        elif client.has_come(self._probes[shard]):
            reply = client.answer(self._probes.pop(shard), self.shard_timeout_s)
            self._learn(shard, reply, draws=reply.a > 0)

    def _learn(self, shard: int, reply: Reply, draws: bool = True) -> None:
        """draws: whether it would answer a batch at once."""
        total, count, smallest = PRESENT.unpack(reply.body)
        self._looked_s[shard] = time.monotonic()
        if self._shares.learn(shard, total * draws, count, smallest):
            self._tell(f"{self.urls[shard]} answers again, with {count:,} transitions")

    def _lose(self, shard: int, error: PeerTimeout) -> None:
        for planned in self._ahead:
            for part in (part for part in planned.parts if part.shard == shard):
                self._clients[shard].forget(part.call)
        if self._shares.lose(shard):
            self._tell(f"{error}: its share goes to the other replays until it answers")
        self._looked_s[shard] = -np.inf

    def _tell(self, text: str) -> None:
        warnings.warn(text, stacklevel=6)

    def _taken(self, shard: int, call: Call) -> Reply | None:
        """The answer of a shard, or None if it does not come in time."""
        try:
            return self._clients[shard].answer(call, self.shard_timeout_s)
        except PeerTimeout as error:
            self._lose(shard, error)
            return None

    # Batches and priorities.

    def _draw(self, batch: Batch, beta: float, method: Method, by_memory: bool) -> None:
        check_method(method)
        rows = batch.layout.batch_size
        with self._lock:
            while self._ahead and (self._ahead[0].rows, self._ahead[0].method) != (rows, method):
                self._forget(self._ahead.popleft())
            if not self._ahead:
                self._look()
                if self._shares.counts.sum() < rows:
                    self._look(again=True)  # others may have added some
                self._demand(rows)
                self._ahead.append(self._planned(rows, method))
            planned = self._ahead.popleft()
            while len(self._ahead) < self.prefetch:
                self._ahead.append(self._planned(rows, method))
            draw = self._gathered(planned, batch)
        batch.keys[:] = draw.keys
        draw.weigh(batch.weights, beta, by_memory=by_memory)

    def _demand(self, rows: int) -> None:
        count = int(self._shares.counts.sum())
        if count < max(rows, 1):
            away = [self.urls[shard] for shard in self._shares.away]
            if len(away) == len(self.urls):
                raise PeerTimeout(f"none of the replays answers: {', '.join(away)}")
            without = f" (without {', '.join(away)})" if away else ""
            raise NotEnoughData(
                f"the replays hold {count} transitions{without} and {rows} are needed to sample: "
                "add more first"
            )

    def _planned(self, rows: int, method: Method) -> _Planned:
        """Ask the shards for their rows of a batch, by the totals that are known now."""
        totals = self._shares.totals
        if not totals.any():
            self._demand(rows)
            raise NotEnoughData("the replays have nothing to draw: all priorities are 0")
        counts = share_out(totals, rows, self._rng, method)
        option = METHODS.index(method) + len(METHODS)  # a part of a batch
        parts = [
            _Asked(s, n, totals[s], self._clients[s].ask(Request.SAMPLE, n, option))
            for s, n in enumerate(counts.tolist())
            if n
        ]
        return _Planned(rows, method, parts)

    def _gathered(self, planned: _Planned, batch: Batch) -> Draw:
        """Fill the batch. Rows of a shard that does not answer are drawn from the others."""
        done: list[Part] = []
        rows = planned.rows
        while True:
            refused = self._take_parts(planned, batch, done)
            first = sum(len(part.draw.keys) for part in done)
            if first == rows:
                return self._shares.together(done)
            if refused is not None and not self._shares.totals.any():
                raise refused
            planned = self._planned(rows - first, planned.method)

    def _take_parts(
        self, planned: _Planned, batch: Batch, done: list[Part]
    ) -> NotEnoughData | None:
        """Take the parts that come in time; returns why one was refused."""
        refused, wait_s = None, self.shard_timeout_s
        try:
            while planned.parts:
                asked = planned.parts.pop(0)
                first = sum(len(part.draw.keys) for part in done)
                try:
                    draw = self._clients[asked.shard].part(asked.call, batch, first, wait_s)
                except PeerTimeout as error:
                    self._lose(asked.shard, error)
                except NotEnoughData as error:  # it holds fewer than its own least
                    refused = error
                    self._shares.learn(asked.shard, 0.0, 0)
                else:
                    self._shares.learn(asked.shard, draw.total, draw.count, draw.smallest)
                    self._looked_s[asked.shard] = time.monotonic()
                    done.append(Part(asked.shard, asked.known, draw))
        finally:
            self._forget(planned)
        return refused

    def _forget(self, planned: _Planned) -> None:
        for part in planned.parts:
            self._clients[part.shard].forget(part.call)

    def _update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> tuple[int, int]:
        magnitudes(priorities, len(keys))  # checked here, so that all parts are sent, or none
        applied = stale = 0
        with self._lock:
            asked = []
            for shard, rows in by_shard(keys).items():
                if shard >= len(self._clients) or self._shares.is_away(shard):
                    stale += len(rows)
                    continue
                for some in np.split(rows, range(self._most_rows, len(rows), self._most_rows)):
                    call = self._clients[shard].ask(
                        Request.UPDATE,
                        len(some),
                        keys=without_shard(keys[some]),
                        priorities=priorities[some],
                    )
                    asked.append((shard, len(some), call))
            for shard, count, call in asked:
                reply = self._taken(shard, call)
                if reply is None:
                    stale += count
                    continue
                self._learn(shard, reply)
                applied, stale = applied + reply.a, stale + reply.b
        return applied, stale

    # What goes in.

    def _in_turn(self) -> list[int]:
        """All shards, from the next one on; those that are away last."""
        first = next(self._turn)
        order = [(first + i) % len(self._clients) for i in range(len(self._clients))]
        return sorted(order, key=self._shares.is_away)

    def _take(self, rows: Rows) -> NDArray[np.int64]:
        keys = self._with_one(lambda shard: self._extended(shard, rows))
        assert isinstance(keys, np.ndarray)
        return keys

    def _extended(self, shard: int, rows: Rows) -> NDArray[np.int64]:
        client = self._clients[shard]
        try:
            keys = client._take(rows)
        except PeerTimeout:
            client.abandon_extending()
            raise
        self._looked_s[shard] = -np.inf
        return with_shard(keys, shard)

    def _with_one(self, work: Callable[[int], Any]) -> Any:
        """The result of `work` with the next shard, or with one after it if that is away."""
        for shard in self._in_turn():
            try:
                return work(shard)
            except PeerTimeout as error:
                with self._lock:
                    self._lose(shard, error)
                last = error
        raise PeerTimeout(f"none of the replays answers; the last: {last}") from None

    def _writer_link(self, num_envs: int) -> UrlSlots:
        slots = self._with_one(lambda s: self._clients[s].writer_slots(num_envs, self._elsewhere))
        assert isinstance(slots, UrlSlots)
        return slots

    def _elsewhere(self, lock: ProcessLock) -> UrlLink:
        """A writer's link to the next shard, in place of one that did not answer."""
        link = self._with_one(lambda shard: self._clients[shard].open_writer(lock))
        assert isinstance(link, UrlLink)
        return link

    def _holds(self, key: int) -> bool:
        return key != NO_KEY

    # Facts.

    def can_sample(self, batch_size: int) -> bool:
        """Whether `sample(batch_size)` would return at once."""
        with self._lock:
            self._look(again=True)
            return int(self._shares.counts.sum()) >= batch_size > 0

    def __len__(self) -> int:
        with self._lock:
            self._look(again=True)
            return int(self._shares.counts.sum())

    def stats(self) -> dict[str, float]:
        """Counters of all replays that answer, added up; see PrioritizedReplay.stats."""
        found: Counter[str] = Counter()
        largest = dict.fromkeys(_LARGEST, 0.0)
        with self._lock:
            self._look()
            there = [s for s in range(len(self._clients)) if not self._shares.is_away(s)]
            asked = [(s, self._clients[s].ask(Request.STATS)) for s in there]
            for shard, call in asked:
                reply = self._taken(shard, call)
                of_one = json.loads(reply.text) if reply is not None else {}
                for name in largest.keys() & of_one.keys():
                    largest[name] = max(largest[name], of_one.pop(name))
                found.update(of_one)
            shares = self._shares
            counts = {"away": len(shares.away), "lost": shares.lost, "back": shares.back}
        return {**found, **largest, **{f"shards_{name}": n for name, n in counts.items()}}

    def close(self) -> None:
        """Disconnect. Added transitions stay. Writers work until they are closed."""
        for client in self._clients:
            client.close()

    def _ask(self, what: Request, rows: int = 0) -> Answer:
        raise NotImplementedError  # every fact is asked of all shards

    def _send_update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> Answer:
        raise NotImplementedError  # see `_update`


def _check(urls: Sequence[str], shard_timeout_s: float) -> None:
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
