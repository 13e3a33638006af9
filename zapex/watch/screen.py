"""One snapshot as lines of styled text, for a screen of any size; draws nothing itself."""

import itertools
import math
from collections.abc import Sequence
from typing import Final

from zapex.host.metrics import LIMITER_STATES, TABLES
from zapex.watch.report import RoleView, Snapshot

Span = tuple[str, str]  # text and rich style
Line = list[Span]
COMMAND: Final = "cyan"
"""The style of commands to copy; they are never broken."""
_QUIET, _STRONG, _ACCENT, _BAD = "bright_black", "bold", "cyan", "bold red"
# The paper's phases in their order (get, compute, send), then waiting.
_PHASE_STYLES: Final = ("cyan", "green", "magenta", _QUIET)
_PHASE_WIDTHS: Final = (10, 11, 10, 8)
_LABEL: Final = 11
_SILENT_S: Final = 5.0
_PLURALS: Final = {"actor": "actors", "evaluator": "evaluator"}


def draw(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """The whole picture, at most `height` lines of at most `width` cells.

    80 x 23 holds everything. More rows show the phases inside "compute" and more messages, more
    columns show longer bars and each role's memory. With fewer rows blank lines are left out first.
    """
    roomy = height >= 30
    lines = [
        *_title(snapshot, width),
        [],
        *_roles(snapshot, width, roomy),
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
        lines += [
            [(f" {clock(message.wall_s):>{_LABEL - 2}}  ", _QUIET), (_one_line(message.text), "")]
            for message in snapshot.messages[-room:]
        ]
    return [_crop(line, width) for line in lines[:height]]


def _title(snapshot: Snapshot, width: int) -> list[Line]:
    facts = snapshot.facts
    streams = f"{facts.streams} stream" + ("s" if facts.streams > 1 else "")
    about = "".join(f" · {part}" for part in (facts.preset, streams, facts.part) if part)
    left: Line = [(" zapex ", f"{_STRONG} {_ACCENT}"), (f" {facts.environment}", _STRONG)]
    left.append((about, _QUIET))
    most = f" of {count(facts.max_frames)}" if facts.max_frames else ""
    right: Line = [(count(snapshot.totals["frames"]), ""), (f"{most} frames   ", _QUIET)]
    limit = f" of {clock(facts.max_wall_s)}" if facts.max_wall_s else ""
    right += [(clock(snapshot.wall_s), _STRONG), (limit + " ", _QUIET)]
    title = _spread(left, right, width)
    if snapshot.progress is None or snapshot.left_s is None:
        if facts.watched:
            return [title, [(" Ctrl-C ends this view; the run goes on", _QUIET)]]
        learner = snapshot.role("learner")
        saves = "saves a checkpoint and " if learner and not learner.elsewhere else ""
        end = f"{saves}ends {'this host alone' if facts.part else 'it'}"
        return [title, [(f" runs until stopped: Ctrl-C {end}", _QUIET)]]
    note = f" {snapshot.progress:4.0%}  {clock(snapshot.left_s)} left "
    return [title, [(" ", ""), *_bar(snapshot.progress, width - len(note) - 1), (note, "")]]


def _roles(snapshot: Snapshot, width: int, roomy: bool) -> list[Line]:
    wide = width >= 100
    legend = sum(_PHASE_WIDTHS) + 2 * len(_PHASE_WIDTHS)
    bar = width - 1 - _LABEL - 2 - legend - 5 - (10 if wide else 0)
    head = [(" " + "role".ljust(_LABEL) + "share of time, %", _QUIET)]
    tail = "cpu" + ("    memory" if wide else "")
    lines = [_spread(head, [(tail + " ", _QUIET)], width)]
    for view in snapshot.roles:
        name = _PLURALS.get(view.role, view.role) if view.processes > 1 else view.role
        name += f" ×{view.processes}" if view.processes > 1 else ""
        line: Line = [(" " + name.ljust(_LABEL), "")]
        line += _phase_bar(view, bar)
        line.append(("  ", ""))
        line += _phase_legend(view)
        use: Line = [("-" if view.elsewhere else f"{_percent(view.cpu_cores)}%", "")]
        if wide:
            memory = "elsewhere" if view.elsewhere else size(view.private_bytes)
            use.append((f"{memory:>10}", _QUIET))
        lines.append(_spread(line, [*use, (" ", "")], width))
        if roomy and (inner := _inner_phases(view)):
            lines.append([(" " * (_LABEL + 1), ""), *inner])
    return lines


def _phase_bar(view: RoleView, cells: int) -> Line:
    """Every phase's share of `cells`, rounded so that together they fill them."""
    spans: Line = []
    total, filled = 0.0, 0
    for i, (share, style) in enumerate(_styled(view)):
        total += share[1]
        end = round(total * cells)
        glyph = "─" if i == len(view.shares) - 1 else "━"
        spans.append((glyph * (end - filled), style))
        filled = end
    spans.append(("─" * (cells - filled), _QUIET))
    return spans


def _phase_legend(view: RoleView) -> Line:
    seconds, name = view.silent
    if seconds > _SILENT_S:
        return [(f"{name} has been silent for {seconds:.0f} s", _BAD)]
    if view.elsewhere and not view.processes:
        return [("not connected", _QUIET)]
    if not any(view.shares.values()):
        return [("starting", _QUIET)]
    spans: Line = []
    named = {style: pair for pair, style in _styled(view)}
    for style, width in zip(_PHASE_STYLES, _PHASE_WIDTHS, strict=True):
        name, share = named.get(style, ("", 0.0))
        text = f"{name}{_percent(share):>{width - len(name)}}" if name else " " * width
        spans.append((text + "  ", style))
    return spans


def _inner_phases(view: RoleView) -> Line:
    """The parts of "compute" and of the other sums, if they say more than the sums."""
    spans: Line = []
    for name, parts in TABLES[view.role].shown_as.items():
        if len(parts) > 1:
            inside = [f"{p} {_percent(view.phases[p])}" for p in parts if view.phases[p] > 5e-4]
            if inside:
                spans.append((f"{name}: {', '.join(inside)}   ", _QUIET))
    return spans


def _percent(share: float) -> str:
    """A share without its sign; small shares get more digits."""
    return f"{share * 100:.{1 if share < 0.0995 else 0}f}"


def _styled(view: RoleView) -> list[tuple[tuple[str, float], str]]:
    """(name, share), style; a role of two phases computes and waits."""
    styles = _PHASE_STYLES if len(view.shares) == 4 else (_PHASE_STYLES[1], _PHASE_STYLES[3])
    return list(zip(view.shares.items(), styles, strict=True))


def _speed(snapshot: Snapshot, width: int) -> list[Line]:
    rates = snapshot.rates
    batches = rates["batches"]
    values = [(f"{rates[name]:,.0f}", f"{name}/s") for name in ("frames", "steps")]
    if snapshot.learner:
        values.append((f"{batches:.{1 if batches < 100 else 0}f}", "batches/s"))
        values.append((count(rates["samples"]), "samples/s"))
    if passes := snapshot.inference.get("passes"):
        values.append((f"{snapshot.inference['answers'] / passes:.1f}", "actors a forward pass"))
    return [_facts("speed", _values(values), width)]


def _replay(snapshot: Snapshot, width: int) -> list[Line]:
    replay, facts = snapshot.replay, snapshot.facts
    capacity = replay.get("capacity", 0.0)
    if not capacity:
        return [_label("replay", [("empty", _QUIET)])]
    plain = replay["live"] * facts.plain_transition_bytes
    fill: list[Line] = [
        [(count(replay["live"]), ""), (f" of {count(capacity)}", _QUIET)],
        [(size(replay["bytes_used"]), "")],
        [(f"a plain buffer: {size(plain)}", _QUIET)] if plain else [],
    ]
    least = 10
    shown = _facts("replay", [[(" " * least, "")], *fill], width)
    bar = least + max(0, width - 1 - sum(len(text) for text, _ in shown))
    first = [shown[0], *_bar(replay["live"] / capacity, bar), *shown[2:]]
    second = [
        *_values([(f"{snapshot.samples_per_insert:.2f}", "samples per insert")]),
        [("stale ", _QUIET), (f"{snapshot.stale_share:.1%}", "")],
        [(LIMITER_STATES[int(replay["limiter"])], "")],
    ]
    return [first, _facts("", second, width)]


def _relay(snapshot: Snapshot, width: int) -> list[Line]:
    relay = snapshot.relay
    if not relay:
        return []
    values = [
        (count(relay["acknowledged"]), "chunks"),
        (count(relay["transitions"]), "transitions"),
        (size(relay["bytes"]), "sent"),
    ]
    second = [
        (f"{relay['unacknowledged']:.0f}", f"of {relay['slots']:.0f} slots not yet acknowledged"),
        (count(relay["again"]), "sent again"),
        (f"v{relay['params_version']:.0f}", "parameters"),
    ]
    return [_facts("to replay", _values(values), width), _facts("", _values(second), width)]


def _returns(snapshot: Snapshot, width: int) -> list[Line]:
    returns, facts = snapshot.returns, snapshot.facts
    if math.isnan(returns.all_mean):
        lines = [_label("return", [("no game has ended yet", _QUIET)])]
    else:
        first: Line = [("greedy ", _QUIET), (number(returns.greedy_mean), f"{_STRONG} {_ACCENT}")]
        first += [("   all ", _QUIET), (number(returns.all_mean), _STRONG), ("   ", "")]
        used = 1 + _LABEL + sum(len(text) for text, _ in first)
        first.append((sparkline(returns.greedy_history, width - used - 1), _ACCENT))
        bands: list[Line] = [
            [(f"{label} ", _QUIET), (number(mean), "")] for label, mean in returns.bands.items()
        ]
        lines = [_label("return", first), _facts("", bands, width)]
    if not snapshot.role("evaluator"):
        return lines
    if snapshot.evaluations:
        last, best = snapshot.evaluations[-1], snapshot.best_evaluation
        newest: Line = [(number(last.mean), f"{_STRONG} green"), (f" ± {last.std:.1f}", "")]
        newest.append((f" ({len(last.returns)} games, {clock(last.wall_s)})", _QUIET))
        evaluated = [newest]
        if best is not None:
            evaluated.append([("best ", _QUIET), (number(best.mean), _STRONG)])
    else:
        evaluated = [[("not yet", _QUIET)]]
    evaluated += [[(f"{name} {value:g}", _QUIET)] for name, value in facts.references.items()]
    return [*lines, _facts("evaluated", evaluated, width)]


def _learner(snapshot: Snapshot, width: int) -> list[Line]:
    learner = snapshot.learner
    if not learner.get("batches"):
        return [_label("learner", [("waits for the first batch", _QUIET)])]
    shown = {"loss": "loss", "q": "q_mean", "|td|": "td_abs_mean", "|grad|": "grad_norm"}
    parts: list[Line] = [
        [(f"{title} ", _QUIET), (number(learner[name]), "")] for title, name in shown.items()
    ]
    parts.append([("params ", _QUIET), (f"v{learner['params_version']:.0f}", "")])
    if learner["torn_rows"]:
        # The replay was full and evicted them: no fault, and no batch holds them.
        parts.append([(f"{count(learner['torn_rows'])} rows evicted while read", _QUIET)])
    return [_facts("learner", parts, width)]


def _machine(snapshot: Snapshot, width: int) -> list[Line]:
    facts = snapshot.facts
    parts: list[Line] = [
        [(f"{snapshot.cpu_cores:.2f}", ""), (f" of {facts.cores} cores", _QUIET)],
        [
            ("memory ", _QUIET),
            (size(snapshot.memory_bytes), ""),
            (f" of {size(snapshot.host_memory_bytes)}", _QUIET),
        ],
        [("monitor ", _QUIET), (f"{snapshot.parent_cpu_cores:.1%}", "")],
    ]
    return [_facts("machine", parts, width)]


def _bar(share: float, cells: int) -> Line:
    done = round(share * max(0, cells))
    return [("━" * done, _ACCENT), ("─" * (cells - done), _QUIET)]


def _label(name: str, spans: Line) -> Line:
    return [(" " + name.ljust(_LABEL), ""), *spans]


def _facts(name: str, parts: Sequence[Line], width: int) -> Line:
    """A label and the parts that fit behind it, whole; the last ones are left out first."""
    line, used = _label(name, []), 1 + _LABEL
    for part in filter(None, parts):
        gap = "   " if len(line) > 1 else ""
        used += len(gap) + sum(len(text) for text, _ in part)
        if used > width:
            break
        line += [(gap + part[0][0], part[0][1]), *part[1:]]
    return line


def _values(values: Sequence[tuple[str, str]]) -> list[Line]:
    return [[(value, ""), (f" {unit}", _QUIET)] for value, unit in values]


def _spread(left: Line, right: Line, width: int) -> Line:
    """`left`, blanks, `right`: `width` cells; a left text that is too long is cut."""
    room = width - sum(len(text) for text, _ in right)
    left = _crop(left, room - 1)
    gap = room - sum(len(text) for text, _ in left)
    return [*left, (" " * gap, ""), *right]


def _one_line(text: str) -> str:
    """A message may hold another program's text: remove what moves the cursor."""
    return "".join(c if c.isprintable() else " " for c in text)


def _crop(line: Line, width: int) -> Line:
    cropped: Line = []
    for text, style in line:
        if width <= 0:
            break
        cropped.append((text[:width], style))
        width -= len(text)
    return cropped


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
    """Bytes: `3.16e9` -> "3.16 GB"; powers of ten."""
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
    """As many decimals as give three digits."""
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
