"""A client's link: what it makes of welcomes."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.wire import messages
from zapex.wire.messages import BULK, SMALL, Welcome


class Inboxes:
    """Connections on which only comes what a test puts there."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self._waiting: tuple[list[Any], list[Any]] = ([], [])

    def put(self, channel: int, message: Any) -> None:
        parts = messages.encode(message, False)
        self._waiting[channel].append([memoryview(bytes(part)) for part in parts])

    def receive(self, channel: int) -> Any:
        waiting = self._waiting[channel]
        return waiting.pop(0) if waiting else None

    def send(self, channel: int, buffers: Any) -> Any:
        return SimpleNamespace(done=True)

    def settled(self, buffers: Any) -> None: ...


def welcome(incarnation: int, epoch: int) -> Welcome:
    return Welcome(incarnation, 7, epoch, 0, 1, 8, True, np.zeros(0, messages.ACTOR_STATE))


def test_a_welcome_of_a_former_process_that_is_read_late_is_no_welcome() -> None:
    inboxes: Any = Inboxes()
    epochs: list[tuple[int, int]] = []
    link = ZmqLink(
        "tcp://x:1", "client", 1, 1, None, {}, Security(insecure_network=True), schema_hash=7,
        dial=lambda *_: inboxes,
    )  # fmt: skip
    link.register(on_welcome=lambda welcome, channel: epochs.append((channel, welcome.epoch)))
    for channel, incarnation, epoch in ((SMALL, 1, 10), (SMALL, 2, 20), (BULK, 1, 10)):
        inboxes.put(channel, welcome(incarnation, epoch))
    link.do_work()
    assert link.welcome is not None
    assert link.welcome.epoch == 20
    assert not link.is_open
    inboxes.put(BULK, welcome(2, 20))
    link.do_work()
    assert link.is_open
    assert epochs == [(SMALL, 10), (SMALL, 20), (BULK, 20)]
