"""A run over tcp: which share of their time actors and learner spend on communication.

    python -m benchmarks.transport.bench_cluster [--seconds 40] [--quick] [--json FILE]

`zapex replay` in one network namespace, `zapex actor` and `zapex learner` in another (on loopback
where these cannot be had), Breakout, without and with CURVE; the learner at its real speed, and one
that takes 20 ms a step and computes nothing. In "held" runs samples per insert hold the actors
back, so that the cores are not overcommitted: what waits for a core counts as communication there.
In "free" ones actors play as fast as they can.

Over each of five windows

    shares          of wall time, by what each role was doing
    communication   of wall time: an actor's pull and push, the learner's sample and set
    busy            of the processor time of all threads of the learner's process: that of libzmq's
                    own threads, and of its own thread at most as long as it was communicating
"""

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.support.harness import FIRST_PRESET, arguments, joined, median, write_json
from benchmarks.support.machine import ROOT
from tests.support import netns
from zapex.net import keys as curve_keys

ENV = "ALE/Breakout-v5"
COMMON = (
    f"--env {ENV} --preset laptop --learning-starts 2k --capacity 50k --eval-period-s 0 --plain "
    + FIRST_PRESET
)
LEARNERS = {
    "real, the paper's network, batch 512": (
        None,
        "--hidden 512 --channels 32 --batch-size 512",
        "--samples-per-insert 3",
    ),
    "paced at 20 ms, batch 64": (
        0.02,
        "--batch-size 64 --prefetch 3",
        "--samples-per-insert 8",
    ),
}
"""Its step, its flags, and those that hold the actors back."""
WINDOWS = 5
_LIBZMQ = "ZMQbg"  # how its threads are named
START_S = 240.0
SETTLE_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Communication's share of wall time, by role."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each measurement")
    options = parser.parse_args(argv)
    least = 2 if options.quick else 20
    settle_s, seconds = (1.0, 8.0) if options.quick else (SETTLE_S, options.seconds)
    results: dict[str, Any] = {}
    spreads: dict[str, Any] = {}
    why_not = netns.can_have_namespaces()
    with contextlib.ExitStack() as stack:
        hosts = None if why_not else stack.enter_context(netns.Namespaces(["server", "clients"]))
        where = f"loopback ({why_not})" if why_not else "two network namespaces over veth"
        print(where)
        cells = [
            (learner, secure, held)
            for learner in LEARNERS
            for secure, held in ((False, True), (True, True), (False, False))
        ]
        for learner, secure, held in cells[4:5] if options.quick else cells:
            step_s, flags, hold = LEARNERS[learner]
            name = f"{learner}, {'CURVE' if secure else 'NULL'}{'' if held else ', free'}"
            flags += f" {hold}" if held else ""
            with _run(hosts, flags.split(), step_s, secure) as (run_dir, commands):
                _wait_for_batches(run_dir, commands, least)
                time.sleep(settle_s)
                found = []
                for window in range(1 if options.quick else WINDOWS):
                    print(f"  {name}: window {window + 1}", file=sys.stderr, flush=True)
                    found.append(_measure(run_dir, commands, seconds))
            results[name] = joined(found, median)
            spreads[name] = joined(found, lambda values: np.percentile(values, [10, 90]).tolist())
            plain = f"{learner}, NULL" if held else name
            _show(name, results[name], results.get(plain, results[name]))
    write_json(options, "cluster", results, rounds=1 if options.quick else WINDOWS, where=where,
               seconds=seconds, spreads=spreads)  # fmt: skip
    return 0


@contextlib.contextmanager
def _run(
    hosts: netns.Namespaces | None, flags: list[str], step_s: float | None, secure: bool
) -> Iterator[tuple[Path, list[subprocess.Popen[bytes]]]]:
    """Three commands that train, and the directory of their own; ended at the end."""
    address, port = "127.0.0.1", 7711
    if hosts is None:
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
    else:
        address = hosts.address("server")
    with tempfile.TemporaryDirectory(prefix="zapex-bench-") as name:
        directory = Path(name)
        trust = ["--insecure-network"]
        if secure:
            curve_keys.make(directory / "keys")
            trust = ["--keys", "keys"]
        plain = [sys.executable, "-m", "zapex"]
        paced = [sys.executable, "-m", "benchmarks.support.paced_learner", str(step_s)]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for part, side in (("replay", "server"), ("actor", "clients"), ("learner", "clients")):
                command = paced if part == "learner" and step_s is not None else plain
                where = "--listen" if part == "replay" else "--replay"
                words = [part, where, f"tcp://{address}:{port}", "--run-dir", part, *trust]
                prefix = hosts.prefix(side) if hosts is not None else []
                with (directory / f"{part}.txt").open("wb") as log:
                    started.append(
                        subprocess.Popen(
                            [*prefix, *command, *words, *COMMON.split(), *flags],
                            cwd=directory, stdout=log, stderr=subprocess.STDOUT,
                            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                        )
                    )  # fmt: skip
            yield directory, started
        finally:
            for process in started:
                process.send_signal(signal.SIGINT)
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                process.kill()


