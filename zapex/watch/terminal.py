"""A run on the terminal: the picture redrawn in place, plain lines for pipes, the closing lines.

`draw`, `status_line` and `summary` are pure: they turn a snapshot into text.
"""

import math
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from zapex.host.metrics import LIMITER_STATES, TABLES
from zapex.machine.reading import printable, say
from zapex.watch.report import Evaluation, RoleView, Snapshot, View

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

Span = tuple[str, str]
"""Text and its rich style."""
Line = list[Span]
_QUIET, _STRONG, _ACCENT, _BAD = "bright_black", "bold", "cyan", "bold red"
_WAITS: Final = "yellow"
_COMMAND: Final = "cyan"  # of commands to copy, which are never broken
# The paper's phases in their order (get, compute, send), then waiting.
_PHASE_STYLES: Final = ("cyan", "green", "magenta", _QUIET)
# Column -> its width, the most important first; a phase's column has the name of its style.
_COLUMNS: Final = {
    "cpu": 7, _QUIET: 10, "green": 13, "cyan": 12, "magenta": 12, "memory": 10
}  # fmt: skip
_LABEL: Final = 11
_MORE: Final = (" " * (1 + _LABEL), "")  # begins a second line about the same thing
_WIDE: Final = 100
_LEAST_BAR: Final = 10
_LEAST_CHART, _MOST_CHART = 4, 20  # rows
_SILENT_S: Final = 5.0
_PLAIN_PERIOD_S: Final = 10.0
_LEAST_COLUMNS: Final = 20  # narrower text is not wrapped


# Numbers as text


def clock(seconds: float) -> str:
    """`252` -> "4:12", `7325` -> "2:02:05"."""
    if math.isnan(seconds):
        return "-"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def count(value: float) -> str:
    """Three digits: `412331` -> "412k", `1234567` -> "1.23M"."""
    for above, scale, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= above:
            return f"{value / scale:.{_decimals(value / scale)}f}{suffix}"
    return f"{value:,.0f}"


