"""Waiting: no wake-up is lost, no deadline is missed, no system call while nobody sleeps."""

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from zapex.machine import waiting as idle
from zapex.machine.resources import Machine
from zapex.machine.waiting import MAX_SLEEP_S, Waiter, Waker, spin_seconds
from zapex.shm_ring import ShmRing


@pytest.fixture
def event() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield fd
    os.close(fd)


def pending(fd: int) -> int:
    try:
        return os.eventfd_read(fd)
    except BlockingIOError:
        return 0


def test_what_is_ready_is_not_waited_for(event: int) -> None:
    words = np.zeros(1, np.int64)
    assert Waiter(words, 0, event).wait(lambda: True, timeout_s=0)


def test_awake_process_is_not_woken(event: int) -> None:
    words = np.zeros(1, np.int64)
    Waiter(words, 0, event)
    Waker(words, 0, event).wake()
    assert pending(event) == 0


def test_a_sleeper_is_woken(event: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "MAX_SLEEP_S", 60.0)  # nothing but the event can wake it
    words, box = np.zeros(2, np.int64), []

    def publish() -> None:
        while not words[1]:
            time.sleep(0.001)
        box.append(1)
        Waker(words, 1, event).wake()

    thread = threading.Thread(target=publish)
    thread.start()
    assert Waiter(words, 1, event).wait(lambda: box, timeout_s=50)
    thread.join()
    assert words[1] == 0
    assert pending(event) == 0


def test_the_deadline_is_kept(event: int) -> None:
    words = np.zeros(1, np.int64)
    start = time.monotonic()
    assert not Waiter(words, 0, event, spin_s=0.001).wait(lambda: False, timeout_s=0.05)
    assert time.monotonic() - start >= 0.05
    assert words[0] == 0


def test_a_waker_that_dies_before_it_wakes_delays_no_longer_than_one_sleep(event: int) -> None:
    words = np.zeros(1, np.int64)
    looks: list[float] = []
    Waiter(words, 0, event).wait(lambda: looks.append(0.0) or len(looks) == 5, timeout_s=60)
    start = time.monotonic()
    Waiter(words, 0, event).wait(lambda: time.monotonic() > start + MAX_SLEEP_S, timeout_s=60)
    assert len(looks) == 5


def test_stale_event_wakes_once(event: int) -> None:
    words = np.zeros(1, np.int64)
    os.eventfd_write(event, 3)
    looks: list[float] = []
    assert not Waiter(words, 0, event).wait(lambda: looks.append(0.0), timeout_s=0.3)
    assert len(looks) < 20
    assert pending(event) == 0


def test_exception_in_ready_clears_the_sleeping_word(event: int) -> None:
    words, looks = np.zeros(1, np.int64), []

    def ready() -> bool:
        looks.append(int(words[0]))
        if len(looks) == 2:
            raise RuntimeError("the question failed")
        return False

    with pytest.raises(RuntimeError):
        Waiter(words, 0, event).wait(ready, timeout_s=60)
    assert looks == [0, 1]
    assert words[0] == 0


def test_a_new_life_of_the_waiter_does_not_look_asleep(event: int) -> None:
    words = np.ones(1, np.int64)
    Waiter(words, 0, event)
    assert words[0] == 0


def test_no_wake_up_is_lost_between_two_threads(
    event: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "MAX_SLEEP_S", 60.0)  # a lost wake-up would show as a time-out
    back = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    words, turns = np.zeros(32, np.int64), 2000
    there = there_ring()
    here = there_ring()

    def answer() -> None:
        waiter, waker = Waiter(words, 16, back), Waker(words, 0, event)
        producer, consumer = here.producer(), there.consumer()
        for turn in range(turns):
            assert waiter.wait(lambda turn=turn: there.tail > turn, timeout_s=30)
            producer.try_offer(consumer.take(1))
            waker.wake()

    thread = threading.Thread(target=answer)
    thread.start()
    waiter, waker = Waiter(words, 0, event), Waker(words, 16, back)
    producer, consumer = there.producer(), here.consumer()
    for turn in range(turns):
        producer.try_offer(np.array([turn]))
        waker.wake()
        assert waiter.wait(lambda turn=turn: here.tail > turn, timeout_s=30)
        assert consumer.take(1).tolist() == [turn]
    thread.join(60)
    os.close(back)


def there_ring() -> ShmRing:
    memory = np.zeros(ShmRing.required_bytes(4, np.int64) + 64, np.uint8)
    return ShmRing(memory[-memory.ctypes.data % 64 :], 4, np.int64, create=True)


def test_no_spinning_without_spare_cores() -> None:
    cores = Machine.look().cores
    assert spin_seconds(cores) == spin_seconds(cores + 1) == 0
    assert spin_seconds(cores - 1) > 0


def test_a_containers_share_of_the_cores_is_all_that_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle.Machine, "look", lambda: Machine(cores=3, memory_bytes=0, gpus=0))
    assert spin_seconds(2) > 0
    assert spin_seconds(3) == 0
