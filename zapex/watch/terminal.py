"""A run on the terminal: the picture redrawn in place, plain lines for pipes, the closing lines.

`draw`, `status_line` and `summary` are pure: they turn a snapshot into text.
"""

import itertools
import math
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from zapex.host.metrics import LIMITER_STATES, TABLES
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
_PHASE_WIDTHS: Final = (10, 11, 10, 8)
_LABEL: Final = 11
_SILENT_S: Final = 5.0
_PLAIN_PERIOD_S: Final = 10.0
_LEAST_COLUMNS: Final = 20  # narrower text is not wrapped


# Numbers as text


def clock(seconds: float) -> str:
    """`252` -> "4:12", `7325` -> "2:02:05"."""
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
    if n < 2:
        return ""
    edges = [i * len(values) // n for i in range(n + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[round((mean - low) * scale)] for mean in means)


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

    80 x 23 holds everything. More rows show the phases inside "compute" and more messages, more
    columns show longer bars and each role's memory. With fewer rows blank lines are left out first.
    """
    lines = [
        *_title(snapshot, width),
        [],
        *_roles(snapshot, width, inner=height >= 30),
        *_waits(snapshot, width),
        [],
        *_speed(snapshot, width),
        *(_replay(snapshot, width) if snapshot.replay else _relay(snapshot, width)),
        [],
        *_returns(snapshot, width),
        [],
        *(_learner(snapshot, width) if snapshot.learner else []),
        *_machine(snapshot, width),
    ]
    if len(lines) > height:
        lines = [line for line in lines if line]
    room = min(height - len(lines) - 1, 12)
    if room > 0 and snapshot.messages:
        lines.append([])
        for message in snapshot.messages[-room:]:
            # A message may hold another program's text: remove what moves the cursor.
            text = "".join(c if c.isprintable() else " " for c in message.text)
            lines.append([(f" {clock(message.wall_s):>{_LABEL - 2}}  ", _QUIET), (text, "")])
    return [_crop(line, width) for line in lines[:height]]


def _title(snapshot: Snapshot, width: int) -> list[Line]:
    facts = snapshot.facts
    streams = f"{facts.streams} stream" + ("s" if facts.streams > 1 else "")
    about = "".join(f" · {part}" for part in (facts.preset, streams, facts.part) if part)
    left: Line = [(" zapex ", f"{_STRONG} {_ACCENT}"), (f" {facts.environment}", _STRONG)]
    left.append((about, _QUIET))
    most = f" of {count(facts.max_frames)}" if facts.max_frames else ""
    limit = f" of {clock(facts.max_wall_s)}" if facts.max_wall_s else ""
    right: Line = [(count(snapshot.totals["frames"]), ""), (f"{most} frames   ", _QUIET)]
    right += [(clock(snapshot.wall_s), _STRONG), (limit + " ", _QUIET)]
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
    wide = width >= 100
    legend = sum(_PHASE_WIDTHS) + 2 * len(_PHASE_WIDTHS)
    bar = width - 1 - _LABEL - 2 - legend - 5 - (10 if wide else 0)
    head = [(" " + "role".ljust(_LABEL) + "share of time, %", _QUIET)]
    tail = "cpu" + ("    memory" if wide else "")
    lines = [_spread(head, [(tail + " ", _QUIET)], width)]
    for view in snapshot.roles:
        several = view.processes > 1
        name = f"{'actors' if view.role == 'actor' else view.role} ×{view.processes}"
        name = name if several else view.role
        line = [(" " + name.ljust(_LABEL), ""), *_phase_bar(view, bar), ("  ", "")]
        use: Line = [("-" if view.elsewhere else f"{_percent(view.cpu_cores)}%", "")]
        if wide:
            memory = "elsewhere" if view.elsewhere else size(view.private_bytes)
            use.append((f"{memory:>10}", _QUIET))
        lines.append(_spread([*line, *_phase_legend(view)], [*use, (" ", "")], width))
        if inner and (parts := _inner_phases(view)):
            lines.append([(" " * (_LABEL + 1), ""), *parts])
    return lines


def _waits(snapshot: Snapshot, width: int) -> list[Line]:
    """Why roles wait, in at most two lines each."""
    lines: list[Line] = []
    for text in snapshot.waiting:
        rows = textwrap.wrap(text, max(_LEAST_COLUMNS, width - _LABEL - 2))[:2]
        lines += [
            _facts("" if i else "waiting", [[(row, _WAITS)]], width) for i, row in enumerate(rows)
        ]
    return lines


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
        end = round(total * cells)
        spans.append((("─" if style == _QUIET else "━") * (end - filled), style))
        filled = end
    return [*spans, ("─" * (cells - filled), _QUIET)]


def _phase_legend(view: RoleView) -> Line:
    seconds, name = view.silent
    if seconds > _SILENT_S:
        return [(f"{name} has been silent for {seconds:.0f} s", _BAD)]
    if view.elsewhere and not view.processes:
        return [("not connected", _QUIET)]
    if not any(view.shares.values()):
        return [("starting", _QUIET)]
    named = {style: (name, _percent(share)) for name, share, style in _styled(view)}
    spans: Line = []
    for style, width in zip(_PHASE_STYLES, _PHASE_WIDTHS, strict=True):
        name, share = named.get(style, ("", ""))
        spans.append((f"{name}{share:>{width - len(name)}}  ", style))
    return spans


def _inner_phases(view: RoleView) -> Line:
    """The parts of "compute" and of the other sums, if they say more than the sums."""
    spans: Line = []
    for name, parts in TABLES[view.role].shown_as.items():
        inside = [f"{p} {_percent(view.phases[p])}" for p in parts if view.phases[p] > 5e-4]
        if len(parts) > 1 and inside:
            spans.append((f"{name}: {', '.join(inside)}   ", _QUIET))
    return spans


def _speed(snapshot: Snapshot, width: int) -> list[Line]:
    rates, inference = snapshot.rates, snapshot.inference
    batches = rates["batches"]
    parts = [_value(f"{rates[name]:,.0f}", f"{name}/s") for name in ("frames", "steps")]
    if snapshot.learner:
        parts.append(_value(f"{batches:.{1 if batches < 100 else 0}f}", "batches/s"))
        parts.append(_value(count(rates["samples"]), "samples/s"))
    if passes := inference.get("passes"):
        parts.append(_value(f"{inference['answers'] / passes:.1f}", "actors per forward pass"))
    return [_facts("speed", parts, width)]


def _replay(snapshot: Snapshot, width: int) -> list[Line]:
    replay = snapshot.replay
    capacity = replay.get("capacity", 0.0)
    if not capacity:
        return [_facts("replay", [[("empty", _QUIET)]], width)]
    plain = replay["live"] * snapshot.facts.plain_transition_bytes
    fill = [
        _value(count(replay["live"]), f"of {count(capacity)}"),
        [(size(replay["bytes_used"]), "")],
        [(f"a plain buffer: {size(plain)}", _QUIET)] if plain else [],
    ]
    least = 10
    shown = _facts("replay", [[(" " * least, "")], *fill], width)
    bar = least + max(0, width - 1 - sum(len(text) for text, _ in shown))
    details = [
        _value(f"{snapshot.samples_per_insert:.2f}", "samples per insert"),
        _named("stale", f"{snapshot.stale_share:.1%}"),
        [(LIMITER_STATES[int(replay["limiter"])], "")],
    ]
    first = [shown[0], *_bar(replay["live"] / capacity, bar), *shown[2:]]
    return [first, _facts("", details, width)]


def _relay(snapshot: Snapshot, width: int) -> list[Line]:
    relay = snapshot.relay
    if not relay:
        return []
    sent = [
        _value(count(relay["acknowledged"]), "chunks"),
        _value(count(relay["transitions"]), "transitions"),
        _value(size(relay["bytes"]), "sent"),
    ]
    details = [
        _value(f"{relay['unacknowledged']:.0f}", f"of {relay['slots']:.0f} slots unacknowledged"),
        _value(count(relay["again"]), "sent again"),
        _value(f"v{relay['params_version']:.0f}", "parameters"),
    ]
    return [_facts("to replay", sent, width), _facts("", details, width)]


def _returns(snapshot: Snapshot, width: int) -> list[Line]:
    returns = snapshot.returns
    if math.isnan(returns.all_mean):
        lines = [_facts("return", [[("no game has ended yet", _QUIET)]], width)]
    else:
        first = _named("greedy", number(returns.greedy_mean), f"{_STRONG} {_ACCENT}")
        first += [("   all ", _QUIET), (number(returns.all_mean), _STRONG), ("   ", "")]
        used = 1 + _LABEL + sum(len(text) for text, _ in first)
        first.append((sparkline(returns.greedy_history, width - used - 1), _ACCENT))
        bands = [_named(label, number(mean)) for label, mean in returns.bands.items()]
        lines = [[*_facts("return", [], width), *first], _facts("", bands, width)]
    if not snapshot.role("evaluator"):
        return lines
    evaluated: list[Line] = [[("not yet", _QUIET)]]
    if snapshot.evaluations:
        last, best = snapshot.evaluations[-1], snapshot.best_evaluation or snapshot.evaluations[-1]
        newest: Line = [(number(last.mean), f"{_STRONG} green"), (f" ± {last.std:.1f}", "")]
        newest.append((f" ({len(last.returns)} games, {clock(last.wall_s)})", _QUIET))
        evaluated = [newest, _named("best", number(best.mean), _STRONG)]
    references = snapshot.facts.references.items()
    evaluated += [[(f"{name} {value:g}", _QUIET)] for name, value in references]
    return [*lines, _facts("evaluated", evaluated, width)]


def _learner(snapshot: Snapshot, width: int) -> list[Line]:
    learner = snapshot.learner
    if not learner.get("batches"):
        return [_facts("learner", [[("waits for the first batch", _QUIET)]], width)]
    shown = {"loss": "loss", "q": "q_mean", "|td|": "td_abs_mean", "|grad|": "grad_norm"}
    parts = [_named(title, number(learner[name])) for title, name in shown.items()]
    parts.append(_named("params", f"v{learner['params_version']:.0f}"))
    if learner["torn_rows"]:
        # The replay was full and evicted them: no fault, and no batch holds them.
        parts.append([(f"{count(learner['torn_rows'])} rows evicted while read", _QUIET)])
    return [_facts("learner", parts, width)]


def _machine(snapshot: Snapshot, width: int) -> list[Line]:
    memory = _named("memory", size(snapshot.memory_bytes))
    memory.append((f" of {size(snapshot.host_memory_bytes)}", _QUIET))
    parts = [
        _value(f"{snapshot.cpu_cores:.2f}", f"of {snapshot.facts.cores} cores"),
        memory,
        _named("monitor", f"{snapshot.parent_cpu_cores:.1%}"),
    ]
    return [_facts("machine", parts, width)]


def _value(value: str, unit: str) -> Line:
    return [(value, ""), (f" {unit}", _QUIET)]


def _named(name: str, value: str, style: str = "") -> Line:
    return [(f"{name} ", _QUIET), (value, style)]


def _bar(share: float, cells: int) -> Line:
    done = round(share * max(0, cells))
    return [("━" * done, _ACCENT), ("─" * (cells - done), _QUIET)]


def _facts(label: str, parts: Sequence[Line], width: int) -> Line:
    """A label and the parts that fit behind it, whole; the last ones are left out first."""
    line: Line = [(" " + label.ljust(_LABEL), "")]
    used = 1 + _LABEL
    for part in filter(None, parts):
        gap = "   " if len(line) > 1 else ""
        used += len(gap) + sum(len(text) for text, _ in part)
        if used > width:
            break
        line += [(gap + part[0][0], part[0][1]), *part[1:]]
    return line


def _spread(left: Line, right: Line, width: int) -> Line:
    """`left`, blanks, `right`: `width` cells; a left text that is too long is cut."""
    room = width - sum(len(text) for text, _ in right)
    left = _crop(left, room - 1)
    gap = room - sum(len(text) for text, _ in left)
    return [*left, (" " * gap, ""), *right]


def _crop(line: Line, width: int) -> Line:
    cropped: Line = []
    for text, style in line:
        if width <= 0:
            break
        cropped.append((text[:width], style))
        width -= len(text)
    return cropped


# Views


class NoView:
    """Shows nothing."""

    def show(self, snapshot: Snapshot) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def open_view(plain: bool = False, stream: TextIO | None = None, quiet: bool = False) -> View:
    """The picture if `stream` (standard output) is a terminal that can show it, else lines."""
    if quiet:
        return NoView()
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
            print("\n".join(lines), file=self._stream, flush=True)
        self._newest = snapshot

    def close(self) -> None:
        """Write the last status line."""
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


# The closing lines


def summary(
    snapshot: Snapshot,
    reason: str,
    curve: Path | None = None,
    saved: bool = True,
    unsaved: str = "",
) -> list[Line]:
    """The last lines of a run: its results, its cost, and how to look at it.

    Args:
        snapshot: the last one, of `Monitor.close()`: its rates and shares are the session's.
        reason: why the run ended, for example "ten minutes are over".
        curve: where the learning curve was drawn.
        saved: there is a checkpoint to play and to resume from.
        unsaved: what is not on the disk, and why; "": nothing.
    """
    facts = snapshot.facts
    batches, ratio = count(snapshot.totals["batches"]), snapshot.samples_per_insert
    learned = f"{batches} batches, {ratio:.1f} samples per insert, {_stale(snapshot)}"
    lines = [*_head(snapshot, reason), _line("learned", learned)]
    if (best := snapshot.best_evaluation) is not None:
        last = snapshot.evaluations[-1]
        lines.append(_line("best", _evaluated(best)))
        if last is not best:
            lines.append(_line("last", _evaluated(last)))
        for name, value in facts.references.items():
            lines.append(_line("", f"{name} {value:g}: {_crossing(snapshot, value)}"))
    lines.append(_line("memory", _memory(snapshot)))
    lines.append(_line("waiting", _waiting(snapshot)))
    if facts.run_dir is None:
        return lines
    run, quoted = facts.run_dir, shlex.quote(str(facts.run_dir))
    lines.append(_line("run", str(run)))
    if curve is not None:
        lines.append(_line("curve", str(curve)))
    if saved:
        play = f"zapex eval {quoted} --episodes 5" + (" --video game.mp4" if facts.films else "")
        lines += [_line("watch", play, _COMMAND), _line("resume", facts.resume, _COMMAND)]
    elif not unsaved:
        lines.append(_line("", "it ended before there was anything to save"))
    if unsaved:
        lines.append(_line("not saved", unsaved, _BAD))
    return [*lines, _line("inspect", f"tensorboard --logdir {quoted}", _COMMAND)]


def summary_of_part(snapshot: Snapshot, reason: str) -> list[Line]:
    """The closing lines of an actor host or of the replay's host: what it did."""
    lines = _head(snapshot, reason)
    if relay := snapshot.relay:
        chunks = (
            f"{count(relay['transitions'])} transitions in {count(relay['acknowledged'])} chunks"
        )
        again = f"{count(relay['again'])} sent again, {int(relay['unacknowledged'])} given up"
        lines.append(_line("sent", f"{chunks}, {size(relay['bytes'])}; {again}"))
    if replay := snapshot.replay:
        taken = f"{count(replay['inserted'])} transitions inserted, {count(replay['batches'])}"
        lines.append(_line("replay", f"{taken} batches sampled, {_stale(snapshot)}"))
        lines.append(_line("memory", _memory(snapshot)))
    return [*lines, _line("run", str(snapshot.facts.run_dir))]


def _head(snapshot: Snapshot, reason: str) -> list[Line]:
    facts, totals = snapshot.facts, snapshot.totals
    title = facts.environment + (f", {facts.part}" if facts.part else "")
    games = f"{count(totals['frames'])} frames, {count(totals['episodes'])} games"
    speed = f"in {clock(snapshot.wall_s)}; {count(snapshot.rates['frames'])} frames/s"
    return [[(f" {title}", _STRONG), (f"  {reason}", "")], _line("played", f"{games} {speed}")]


def _stale(snapshot: Snapshot) -> str:
    return f"{snapshot.stale_share:.1%} of the priorities came too late"


def _evaluated(evaluation: Evaluation) -> str:
    mean = f"{number(evaluation.mean)} ± {evaluation.std:.1f}"
    return f"{mean} over {len(evaluation.returns)} greedy games, at {clock(evaluation.wall_s)}"


def _crossing(snapshot: Snapshot, value: float) -> str:
    first = next((e for e in snapshot.evaluations if e.mean >= value), None)
    if first is None:
        return "not reached"
    return f"first reached at {clock(first.wall_s)}, {count(first.frames)} frames"


def _memory(snapshot: Snapshot) -> str:
    live = snapshot.replay.get("live", 0.0)
    text = f"{count(live)} transitions in {size(snapshot.replay.get('bytes_used', 0.0))}"
    plain = live * snapshot.facts.plain_transition_bytes
    return f"{text}; a plain buffer takes {size(plain)}" if plain else text


def _waiting(snapshot: Snapshot) -> str:
    """How long each role waited. Speed up the role that the others wait for."""
    actor, learner = snapshot.role("actor"), snapshot.role("learner")
    parts = []
    if learner is not None:
        share = learner.shares_total["wait"]
        parts.append(f"the learner waited {share:.1%} of its time for batches")
    if actor is not None:
        share = actor.phases_total["wait"]
        parts.append(f"actors waited {share:.1%} of theirs for room in the replay")
        if share := actor.phases_total["inference"]:
            parts.append(f"and {share:.1%} for their Q values")
    return ", ".join(parts)


def _line(label: str, text: str, style: str = "") -> Line:
    return [(" " + label.ljust(_LABEL), _QUIET), (text, style)]


def print_lines(lines: Sequence[Line], plain: bool = False, stream: TextIO | None = None) -> None:
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
        whole = text if style == _COMMAND else _wrapped(text, console.width, indent)
        console.print(Text.assemble(*label, (whole, style)), soft_wrap=True)


def print_table(text: str) -> None:
    """Print lines; on a terminal the last column, after two spaces, is wrapped between words."""
    if sys.stdout.isatty():
        width, lines = shutil.get_terminal_size().columns, text.splitlines()
        starts = [line.rfind("  ") + 2 if "  " in line else 0 for line in lines]
        text = "\n".join(
            line[:start] + _wrapped(line[start:], width, start)
            for line, start in zip(lines, starts, strict=True)
        )
    print(text, flush=True)


def _wrapped(text: str, width: int, indent: int) -> str:
    """`text` wrapped between words into the columns from `indent` on."""
    if width - indent < _LEAST_COLUMNS:
        return text
    lines = textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * indent).join(lines)
