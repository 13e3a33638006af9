"""One snapshot as lines of styled text, for a screen of any size; draws nothing itself."""

import itertools
import math
from collections.abc import Sequence
from typing import Final

from zapex.metrics import LIMITER_STATES, TABLES
from zapex.report import RoleView, Snapshot

Span = tuple[str, str]  # text and rich style
Line = list[Span]

_QUIET, _STRONG, _ACCENT, _BAD = "bright_black", "bold", "cyan", "bold red"
# The paper's phases in their order (fetch, compute, hand on), then waiting.
_PHASE_STYLES: Final = ("cyan", "green", "magenta", _QUIET)
_PHASE_WIDTHS: Final = (10, 11, 10, 8)
_LABEL: Final = 11
_SILENT_S: Final = 5.0
_PLURALS: Final = {"actor": "actors", "evaluator": "evaluator"}


def draw(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """The whole picture, at most `height` lines of at most `width` cells.

    80 x 23 holds everything; more rows bring the phases inside of "compute" and more messages,
    more columns longer bars and each role's memory. On fewer rows the blank lines go first.
    """
    roomy = height >= 30
    lines = [
        *_title(snapshot, width),
        [],
        *_roles(snapshot, width, roomy),
        [],
        *_speed(snapshot),
        *(_replay(snapshot, width) if snapshot.replay else _relay(snapshot)),
        [],
        *_returns(snapshot, width),
        [],
        *(_learner(snapshot) if snapshot.learner else []),
        *_machine(snapshot),
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
        learner = snapshot.role("learner")
        saves = "saves a checkpoint and " if learner and not learner.elsewhere else ""
        end = f"{saves}ends {'this host alone' if facts.part else 'it'}"
        return [title, [(f" runs until stopped: Ctrl-C {end}", _QUIET)]]
    note = f" {snapshot.progress:4.0%}  {clock(snapshot.left_s)} left "
    cells = max(0, width - len(note) - 1)
    done = round(snapshot.progress * cells)
    bar: Line = [(" " + "━" * done, _ACCENT), ("─" * (cells - done), _QUIET), (note, "")]
    return [title, bar]


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
        use: Line = [("-" if view.elsewhere else f"{view.cpu_cores:.0%}", "")]
        if wide:
            memory = "elsewhere" if view.elsewhere else size(view.private_bytes)
            use.append((f"{memory:>10}", _QUIET))
        lines.append(_spread(line, [*use, (" ", "")], width))
        if roomy and (inner := _inner_phases(view)):
            lines.append([(" " * (_LABEL + 1), ""), *inner])
    return lines


def _phase_bar(view: RoleView, cells: int) -> Line:
    """Every phase its share of `cells`, rounded so that they fill them."""
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
        return [("nobody there", _QUIET)]
    if not any(view.shares.values()):
        return [("starting", _QUIET)]
    spans: Line = []
    cells = dict(zip(_PHASE_STYLES, _PHASE_WIDTHS, strict=True))
    named = {style: pair for pair, style in _styled(view)}
    for style, width in cells.items():
        name, share = named.get(style, ("", 0.0))
        text = f"{name}{_percent(share):>{width - len(name)}}" if name else " " * width
        spans.append((text + "  ", style))
    return spans


def _inner_phases(view: RoleView) -> Line:
    """What "compute" and the other sums are made of, where that says more than they do."""
    spans: Line = []
    for name, parts in TABLES[view.role].shown_as.items():
        if len(parts) > 1:
            inside = [f"{p} {_percent(view.phases[p])}" for p in parts if view.phases[p] > 5e-4]
            spans.append((f"{name}: {', '.join(inside)}   " if inside else "", _QUIET))
    return spans


def _percent(share: float) -> str:
    """Without its sign; small shares are the interesting ones."""
    return f"{share * 100:.{1 if share < 0.0995 else 0}f}"


def _styled(view: RoleView) -> list[tuple[tuple[str, float], str]]:
    """(name, share), style; a role of two phases computes and waits."""
    styles = _PHASE_STYLES if len(view.shares) == 4 else (_PHASE_STYLES[1], _PHASE_STYLES[3])
    return list(zip(view.shares.items(), styles, strict=True))


def _speed(snapshot: Snapshot) -> list[Line]:
    rates = snapshot.rates
    batches = rates["batches"]
    values = [
        (f"{rates['frames']:,.0f}", "frames/s"),
        (f"{rates['steps']:,.0f}", "steps/s"),
    ]
    if snapshot.learner:
        values.append((f"{batches:.{1 if batches < 100 else 0}f}", "batches/s"))
        values.append((count(rates["samples"]), "samples/s"))
    return [_label("speed", _values(values))]


def _replay(snapshot: Snapshot, width: int) -> list[Line]:
    replay, facts = snapshot.replay, snapshot.facts
    capacity = replay.get("capacity", 0.0)
    if not capacity:
        return [_label("replay", [("empty", _QUIET)])]
    fill = replay["live"] / capacity
    cells = max(10, width - 62)
    done = round(fill * cells)
    plain = replay["live"] * facts.plain_transition_bytes
    memory = size(replay["bytes_used"])
    first: Line = [("━" * done, _ACCENT), ("─" * (cells - done), _QUIET)]
    first += [(f"  {count(replay['live'])}", ""), (f" of {count(capacity)}", _QUIET)]
    first += [(f"  {memory}", ""), (f" (a plain buffer: {size(plain)})" if plain else "", _QUIET)]
    limiter = LIMITER_STATES[int(replay["limiter"])]
    stale = f"{snapshot.stale_share:.1%}"
    second = _values([(f"{snapshot.samples_per_insert:.2f}", "samples per insert")])
    second += [("   stale ", _QUIET), (stale, ""), (f"   {limiter}", _QUIET)]
    return [_label("replay", first), _label("", second)]


def _relay(snapshot: Snapshot) -> list[Line]:
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
    return [_label("to replay", _values(values)), _label("", _values(second))]


def _returns(snapshot: Snapshot, width: int) -> list[Line]:
    returns, facts = snapshot.returns, snapshot.facts
    if math.isnan(returns.all_mean):
        lines = [_label("return", [("no game has ended yet", _QUIET)])]
    else:
        first: Line = [("greedy ", _QUIET), (number(returns.greedy_mean), f"{_STRONG} {_ACCENT}")]
        first += [("   all ", _QUIET), (number(returns.all_mean), _STRONG), ("   ", "")]
        used = 1 + _LABEL + sum(len(text) for text, _ in first)
        first.append((sparkline(returns.greedy_history, width - used - 1), _ACCENT))
        bands: Line = []
        for label, mean in returns.bands.items():
            bands += [(f"{label} ", _QUIET), (number(mean), ""), ("   ", "")]
        lines = [_label("return", first), _label("", bands)]
    if not snapshot.role("evaluator"):
        return lines
    evaluated: Line = []
    if snapshot.evaluations:
        last, best = snapshot.evaluations[-1], snapshot.best_evaluation
        evaluated += [(number(last.mean), f"{_STRONG} green"), (f" ± {last.std:.1f}", "")]
        evaluated.append((f" ({len(last.returns)} games, {clock(last.wall_s)})", _QUIET))
        if best is not None:
            evaluated += [("   best ", _QUIET), (number(best.mean), _STRONG)]
    else:
        evaluated.append(("not yet", _QUIET))
    for name, value in facts.references.items():
        evaluated += [(f"   {name} ", _QUIET), (f"{value:g}", _QUIET)]
    return [*lines, _label("evaluated", evaluated)]


def _learner(snapshot: Snapshot) -> list[Line]:
    learner = snapshot.learner
    if not learner.get("batches"):
        return [_label("learner", [("waits for the first batch", _QUIET)])]
    spans: Line = []
    for title, name in (
        ("loss", "loss"),
        ("q", "q_mean"),
        ("|td|", "td_abs_mean"),
        ("|grad|", "grad_norm"),
    ):
        spans += [(f"{title} ", _QUIET), (number(learner[name]), ""), ("   ", "")]
    spans += [("parameters ", _QUIET), (f"v{learner['params_version']:.0f}", "")]
    if learner["torn_rows"]:
        spans += [("   torn ", _QUIET), (count(learner["torn_rows"]), _BAD)]
    return [_label("learner", spans)]


def _machine(snapshot: Snapshot) -> list[Line]:
    facts = snapshot.facts
    spans: Line = [(f"{snapshot.cpu_cores:.2f}", ""), (f" of {facts.cores} cores", _QUIET)]
    spans += [("   memory ", _QUIET), (size(snapshot.memory_bytes), "")]
    spans += [(f" of {size(snapshot.host_memory_bytes)}", _QUIET)]
    spans += [("   monitor ", _QUIET), (f"{snapshot.parent_cpu_cores:.1%}", "")]
    return [_label("machine", spans)]


def _label(name: str, spans: Line) -> Line:
    return [(" " + name.ljust(_LABEL), ""), *spans]


def _values(values: Sequence[tuple[str, str]]) -> Line:
    spans: Line = []
    for i, (value, unit) in enumerate(values):
        spans += [("   " * (i > 0) + value, ""), (f" {unit}", _QUIET)]
    return spans


def _spread(left: Line, right: Line, width: int) -> Line:
    """`left`, blanks, `right`: `width` cells; what is too long on the left is cut."""
    room = width - sum(len(text) for text, _ in right)
    left = _crop(left, room - 1)
    gap = room - sum(len(text) for text, _ in left)
    return [*left, (" " * gap, ""), *right]


def _one_line(text: str) -> str:
    """A message may carry what another program wrote: nothing that moves the cursor."""
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
    """Three digits are enough for the eye: `412331` -> "412k", `1234567` -> "1.23M"."""
    for above, scale, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= above:
            return f"{value / scale:.{_decimals(value / scale)}f}{suffix}"
    return f"{value:,.0f}"


def size(value: float) -> str:
    """Bytes: `3.16e9` -> "3.16 GB"; powers of ten, as capacity is written on the machine."""
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
    """So many that three digits are seen."""
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