def size(value: float) -> str:
    """Bytes in powers of ten: `3.16e9` -> "3.16 GB"."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if value >= scale:
            return f"{value / scale:.{_decimals(value / scale)}f} {unit}"
    return f"{value / 1e3:.0f} kB"


def number(value: float) -> str:
    """A measured value with three or four digits: 412, 23.4, 1.23, 0.0123."""
    magnitude = abs(value)
    if not math.isfinite(value):
        return "-"
    if magnitude >= 1e5 or 0 < magnitude < 1e-4:
        return f"{value:.2e}"
    if 0 < magnitude < 1:
        return f"{value:.4f}"
    return f"{value:,.{_decimals(value)}f}" if magnitude < 1000 else f"{value:,.0f}"


def _decimals(value: float) -> int:
    """The decimals that make three digits."""
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2


def _percent(share: float) -> str:
    """A share without its sign; small shares get one more digit."""
    return f"{share * 100:.{1 if share < 0.0995 else 0}f}"


def sparkline(values: Sequence[float], cells: int) -> str:
    """`values` thinned to at most `cells` bars, the smallest ▁ and the largest █."""
    n = min(len(values), cells)
    return chart(values, n, 1)[0] if n >= 2 else ""


def chart(values: Sequence[float], cells: int, rows: int) -> list[str]:
    """`values` as `cells` columns; the smallest is ▁, the largest reaches over all `rows`."""
    n = len(values)
    parts = (
        values[i * n // cells : max(i * n // cells + 1, (i + 1) * n // cells)] for i in range(cells)
    )
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (8 * rows - 1) / (high - low) if high > low else 0.0
    heights = [1 + round((mean - low) * scale) for mean in means]
    return [
        "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, height - 8 * row))] for height in heights)
        for row in reversed(range(rows))
    ]


def in_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Lines of text, a row each, with aligned columns; those numbered in `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# The picture


def draw(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """The whole picture, at most `height` lines of at most `width` cells.

    80 x 23 holds everything. More rows show the returns as a chart, and more messages; more columns
    show longer bars and each role's memory. On fewer columns whole facts are left out, the last
    ones first; with fewer rows first blank lines, then second lines about a thing, then the last.
    """
    blocks = [
        _title(snapshot, width),
        [*_roles(snapshot, width, inner=height >= 30), *_waits(snapshot, width)],
        [_speed(snapshot, width), *_experience(snapshot, width)],
        _returns(snapshot, width),
        [*_learner(snapshot, width), _machine(snapshot, width)],
    ]
    lines = [line for block in blocks for line in (*block, [])]
    if len(lines) > height:
        lines = [line for line in lines if line]
    if len(lines) > height:
        lines = [line for line in lines if line[0] != _MORE]
    room = max(0, height - len(lines))
    lines += _chart(
        snapshot, width, min(_MOST_CHART, room - min(len(snapshot.messages), room // 2))
    )
    room = max(0, height - len(lines))
    for note in snapshot.messages[max(0, len(snapshot.messages) - room) :]:
        lines.append([(f" {clock(note.wall_s):>{_LABEL - 2}}  ", _QUIET), (note.text, "")])
    return [_crop(line, width) for line in lines[:height]]


def _title(snapshot: Snapshot, width: int) -> list[Line]:
    facts = snapshot.facts
    streams = f"{facts.streams} stream" + ("s" if facts.streams > 1 else "")
    most = f" of {count(facts.max_frames)}" if facts.max_frames else ""
    limit = f" of {clock(facts.max_wall_s)}" if facts.max_wall_s else ""
    time: Line = [(clock(snapshot.wall_s), _STRONG), (f"{limit} ", _QUIET)]
    name: Line = [(" zapex  ", f"{_STRONG} {_ACCENT}"), (f"{facts.environment} ", _STRONG)]
    frames = _mixed(f"{count(snapshot.totals['frames'])}~{most} frames   ~")
    about = [[(f"· {part} ", _QUIET)] for part in (facts.preset, streams, facts.part) if part]
    right = [*_fit([frames], width - _length([*time, *name])), *time]
    left = _fit([_crop(name, width - _length(right)), *about], width - _length(right))
    title = _spread(left, right, width)
    if snapshot.progress is not None and snapshot.left_s is not None:
        note = f" {snapshot.progress:4.0%}  {clock(snapshot.left_s)} left "
        bar = _bar(snapshot.progress, width - len(note) - 1)
        return [title, [(" ", ""), *bar, (note, "")]]
    if facts.watched:
        return [title, [(" Ctrl-C closes this view; the run continues", _QUIET)]]
    learner = snapshot.role("learner")
    saves = "saves a checkpoint and " if learner and not learner.elsewhere else ""
    ends = f"{saves}ends {'this host only' if facts.part else 'it'}"
    return [title, [(f" runs until stopped: Ctrl-C {ends}", _QUIET)]]


def _roles(snapshot: Snapshot, width: int, inner: bool) -> list[Line]:
    """A table of all roles; a column that does not fit is left out, in every row."""
    room, columns = width - 1 - _LABEL, dict[str, int]()
    for name, cells in _COLUMNS.items():
        if cells <= room and (name != "memory" or width >= _WIDE):
            columns[name] = cells
            room -= cells
    bar = room - 2 if room >= 2 + _LEAST_BAR else 0
    used = [name for name in ("cpu", "memory") if name in columns]
    head = [(f"{name:>{columns[name]}}", _QUIET) for name in used]
    lines = [_spread([(f" {'role':<{_LABEL}}share of time, %", _QUIET)], head, width)]
    for view in snapshot.roles:
        name = "actors" if view.role == "actor" and view.processes > 1 else view.role
        name += f" ×{view.processes}" if view.processes > 1 else ""
        line: Line = [(f" {name:<{_LABEL}}", "")]
        if bar:
            line += [*_phase_bar(view, bar), ("  ", "")]
        cpu = "-" if view.elsewhere else f"{_percent(view.cpu_cores)}%"
        memory = "elsewhere" if view.elsewhere else size(view.private_bytes)
        use = {"cpu": (cpu, ""), "memory": (memory, _QUIET)}
        right = [(f"{use[column][0]:>{columns[column]}}", use[column][1]) for column in used]
        lines.append(_spread([*line, *_phase_legend(view, columns)], right, width))
        if inner and (parts := _inner_phases(view)):
            lines.append([(" " * (1 + _LABEL), ""), *parts])
    return lines


def _inner_phases(view: RoleView) -> Line:
    """The parts of "compute" and of the other sums, if they say more than the sums."""
    spans: Line = []
    for name, parts in TABLES[view.role].shown_as.items():
        inside = [f"{p} {_percent(view.phases[p])}" for p in parts if view.phases[p] > 5e-4]
        if len(inside) > 1:
            spans.append((f"{name}: {', '.join(inside)}   ", _QUIET))
    return spans


def _styled(view: RoleView) -> list[tuple[str, float, str]]:
    """(name, share, style) of each bar; a role of two phases computes and waits."""
    styles = _PHASE_STYLES if len(view.shares) == 4 else (_PHASE_STYLES[1], _PHASE_STYLES[3])
    return [(*item, style) for item, style in zip(view.shares.items(), styles, strict=True)]


def _phase_bar(view: RoleView, cells: int) -> Line:
    """Every phase's share of `cells`, rounded so that together they fill them."""
    spans: Line = []
    total, filled = 0.0, 0
    for _, share, style in _styled(view):
        total += share
        end = _cells(total, cells)
        spans.append((("─" if style == _QUIET else "━") * (end - filled), style))
        filled = max(filled, end)
    return [*spans, ("─" * (cells - filled), _QUIET)]


