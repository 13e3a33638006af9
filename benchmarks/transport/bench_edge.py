"""Replay and actors at the edge, the learner behind a long link: how busy is it, how stale?

    python -m benchmarks.transport.bench_edge [--windows 5] [--quick] [--json F] [--figure F]

`zapex replay` and `zapex actor` play Breakout here; a paced learner (180 ms a batch of 512, the
paper's network) reaches the replay through a relay with delay, rate, losses and compression
(long_link.py). For each link and each number of batches asked for ahead, with --compress or not:

    wait         share of the learner's time in which it has no batch
    batches      a second; behind a link without limit they are those of the pace
    staleness    batches learned between a batch's request and its use; more ahead is staler
    Mbit/s       on the line: batches come down, parameters and priorities go up

Medians of windows of 10 s, one after the other; `spreads` has their p10 and p90. Mbit/s are of all.

Beside it: what LZ4, zstd and zlib make of the frames of such a batch (LZ4 and zstd where `pip
install lz4 zstandard` has been done).
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.harness import arguments, goal, joined, median, p10_p90, write_json
from benchmarks.support.machine import ROOT
from benchmarks.transport.long_link import Line, LongLink

ENV = "ALE/Breakout-v5"
COMMON = (
    f"--env {ENV} --preset laptop --learning-starts 5k --capacity 50k --eval-period-s 0 --plain "
    "--hidden 512 --channels 32 --batch-size 512 --samples-per-insert 8"
)
BATCH, STEP_S = 512, 0.18
GOAL_LINE = Line(50.0, 100.0)
LINES = (
    Line(), Line(0.1), Line(10.0, 1000.0), Line(50.0, 1000.0), GOAL_LINE,
    Line(50.0, 100.0, loss=0.001), Line(100.0, 100.0), Line(200.0, 100.0),
)  # fmt: skip
TUNNEL = Line(50.0, 100.0, compressed=True)  # for comparison, without --compress
START_S, END_S = 300.0, 20.0
RECORD_S, RECORDS = 5.0, 2  # of the learner; of a window


@dataclass(frozen=True)
class Ahead:
    """Batches asked for ahead, seconds between two publications of parameters, --compress."""

    prefetch: int
    publish_s: float
    compress: bool

    def __str__(self) -> str:
        how = ", --compress" if self.compress else ""
        return f"{self.prefetch} batches ahead, parameters each {self.publish_s:g} s{how}"


SETTINGS = (
    Ahead(4, 10.0, False), Ahead(2, 10.0, True), Ahead(4, 10.0, True), Ahead(8, 10.0, True),
    Ahead(4, 1.0, True),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """A paced learner behind a long link."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--windows", type=int, help="of each measurement: 5; --quick: 1")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the results here")
    options = parser.parse_args(argv)
    settle_s, windows = (6.0, 1) if options.quick else (12.0, 5)
    windows = options.windows or windows
    settings = (SETTINGS[0], SETTINGS[2]) if options.quick else SETTINGS
    lines = {ahead: lines_of(ahead, options.quick) for ahead in settings}
    count = sum(map(len, lines.values()))
    seconds = (windows * RECORDS + 1) * RECORD_S
    minutes = len(settings) + count * (settle_s + seconds) / 60
    print(f"{count} measurements, about {minutes:.0f} minutes")
    codecs = compression(2 if options.quick else 20)
    for codec in codecs:
        print("  {name}: {batch_ratio:.0f} : 1 of a batch, {frame_bytes:.0f} bytes a frame of its "
              "own; packs {pack_mb_per_s:,.0f} MB/s, unpacks {unpack_mb_per_s:,.0f}"
              .format(**codec))  # fmt: skip
    cells: list[dict[str, Any]] = []
    for ahead in settings:
        with _run(ahead) as (directory, link):
            for line in lines[ahead]:
                link.set(line)
                time.sleep(settle_s)
                cells.append(_measure(directory, link, line, ahead, windows))
                print("  " + _told(cells[-1]), flush=True)
    meant = [cell for cell in cells if cell["line"] == asdict(GOAL_LINE) and cell["compress"]]
    best = min(meant, key=lambda cell: cell["wait_share"])
    what = f"waits at {GOAL_LINE}, --compress, {best['prefetch']} ahead"
    print(goal(what, 100 * best["wait_share"], 10, " %"))
    results = {"cells": cells, "compression": codecs}
    write_json(options, "edge", results, rounds=windows, seconds=RECORDS * RECORD_S)
    if options.figure:
        draw(cells, options.figure, options.quick)
    return 0


