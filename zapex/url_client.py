"""A replay served by `zapex replay --schema`, on any host, with the names of PrioritizedReplay.

Chunks travel when they are closed, as a relay's do: kept until acknowledged, sent again when the
replay comes back, never taken twice. Everything else is a call and its answer; a call that was not
answered goes again. So a replay whose process died and was started again is a pause.
"""

import itertools
import json
import secrets
import threading
import time
from collections import deque
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zapex import library_messages as library
from zapex.arguments import FLOAT64, INT64, column
from zapex.batch import Batch
from zapex.batch_packing import BatchUnpacker
from zapex.chunk_store import NO_KEY
from zapex.errors import TELLABLE, ConfigError, InvalidPriority
from zapex.experience_messages import BatchMessage
from zapex.library_messages import Call, Reply
from zapex.message_header import Kind
from zapex.messages import SMALL, Bye, Welcome
from zapex.replay_core import Method, ReplayLayout, importance_weights
from zapex.replay_face import Extender, Normalise, ReplayFace, Rows
from zapex.schema import BatchLayout, Schema
from zapex.url_link import CONFIG, Keeper, UrlHome, UrlLink, form_of
from zapex.writer import Autoreset, Writer
from zapex.zmq_client import ZmqLink
from zapex.zmq_socket import Security

_METHODS = get_args(Method)
_AGAIN_S = 2.0  # no answer for so long: the call goes again


