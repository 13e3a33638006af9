"""A run on the terminal: plain lines where no terminal is."""

import math
import sys
from typing import Final, TextIO

from zapex.report import Snapshot

_PLAIN_PERIOD_S: Final = 10.0


class PlainLines:
    """One line every ten seconds, and every message as it comes: for pipes, files and CI."""

    def __init__(self, stream: TextIO | None = None, period_s: float = _PLAIN_PERIOD_S) -> None:
        self._stream = stream or sys.stdout
        self._period_s = period_s
        self._due_s = 0.0
        self._told = 0
        self._newest: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        """Write what is new; the status line if it is time for one."""
        lines = [f"{clock(m.wall_s)}  {m.text}" for m in snapshot.messages if m.number > self._told]
        if snapshot.messages:
            self._told = snapshot.messages[-1].number
        if snapshot.wall_s >= self._due_s:
            self._due_s = snapshot.wall_s + self._period_s
            lines.append(status_line(snapshot))
        if lines:
            print("\n".join(lines), file=self._stream, flush=True)
        self._newest = snapshot

    def close(self) -> None:
        if self._newest is not None:
            print(status_line(self._newest), file=self._stream, flush=True)


def status_line(snapshot: Snapshot) -> str:
    """The whole run in one line; what is not known yet is left out."""
    totals, rates, returns = snapshot.totals, snapshot.rates, snapshot.returns
    parts = [
        clock(snapshot.wall_s),
        f"{count(totals['frames'])} frames ({count(rates['frames'])}/s)",
        f"{count(rates['steps'])} steps/s",
        f"{rates['batches']:.1f} batches/s",
    ]
    if capacity := snapshot.replay.get("capacity"):
        parts.append(f"replay {snapshot.replay['live'] / capacity:.0%}")
    if not math.isnan(returns.all_mean):
        parts.append(f"return {number(returns.all_mean)}")
    if not math.isnan(returns.greedy_mean):
        parts.append(f"greedy {number(returns.greedy_mean)}")
    if snapshot.evaluations:
        parts.append(f"evaluated {number(snapshot.evaluations[-1].mean)}")
    if totals["batches"]:
        parts.append(f"loss {number(snapshot.learner['loss'])}")
    if snapshot.left_s is not None:
        parts.append(f"{clock(snapshot.left_s)} left")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """`252` -> "4:12", `7325` -> "2:02:05"."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def count(value: float) -> str:
    """Three digits are enough for the eye: `412331` -> "412k", `1234567` -> "1.23M"."""
    for above, size, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= above:
            scaled = value / size
            decimals = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
            return f"{scaled:.{decimals}f}{suffix}"
    return f"{value:,.0f}"


def number(value: float) -> str:
    """A measured value with three or four digits: 412, 23.4, 1.23, 0.0123."""
    size = abs(value)
    if not math.isfinite(value):
        return "-"
    if size >= 1e5 or 0 < size < 1e-4:
        return f"{value:.2e}"
    decimals = 0 if size >= 1000 else 1 if size >= 10 else 2 if size >= 1 or size == 0 else 4
    return f"{value:,.{decimals}f}"
