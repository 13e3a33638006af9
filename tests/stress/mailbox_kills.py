"""Kills a mailbox's writer at random instructions while readers check every value they get.

python -m tests.stress.mailbox_kills --kills 300 --seed 1 --kib 64      prints one line of JSON
"""

import argparse
import json
import random
import time
from typing import Any

import numpy as np

from tests.stress.forks import Child, sleep_until
from zapex.machine.jit import kernel
from zapex.machine.mailbox import Mailbox
from zapex.machine.segment import Segment

READERS = 2
READS, TORN, FELL, SEEN = 0, 1, 2, 3  # counters; each reader has two cache lines of them
_LIVES = 2**20  # a value is made of version * _LIVES + life, over and over


@kernel
def _differ_kernel(value: Any, wanted: int) -> bool:
    differ = False
    for i in range(value.size):
        differ |= value[i] != wanted
    return differ


class Reader:
    """Reads newer values for ever and counts in shared memory."""

    def __init__(self, mailbox: Mailbox, counters: Any) -> None:
        self.mailbox, self.counters = mailbox, counters
        self.out = np.zeros(mailbox.value_bytes, np.uint8)

    def read(self) -> None:
        seen = int(self.counters[SEEN])
        version = self.mailbox.newer_than(seen, self.out)
        if version:
            value = self.out.view(np.int64)
            self.counters[READS] += 1
            self.counters[TORN] += _differ_kernel(value, value[0])
            self.counters[TORN] += value[0] // _LIVES != version
            self.counters[FELL] += version <= seen
            self.counters[SEEN] = version


def publish(mailbox: Mailbox, value: Any, life: int) -> None:
    version = mailbox.version + 1
    value.view(np.int64)[:] = version * _LIVES + life
    mailbox.publish(version, value)


def run(kills: int, seed: int, kib: int) -> dict[str, Any]:
    rng, size = random.Random(seed), kib << 10
    memory_bytes = Mailbox.required_bytes(size)
    segment = Segment.create("mailbox-kills", memory_bytes + READERS * 128)
    counters = segment.buffer[memory_bytes:].view(np.int64).reshape(READERS, 16)
    mailbox = Mailbox(segment.buffer, size, create=True)
    value = np.zeros(size, np.uint8)
    publish(mailbox, value, 0)
    Reader(Mailbox(segment.buffer, size), np.zeros(16, np.int64)).read()  # compiled before the fork

    readers = [Reader(Mailbox(segment.buffer, size), row) for row in counters]
    children = [Child(reader.read) for reader in readers]
    slowest_s = 0.0
    for life in range(1, kills + 1):
        writer = Child(lambda life=life: publish(Mailbox(segment.buffer, size), value, life))
        # Versions of this life reach every reader: nobody is stuck on what the dead one left.
        before = counters[:, SEEN].copy()
        waited = sleep_until(lambda b=before: (counters[:, SEEN] > b).all(), 20, "readers go on")
        slowest_s = max(slowest_s, waited)
        time.sleep(rng.random() * 2e-3)
        writer.kill()
    for child in children:
        child.kill()
    return {
        "kills": kills,
        "seed": seed,
        "value_bytes": size,
        "versions": mailbox.version,
        "reads": int(counters[:, READS].sum()),
        "torn": int(counters[:, TORN].sum()),
        "fell": int(counters[:, FELL].sum()),
        "slowest_restart_s": round(slowest_s, 4),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kib", type=int, default=64)
    print(json.dumps(run(**vars(parser.parse_args()))))