class UrlClient(ReplayFace):
    """A replay's client, made by `zapex.connect(url, schema=...)`. Public methods are thread-safe.

    Transitions of a writer can be drawn when their chunk is closed: full, or by `flush`. `extend`
    closes what it brings, so give it many rows at once. Weights and priorities are as in the
    replay itself, the priorities of new transitions as float32.
    """

    def __init__(
        self,
        url: str,
        schema: Schema,
        *,
        timeout_s: float = 10.0,
        prefetch: int = 0,
        security: Security | None = None,
    ) -> None:
        """Raises PeerTimeout, Refused (another schema, no library), ConfigError."""
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive, got {timeout_s}")
        if not 0 <= prefetch <= 16:
            raise ConfigError(f"prefetch must be 0 to 16 batches, got {prefetch}")
        super().__init__(schema)
        self.url, self.timeout_s, self.prefetch = url, timeout_s, prefetch
        self._security = security or Security()
        chunk = self._ask_chunk().chunk
        self._layout = ReplayLayout(schema, max(1, chunk), 1, chunk)
        self._form = form_of(self._layout)
        self._unpackers: dict[BatchLayout, BatchUnpacker] = {}
        self._keeper = Keeper()
        self._link = self._open()
        self._sequence = itertools.count()
        self._waiting: dict[int, Call] = {}
        self._answers: dict[int, Reply | BatchMessage] = {}
        self._ahead: deque[Call] = deque()
        self._extending: tuple[UrlLink, UrlHome, Extender] | None = None
        self._extending_lock = threading.Lock()
        link = self._link.link
        link.handlers[Kind.REPLY] = link.handlers[Kind.BATCH] = self._take_answer
        link.on_welcome.append(self._call_again)
        self._keeper.start()

    def _ask_chunk(self) -> Welcome:
        """Only the replay knows how long its chunks are."""
        link = ZmqLink(
            self.url, "client", 1 + secrets.randbits(62), 1, None, CONFIG, self._security,
            schema_hash=self.schema.hash,
        )  # fmt: skip
        try:
            return link.open(self.timeout_s)
        finally:
            link.close(bye=Bye())

    def _open(self, actors: int = 0) -> UrlLink:
        link = UrlLink(self.url, self._form, self._security, self.timeout_s, actors=actors)
        return self._keeper.keep(link)

    # Calls.

    def _call(self, what: int, rows: int = 0, option: int = 0, **more: Any) -> Any:
        """The answer. Raises what the replay raised, PeerTimeout, Refused."""
        with self._link.lock:
            return self._await(self._send(what, rows, option, **more))

    def _send(self, what: int, rows: int = 0, option: int = 0, **more: Any) -> Call:
        self._link.check()
        call = Call(next(self._sequence), what, rows, option, **more)
        self._waiting[call.sequence] = call
        self._link.link.send(SMALL, call)
        return call

    def _await(self, call: Call) -> Reply | BatchMessage:
        asked_s = time.monotonic()

        def answered() -> bool:
            nonlocal asked_s
            if call.sequence not in self._answers and time.monotonic() - asked_s > _AGAIN_S:
                asked_s = time.monotonic()
                self._link.link.send(SMALL, call)
            return call.sequence in self._answers

        try:
            self._link.wait(answered, "an answer")
            answer = self._answers.pop(call.sequence)
        finally:
            self._waiting.pop(call.sequence, None)
        if isinstance(answer, Reply) and answer.error:
            raise TELLABLE[answer.error - 1](answer.text)
        return answer

    def _take_answer(self, answer: Reply | BatchMessage) -> None:
        if answer.sequence in self._waiting:  # else it came twice
            self._answers[answer.sequence] = answer

    def _call_again(self, welcome: Welcome, channel: int) -> None:
        if welcome.fresh:
            for sequence, call in self._waiting.items():
                if sequence not in self._answers:
                    self._link.link.send(SMALL, call)

    # The names of PrioritizedReplay.

    def writer(self, num_envs: int, autoreset: Autoreset = "next_step") -> Writer:
        """Streams of steps of vectorised environments, a link of their own; see Writer."""
        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1, got {num_envs}")
        link = self._open(actors=1)
        try:
            return Writer(UrlHome(link, self._layout, num_envs), num_envs, autoreset)
        except BaseException:
            link.close()
            raise

    def _take(self, rows: Rows) -> NDArray[np.int64]:
        with self._extending_lock:
            if self._extending is None:
                link = self._open(actors=1)
                home = UrlHome(link, self._layout, 1)
                self._extending = link, home, Extender(home)
            link, home, extender = self._extending
            with link.lock:
                home.sent.clear()
                extender.extend(rows)
                extender.close()
                home.settle()
                sent = list(home.sent)
            return self._keys_of(home.number, sent, len(rows.magnitudes))

    def _keys_of(self, actor: int, sent: list[int], rows: int) -> NDArray[np.int64]:
        """Keys of chunks that were extended, in order; -1 where one is gone already."""
        found = []
        for sequence in sent:
            reply: Reply = self._call(library.KEYS, actor, sequence, incarnation=1)
            found.append(np.frombuffer(reply.body, "<i8"))
        keys = np.concatenate([np.empty(0, np.int64), *found])
        # The first ones go first.
        return np.concatenate([np.full(rows - len(keys), NO_KEY, np.int64), keys])

    def sample(
        self,
        batch_size: int,
        beta: float = 0.4,
        out: Batch | None = None,
        *,
        method: Method = "stratified",
        normalise: Normalise = "batch",
    ) -> Batch:
        """`batch_size` transitions by priority; see PrioritizedReplay.sample.

        With `prefetch` the batches after it are asked for now: their priorities are those of now.
        """
        most = self._form.batch_size
        if not 1 <= batch_size <= most:
            raise ConfigError(
                f"a batch over a network has 1 to {most} rows, got {batch_size}: draw several"
            )
        batch = self._batch_for(out, batch_size, method, normalise, _METHODS)
        option = _METHODS.index(method)
        with self._link.lock:
            while self._ahead and (self._ahead[0].rows, self._ahead[0].option) != (
                batch_size, option,
            ):  # fmt: skip
                self._forget(self._ahead.popleft())
            if not self._ahead:
                self._ahead.append(self._send(library.SAMPLE, batch_size, option))
            call = self._ahead.popleft()
            while len(self._ahead) < self.prefetch:
                self._ahead.append(self._send(library.SAMPLE, batch_size, option))
            try:
                message = self._await(call)
            except BaseException:
                while self._ahead:
                    self._forget(self._ahead.popleft())
                raise
            assert isinstance(message, BatchMessage)
            layout = batch.layout
            if layout not in self._unpackers:
                self._unpackers[layout] = BatchUnpacker(layout, self._form.layout)
            leaves, _, smallest = self._unpackers[layout].unpack(message, batch)
        of_memory = smallest if normalise == "memory" else None
        batch.weights[:] = importance_weights(leaves, beta, of_memory)
        return batch

    def _forget(self, call: Call) -> None:
        self._waiting.pop(call.sequence, None)
        self._answers.pop(call.sequence, None)

    def can_sample(self, batch_size: int) -> bool:
        """Whether `sample(batch_size)` would return at once."""
        return bool(self._call(library.CAN_SAMPLE, min(batch_size, self._form.batch_size)).a)

    def update_priorities(self, keys: ArrayLike, priorities: ArrayLike) -> tuple[int, int]:
        """New priorities for the transitions of `keys`; see PrioritizedReplay.update_priorities."""
        keys = np.asarray(keys)
        keys = column(keys, INT64, (keys.size,), "keys")
        given = column(priorities, FLOAT64, keys.shape, "priorities")
        if not np.isfinite(given).all():
            row = int(np.flatnonzero(~np.isfinite(given))[0])
            raise InvalidPriority(
                f"a priority must be finite, got {given[row]} in row {row}: has the loss diverged? "
                "Nothing was updated"
            )
        applied = stale = 0
        most = self._form.batch_size
        with self._link.lock:
            for first in range(0, max(1, len(keys)), most):
                some = slice(first, first + most)
                reply: Reply = self._call(
                    library.UPDATE, len(keys[some]), keys=keys[some], priorities=given[some]
                )
                applied, stale = applied + reply.a, stale + reply.b
        return applied, stale

    def stats(self) -> dict[str, float]:
        """Counters of the replay, by name; see PrioritizedReplay.stats."""
        found: dict[str, float] = json.loads(self._call(library.STATS).text)
        return found

    def __len__(self) -> int:
        return int(self._call(library.STATS).a)

    def close(self) -> None:
        """Disconnect; what was extended is there. Writers go on until they are closed."""
        self._link.close()
        if self._extending is not None:
            self._extending[0].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