def _lines(directory: Path, part: str) -> list[dict[str, Any]]:
    """What a part has recorded of itself, every five seconds."""
    with contextlib.suppress(FileNotFoundError):
        text = (directory / part / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()[:-1]]
    return []


def _wait_for_batches(directory: Path, commands: list[subprocess.Popen[bytes]], least: int) -> None:
    deadline = time.monotonic() + START_S
    while not any(line.get("batches", 0) >= least for line in _lines(directory, "learner")):
        if time.monotonic() > deadline or any(one.poll() is not None for one in commands):
            said = "\n".join(p.read_text()[-2000:] for p in directory.glob("*.txt"))
            raise RuntimeError(
                f"a command has ended, or no batch was learned within {START_S:g} s\n{said}"
            )
        time.sleep(1.0)


def _threads_s(commands: Sequence[subprocess.Popen[bytes]]) -> tuple[float, float]:
    """Processor seconds of the learner's process so far: of libzmq's threads, and of all."""
    for command in commands:
        for child in psutil.Process(command.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                if " ".join(child.cmdline()).startswith("zapex: learner"):
                    tasks = Path(f"/proc/{child.pid}/task")
                    libzmq_s = sum(
                        one.user_time + one.system_time
                        for one in child.threads()
                        if (tasks / str(one.id) / "comm").read_text().startswith(_LIBZMQ)
                    )
                    return libzmq_s, sum(child.cpu_times()[:2])
    raise RuntimeError("there is no learner")


def _measure(
    directory: Path, commands: list[subprocess.Popen[bytes]], seconds: float
) -> dict[str, Any]:
    """Shares over a window."""
    began = {part: len(_lines(directory, part)) for part in ("replay", "actor", "learner")}
    before, began_s = _threads_s(commands), time.monotonic()
    time.sleep(seconds)
    elapsed_s, after = time.monotonic() - began_s, _threads_s(commands)
    shares: dict[str, dict[str, float]] = {}
    for part, roles in (
        ("replay", ("replay",)), ("actor", ("actor", "relay")), ("learner", ("learner",)),
    ):  # fmt: skip
        window = [line for line in _lines(directory, part)[began[part] :] if "comm/" in str(line)]
        for role in roles:
            prefix = f"comm/{role}_"
            named = {key for line in window for key in line if key.startswith(prefix)}
            shares[role] = {k.removeprefix(prefix): _mean(window, k) for k in sorted(named)}
    # The learner's lines are the last: its window has the run's rates.
    rates = {
        "batches": _mean(window, "learner/batches_per_s"), "frames": _mean(window, "charts/FPS"),
    }  # fmt: skip
    communication = {
        "actor": shares["actor"]["pull"] + shares["actor"]["push"],
        "learner": shares["learner"]["sample"] + shares["learner"]["set"],
    }
    libzmq_s, all_s = (end - start for start, end in zip(before, after, strict=True))
    own_s = min(elapsed_s * communication["learner"], all_s - libzmq_s)
    return {
        "shares": shares,
        "rates_per_s": rates,
        "step_s": _mean(window, "phases/learner_forward") / rates["batches"],
        "machine_busy": _mean(window, "system/host_cpu_share"),
        "communication": communication,
        "busy": {"learner": {"communication": (libzmq_s + own_s) / all_s}},
    }


def _mean(lines: list[dict[str, Any]], key: str) -> float:
    values = [line[key] for line in lines if key in line]
    return round(statistics.fmean(values), 5) if values else float("nan")


def _show(name: str, found: dict[str, Any], plain: dict[str, Any]) -> None:
    """plain: of the run without keys, with which it can be compared if it did as much."""
    rates = found["rates_per_s"]
    print(f"\n{name}: {rates['batches']:.2f} batches/s, {rates['frames']:,.0f} frames/s; the "
          f"machine was {found['machine_busy']:.0%} busy")  # fmt: skip
    for role, shares in found["shares"].items():
        print(f"  {role:8} " + "  ".join(f"{k} {v:.1%}" for k, v in shares.items()))
    for role, share in found["communication"].items():
        print(f"  {role}'s communication {share:.1%}")
    print(f"  of the learner's processor time {found['busy']['learner']['communication']:.1%}")
    for kind, rate in rates.items():
        if abs(rate / plain["rates_per_s"][kind] - 1) > 0.1:
            print(f"  don't compare: {rate / plain['rates_per_s'][kind]:.2f} x the {kind}")


if __name__ == "__main__":
    sys.exit(main())
