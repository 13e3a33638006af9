"""`make reproduce`: the headline numbers measured again on this machine, next to published ones.

    python -m benchmarks.reproduce [--quick] [--only NAME] [--work DIR]

About an hour; --quick: ten minutes. Results and logs go to build/reproduce. What needs another
library or root and does not have it fails, and the rest goes on. Absolute times of another
processor differ; compare the ratios. Exit code 1 if a command failed.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report import load
from benchmarks.support.harness import FIRST_PRESET
from benchmarks.support.machine import ROOT

Figure = Callable[[Any], float]


class Headline(NamedTuple):
    """A published number. text: with {} in its place; those that README has are there as here."""

    text: str
    figure: Figure  # of a result's whole JSON
    in_readme: bool = True


class Measurement(NamedTuple):
    """A result, its command (without --json), and the headlines that it has.

    minutes: on two cores; 0: too long to be measured here.
    """

    name: str
    command: str
    minutes: float
    headlines: tuple[Headline, ...]
    quick: bool = False


def pair(*names: str) -> Figure:
    """Milliseconds of sample(512) + update_priorities: the fastest of these contenders."""
    return lambda whole: min(
        one["pair"]["p50"]
        for name, one in whole["results"]["batch"]["1"].items()
        if name in names and "pair" in one
    )


def over(figure: Figure, divisor: Figure) -> Figure:
    """The ratio of two figures."""
    return lambda whole: figure(whole) / divisor(whole)


def score(name: str) -> Figure:
    """A score of `make learning`."""
    return lambda whole: float(whole["scores"][name]["p50"])


def communication(system: str, actors: int) -> Figure:
    """Percent of the time that a system of the paper spends on communication."""
    return lambda rows: next(
        100 * row["communication_share"]
        for row in rows
        if (row["system"], row["actors"], row["gbit"]) == (system, actors, None)
    )


def kills(name: str) -> Figure:
    """A count of the run over tcp whose roles are killed."""
    return lambda whole: whole["results"]["network_kills"][name]


def tree(name: str, state: str) -> Figure:
    """Nanoseconds an item of a sum tree's sample + update."""
    return lambda whole: whole["results"]["peers"][name]["stratified"][state]["pair"]["p50"]


def row(kind: str, what: str) -> Figure:
    """Milliseconds of an operation between hosts."""
    return lambda whole: whole["results"]["rows"][f"zapex {kind}"][f"{what}_us"]["p50"] / 1e3


CPPRB = ("cpprb", "cpprb, next_of", "cpprb, stack_compress")
MEASUREMENTS = (
    Measurement(
        "train_cartpole", "zapex bench train cartpole", 3,
        (Headline("CartPole-v1 to 475 in {:.0f} s", lambda whole: float(
            np.median([run["command_s"] for run in whole["results"]["seeds"].values()]))),),
        quick=True,
    ),
    Measurement(
        "sumtree", "zapex bench sumtree --peers", 1,
        (Headline("sum tree, cold caches: {:.0f} ns an item", tree("zapex", "cold"), False),
         Headline("Tianshou's over it: {:.1f} x",
                  over(tree("tianshou", "cold"), tree("zapex", "cold")), False)),
        quick=True,
    ),
    Measurement(
        "replay", "zapex bench replay --peers", 5,
        (Headline("`sample(512, out=batch)` + `update_priorities` of Atari transitions in "
                  "{:.2f} ms", pair("zapex")),
         Headline("{:.2f} x a loop that only moves the frames", over(pair("zapex"), pair("roof")),
                  False),
         Headline("cpprb takes {:.1f}", pair(*CPPRB)),
         Headline("TorchRL {:.1f}", pair("torchrl")),
         Headline("Reverb {:.1f}", pair("reverb"))),
        quick=True,
    ),
    Measurement(
        "clients", "zapex bench clients", 3,
        (Headline("`sample(512)` by a handle: {:,.0f} µs",
                  lambda whole: whole["results"]["sample"]["handle"]["p50"], False),),
    ),
    Measurement(
        "transport_tcp", "zapex bench transport --over tcp", 6,
        (Headline("push of 800 transitions over tcp: {:.1f} ms", row("tcp", "push"), False),
         Headline("`sample(512)` over tcp: {:.1f} ms", row("tcp", "sample"), False)),
    ),
    Measurement(
        "train_speed", f"zapex bench train speed --minutes 5 --train {FIRST_PRESET}", 12,
        (Headline("`zapex train` on Breakout: {:,.0f} frames/s",
                  lambda whole: whole["results"]["rates_per_s"]["frames"], False),),
    ),
    Measurement(
        "kills", "python -m tests.stress.network_kills --kills 300 --cuts 100", 6,
        (Headline("of {:,.0f} chunks", kills("at_the_replay")),
         Headline("{:.0f} lost", kills("lost")), Headline("{:.0f} doubled", kills("doubled"))),
    ),
    Measurement(
        "paper", "zapex bench paper --systems a a2 b2 c --actors 8", 4,
        (Headline("{:.0f} % of the time with pairs over Redis", communication("a", 8)),
         Headline("{:.1f} % when each frame is sent once", communication("a2", 8)),
         Headline("{:.1f} % over ZeroMQ", communication("b2", 8)),
         Headline("{:.1f} % with the replay in the network", communication("c", 8))),
    ),
    Measurement(
        "learning", "make learning ARGS='--hours 4'", 0,
        (Headline("Breakout {:.1f}", score("breakout_zapex")),
         Headline("Pong {:.1f}", score("pong_zapex"))),
    ),
)  # fmt: skip