def lines_of(ahead: Ahead, quick: bool) -> tuple[Line, ...]:
    """Plain links; without --compress also a tunnel that compresses."""
    if quick:
        return (GOAL_LINE,) if ahead.compress else (LINES[0], GOAL_LINE)
    return LINES if ahead.compress else (*LINES, TUNNEL)


@contextlib.contextmanager
def _run(ahead: Ahead) -> Iterator[tuple[Path, LongLink]]:
    """The three commands, and the link of the learner; ended at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    more = f"--prefetch {ahead.prefetch} --publish-period-s {ahead.publish_s:g}".split()
    with (
        tempfile.TemporaryDirectory(prefix="zapex-bench-") as name,
        LongLink(port) as link,
    ):
        directory, started = Path(name), []
        paced = ["-m", "benchmarks.support.paced_learner", str(STEP_S)]
        of_learner = ["--compress"] if ahead.compress else []
        try:
            for part, where, to in (
                ("replay", "--listen", port), ("actor", "--replay", port),
                ("learner", "--replay", link.port),
            ):  # fmt: skip
                if part == "learner":  # the relay listens before there is a replay behind it
                    wait_until_it_listens(port)
                command = paced if part == "learner" else ["-m", "zapex"]
                words = [part, where, f"tcp://127.0.0.1:{to}", "--run-dir", part]
                words += of_learner if part == "learner" else []
                with (directory / f"{part}.txt").open("wb") as log:
                    started.append(
                        subprocess.Popen(
                            [sys.executable, *command, *words, *COMMON.split(), *more],
                            cwd=directory, stdout=log, stderr=subprocess.STDOUT,
                            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                        )
                    )  # fmt: skip
            _wait_for_batches(directory, started)
            yield directory, link
        finally:
            for process in started:
                process.send_signal(signal.SIGINT)
            for process in reversed(started):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                process.kill()
                process.wait()


def wait_until_it_listens(port: int) -> None:
    """Raises RuntimeError after five minutes."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.2)
    raise RuntimeError(f"the replay did not listen within {START_S:g} s")


def _lines(directory: Path) -> list[dict[str, Any]]:
    """What the learner has recorded, every five seconds."""
    with contextlib.suppress(FileNotFoundError):
        text = (directory / "learner" / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()[:-1]]
    return []


