"""What an insider says: `LIES` is the table, with what counts each lie."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import zmq

from tests.stress.insider_world import (
    ACTORS,
    CHUNK,
    CONFIG,
    INSIDER,
    LIAR,
    LIMITS,
    PARAMETER_BYTES,
    SCHEMA,
    STREAMS,
    World,
    form,
    layout,
)
from tests.support.relays import fill
from tests.support.transport_rigs import BATCH, until
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.store import ChunkStore
from zapex.errors import ZapexError
from zapex.host.metrics import EPISODE, TABLES, Role, RoleMetrics
from zapex.wire import control as m
from zapex.wire.calls import Call, Request
from zapex.wire.control import BULK, SMALL
from zapex.wire.header import as_buffer


class Insider:
    """Bare connections with a role's key: it says what it wants, in whole messages."""

    def __init__(self, world: World, role: str, host: int = INSIDER) -> None:
        self.world, self.role, self.host = world, role, host
        self.context: Any = zmq.Context()
        self.dealers = [self.dealer(), self.dealer()]
        self.store = ChunkStore(
            aligned_zeros(ChunkStore.required_bytes(layout().chunk_layout, 1)),
            layout().chunk_layout, 1,
        )  # fmt: skip
        self.rng = np.random.default_rng(2)
        self.life = 1
        self.actor = self.incarnation = self.sequence = self.credit = 0

    def dealer(self) -> Any:
        """One more connection, with the key."""
        keys = self.world.security[self.role].keys
        assert keys is not None
        made = self.context.socket(zmq.DEALER)
        made.linger = 0
        made.curve_serverkey = keys.publics["replay"].encode()
        made.curve_publickey, made.curve_secretkey = keys.public.encode(), keys.secret.encode()
        made.connect(self.world.url)
        return made

    def hello(self, channel: int, **changes: Any) -> m.Hello:
        wanted = 1 if self.role == "relay" else 0
        true = m.Hello(self.role, self.host, self.life, channel, SCHEMA.hash, wanted, CONFIG)
        return replace(true, **changes)

    def join(self) -> None:
        """Be a client like others, until the next lie."""
        left = {SMALL, BULK}
        said_s = dict.fromkeys(left, 0.0)

        def heard() -> bool:
            for channel in sorted(left):
                if time.monotonic() - said_s[channel] > 0.3:
                    said_s[channel] = time.monotonic()
                    self.send(channel, self.hello(channel))
                for answer in self.answers(channel):
                    if isinstance(answer, m.Welcome):
                        left.discard(channel)
                    if channel == SMALL and isinstance(answer, m.Welcome | m.Ack):
                        self._state(answer.actors)
            return not left

        until(heard, self.world.turn, f"the {self.role} insider to come in")
        if self.role == "relay":
            until(lambda: self._look() or self.credit >= CHUNK, self.world.turn, "its credit")

    def _look(self) -> bool:
        for answer in self.answers(SMALL):
            if isinstance(answer, m.Ack):
                self._state(answer.actors)
        return False

    def _state(self, states: Any) -> None:
        for actor, incarnation, sequence, credit in states.tolist():
            self.actor, self.incarnation, self.sequence = actor, max(1, incarnation), sequence
            self.credit = credit

    def answers(self, channel: int) -> list[Any]:
        """What has come and is a message."""
        found = []
        while self.dealers[channel].poll(0):
            with suppress(ZapexError):
                found.append(m.decode(self.dealers[channel].recv_multipart(), form()))
        return found

    def send(self, channel: int, message: Any) -> None:
        self.raw(channel, m.encode(message))

    def raw(self, channel: int, parts: Any) -> None:
        with suppress(zmq.Again):
            self.dealers[channel].send_multipart([bytes(part) for part in parts], zmq.NOBLOCK)

    def push(
        self, values: dict[str, Any] | None = None, *, row: Any = 0, chunks: int = 1, **changes: Any
    ) -> m.Push:
        """Push chunks of its own; `values` stand in their rows, `changes` in the message."""
        fill(self.store, 0, (self.actor, 1, self.sequence % 1000), 3, self.rng)
        self.store.column(0, "mask")[:], self.store.column(0, "discount")[:] = LIAR, 0.9
        for name, value in (values or {}).items():
            self.store.column(0, name)[row] = value
        push = m.Push.of_chunks(
            self.store.layout, self.store.mem, [(self.store.body(0), 0, CHUNK)] * chunks,
            actor=self.actor, incarnation=self.incarnation, sequence=self.sequence,
        )  # fmt: skip
        push = replace(push, **changes)
        self.send(BULK, push)
        if not changes:
            self.sequence += chunks
        return push

    def stats(
        self, number: int | None = None, role: Role = "actor", *, time_ns: int | None = None,
        episode: dict[str, Any] | None = None, **words: float,
    ) -> None:  # fmt: skip
        """Statistics of an actor; words: of its block."""
        block = RoleMetrics(bytearray(RoleMetrics.required_bytes()), role, create=True)
        block.enter(TABLES[role].phases[0])
        for name, value in words.items():
            block.set(name, value)
        records = np.zeros(len(episode or ()) and 1, EPISODE)
        for name, value in ({"steps": 1, "frames": 1} | episode if episode else {}).items():
            records[name] = value
        if episode and "stream" not in episode:
            records["stream"] = self.actor * STREAMS
        self.send(SMALL, m.Stats(
            self.actor if number is None else number,
            time.perf_counter_ns() if time_ns is None else time_ns,
            as_buffer(block.as_bytes()), as_buffer(records.tobytes()),
        ))  # fmt: skip

    def flood(self, connections: int = 40) -> None:
        """Very many hosts that nobody has heard of, each over a connection of its own."""
        crowd = [self.dealer() for _ in range(connections)]
        for i, one in enumerate(crowd):
            hello = self.hello(SMALL, host=5000 + i, actors=0)
            one.send_multipart([bytes(part) for part in m.encode(hello)])
        for _ in range(20):
            self.world.turn()
        for one in crowd:
            one.close()

    def close(self) -> None:
        self.context.destroy(linger=0)


