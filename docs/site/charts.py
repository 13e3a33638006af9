"""Curves of the stored results, drawn in the reader's browser."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.offline import get_plotlyjs

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
_CURVES = re.compile("<!-- curves?(?:: (.+))? -->")
"""Where a page has all curves, or those of one environment."""
Line = tuple[str, list[float], list[float], list[float | None], str]
"""Name, minutes, frames, returns, plotly's mode."""


def script() -> str:
    """The program that draws in the reader's browser."""
    return str(get_plotlyjs())


def filled(markdown: str) -> str:
    """A page with its curves."""

    def drawn(match: re.Match[str]) -> str:
        parts = ['<script src="site/plotly.js"></script>']
        for file, report in _reports():
            curves = _curves(file, report)
            if match[1] and match[1] in curves:
                ours = [line for line in curves[match[1]] if line[0] == "zapex"]
                parts.append(_part(match[1], ours).partition("\n\n")[2])
            elif curves and not match[1]:
                parts += [_part(title, lines) for title, lines in curves.items()]
                parts.append(f"[The raw numbers](files/benchmarks/results/{file}.json)")
        return "\n\n".join(parts)

    return _CURVES.sub(drawn, markdown)


def _reports() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(RESULTS.glob("*.json")):
        report = json.loads(path.read_text())
        if isinstance(report, list):  # of points, each with the facts of its machine
            report = {"machine": report[0]["machine"]}
        yield path.stem, report


def _curves(file: str, report: dict[str, Any]) -> dict[str, list[Line]]:
    """What a result has of returns over time, by title; nothing if it has no runs."""
    results = report.get("results", {})
    found: dict[str, list[Line]] = {}
    if file == "learning":
        for run in results.values():
            line = _line(run["variant"], run["curve"], "lines")
            found.setdefault(run["env"], []).append(line)
    for run in results.get("seeds", {}).values():
        line = _line("zapex", run["evaluations"], "lines+markers")
        found.setdefault("CartPole-v1", []).append(line)
    return found


def _line(name: str, points: Sequence[Sequence[float]], mode: str) -> Line:
    seconds, frames, means = zip(*points, strict=True)
    return name, [s / 60 for s in seconds], list(frames), list(means), mode


def _part(title: str, lines: list[Line]) -> str:
    figure = go.Figure()
    names = list(dict.fromkeys(name for name, *_ in lines))  # a colour each, for all its seeds
    shown = set[str]()
    for name, minutes, _, returns, mode in lines:
        figure.add_scatter(
            x=minutes, y=returns, name=name, mode=mode, legendgroup=name,
            showlegend=name not in shown, line={"color": qualitative.D3[names.index(name)]},
        )  # fmt: skip
        shown.add(name)
    buttons = [
        {"label": label, "method": "update",
         "args": [{"x": [line[column] for line in lines]}, {"xaxis.title.text": label}]}
        for label, column in (("minutes", 1), ("frames", 2))
    ]  # fmt: skip
    figure.update_layout(
        template="none", height=360 + 19 * len(names),
        margin={"l": 55, "r": 15, "t": 45, "b": 50 + 19 * len(names)},
        xaxis_title={"text": "minutes", "standoff": 5}, yaxis_title="return",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",  # the theme's, as in site.css
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
        updatemenus=[{"type": "buttons", "direction": "right", "buttons": buttons,
                      "x": 0, "y": 1.15, "xanchor": "left"}],
    )  # fmt: skip
    drawn = figure.to_html(
        full_html=False, include_plotlyjs=False, div_id=f"curve-{title.replace('/', '-')}",
        config={"displayModeBar": False, "responsive": True},
    )  # fmt: skip
    return f"### {title}\n\n{drawn}"