def _wait_for_batches(directory: Path, started: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_S
    while not any(line.get("batches", 0) >= 5 for line in _lines(directory)):
        if time.monotonic() > deadline or any(one.poll() is not None for one in started):
            said = "\n".join(p.read_text()[-1500:] for p in directory.glob("*.txt"))
            raise RuntimeError(f"a command has ended, or no batch came in {START_S:g} s\n{said}")
        time.sleep(1.0)


def _measure(
    directory: Path, link: LongLink, line: Line, ahead: Ahead, windows: int
) -> dict[str, Any]:
    """What the learner recorded in windows that follow each other."""
    before = len(_lines(directory))
    link.set(line)
    began_s = time.monotonic()
    deadline = began_s + START_S + (windows * RECORDS + 1) * RECORD_S
    while len(found := _lines(directory)[before:]) < windows * RECORDS + 1:
        assert time.monotonic() < deadline, "the learner records nothing"
        time.sleep(0.5)
    passed, elapsed_s = link.set(line), time.monotonic() - began_s
    rows = [_window(found[i * RECORDS :][: RECORDS + 1]) for i in range(windows)]
    return {
        "line": asdict(line), **asdict(ahead), "step_ms": 1e3 * STEP_S,
        **joined(rows, median), "spreads": joined(rows, p10_p90),
        **{f"{name}_bytes": passed[name] for name in ("up", "down")},
        **{f"{name}_bytes_on_the_line": passed[f"{name}_on_the_line"] for name in ("up", "down")},
        "down_mbit": passed["down_on_the_line"] * 8e-6 / elapsed_s,
        "up_mbit": passed["up_on_the_line"] * 8e-6 / elapsed_s,
    }  # fmt: skip


def _window(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Between the first record and the last. The first one's means are of the time before."""
    first, last = lines[0], lines[-1]
    return {
        "wait_share": _mean(lines[1:], "comm/learner_wait"),
        "batches_per_s": (last["batches"] - first["batches"]) / (last["wall_s"] - first["wall_s"]),
        "staleness_batches": _mean(lines[1:], "learner/staleness"),
        "machine_busy": _mean(lines[1:], "system/host_cpu_share"),
    }


def _mean(lines: list[dict[str, Any]], key: str) -> float:
    return float(np.mean([line[key] for line in lines if key in line]))


def _ahead_of(cell: dict[str, Any]) -> Ahead:
    return Ahead(cell["prefetch"], cell["publish_s"], cell["compress"])


def _told(cell: dict[str, Any]) -> str:
    return (
        f"{Line(**cell['line'])}; {_ahead_of(cell)}: "
        f"waits {cell['wait_share']:.1%}, {cell['batches_per_s']:.2f} batches/s, "
        f"{cell['staleness_batches']:.1f} batches stale, down {cell['down_mbit']:.0f} "
        f"and up {cell['up_mbit']:.0f} Mbit/s"
    )


def compression(seconds: int) -> list[dict[str, Any]]:
    """What each codec makes of 2,500 frames of random play, about those of a batch, shuffled."""
    from zapex.envs import environments, streams

    rng = np.random.default_rng(0)
    played = streams.make(environments.check(ENV, {}), 8, seed=1)
    played.reset()
    frames = np.concatenate(
        [played.step(rng.integers(0, 4, 8)).obs[:, -1].copy() for _ in range(40 * seconds)]
    )
    frames = rng.permutation(frames)[:2_500]
    whole, each = frames.tobytes(), [frame.tobytes() for frame in frames[:500]]
    found = []
    for name, (pack, unpack) in _codecs().items():
        began = time.perf_counter()
        packed = pack(whole)
        packed_s, again = time.perf_counter() - began, time.perf_counter()
        assert unpack(packed) == whole
        unpacked_s = time.perf_counter() - again
        found.append(
            {
                "name": name,
                "batch_ratio": len(whole) / len(packed),
                "frame_bytes": float(np.mean([len(pack(one)) for one in each])),
                "pack_mb_per_s": len(whole) / 1e6 / packed_s,
                "unpack_mb_per_s": len(whole) / 1e6 / unpacked_s,
            }
        )
    return found


def _codecs() -> dict[str, Any]:
    import zlib

    found: dict[str, Any] = {"zlib 1": (lambda data: zlib.compress(data, 1), zlib.decompress)}
    with contextlib.suppress(ImportError):
        frame: Any = import_module("lz4.frame")
        found["lz4"] = frame.compress, frame.decompress
    with contextlib.suppress(ImportError):
        zstd: Any = import_module("zstandard")
        found["zstd 1"] = zstd.ZstdCompressor(1).compress, zstd.ZstdDecompressor().decompress
    return found


def draw(cells: list[dict[str, Any]], path: Path, quick: bool) -> None:
    """Waiting and staleness of each link, by batches ahead."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(str(Line(**cell["line"])) for cell in cells))
    settings = list(dict.fromkeys(_ahead_of(cell) for cell in cells))
    height = 0.8 / len(settings)
    for i, ahead in enumerate(settings):
        mine = [c for c in cells if _ahead_of(c) == ahead]
        at = [
            names.index(str(Line(**c["line"]))) + (i - len(settings) / 2 + 0.5) * height
            for c in mine
        ]
        waits = [100 * c["wait_share"] for c in mine]
        left.barh(at, waits, height, label=str(ahead), color=f"C{i}")
        right.barh(at, [c["staleness_batches"] for c in mine], height, color=f"C{i}")
        for axes, values, form in (
            (left, [100 * c["wait_share"] for c in mine], "{:.0f} %"),
            (right, [c["staleness_batches"] for c in mine], "{:.1f}"),
        ):
            for y, value in zip(at, values, strict=True):
                axes.annotate(form.format(value), (value, y), (3, 0), va="center", fontsize=7,
                              textcoords="offset points")  # fmt: skip
    left.axvline(10, color="#6b7280", linestyle=":", label="goal: 10 %")
    left.set_yticks(range(len(names)), names, fontsize=8)
    for axes in (left, right):
        axes.margins(x=0.1)  # room for the figures
    left.invert_yaxis()
    left.set_ylabel("the link: round trip, line rate")
    left.set_xlabel("the learner waits for a batch, % of its time")
    right.set_xlabel("staleness: batches learned since a batch was asked for")
    left.legend(fontsize=8, framealpha=0.9, edgecolor="none")
    note = "; quick form: not to be relied on" if quick else ""
    figure.suptitle(f"A learner of {1e3 * STEP_S:g} ms a batch of {BATCH} behind a long link{note}")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