class Lie(NamedTuple):
    """tell: says it. counted: the count that grows by it; "": it is allowed, or does nothing."""

    tell: Callable[[Insider], object]
    counted: str = ""
    role: str = "relay"


def _value(column: str, value: float, counted: str = "push refused") -> Lie:
    return Lie(lambda who: who.push({column: value}), counted)


def _all(column: str, value: float) -> Lie:
    return Lie(lambda who: who.push({column: value}, row=slice(None)))


def _said(message: Callable[[Insider], Any], counted: str, role: str = "relay") -> Lie:
    return Lie(lambda who: who.send(SMALL, message(who)), counted, role)


def _spoilt(**words: Any) -> Lie:
    """A push whose header says something else than its body, with a right checksum."""

    def tell(who: Insider) -> None:
        push = who.push({}, sequence=1 << 50)  # early: it only shows how a push looks
        raw = push.raw()
        for name, value in words.items():
            setattr(raw, name, value)
        who.raw(BULK, raw.encode())

    return Lie(tell, "bad")


def _bytes(parts: list[bytes]) -> Lie:
    return Lie(lambda who: who.raw(SMALL, parts), "bad")


_KEYS, _PRIORITIES = np.arange(BATCH), np.full(BATCH, 3e38, np.float32)
_UPDATE = m.Update(1, 1 << 40, _KEYS, _PRIORITIES)
_PARAMETERS = m.Publish((1 << 60) - 1, as_buffer(bytes(PARAMETER_BYTES)))

FINITE = {
    "the largest priority": _all("priority", LIMITS.priority),
    "a priority of 3e38": _all("priority", 3e38),
    "no priority": _all("priority", -1.0),
    "a priority of 3e38 in one row": _value("priority", 3e38, ""),
}
"""Lies that can be true."""

