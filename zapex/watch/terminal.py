"""A run on the terminal: one picture, redrawn in place, or plain lines for pipes."""

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TextIO

from zapex.watch.report import Snapshot, View
from zapex.watch.screen import COMMAND, Line, clock, count, draw, number

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

_PLAIN_PERIOD_S: Final = 10.0
_LEAST_COLUMNS: Final = 20  # for text to be broken into


def open_view(plain: bool = False, stream: TextIO | None = None) -> View:
    """The picture if `stream` (standard output) is a terminal that can show it, else lines."""
    stream = stream or sys.stdout
    capable = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    utf8 = (stream.encoding or "").lower().replace("-", "") == "utf8"
    return PlainLines(stream) if plain or not capable or not utf8 else LivePicture(stream)


class LivePicture:
    """The picture, redrawn in place; the last one stays when the run ends."""

    def __init__(self, stream: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream or sys.stdout)
        self._size = self._console.size
        # Only show() draws: a refresh thread would wake up for nothing.
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")

    def show(self, snapshot: Snapshot) -> None:
        """Draw `snapshot` over the one before."""
        if not self._live.is_started:
            self._live.start()
        if self._console.size != self._size:
            # The terminal has wrapped the old lines again: their first row is unknown.
            self._size = self._console.size
            self._console.clear()
        self._live.update(Picture(snapshot), refresh=True)

    def close(self) -> None:
        """Leave the last picture as it is and show the cursor again."""
        self._live.stop()


class Picture:
    """Adapter: lines of styled text as rich's segments, which skips its slow layout."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterator[Segment]":
        from rich.segment import Segment

        # The last row stays free: a full screen would scroll when the run ends.
        for line in draw(self._snapshot, options.max_width, max(5, console.height - 1)):
            for text, style in line:
                yield Segment(text, console.get_style(style) if style else None)
            yield Segment.line()


class PlainLines:
    """One line every ten seconds, and every message as it comes: for pipes, files and CI."""

    def __init__(self, stream: TextIO | None = None, period_s: float = _PLAIN_PERIOD_S) -> None:
        self._stream = stream or sys.stdout
        self._period_s = period_s
        self._due_s = 0.0
        self._told = 0
        self._newest: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        """Write new messages, and the status line if it is time for one."""
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
    """The whole run in one line, without values that are not known yet."""
    totals, rates, returns = snapshot.totals, snapshot.rates, snapshot.returns
    parts = [
        clock(snapshot.wall_s),
        f"{count(totals['frames'])} frames ({count(rates['frames'])}/s)",
        f"{count(rates['steps'])} steps/s",
    ]
    if snapshot.learner:
        parts.append(f"{rates['batches']:.1f} batches/s")
    if snapshot.relay:
        parts.append(f"{count(snapshot.relay['acknowledged'])} chunks sent")
    if capacity := snapshot.replay.get("capacity"):
        parts.append(f"replay {snapshot.replay['live'] / capacity:.0%}")
    if not math.isnan(returns.all_mean):
        parts.append(f"return {number(returns.all_mean)}")
    if not math.isnan(returns.greedy_mean):
        parts.append(f"greedy {number(returns.greedy_mean)}")
    if snapshot.evaluations:
        parts.append(f"evaluated {number(snapshot.evaluations[-1].mean)}")
    if snapshot.learner.get("batches"):
        parts.append(f"loss {number(snapshot.learner['loss'])}")
    if snapshot.left_s is not None:
        parts.append(f"{clock(snapshot.left_s)} left")
    return "  ".join(parts)


def print_lines(lines: list[Line], plain: bool = False, stream: TextIO | None = None) -> None:
    """Write styled lines, or only their text if `stream` is no terminal or plain is asked for."""
    stream = stream or sys.stdout
    if plain or not stream.isatty():
        print("\n".join("".join(text for text, _ in line).rstrip() for line in lines), file=stream)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for *label, (text, style) in lines:
        # A user copies a command as a whole, so it may be longer than the line.
        indent = sum(len(part) for part, _ in label)
        whole = text if style == COMMAND else _wrapped(text, console.width, indent)
        console.print(Text.assemble(*label, (whole, style)), soft_wrap=True)


def print_table(text: str) -> None:
    """Print lines whose last column, after two spaces, is broken between words on a terminal."""
    if sys.stdout.isatty():
        width, lines = shutil.get_terminal_size().columns, text.splitlines()
        starts = [line.rfind("  ") + 2 if "  " in line else 0 for line in lines]
        text = "\n".join(
            line[:start] + _wrapped(line[start:], width, start)
            for line, start in zip(lines, starts, strict=True)
        )
    print(text, flush=True)


def _wrapped(text: str, width: int, indent: int) -> str:
    """`text` broken between words for the columns from `indent` on; narrow ones are left alone."""
    if width - indent < _LEAST_COLUMNS:
        return text
    lines = textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * indent).join(lines)