def _phase_legend(view: RoleView, columns: Collection[str]) -> Line:
    """The share of each phase whose column is among `columns`, or why there is none."""
    seconds, name = view.silent
    if seconds > _SILENT_S:
        return [(f"{name} has been silent for {seconds:.0f} s", _BAD)]
    if view.elsewhere and not view.processes:
        return [("not connected", _QUIET)]
    if not any(view.shares.values()):
        return [("starting", _QUIET)]
    named = {style: (name, _percent(share)) for name, share, style in _styled(view)}
    spans: Line = []
    for style in _PHASE_STYLES:
        if style in columns:
            name, share = named.get(style, ("", ""))
            spans.append((f"{name}{share:>{_COLUMNS[style] - 2 - len(name)}}  ", style))
    return spans


def _waits(snapshot: Snapshot, width: int) -> list[Line]:
    """Why roles wait, in at most two lines each."""
    lines: list[Line] = []
    for text in snapshot.waiting:
        rows = textwrap.wrap(text, max(_LEAST_COLUMNS, width - _LABEL - 2))[:2]
        lines += [
            [((" " if i else " waiting").ljust(1 + _LABEL), _WAITS), (row, _WAITS)]
            for i, row in enumerate(rows)
        ]
    return lines


def _speed(snapshot: Snapshot, width: int) -> Line:
    rates, inference = snapshot.rates, snapshot.inference
    parts = [_mixed(f"{rates[name]:,.0f} ~{name}/s~") for name in ("frames", "steps")]
    if snapshot.learner:
        parts.append(
            _mixed(f"{rates['batches']:.{1 if rates['batches'] < 100 else 0}f} ~batches/s~")
        )
        parts.append(_mixed(f"{count(rates['samples'])} ~samples/s~"))
    if passes := inference.get("passes"):
        parts.append(_mixed(f"{inference['answers'] / passes:.1f} ~actors per forward pass~"))
    return _facts("speed", parts, width)


