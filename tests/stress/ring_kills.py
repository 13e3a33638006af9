"""Kills both ends of a ring at random instructions and accounts for every record.

python -m tests.stress.ring_kills --kills 1000 --seed 1      prints one line of JSON
"""

import argparse
import json
import random
import time
from typing import Any

import numpy as np

from tests.stress.forks import Child, sleep_until
from zapex.machine.jit import kernel
from zapex.machine.segment import Segment
from zapex.shm_ring import FULL, RingConsumer, RingProducer, ShmRing

CAPACITY = 64
WORDS = 16  # a record: two cache lines, so that a torn one would show
TORN, FOREIGN, DOUBLED, SEEN = 0, 16, 32, 48  # counters, two cache lines apart


@kernel
def _fill_kernel(rows: Any, first: int) -> None:
    for i in range(rows.shape[0]):
        for k in range(rows.shape[1]):
            rows[i, k] = (first + i) * 1_000_003 + k


@kernel
def _check_kernel(rows: Any, first: int, counters: Any) -> None:
    for i in range(rows.shape[0]):
        number = rows[i, 0] // 1_000_003
        torn = 0
        for k in range(rows.shape[1]):
            torn |= rows[i, k] != number * 1_000_003 + k
        counters[TORN] += torn
        counters[FOREIGN] += not torn and number != first + i


@kernel
def _note_seen_kernel(counters: Any, released: int) -> None:
    """Records up to `released` are consumed; going back means that one came again after release."""
    if released < counters[SEEN]:
        counters[DOUBLED] += 1
    counters[SEEN] = released


class Account:
    """The ring under test and its counters, in one segment."""

    def __init__(self) -> None:
        dtype = np.dtype([("words", np.int64, WORDS)])
        ring_bytes = -(-ShmRing.required_bytes(CAPACITY, dtype) // 64) * 64
        self.segment = Segment.create("ring-kills", ring_bytes + 8 * 64)
        self.counters = self.segment.buffer[ring_bytes:].view(np.int64)
        self.memory = self.segment.buffer[:ring_bytes]
        self.dtype = dtype
        ShmRing(self.memory, CAPACITY, dtype, create=True)

    def attach(self) -> ShmRing:
        return ShmRing(self.memory, CAPACITY, self.dtype)


def produce(ring: ShmRing, producer: RingProducer, rng: random.Random) -> None:
    """One batch, by copy or by claim, write, commit. Record number = sequence."""
    n = rng.randint(1, CAPACITY)
    rows = np.empty(n, ring.dtype)
    if rng.random() < 0.5:
        _fill_kernel(rows["words"].reshape(n, WORDS), ring.tail)
        producer.try_offer(rows)
        return
    sequence = producer.try_claim(n)
    if sequence == FULL:
        return
    _fill_kernel(rows["words"].reshape(n, WORDS), sequence)
    for i in range(n):
        ring.records[(sequence + i) & (CAPACITY - 1)] = rows[i]
    producer.commit(n)


def consume(ring: ShmRing, consumer: RingConsumer, rng: random.Random, counters: Any) -> None:
    """One batch, checked in place before it is released, or copied out."""
    if rng.random() < 0.5:
        before = ring.head
        rows = consumer.take(rng.randint(1, CAPACITY))
        _check_kernel(rows["words"].reshape(rows.size, WORDS), before, counters)
    else:
        first, n = consumer.poll(rng.randint(1, CAPACITY))
        rows = ring.records[(first + np.arange(n)) & (CAPACITY - 1)]
        _check_kernel(rows["words"].reshape(n, WORDS), first, counters)
        consumer.release(n)
    _note_seen_kernel(counters, ring.head)


def run(kills: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    account = Account()

    def start_producer() -> Child:
        ring = account.attach()
        producer, own = ring.producer(), random.Random(rng.random())
        return Child(lambda: produce(ring, producer, own))

    def start_consumer() -> Child:
        ring = account.attach()
        consumer, own = ring.consumer(), random.Random(rng.random())
        return Child(lambda: consume(ring, consumer, own, account.counters))

    # Everything compiled before the first fork; the ring goes on from there.
    ring, warm = account.attach(), random.Random(seed)
    producer, consumer = ring.producer(), ring.consumer()
    for _ in range(20):
        produce(ring, producer, warm)
        consume(ring, consumer, warm, account.counters)
    starts = {"producer": start_producer, "consumer": start_consumer}
    children = {name: start() for name, start in starts.items()}
    slowest_s = 0.0
    for _ in range(kills):
        time.sleep(rng.random() * 2e-3)
        name = rng.choice(list(children))
        children[name].kill()
        head, tail = ring.head, ring.tail
        if not 0 <= tail - head <= CAPACITY:
            raise RuntimeError(f"I1 is broken: head {head}, tail {tail}")
        children[name] = starts[name]()
        word = "tail" if name == "producer" else "head"
        before = getattr(ring, word)
        waited = sleep_until(
            lambda word=word, before=before: getattr(ring, word) > before, 20, f"the {name} goes on"
        )
        slowest_s = max(slowest_s, waited)
    for child in children.values():
        child.kill()
    counters = account.counters
    return {
        "kills": kills,
        "seed": seed,
        "records": ring.head,
        "torn": int(counters[TORN]),
        "foreign": int(counters[FOREIGN]),
        "doubled": int(counters[DOUBLED]),
        "slowest_restart_s": round(slowest_s, 4),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    print(json.dumps(run(**vars(parser.parse_args()))))
