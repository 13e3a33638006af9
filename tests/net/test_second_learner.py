"""A second learner does not end the first one's training by chance."""

from typing import Any

import pytest

from tests.support.transport_rigs import (
    Memory,
    NetworkReplay,
    layout_of,
    make_link,
    nothing_left_open,
    until,
)
from zapex.errors import Fenced, Refused
from zapex.net.sockets import _inode
from zapex.wire.messages import Bye

__all__ = ["nothing_left_open"]  # a fixture of every test here


def test_a_second_learner_is_refused() -> None:
    layout = layout_of(400)
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")
    first = make_link(server.url, "learner", 1, layout, incarnation=1)
    until(lambda: first.is_open, lambda: (server.turn(), first.do_work()), "a welcome")
    second = make_link(server.url, "learner", 2, layout, incarnation=2)
    with pytest.raises(Refused, match=r"the learner at .* trains with this replay: .*--take-over"):
        until(lambda: False, lambda: (server.turn(), second.do_work()))
    again = make_link(server.url, "learner", 1, layout, incarnation=3)  # its own next incarnation
    until(lambda: again.is_open, lambda: (server.turn(), again.do_work()), "a welcome")


def test_take_over_fences_the_first_learner() -> None:
    layout = layout_of(400)
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")
    first = make_link(server.url, "learner", 1, layout, incarnation=1)
    until(lambda: first.is_open, lambda: (server.turn(), first.do_work()), "a welcome")
    second = make_link(server.url, "learner", 2, layout, incarnation=2, actors=1)
    until(lambda: second.is_open, lambda: (server.turn(), second.do_work()), "a welcome")
    with pytest.raises(Fenced, match="a newer learner has replaced this one"):
        until(lambda: False, lambda: (server.turn(), first.do_work()))


def test_a_learner_can_join_after_another_disconnected() -> None:
    layout = layout_of(400)
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")
    first = make_link(server.url, "learner", 1, layout, incarnation=1)
    until(lambda: first.is_open, lambda: (server.turn(), first.do_work()), "a welcome")
    first.close()
    until(
        lambda: not any(any(s.peers) for s in server.server.sessions.of_roles("learner")),
        server.turn,
        "the end of its connections",
    )
    second = make_link(server.url, "learner", 2, layout, incarnation=2)
    until(lambda: second.is_open, lambda: (server.turn(), second.do_work()), "a welcome")


def test_what_a_learner_said_before_it_left_is_heard() -> None:
    layout = layout_of(400)
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")
    learner = make_link(server.url, "learner", 1, layout)
    until(lambda: learner.is_open, lambda: (server.turn(), learner.do_work()), "a welcome")
    learner.close(bye=Bye("enough"))
    listener: Any = server.listener
    sockets = list(listener._connections._fds.values())
    gone = lambda: all(_inode(fd) != inode for fd, inode in sockets)  # noqa: E731
    until(gone, lambda: None, "the end of its connections")
    listener._look_s = 0.0  # it looks for such ends once a second
    server.turn()
    assert server.server.over == "enough"
