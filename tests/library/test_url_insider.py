"""A client of a served replay that lies: the server goes on, and the others lose nothing."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.library.test_url_client import SCHEMA, Server, check_all, server
from tests.support.handle_processes import rows_from
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.store import ChunkStore
from zapex.library.url_client import CONFIG, form_of
from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.replay.core import ReplayLayout
from zapex.wire import messages as m
from zapex.wire.messages import Call, Request

DEADLINE_S = 60.0


class Insider:
    """A client over a bare link: one actor, one chunk of memory, and calls of any kind."""

    def __init__(self, served: Server) -> None:
        def link(form: Any) -> ZmqLink:
            return ZmqLink(
                served.url, "client", 77, 1, form, CONFIG, Security(), schema_hash=SCHEMA.hash,
                actors=1,
            )  # fmt: skip

        asking = link(None)
        chunk = asking.open(DEADLINE_S).chunk
        asking.close()
        layout = ReplayLayout(SCHEMA, chunk, 1, chunk)
        self.link, self.replies = link(form_of(layout)), 0
        self.link.handlers[m.Kind.ACK] = lambda ack: setattr(self, "states", ack.actors)
        self.link.handlers[m.Kind.REPLY] = self._reply
        self.states = self.link.open(DEADLINE_S).actors
        self.layout = layout.chunk_layout
        nbytes = ChunkStore.required_bytes(self.layout, 1)
        self.store = ChunkStore(aligned_zeros(nbytes), self.layout, 1)

    def _reply(self, reply: Any) -> None:
        self.replies += 1

    def wait(self, ready: Any) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not ready():
            self.link.do_work()
            time.sleep(0.002)
            assert time.monotonic() < deadline

    def push(self, column: str, value: float) -> None:
        """A chunk with that value in its first row; returns when it is acknowledged."""
        self.wait(lambda: self.states["credit_bytes"][0] > 0)
        actor, incarnation, sequence, _ = self.states[0].tolist()
        for name in ("reward", "discount", "priority"):
            self.store.column(0, name)[:] = 0
        self.store.column(0, "action")[:] = -5
        self.store.column(0, column)[0] = value
        push = m.Push.of_chunks(
            self.layout, self.store.mem, [(self.store.body(0), 0, self.layout.chunk)],
            actor=actor, incarnation=max(1, incarnation), sequence=sequence,
        )  # fmt: skip
        assert self.link.send(m.BULK, push) is not None
        self.wait(lambda: self.states["sequence"][0] > sequence)

    def call(self, number: int, what: int, **more: Any) -> None:
        assert self.link.send(m.SMALL, Call(number, what, **more)) is not None


def test_a_client_that_lies_takes_nothing_from_the_others(tmp_path: Path) -> None:
    flags = "--capacity", "4000", "--writers", "4", "--alpha", "1"
    with server(tmp_path, *flags) as served, served.connect() as honest:
        rows, twins = rows_from(1)
        keys = honest.extend(**rows)
        pid, insider = served.server_pid(), Insider(served)
        for column in ("reward", "discount", "priority"):
            for value in (np.nan, np.inf, -np.inf):
                insider.push(column, value)
        random = np.random.default_rng(1).integers(-(2**62), 2**62, 8)
        lies: list[tuple[int, dict[str, Any]]] = [
            (Request.UPDATE, {"rows": 8, "keys": random, "priorities": np.full(8, 1e300)}),
            (Request.UPDATE, {"rows": 0, "keys": random[:0], "priorities": np.empty(0)}),
            (Request.CAN_SAMPLE, {"rows": 4000}),
            (Request.KEYS, {"rows": 4095, "option": 1 << 59}),
            (Request.STATS, {}),
        ]
        for number, (what, more) in enumerate(lies):
            insider.call(number, what, **more)
        insider.wait(lambda: insider.replies == len(lies))
        insider.link.close(bye=m.Bye())
        more_rows, more_twins = rows_from(2)
        keys = np.concatenate([keys, honest.extend(**more_rows)])
        check_all(honest, twins + more_twins)
        assert honest.update_priorities(keys, np.ones(400)) == (400, 0)
        assert served.server_pid() == pid
        _, said = served.close()
        assert "the client of actor" in said
        assert "Traceback" not in said
