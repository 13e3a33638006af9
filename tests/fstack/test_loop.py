"""The loop: who turns it, what it carries out, and its one start and end in a process."""

import signal
import threading
import time

import greenlet
import pytest

from tests.support import fstack
from zapex.errors import ConfigError
from zapex.fstack import Setup
from zapex.fstack.loop import FstackReactor, loop_of

PATIENCE_S = 20.0


class Alarm(Exception):
    pass


def test_a_signal_handler_may_raise_within_a_turn() -> None:
    loop = fstack.loop()

    def ring(number: int, frame: object) -> None:
        raise Alarm

    former = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(20):  # it comes at any point of a turn
            with pytest.raises(Alarm):
                turn_until_alarm(loop)
    finally:
        signal.signal(signal.SIGALRM, former)
    loop.turn()
    assert not loop.ended


def turn_until_alarm(loop) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.002)
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        loop.turn()


def test_another_thread_cannot_turn_it() -> None:
    loop, said = fstack.loop(), []

    def turn() -> None:
        try:
            loop.turn()
        except greenlet.error as error:
            said.append(error)

    thread = threading.Thread(target=turn)
    thread.start()
    thread.join(PATIENCE_S)
    assert len(said) == 1
    loop.turn()


def test_f_stack_starts_once_in_a_process() -> None:
    assert loop_of(fstack.setup()) is fstack.loop()
    with pytest.raises(ConfigError, match="it starts only once"):
        loop_of(Setup("another", "set-up"))


def test_a_closed_listener_leaves_f_stack_to_others() -> None:
    loop, host = fstack.loop(), fstack.addresses(fstack.setup())[0]
    one, two = FstackReactor(loop), FstackReactor(loop)
    one.listen(host, fstack.free_port())
    one.close_all()
    two.listen(host, fstack.free_port())
    two.close_all()
    assert not loop.ended
