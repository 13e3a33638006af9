"""Reads parameters while a writer publishes as fast as it can, and checks every byte of them.

    python -m tests.stress.mailbox_reads [--reads 10000000 --bytes 65536] [--json FILE]

Without arguments: ten million reads of 64 KiB, then ten thousand of 13.17 MB, the dueling net of
arXiv 2110.13506. Prints a line of JSON for each; exit code 1 if a value was torn or a version fell.
`starved`: reads that gave up against the writer and were made again, as on a crowded machine.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.harness import add_json, evidence
from benchmarks.support.machine import Watch
from tests.stress.forks import Child
from zapex.machine.jit import kernel
from zapex.machine.mailbox import Mailbox
from zapex.machine.segment import Segment

PARAMETER_BYTES = 4 * 3_292_837
RUNS = ((10_000_000, 65536), (10_000, PARAMETER_BYTES))
_VALUES = 8  # more than cells, so that a cell's old and new bytes always differ


@kernel
def _wrong_kernel(value: Any, wanted: int) -> bool:
    wrong = False
    for i in range(value.size):
        wrong |= value[i] != wanted
    return wrong


def run(reads: int, size: int) -> dict[str, Any]:
    """`reads` reads of `size` bytes, a multiple of 4, against a busy writer."""
    segment = Segment.create("mailbox-reads", Mailbox.required_bytes(size))
    segment.populate()
    mailbox = Mailbox(segment.buffer, size, create=True)
    values = [np.full(size // 4, i, np.uint32).view(np.uint8) for i in range(_VALUES)]
    mailbox.publish(1, values[1])
    out = np.zeros(size, np.uint8)
    words = out.view(np.uint32)
    mailbox.newer_than(0, out)
    assert not _wrong_kernel(words, 1)  # compiled before the fork

    def publish() -> None:
        version = mailbox.version + 1
        mailbox.publish(version, values[version % _VALUES])

    torn = fell = starved = done = 0
    last = 1
    writer = Child(publish)
    began = time.monotonic()
    try:
        while done < reads:
            version = mailbox.newer_than(0, out)
            if not version:
                starved += 1
                continue
            done += 1
            torn += _wrong_kernel(words, version % _VALUES)
            fell += version < last
            last = version
    finally:
        writer.kill()
    return {
        "reads": done,
        "value_bytes": size,
        "torn": torn,
        "fell": fell,
        "starved": starved,
        "retries": mailbox.torn_reads,
        "versions": mailbox.version,
        "seconds": round(time.monotonic() - began, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Read, count, tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reads", type=int)
    parser.add_argument("--bytes", type=int, default=65536)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the results to this file")
    options = parser.parse_args(argv)
    watch = Watch()
    runs = RUNS if options.reads is None else ((options.reads, options.bytes),)
    results = []
    for reads, size in runs:
        results.append(run(reads, size))
        print(json.dumps(results[-1]), flush=True)
    if options.json:
        add_json(options.json, "plane", "mailbox_reads", {"runs": results}, evidence(watch, None))
    return int(any(one["torn"] or one["fell"] for one in results))


if __name__ == "__main__":
    raise SystemExit(main())