def run(one: Measurement, out: Path) -> str:
    """Run the command, which writes the JSON file `out`; why it failed, empty if it did not."""
    out.unlink(missing_ok=True)
    log = out.with_suffix(".log")
    words = shlex.split(one.command)
    if words[0] != "python":
        words = ["python", "-m", *words]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *words[1:], "--json", str(out)],
            cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            code = process.wait(60 * (4 * one.minutes + 5))
        except subprocess.TimeoutExpired:
            return f"it had not ended after {4 * one.minutes + 5:.0f} minutes, see {log}"
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    time.sleep(5)
    return "" if code == 0 and out.exists() else f"exit code {code}, see {log}"


def seen(headline: Headline, whole: Any) -> str:
    """The figure in a new result; "missing" where a library was not installed."""
    try:
        return f"{headline.figure(whole):.4g}"
    except (KeyError, StopIteration, ValueError):
        return "missing"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print published and seen."""
    parser = argparse.ArgumentParser(description="Measure the headline numbers again.")
    parser.add_argument("--quick", action="store_true", help="those that fit into ten minutes")
    names = [one.name for one in MEASUREMENTS if one.minutes]
    parser.add_argument("--only", action="append", choices=names, help="this result alone")
    parser.add_argument("--work", type=Path, default=ROOT / "build/reproduce", metavar="DIR")
    options = parser.parse_args(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    chosen = [m for m in MEASUREMENTS if m.name in (options.only or names)]
    chosen = [m for m in chosen if m.quick or not options.quick]
    failed = False
    lines = []
    for number, one in enumerate(chosen, 1):
        minutes = f"about {one.minutes:g} min"
        print(f"[{number} of {len(chosen)}, {minutes}] {one.command}", flush=True)
        out = options.work / f"{one.name}.json"
        if reason := run(one, out):
            failed = True
            print(f"  failed: {reason}", flush=True)
            if not out.exists():
                continue
        whole = json.loads(out.read_text())
        for doubt in whole.get("doubts", []) if isinstance(whole, dict) else []:
            print(f"  doubt: {doubt}", flush=True)
        for headline in one.headlines:
            published = f"{headline.figure(load(one.name)):.4g}"
            text = re.sub(r"{.*?}", "...", headline.text)
            lines.append(f"{published:>10} {seen(headline, whole):>10}  {text}")
            print(f"  published, seen: {lines[-1]}", flush=True)
    print(f"\n{'published':>10} {'seen':>10}\n" + "\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
