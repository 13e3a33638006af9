"""A batch of 512 from several served replays against the same batch from one, on one machine.

    python -m benchmarks.replay.bench_shards [--quick] [--json FILE]

sample   512 Atari transitions (84x84x4, n = 3) into memory that was used before
pair     the same, and update_priorities of them: what a learner does for each batch

The same transitions are in one replay, in two and in four, each a `zapex replay --schema` of its
own over ipc. The client is one process; its calls to all contenders are interleaved. "bytes" is
what a batch was on the wire: a frame that two rows share is sent once, so it hardly differs.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import zapex
from benchmarks.peers.replays import SIDE, STACK
from benchmarks.support.harness import arguments, clock_ns, interleaved, percentiles, write_json
from benchmarks.support.machine import ROOT
from zapex import Column, Schema
from zapex.library.url_client import UrlClient

BATCH, ROWS, SHARDS = 512, 256, (1, 2, 4)
SCHEMA = Schema(
    {"obs": Column((SIDE, SIDE), np.uint8, STACK), "action": Column((), np.int64)}, n_step=3
)


@contextlib.contextmanager
def served(folder: Path, shards: int, capacity: int) -> Iterator[list[str]]:
    """So many served replays; their URLs."""
    schema_file = folder / "schema.json"
    schema_file.write_text(SCHEMA.to_json())
    urls, servers = [f"ipc://{folder}/{shards}-{s}" for s in range(shards)], []
    try:
        for url in urls:
            command = [sys.executable, "-m", "zapex", "replay", "--schema", str(schema_file),
                       "--listen", url, "--capacity", str(capacity), "--writers", "4"]  # fmt: skip
            servers.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL))
        yield urls
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(30)


def fill(client: Any, rows: int) -> None:
    """The same rows for everybody, with priorities of their own."""
    rng = np.random.default_rng(0)
    frames = rng.integers(1, 255, (ROWS + STACK + 3, SIDE, SIDE), np.uint8)
    for first in range(0, rows, ROWS):
        at = np.arange(ROWS)[:, None] + np.arange(STACK)
        frames[:: 1 + first % 7] ^= 1
        client.extend(
            obs=frames[at], next_obs=frames[at + 3], action=np.zeros(ROWS, np.int64),
            reward=np.zeros(ROWS), terminated=np.zeros(ROWS, bool),
            priorities=rng.random(ROWS) + 0.1,
        )  # fmt: skip


class Contender:
    """A client of so many replays, and the bytes of the batches that came."""

    def __init__(self, urls: list[str], rows: int) -> None:
        target: Any = urls if len(urls) > 1 else urls[0]
        self.client: Any = zapex.connect(target, schema=SCHEMA, timeout_s=60.0)
        fill(self.client, rows)
        self.nbytes = self.batches = 0
        inner: list[UrlClient] = getattr(self.client, "_clients", [self.client])
        for one in inner:
            self._count(one)
        self._out = self.client.empty_batch(BATCH)
        self._errors = np.random.default_rng(1).random(BATCH)

    def _count(self, client: UrlClient) -> None:
        unpack = client._unpack

        def counted(message: Any, *more: Any) -> Any:
            self.nbytes += sum(part.nbytes for part in message.body)
            return unpack(message, *more)

        client._unpack = counted  # type: ignore[method-assign]

    def sample(self) -> float:
        self.batches += 1
        start = clock_ns()
        self.client.sample(BATCH, out=self._out)
        return clock_ns() - start

    def pair(self) -> float:
        self.batches += 1
        start = clock_ns()
        self.client.sample(BATCH, out=self._out)
        self.client.update_priorities(self._out.keys, self._errors)
        return clock_ns() - start


def measure(rounds: int, calls: int, rows: int) -> dict[str, Any]:
    """Milliseconds a call by case and number of replays, and the bytes of a batch."""
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        contenders = {
            str(n): Contender(held.enter_context(served(folder, n, 2 * rows)), rows) for n in SHARDS
        }
        for contender in contenders.values():
            held.enter_context(contender.client)
        found: dict[str, Any] = {}
        for case in ("sample", "pair"):

            def median(call: Callable[[], float]) -> Callable[[], float]:
                return lambda: float(np.median([call() for _ in range(calls)]))

            works = {n: median(getattr(one, case)) for n, one in contenders.items()}
            times = interleaved(works, rounds, warm_up=1)
            found[case] = {n: percentiles(values, 1e6) for n, values in times.items()}
            one = found[case]["1"]["p50"]
            found[case]["over one"] = {
                n: round(found[case][n]["p50"] / one, 3) for n in works if n != "1"
            }
        found["bytes"] = {n: c.nbytes / c.batches for n, c in contenders.items()}
        return found


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, pins=True).parse_args(argv)
    start = time.monotonic()
    rounds = 3 if options.quick else 15
    found = measure(rounds, 3 if options.quick else 20, 2048 if options.quick else 16_384)
    print("milliseconds a call, medians" + "".join(f"{n:>12}" for n in SHARDS) + "   4 over 1")
    for case in ("sample", "pair"):
        row = "".join(f"{found[case][str(n)]['p50']:12.1f}" for n in SHARDS)
        print(f"{case:28}{row}{found[case]['over one']['4']:11.2f}")
    print(f"{'MB a batch':28}" + "".join(f"{found['bytes'][str(n)] / 1e6:12.2f}" for n in SHARDS))
    print(f"{time.monotonic() - start:.0f} s")
    write_json(options, "shards", found, rounds=rounds, batch=BATCH)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