def _experience(snapshot: Snapshot, width: int) -> list[Line]:
    """What the replay holds; on a host without it, what was sent there."""
    replay, relay = snapshot.replay, snapshot.relay
    if replay and not replay.get("capacity"):
        return [_facts("replay", [_mixed("~empty~")], width)]
    if replay:
        plain = replay["live"] * snapshot.facts.plain_transition_bytes
        fill = [
            _mixed(f"{count(replay['live'])} ~of {count(replay['capacity'])}~"),
            _mixed(size(replay["bytes_used"])),
            _mixed(f"~a plain buffer: {size(plain)}~") if plain else [],
        ]
        details = [
            _mixed(f"{snapshot.samples_per_insert:.2f} ~samples per insert~"),
            _mixed(f"~stale~ {snapshot.stale_share:.1%}"),
            _mixed(dict(enumerate(LIMITER_STATES)).get(int(replay["limiter"]), "")),
        ]
        beside = _length(_facts("", fill, width - _LEAST_BAR - 3))
        bar = _bar(replay["live"] / replay["capacity"], max(_LEAST_BAR, width - beside - 4))
        return [_facts("replay", [bar, *fill], width), _facts("", details, width)]
    if relay:
        sent = [
            _mixed(f"{count(relay['acknowledged'])} ~chunks~"),
            _mixed(f"{count(relay['transitions'])} ~transitions~"),
            _mixed(f"{size(relay['bytes'])} ~sent~"),
        ]
        details = [
            _mixed(f"{relay['unacknowledged']:.0f} ~of {relay['slots']:.0f} slots unacknowledged~"),
            _mixed(f"{count(relay['again'])} ~sent again~"),
            _mixed(f"v{relay['params_version']:.0f} ~parameters~"),
        ]
        return [_facts("to replay", sent, width), _facts("", details, width)]
    return []


def _returns(snapshot: Snapshot, width: int) -> list[Line]:
    returns, last = snapshot.returns, snapshot.evaluations[-1:]
    if math.isnan(returns.all_mean):
        lines = [_facts("return", [_mixed("~no game has ended yet~")], width)]
    else:
        first = _mixed(f"~greedy~ {number(returns.greedy_mean)}", f"{_STRONG} {_ACCENT}")
        parts = [first, _mixed(f"~all~ {number(returns.all_mean)}", _STRONG)]
        room = width - _length(_facts("return", parts, width)) - 4
        parts.append([(sparkline(returns.greedy_history, room), _ACCENT)])
        bands = [_mixed(f"~{label}~ {number(mean)}") for label, mean in returns.bands.items()]
        lines = [_facts("return", parts, width), _facts("", bands, width)]
    if not snapshot.role("evaluator"):
        return lines
    evaluated = [_mixed("~not yet~")]
    if last:
        best = snapshot.best_evaluation or last[0]
        newest: Line = [(number(last[0].mean), f"{_STRONG} green")]
        games = f"~({len(last[0].returns)} games, {clock(last[0].wall_s)})~"
        newest += _mixed(f" ± {last[0].std:.1f} {games}")
        evaluated = [newest, _mixed(f"~best~ {number(best.mean)}", _STRONG)]
    evaluated += [
        [(f"{name} {value:g}", _QUIET)] for name, value in snapshot.facts.references.items()
    ]
    return [*lines, _facts("evaluated", evaluated, width)]


def _learner(snapshot: Snapshot, width: int) -> list[Line]:
    learner = snapshot.learner
    if not learner:
        return []
    if not learner.get("batches"):
        return [_facts("learner", [_mixed("~waits for the first batch~")], width)]
    shown = {"loss": "loss", "q": "q_mean", "|td|": "td_abs_mean", "|grad|": "grad_norm"}
    parts = [_mixed(f"~{title}~ {number(learner[name])}") for title, name in shown.items()]
    parts.append(_mixed(f"~params~ v{learner['params_version']:.0f}"))
    if learner["torn_rows"]:
        # The replay was full and evicted them: no fault, and no batch holds them.
        parts.append(_mixed(f"~{count(learner['torn_rows'])} rows evicted while read~"))
    return [_facts("learner", parts, width)]


