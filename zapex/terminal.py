"""A run on the terminal: one picture that is kept up to date, or plain lines for pipes."""

import math
import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TextIO

from zapex.report import Snapshot, View
from zapex.screen import Line, clock, count, draw, number

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

_PLAIN_PERIOD_S: Final = 10.0


def open_view(plain: bool = False, stream: TextIO | None = None) -> View:
    """The picture where `stream` (standard output) is a terminal that can show it, else lines."""
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
        # Drawn by show() alone: a refresh thread would wake up for nothing.
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")

    def show(self, snapshot: Snapshot) -> None:
        """Draw `snapshot` over the one before."""
        if not self._live.is_started:
            self._live.start()
        if self._console.size != self._size:
            # The terminal has wrapped the old lines anew: where they begin is anybody's guess.
            self._size = self._console.size
            self._console.clear()
        self._live.update(_Picture(snapshot), refresh=True)

    def close(self) -> None:
        """Leave the last picture as it is and give the cursor back."""
        self._live.stop()


class _Picture:
    """Adapter: lines of styled text as rich's segments, which skips its slow layout."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterator[Segment]":
        from rich.segment import Segment

        # The last row stays free: a full screen would scroll when the picture is left.
        for line in draw(self._snapshot, options.max_width, max(5, console.height - 1)):
            for text, style in line:
                yield Segment(text, console.get_style(style) if style else None)
            yield Segment.line()


def svg(snapshot: Snapshot, width: int = 100, height: int = 32) -> str:
    """The picture as an SVG, for a README: no outside fonts, so it looks the same everywhere."""
    import io

    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console

    console = Console(
        record=True, width=width, height=height, file=io.StringIO(), force_terminal=True
    )
    console.print(_Picture(snapshot), end="")
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(
        title=f"zapex train --env {snapshot.facts.environment}", code_format=form
    )


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
    """Write styled lines, or their text alone where `stream` is no terminal or plain is asked."""
    stream = stream or sys.stdout
    if plain or not stream.isatty():
        print("\n".join("".join(text for text, _ in line).rstrip() for line in lines), file=stream)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for line in lines:
        # A command must be copied whole, so it may run over the edge.
        console.print(Text.assemble(*line), soft_wrap=True)
