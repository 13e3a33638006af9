"""A replay's server without a socket: whole sessions of its clients, mutated.

Whatever clients say in whatever order, the server goes on, and what it answers is a message.
"""

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from tests.fuzz import mutation
from tests.fuzz.mutation import Blind
from zapex.chunks.batch import aligned_zeros
from zapex.errors import NotEnoughData
from zapex.host.roster import Roster
from zapex.library.prioritized import OwnedReplay
from zapex.library.url_client import CONFIG, form_of
from zapex.library.url_server import LibraryServer
from zapex.machine.mailbox import Mailbox
from zapex.net.replay_ends import ZmqExperienceSource, ZmqParameters, ZmqSampleSink
from zapex.net.server import LinkServer
from zapex.net.sockets import Received
from zapex.replay.core import ReplayLayout
from zapex.replay.limiter import LimiterConfig
from zapex.roles.intake import Intake
from zapex.wire import messages as m
from zapex.wire.messages import Request
from zapex.wire.protocol import Form, decode_header

_ACTORS, _STREAMS, _MOST = 2, 2, 24


class _Sent:
    """Of an answer: its peer has taken it."""

    done = True


class _Listener:
    """A transport without a socket: one message in each duty cycle, and peers that take all."""

    url = "tcp://127.0.0.1:0"

    def __init__(self, inbox: list[list[bytes]]) -> None:
        self._inbox = inbox
        self._now: list[Received] = []
        self.answers: list[list[bytes]] = []

    def next(self) -> None:
        """The next message comes."""
        peer, *buffers = self._inbox.pop()
        self._now.append((peer, buffers))

    def receive(self) -> Received | None:
        return self._now.pop() if self._now else None

    def ready(self) -> bool:
        return bool(self._now)

    def role_of(self, peer: bytes, buffers: Sequence[Any]) -> str | None:
        return None

    def address_of(self, peer: bytes, buffers: Sequence[Any]) -> str:
        return ""

    def send(self, peer: bytes, buffers: Sequence[Any]) -> _Sent:
        self.answers.append([bytes(buffer) for buffer in buffers])
        return _Sent()

    def gone(self) -> list[bytes]:
        return []

    def queued(self, peer: bytes) -> int:
        return 0

    def held(self) -> list[tuple[int, bytes | int]]:
        return []

    def settled(self, peer: bytes) -> None:
        pass

    def hang_up(self, connection: bytes | int) -> None:
        pass

    def do_work(self) -> None:
        pass

    def close(self) -> None:
        pass


Said = list[tuple[bytes, Any]]
"""Messages in order; before each the name of the connection that it comes on."""


def _pushes(route: bytes, example: m.Push) -> Said:
    """Two pushes of two chunks each, and one that brings the last chunk again."""
    said = []
    for sequence in (0, 2, 3):
        changed = {**vars(example), "actor": 0, "incarnation": 5, "sequence": sequence}
        said.append((route, m.Push(**changed)))
    return said


class Sessions(ABC):
    """One execution is one life of a server; its memory is new each time."""

    form: Form
    config: dict[str, Any]

    def __init__(self, layout: ReplayLayout, examples: dict[str, Any]) -> None:
        self._layout = layout
        self._memory = aligned_zeros(layout.nbytes)
        self._roster = aligned_zeros(Roster.required_bytes(_ACTORS))
        said = self._session(examples)
        self.seed = mutation.joined([mutation.joined([r, *m.encode(what)]) for r, what in said])
        self._others = [mutation.joined(m.encode(e)) for e in examples.values()]

    def _hellos(self, *clients: tuple[bytes, str, int]) -> Said:
        """Of both connections of each client (their names, its role, the actors it wants)."""
        schema, said = self.form.schema.hash, []
        for host, (routes, role, actors) in enumerate(clients):
            for channel, route in enumerate(routes):
                hello = m.Hello(role, 7 + host, 5, channel, schema, actors, self.config)
                said.append((bytes([route]), hello))
        return said

    @abstractmethod
    def _session(self, examples: dict[str, Any]) -> Said:
        """All clients' lives."""

    @abstractmethod
    def _serve(self, server: LinkServer, replay: OwnedReplay) -> Callable[[], object]:
        """What serves; the call is one duty cycle of it, after a message has come in."""

    def _params_version(self) -> int:
        return 0

    def run(self, data: bytes) -> bool:
        """True where no message was refused."""
        self._memory[:] = 0
        self._roster[:] = 0
        layout = self._layout
        replay = OwnedReplay(layout, seed=1, buffer=self._memory)
        roster = Roster(self._roster, _ACTORS, replay.store.header_rows)
        inbox = [mutation.split(message) for message in mutation.split(data, _MOST)]
        inbox = [[parts[0] or b"a", *parts[1:]] for parts in inbox if parts]
        inbox.reverse()
        listener = _Listener(inbox)
        server = LinkServer(
            listener, self.form, self.config, roster, incarnation=1,
            params_version=self._params_version,
        )  # fmt: skip
        try:
            do_work = self._serve(server, replay)
            while inbox:
                listener.next()
                do_work()
        finally:
            server.close()
        for answer in listener.answers:
            m.decode(answer, self.form)
        return not any(server.counts[name] for name in ("bad", "unknown", "forbidden", "refused"))

    def renew(self, data: bytes) -> bytes:
        """A session as this version's clients would have it."""
        said = [mutation.split(message) for message in mutation.split(data, _MOST)]
        return mutation.joined(
            [mutation.joined([*parts[:1], *mutation.renewed(parts[1:])]) for parts in said]
        )

    def mutate(self, data: bytes, draw: random.Random, blind: Blind) -> bytes:
        """One message of the session changed, moved, doubled or dropped."""
        said = mutation.split(data, _MOST)
        if not said:
            return self.seed
        i = draw.randrange(len(said))
        choice = draw.random()
        if choice < 0.7:
            route, *parts = mutation.split(said[i]) or [b"a"]
            try:
                kind = int(decode_header(parts).kind)
            except ValueError:
                kind = draw.randrange(16)
            message = mutation.mutate_message(
                mutation.joined(parts), draw, blind, kind, self._others
            )
            said[i] = mutation.joined([route, *mutation.split(message)])
        elif choice < 0.8:
            said.insert(draw.randrange(len(said)), said[i])
        elif choice < 0.9:
            route = draw.choice((b"a", b"b", b"c", b"d", b"e"))
            said[i] = mutation.joined([route, *mutation.split(said[i])[1:]])
        else:
            del said[i]
        return mutation.joined(said)


