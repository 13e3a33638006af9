"""A replay's server without a socket: whole sessions of a relay and a learner, mutated.

Whatever clients say in whatever order, the server goes on, and what it answers is a message.
"""

import random
from typing import Any
from unittest import mock

import numpy as np
import zmq

from tests.fuzz import mutation
from tests.fuzz.mutation import Blind
from zapex import messages as m
from zapex import zmq_server
from zapex.batch import aligned_zeros
from zapex.errors import NotEnoughData
from zapex.intake import Intake
from zapex.message_header import Form, decode_header
from zapex.rate_limiter import LimiterConfig
from zapex.replay import PrioritizedReplay, ReplayLayout
from zapex.roster import Roster
from zapex.shm_mailbox import Mailbox
from zapex.zmq_replay import ZmqExperienceSource, ZmqParameters, ZmqSampleSink
from zapex.zmq_server import ZmqServer
from zapex.zmq_socket import Security

_ACTORS, _MOST = 2, 24


class _Frame(zmq.Frame):
    """What libzmq would hand over, from nowhere."""

    def get(self, name: Any) -> Any:
        return {"User-Id": "any", "Peer-Address": "127.0.0.1"}.get(name, -1)


class _Anything:
    """Takes every call; its answers are itself."""

    done = True
    POLLIN = NOBLOCK = 1

    def __call__(self, *_: object, **__: object) -> "_Anything":
        return self

    def __getattr__(self, name: str) -> "_Anything":
        return self

    def decode(self) -> str:
        return ""


_ANYTHING = _Anything()


class Sessions:
    """One execution is one life of a server; its memory is new each time."""

    def __init__(self, form: Form, examples: dict[str, Any]) -> None:
        self._form = form
        layout = self._layout = ReplayLayout(form.schema, 16, 2, form.layout.chunk)
        self._memory = aligned_zeros(layout.nbytes)
        self._roster = aligned_zeros(Roster.required_bytes(_ACTORS))
        self._mailbox = aligned_zeros(Mailbox.required_bytes(form.parameter_bytes))
        self._seed_messages = self._session(examples)
        self.seed = mutation.joined(self._seed_messages)
        self._others = [mutation.joined(m.encode(e)) for e in examples.values()]

    def _session(self, examples: dict[str, Any]) -> list[bytes]:
        """Both clients' lives; the first part of each message is the connection's name."""
        schema = self._form.schema.hash
        said: list[tuple[bytes, Any]] = []
        for route, role, channel in ((b"a", "relay", 0), (b"b", "relay", 1), (b"c", "learner", 0),
                                     (b"d", "learner", 1)):  # fmt: skip
            hello = m.Hello(role, 7 if role == "relay" else 8, 5, channel, schema, 1, {})
            said.append((route, hello))
        push = vars(examples["push"])
        for sequence in range(2):
            changed = {**push, "actor": 0, "incarnation": 5, "sequence": sequence}
            said.append((b"b", m.Push(**changed)))
        said += [(b"c", m.Sample(1, 2)), (b"d", m.Publish(3, examples["publish"].parameters))]
        said += [(b"a", m.Pull(0, 1)), (b"c", m.Update(1, 0, np.array([0, 1]), np.ones(2, "f4")))]
        said += [(b"a", examples["stats"]), (b"a", m.Bye())]
        return [mutation.joined([route, *m.encode(message)]) for route, message in said]

    def run(self, data: bytes) -> bool:
        """True where no message was refused."""
        for memory in (self._memory, self._roster, self._mailbox):
            memory[:] = 0
        layout, form = self._layout, self._form
        replay = PrioritizedReplay(
            layout.capacity, layout.schema, seed=1, streams=2, chunk=layout.chunk,
            buffer=self._memory,
        )  # fmt: skip
        roster = Roster(self._roster, _ACTORS, replay.store.header_rows)
        mailbox = Mailbox(self._mailbox, form.parameter_bytes, create=True)
        inbox = [mutation.split(message) for message in mutation.split(data, _MOST)]
        inbox = [[parts[0] or b"a", *parts[1:]] for parts in inbox if parts]
        answers: list[list[Any]] = []

        def send(socket: Any, parts: list[Any]) -> Any:
            answers.append([bytes(part) for part in parts])
            return _ANYTHING

        def receive(socket: Any) -> list[Any] | None:
            return [_Frame(part) for part in inbox.pop(0)] if inbox else None

        with mock.patch.multiple(
            zmq_server, listen=_ANYTHING, Gatekeeper=_ANYTHING, send=send, receive=receive,
            zmq=_ANYTHING, Guard=_ANYTHING,
        ):  # fmt: skip
            server = ZmqServer(
                "tcp://127.0.0.1:0", form, {}, roster, Security(), incarnation=1,
                params_version=lambda: mailbox.version,
            )  # fmt: skip
            source = ZmqExperienceSource(server, replay.store)
            sink, parameters = ZmqSampleSink(server, replay.store), ZmqParameters(server, mailbox)
            limits = LimiterConfig(
                samples_per_insert=0, min_size=1, tolerance=0, grant=layout.chunk, batch=1,
                capacity=layout.capacity,
            )  # fmt: skip
            intake = Intake(source, replay, limits, actors=_ACTORS, streams_per_actor=1)
            while inbox:
                # One message, then all that a replay server does.
                rest, inbox[:] = inbox[1:], inbox[:1]
                intake.do_work(sink.issued, sink.released)
                inbox[:] = rest
                for keys, priorities in sink.updates():
                    replay.update_priorities(keys, priorities)
                for _ in range(sink.requests()):
                    try:
                        sink.answer(replay.draw(form.batch_size))
                    except NotEnoughData:
                        break
                parameters.do_work()
        for answer in answers:
            m.decode(answer[1:], form)
        return not any(server.counts[name] for name in ("bad", "unknown", "forbidden", "refused"))

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
