"""One measurement's command: run with a deadline, its words in a log, and a sign of life."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.claims.claims import Measurement
from benchmarks.support.machine import ROOT

_SIGN_S = 30.0
_PATIENCE = 4.0  # times the minutes that it takes on our machine, and five minutes more


def run(measurement: Measurement, out: Path) -> str:
    """Run the command, which writes the JSON file `out`; why it has failed, empty if it has not.

    What it says goes to a log beside `out`; every half minute its last line is printed.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    log = out.with_suffix(".log")
    words = shlex.split(measurement.command.replace("{json}", shlex.quote(str(out))))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    limit_s = 60 * (_PATIENCE * measurement.minutes + 5)
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return str(error)
        try:
            while (code := _wait(process)) is None:
                minutes = (time.monotonic() - began) / 60
                print(f"  {minutes:.1f} of about {measurement.minutes:g} min  {_last(log)}",
                      flush=True)  # fmt: skip
                if 60 * minutes > limit_s:
                    return f"it had not ended after {minutes:.0f} min, see {log}"
        finally:
            _end(process)
    if code:
        return f"exit code {code}, see {log}: {_last(log)}"
    return "" if out.exists() else f"it wrote no {out.name}, see {log}"


def _wait(process: "subprocess.Popen[bytes]") -> int | None:
    try:
        return process.wait(_SIGN_S)
    except subprocess.TimeoutExpired:
        return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """It and all that it has started, at first in order."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            _wait(process)


def _last(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip()[:90] for line in reversed(lines) if line.strip()), "")