class RunSessions(Sessions):
    """A relay, a learner and a reader beside the replay server of a run."""

    config: ClassVar[dict[str, Any]] = {}

    def __init__(self, form: Form, examples: dict[str, Any]) -> None:
        self.form = form
        self._mailbox_memory = aligned_zeros(Mailbox.required_bytes(form.parameter_bytes))
        super().__init__(
            ReplayLayout(form.schema, 16, _ACTORS * _STREAMS, form.layout.chunk), examples
        )

    def _session(self, examples: dict[str, Any]) -> Said:
        said = self._hellos((b"ab", "relay", 1), (b"cd", "learner", 1), (b"ef", "reader", 0))
        said += _pushes(b"b", examples["push"])
        said += [(b"c", m.Sample(1, 2)), (b"d", m.Publish(3, examples["publish"].parameters))]
        said += [(b"a", m.Pull(0, 1)), (b"c", m.Update(1, 0, np.array([0, 1]), np.ones(2, "f4")))]
        said += [(b"e", m.Pull(0, 1)), (b"a", examples["stats"]), (b"a", m.Bye())]
        return said

    def _params_version(self) -> int:
        return self._mailbox.version

    def _serve(self, server: LinkServer, replay: OwnedReplay) -> Callable[[], None]:
        form, layout = self.form, self._layout
        self._mailbox_memory[:] = 0
        self._mailbox = Mailbox(self._mailbox_memory, form.parameter_bytes, create=True)
        sink, parameters = ZmqSampleSink(server, replay.store), ZmqParameters(server, self._mailbox)
        source = ZmqExperienceSource(server, replay.store, [sink, parameters])
        limits = LimiterConfig(
            samples_per_insert=0, min_size_to_sample=1, tolerance=0, batch=1,
            grant=_STREAMS * layout.chunk, capacity=layout.capacity,
        )  # fmt: skip
        intake = Intake(source, replay, limits, streams_per_actor=_STREAMS)

        def do_work() -> None:
            intake.do_work(sink.issued, sink.released)
            for keys, priorities in sink.updates():
                replay.reprioritise(keys, priorities.astype(np.float64))
            for _ in range(sink.requests()):
                try:
                    sink.answer(replay.draw(form.batch_size))
                except NotEnoughData:
                    break
            parameters.do_work()

        return do_work


class LibrarySessions(Sessions):
    """A client that writes and one that calls, beside a replay served as a library."""

    config = CONFIG

    def __init__(self, form: Form, examples: dict[str, Any]) -> None:
        layout = ReplayLayout(form.schema, 16, _ACTORS * _STREAMS, form.layout.chunk)
        self.form = form_of(layout)
        super().__init__(layout, examples)

    def _session(self, examples: dict[str, Any]) -> Said:
        said = self._hellos((b"ab", "client", 1), (b"cd", "client", 0))
        said += _pushes(b"b", examples["push"])
        keys, priorities = np.array([0, 1]), np.array([0.5, 2.0])
        calls = [
            m.Call(0, Request.CAN_SAMPLE, rows=2), m.Sample(1, 2), m.Sample(2, 1, part=True),
            m.Call(3, Request.UPDATE, rows=2, keys=keys, priorities=priorities),
            m.Call(4, Request.STATS), m.Call(5, Request.KEYS, rows=0, option=1),
            m.Sample(6, 4, piece_rows=2, method=2),
        ]  # fmt: skip
        said += [(b"c", call) for call in calls]
        return [*said, (b"a", m.Bye()), (b"c", m.Bye())]

    def _serve(self, server: LinkServer, replay: OwnedReplay) -> Callable[[], object]:
        grant = _STREAMS * self._layout.chunk
        limits = LimiterConfig(
            samples_per_insert=1, min_size_to_sample=1, tolerance=2 * grant + self.form.batch_size,
            grant=grant, batch=self.form.batch_size, capacity=self._layout.capacity,
        )  # fmt: skip
        clock = itertools.count()  # a request that waits for the limiter is refused soon
        library = LibraryServer(
            server, replay, limits, credit=_STREAMS, timeout_s=4.0,
            clock_s=lambda: float(next(clock)),
        )  # fmt: skip
        return library.do_work