LIES: dict[str, Lie] = FINITE | {
    "a return of +infinity": _value("reward", np.inf),
    "a return of -infinity": _value("reward", -np.inf),
    "a return that is NaN": _value("reward", np.nan),
    "a return beyond the clipping": _value("reward", CHUNK + 0.5),
    "a return of 3e38": _value("reward", 3e38),
    "a discount that is NaN": _value("discount", np.nan),
    "a discount of 1": _value("discount", 1.0),
    "a discount below 0": _value("discount", -0.5),
    "a priority that is NaN": _value("priority", np.nan),
    "a priority of infinity": _value("priority", np.inf),
    "an action that there is not": _value("action", 1 << 41),
    "an action below 0": _value("action", -1),
    "an observation that is NaN": _value("obs", np.nan),
    "an observation of 3e38": _value("obs", 3e38),
    "another host's actor": Lie(lambda w: w.push(actor=(w.actor + 1) % ACTORS), "push uncredited"),
    "an actor that there is not": Lie(lambda w: w.push(actor=4000), "bad"),
    "a sequence far ahead": Lie(lambda w: w.push(sequence=1 << 59), "push early"),
    "an old sequence": Lie(lambda w: [w.push(), w.push(sequence=0)], "push doubled"),
    "an old incarnation": Lie(lambda w: [w.push(), w.push(incarnation=0)], "push doubled"),
    "a huge incarnation": Lie(lambda w: w.push(incarnation=w.incarnation + (1 << 40), sequence=0)),
    "more than the credit": Lie(lambda w: w.push(chunks=20), "push uncredited"),
    "fewer rows than it says": _spoilt(rows=CHUNK - 1),
    "no chunk at all": _spoilt(value=0),
    "more chunks than there are": _spoilt(value=5000),
    "another schema's chunk": _spoilt(schema=77),
    "10^12 frames": Lie(lambda w: w.stats(frames=1e12, steps=1e12), "lies"),
    "2^62 episodes": Lie(lambda w: w.stats(episodes=float(1 << 62)), "lies"),
    "counters below 0": Lie(lambda w: w.stats(frames=-1e15, chunks=-1.0)),
    "a version that is NaN": Lie(lambda w: w.stats(params_version=np.nan), "stats foreign"),
    "counters of another's actor": Lie(lambda w: w.stats((w.actor + 1) % ACTORS), "stats foreign"),
    "counters of the learner": Lie(lambda w: w.stats(m.LEARNER, "learner"), "stats foreign"),
    "counters of the replay": Lie(lambda w: w.stats(m.REPLAY, "replay"), "stats foreign"),
    "a learner's block as an actor's": Lie(lambda w: w.stats(role="learner"), "stats foreign"),
    "a clock that is far off": Lie(lambda w: w.stats(time_ns=(1 << 63) - 1)),
    "a score that is NaN": Lie(lambda w: w.stats(episode={"game_return": np.nan}), "lies"),
    "an episode of another's stream": Lie(lambda w: w.stats(episode={"stream": 99}), "lies"),
    "an episode of 10^12 frames": Lie(lambda w: w.stats(episode={"frames": 10**12}), "lies"),
    "an epsilon of 7": Lie(lambda w: w.stats(episode={"epsilon": 7.0}), "lies"),
    "all actor numbers": _said(lambda w: w.hello(SMALL, actors=4096), ""),
    "very many hosts": Lie(lambda w: w.flood()),
    "two hosts on one connection": _said(lambda w: w.hello(SMALL, host=4), "bad"),
    "the learner's role": _said(lambda w: w.hello(SMALL, role="learner"), "refused"),
    "other settings": _said(lambda w: w.hello(SMALL, config={"env": "x"}), "refused"),
    "an older incarnation of itself": _said(lambda w: w.hello(SMALL, incarnation=0), "fenced"),
    "a batch for itself": _said(lambda w: m.Sample(0, BATCH), "forbidden"),
    "priorities of its own": _said(lambda w: _UPDATE, "forbidden"),
    "parameters of its own": _said(lambda w: _PARAMETERS, "forbidden"),
    "a call": _said(lambda w: Call(1, Request.STATS), "forbidden"),
    "parameters from the future": _said(lambda w: m.Pull(0, (1 << 60) - 1), ""),
    "the end of the run": _said(lambda w: m.Bye(over="it is over"), ""),
    "an answer of the replay": _said(lambda w: m.UpdateAck(1 << 59, 0), "forbidden"),
    "an unknown kind": _bytes([b"ZAPX\2\0\x63\0" + bytes(56)]),
    "random bytes": _bytes([bytes(range(64)), b"no body"]),
    "very many parts": Lie(lambda w: w.raw(SMALL, [b"x"] * 500)),
    "an empty message": _bytes([b""]),
    "a reader's chunk": Lie(lambda w: w.push(), "forbidden", "reader"),
    "a reader's counters": Lie(lambda w: w.stats(0), "forbidden", "reader"),
    "a reader's parameters": _said(lambda w: _PARAMETERS, "forbidden", "reader"),
    "a client's priorities": _said(lambda w: _UPDATE, "forbidden", "client"),
    "a client's chunk": Lie(lambda w: w.push(actor=0), "push uncredited", "client"),
    "a client's parameters": _said(lambda w: _PARAMETERS, "forbidden", "client"),
}  # fmt: skip