def _machine(snapshot: Snapshot, width: int) -> Line:
    memory, most = size(snapshot.memory_bytes), size(snapshot.host_memory_bytes)
    parts = [
        _mixed(f"{snapshot.cpu_cores:.2f} ~of {snapshot.facts.cores} cores~"),
        _mixed(f"~memory~ {memory} ~of {most}~"),
        _mixed(f"~monitor~ {snapshot.parent_cpu_cores:.1%}"),
    ]
    return _facts("machine", parts, width)


def _chart(snapshot: Snapshot, width: int, rows: int) -> list[Line]:
    """The return of the greediest stream over the whole run, where there is room for it."""
    history, cells = snapshot.returns.greedy_history, width - _LABEL - 2
    if min(rows - 2, cells // 8) < _LEAST_CHART or len(history) < 2:
        return []
    labels = [""] * (rows - 2)
    labels[0], labels[-1] = number(max(history)), number(min(history))
    drawn = zip(labels, chart(history, cells, rows - 2), strict=True)
    lines: list[Line] = [[(f" {y:>{_LABEL - 1}} ", _QUIET), (row, _ACCENT)] for y, row in drawn]
    return [[_MORE, ("greedy return over the whole run", _QUIET)], *lines, []]


def _mixed(text: str, style: str = "") -> Line:
    """`text` as spans: what is between tildes is quiet, the rest has `style`."""
    spans = ((part, _QUIET if i % 2 else style) for i, part in enumerate(text.split("~")))
    return [span for span in spans if span[0]]


def _cells(share: float, cells: int) -> int:
    return round(min(1.0, max(0.0, share)) * max(0, cells))


def _bar(share: float, cells: int) -> Line:
    done = _cells(share, cells)
    return [("━" * done, _ACCENT), ("─" * (cells - done), _QUIET)]


def _facts(label: str, parts: Sequence[Line], width: int) -> Line:
    """A label, and behind it the parts that fit."""
    return [(f" {label:<{_LABEL}}", ""), *_fit(parts, width - 1 - _LABEL, "   ")]


def _spread(left: Line, right: Line, width: int) -> Line:
    """`left`, blanks, `right`: `width` cells; a left text that is too long is cut."""
    room = max(0, width - _length(right))
    left = _crop(left, room)
    return [*left, (" " * (room - _length(left)), ""), *right]


def _fit(parts: Sequence[Line], room: int, gap: str = "") -> Line:
    """The first parts that fit into `room` cells as a whole."""
    line: Line = []
    for part in filter(None, parts):
        between: Line = [(gap, "")] if gap and line else []
        if _length(line) + _length(between) + _length(part) > room:
            break
        line += [*between, *part]
    return line


def _length(line: Line) -> int:
    return sum(len(text) for text, _ in line)


def _crop(line: Line, width: int) -> Line:
    """The first `width` cells, without what a terminal would obey."""
    cropped: Line = []
    for text, style in line:
        if width > 0:
            shown = text if text.isprintable() else " ".join(printable(text).split("\n"))
            cropped.append((shown[:width], style))
            width -= len(text)
    return cropped


# Views


def open_view(plain: bool = False, stream: TextIO | None = None) -> View:
    """The picture if `stream` (standard output) is a terminal that can show it, else lines."""
    stream = stream or sys.stdout
    return LivePicture(stream) if not plain and shows_pictures(stream) else PlainLines(stream)


def shows_pictures(stream: TextIO) -> bool:
    """Whether a stream is a terminal that understands escapes and UTF-8."""
    capable = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return capable and (stream.encoding or "").lower().replace("-", "") == "utf8"


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
        self.draw(partial(draw, snapshot))

    def draw(self, lines: Callable[[int, int], list[Line]]) -> None:
        """Draw what `lines(width, height)` gives over what was there before."""
        if not self._live.is_started:
            self._live.start()
        if self._console.size != self._size:
            # The terminal has wrapped the old lines again: their first row is unknown.
            self._size = self._console.size
            self._console.clear()
        self._live.update(Picture(lines), refresh=True)

    def close(self) -> None:
        """Leave the last picture as it is and show the cursor again."""
        self._live.stop()


@dataclass(frozen=True)
class Picture:
    """Lines of styled text as rich's segments, which skips its slow layout."""

    lines: Callable[[int, int], list[Line]]

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterator[Segment]":
        from rich.segment import Segment

        # The last row stays free: a full screen would scroll when the run ends.
        for line in self.lines(options.max_width, max(5, console.height - 1)):
            for text, style in line:
                yield Segment(text, console.get_style(style) if style else None)
            yield Segment.line()


class PlainLines:
    """One line every ten seconds, and every message as it comes: for pipes, files and CI."""

    def __init__(self, stream: TextIO | None = None, period_s: float = _PLAIN_PERIOD_S) -> None:
        self._stream = stream or sys.stdout
        self._period_s = period_s
        self._due_s = 0.0
        self._printed = 0  # number of the last message
        self._newest: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        """Write new messages, and the status line if it is due."""
        new = [note for note in snapshot.messages if note.number > self._printed]
        lines = [f"{clock(note.wall_s)}  {note.text}" for note in new]
        if snapshot.messages:
            self._printed = snapshot.messages[-1].number
        if snapshot.wall_s >= self._due_s:
            self._due_s = snapshot.wall_s + self._period_s
            lines += [status_line(snapshot), *snapshot.waiting]
        if lines:
            say("\n".join(lines), self._stream)
        self._newest = snapshot

    def close(self) -> None:
        """Write the last status line."""
        if self._newest is not None:
            say(status_line(self._newest), self._stream)


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


# The closing lines


def summary(
    snapshot: Snapshot,
    reason: str,
    curve: Path | None = None,
    saved: bool = True,
    unsaved: str = "",
) -> list[Line]:
    """The last lines of a run, or of one host's part: its results, its cost, how to look at it.

    Args:
        snapshot: the last one, of `Monitor.close()`: its rates and shares are the session's.
        reason: why the run ended, for example "ten minutes are over".
        curve: where the learning curve was drawn.
        saved: there is a checkpoint to play and to resume from.
        unsaved: what is not on the disk, and why; "": nothing.
    """
    facts, totals, relay, replay = snapshot.facts, snapshot.totals, snapshot.relay, snapshot.replay
    learner, best = snapshot.role("learner"), snapshot.best_evaluation
    learns = learner is not None and not learner.elsewhere
    run, quoted = facts.run_dir, shlex.quote(str(facts.run_dir))
    title = facts.environment + (f", {facts.part}" if facts.part else "")
    games = f"{count(totals['frames'])} frames, {count(totals['episodes'])} games"
    speed = f"in {clock(snapshot.wall_s)}; {count(snapshot.rates['frames'])} frames/s"
    stale = f"{snapshot.stale_share:.1%} of the priorities came too late"
    rows = [("played", f"{games} {speed}", "")]
    if learns:
        ratio = f"{snapshot.samples_per_insert:.1f} samples per insert"
        rows.append(("learned", f"{count(totals['batches'])} batches, {ratio}, {stale}", ""))
    if learns and best is not None:
        last = snapshot.evaluations[-1]
        rows.append(("best", _evaluated(best), ""))
        if last is not best:
            rows.append(("last", _evaluated(last), ""))
        for name, value in facts.references.items():
            rows.append(("", f"{name} {value:g}: {_crossing(snapshot, value)}", ""))
    if relay:
        sent = f"{count(relay['transitions'])} transitions in {count(relay['acknowledged'])} chunks"
        again = f"{count(relay['again'])} sent again, {int(relay['unacknowledged'])} given up"
        rows.append(("sent", f"{sent}, {size(relay['bytes'])}; {again}", ""))
    if replay and not learns:
        taken = f"{count(replay['inserted'])} transitions inserted, {count(replay['batches'])}"
        rows.append(("replay", f"{taken} batches sampled, {stale}", ""))
    if replay or learns:
        live = replay.get("live", 0.0)
        there = f"{count(live)} transitions in {size(replay.get('bytes_used', 0.0))}"
        if plain := live * facts.plain_transition_bytes:
            there += f"; a plain buffer takes {size(plain)}"
        rows.append(("memory", there, ""))
    if learns:
        rows.append(("waiting", _waiting(snapshot), ""))
    if run is not None:
        rows.append(("run", str(run), ""))
    if curve is not None:
        rows.append(("curve", str(curve), ""))
    if run is not None and learns:
        if saved:
            play = f"zapex eval {quoted} --episodes 5" + " --video game.mp4" * facts.films
            more = ""  # as much again, where a limit has ended the run
            if 0 < facts.max_frames <= totals["frames"]:
                more = f" --more-frames {facts.max_frames}"
            elif 0 < facts.max_wall_s <= snapshot.wall_s:
                more = f" --more-minutes {facts.max_wall_s / 60:g}"
            rows.append(("watch", play, _COMMAND))
            if facts.resume:
                rows.append(("resume", facts.resume + more, _COMMAND))
        elif not unsaved:
            rows.append(("", "it ended before there was anything to save", ""))
        if unsaved:
            rows.append(("not saved", unsaved, _BAD))
        rows.append(("inspect", f"tensorboard --logdir {quoted}", _COMMAND))
    lines = [[(f" {label:<{_LABEL}}", _QUIET), (text, style)] for label, text, style in rows]
    return [[(f" {title}", _STRONG), (f"  {reason}", "")], *lines]


def _evaluated(evaluation: Evaluation) -> str:
    mean = f"{number(evaluation.mean)} ± {evaluation.std:.1f}"
    return f"{mean} over {len(evaluation.returns)} greedy games, at {clock(evaluation.wall_s)}"


def _crossing(snapshot: Snapshot, value: float) -> str:
    first = next((e for e in snapshot.evaluations if e.mean >= value), None)
    if first is None:
        return "not reached"
    return f"first reached at {clock(first.wall_s)}, {count(first.frames)} frames"


def _waiting(snapshot: Snapshot) -> str:
    """How long each role waited. Speed up the role that the others wait for."""
    actor, learner = snapshot.role("actor"), snapshot.role("learner")
    parts = []
    if learner is not None:
        share, fill = learner.phases_total["wait"], learner.phases_total["fill"]
        parts.append(f"the learner waited {share:.1%} of its time for batches")
        if fill:
            parts.append(f"and {fill:.1%} for the first one")
    if actor is not None:
        share = actor.phases_total["wait"]
        parts.append(f"actors waited {share:.1%} of theirs for room in the replay")
        if share := actor.phases_total["inference"]:
            parts.append(f"and {share:.1%} for their Q values")
    return ", ".join(parts)


def print_lines(lines: Sequence[Line], plain: bool = False, stream: TextIO | None = None) -> None:
    """Write styled lines, or only their text if `stream` is no terminal or plain is asked for.

    On a terminal the last span of a line is wrapped between words, except commands.
    """
    stream = stream or sys.stdout
    if plain or not stream.isatty():
        say("\n".join("".join(text for text, _ in line).rstrip() for line in lines), stream)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for *label, (text, style) in lines:
        shown, indent = printable(text), _length(label)
        room = console.width - indent
        # A user copies a command as a whole, so it may be longer than the line.
        if style != _COMMAND and room >= _LEAST_COLUMNS:
            rows = textwrap.wrap(shown, room, break_long_words=False, break_on_hyphens=False)
            shown = ("\n" + " " * indent).join(rows)
        known = [(printable(part), style) for part, style in label]
        console.print(Text.assemble(*known, (shown, style)), soft_wrap=True)


def print_table(text: str) -> None:
    """Print lines; on a terminal the last column, after two spaces, is wrapped between words."""
    starts = [(line, line.rfind("  ") + 2 if "  " in line else 0) for line in text.splitlines()]
    print_lines([[(line[:start], ""), (line[start:], "")] for line, start in starts])
