"""A run over tcp: which share of their time actors and learner spend on communication.

    python -m benchmarks.bench_cluster [--seconds 40] [--quick] [--json FILE]

`zapex replay` in one network namespace, `zapex actor` and `zapex learner` in another (on loopback
where these cannot be had), Breakout, without and with CURVE; the learner at its real speed, and one
that takes 20 ms a step and computes nothing. Samples per insert hold the actors back, so that the
cores are not overcommitted: what waits for a core would count as communication.
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

from benchmarks._harness import ROOT, arguments, goal, write_json
from zapex import curve_keys, netns

ENV = "ALE/Breakout-v5"
COMMON = (
    f"--env {ENV} --preset laptop --learning-starts 2k --capacity 50k --eval-period-s 0 --plain"
)
LEARNERS = {
    "real, the paper's network, batch 512": (
        None,
        "--hidden 512 --channels 32 --batch-size 512 --samples-per-insert 3",
    ),
    "paced at 20 ms, batch 64": (0.02, "--batch-size 64 --samples-per-insert 8 --prefetch 3"),
}
START_S = 240.0
SETTLE_S = 10.0
GOAL = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Communication's share of wall time, by role."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each measurement")
    options = parser.parse_args(argv)
    # Ended from outside, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench_cluster: ended by SIGTERM"))
    seconds = 12.0 if options.quick else options.seconds
    results: dict[str, Any] = {}
    why_not = netns.can_have_namespaces()
    with contextlib.ExitStack() as stack:
        hosts = None if why_not else stack.enter_context(netns.Hosts(["server", "clients"]))
        where = f"loopback ({why_not})" if why_not else "two network namespaces over veth"
        print(where)
        for name, (step_s, flags) in LEARNERS.items():
            for secure in (False, True):
                with _run(hosts, flags.split(), step_s, secure) as run_dir:
                    found = _measure(run_dir, seconds)
                results[f"{name}, {'CURVE' if secure else 'NULL'}"] = found
                _show(f"{name}, {'CURVE' if secure else 'NULL'}", found)
    if options.json:
        write_json(options.json, "cluster", results, where=where, seconds=seconds)
    return 0


@contextlib.contextmanager
def _run(
    hosts: netns.Hosts | None, flags: list[str], step_s: float | None, secure: bool
) -> Iterator[Path]:
    """Three commands that train, in a directory of their own, ended at the end."""
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
        plain = [sys.executable, "-m", "zapex.cli"]
        paced = [sys.executable, "-m", "benchmarks.paced_learner", str(step_s)]
        started = []
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
            yield directory
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


def _measure(directory: Path, seconds: float) -> dict[str, Any]:
    """Shares over a window that begins a while after learning did."""
    deadline = time.monotonic() + START_S
    while not any(line.get("batches", 0) >= 20 for line in _lines(directory, "learner")):
        if time.monotonic() > deadline:
            said = "\n".join(p.read_text()[-2000:] for p in directory.glob("*.txt"))
            raise RuntimeError(f"no batch was learned within {START_S:g} s\n{said}")
        time.sleep(1.0)
    time.sleep(SETTLE_S)
    began = {part: len(_lines(directory, part)) for part in ("replay", "actor", "learner")}
    time.sleep(seconds)
    found: dict[str, Any] = {"shares": {}, "cores_used": {}}
    used_s = 0.0
    for part, roles in (
        ("replay", ("replay",)), ("actor", ("actor", "relay")), ("learner", ("learner",)),
    ):  # fmt: skip
        window = [line for line in _lines(directory, part)[began[part] :] if "comm/" in str(line)]
        for role in roles:
            named = {k for line in window for k in line if k.startswith(f"comm/{role}_")}
            found["shares"][role] = {
                key.removeprefix(f"comm/{role}_"): _mean(window, key) for key in sorted(named)
            }
            found["cores_used"][role] = _mean(window, f"system/{role}_cpu_cores")
        used_s += _mean(window, "system/cpu_cores")
        if part == "learner":
            found["rates_per_s"] = {
                "batches": _mean(window, "learner/batches_per_s"),
                "frames": _mean(window, "charts/FPS"),
            }
            found["machine_busy"] = _mean(window, "system/host_cpu_share")
    found["cores_used"]["all"] = used_s
    shares = found["shares"]
    found["communication"] = {
        "actor": shares["actor"]["pull"] + shares["actor"]["push"],
        "learner": shares["learner"]["sample"] + shares["learner"]["set"],
    }
    return found


def _mean(lines: list[dict[str, Any]], key: str) -> float:
    values = [line[key] for line in lines if key in line]
    return round(statistics.fmean(values), 5) if values else float("nan")


def _show(name: str, found: dict[str, Any]) -> None:
    rates, cores = found["rates_per_s"], len(os.sched_getaffinity(0))
    print(f"\n{name}: {rates['batches']:.2f} batches/s, {rates['frames']:,.0f} frames/s")
    print(f"  cores used {found['cores_used']['all']:.2f} of {cores}; the machine was "
          f"{found['machine_busy']:.0%} busy")  # fmt: skip
    for role, shares in found["shares"].items():
        print(f"  {role:8} " + "  ".join(f"{k} {v:.1%}" for k, v in shares.items()))
    for role, share in found["communication"].items():
        print(goal(f"{role}'s communication", 100 * share, 100 * GOAL, " %"))
    print(goal("learner's waiting", 100 * found["shares"]["learner"]["wait"], 5, " %"))
    if found["machine_busy"] > 0.8:
        print("  above 80 % load: what waits for a core counts as communication too")


if __name__ == "__main__":
    sys.exit(main())
