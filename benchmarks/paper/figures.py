"""The figures of arXiv 2110.13506 from our rows, PNG and tables, with the paper's numbers beside.

breakdown.png     fig. 3: where an actor's and the learner's time goes
push.png          actors' pushes a second, against what they are without communication
latency.png       actor push and pull, learner set and sample
pull.png          experiences a second of the learner's sampling time
server.png        the server's time: input and output, adding, sampling
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

PAPER_SHARE = {1: 0.145, 8: 0.190}
"""Communication in the paper's baseline, by actors."""
_LIKE = 0.1
NAMES = {
    "a": "Redis, pairs", "a-fstack": "Redis on F-Stack, pairs", "a2": "Redis, chunks",
    "b": "ZeroMQ, pairs", "b2": "ZeroMQ, chunks", "c": "in-network",
    "d-zmtp": "in-network, zmtp", "d-fstack": "in-network, F-Stack", "e": "one host, memory",
}  # fmt: skip
_COLORS = {
    "compute": "#c9d3dc", "push": "#d1495b", "pull": "#edae49", "sample": "#30638e",
    "update": "#8d6a9f", "set": "#00798c", "wait": "#888888",
}  # fmt: skip
_LATENCIES = {
    "actor_push_ms": "actor: a push of experience", "actor_pull_ms": "actor: pull parameters",
    "learner_set_ms": "learner: set parameters", "learner_sample_ms": "learner: sample a batch",
}  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """One row in a line."""
    gbit = f" at {row['gbit']:g} Gbit/s" if row["gbit"] else ""
    if row["paced"]:
        bound = ", HOST-BOUND: does not count" if row["host_bound"] else ""
        share = "communication", row["communication_share"]
        work = (
            f"{row['push_hz']:.2f} pushes/s of {row['ideal_push_hz']:.2f}, load "
            f"{row['machine']['load']:.0%}{bound}"
        )
    else:
        share = "moving data", row["moving_share"]
        work = f"{row['steps_per_s']:,.0f} steps/s, {row['batches_per_s']:.1f} batches/s"
    return f"  {row['system']:9}{row['actors']} actors{gbit}: {share[0]} {share[1]:.1%}, {work}"


def _ms(value: dict[str, float]) -> str:
    if not value:
        return "-"
    spread = f" ({value['q25']:.1f}..{value['q75']:.1f})" if "q25" in value else ""
    return f"{value['median']:.1f}{spread}"


def table(rows: list[dict[str, Any]]) -> str:
    """All rows, as Markdown; bytes beside every time."""
    head = (
        "| system | actors | Gbit/s | communication | paper | push ms | MB | pull ms | MB | set ms "
        "| sample ms | MB | experiences/s pulled | pushes/s (ideal) | |\n" + "|---" * 15 + "|"
    )
    lines = []
    some = [row for row in rows if row["paced"]]
    some.sort(key=lambda r: (r["gbit"] or 0, list(NAMES).index(r["system"]), r["actors"]))
    for row in some:
        paper = PAPER_SHARE.get(row["actors"]) if row["system"] == "a" else None
        notes = "host-bound" if row["host_bound"] else ""
        mb = {name: f"{n / 1e6:.2f}" for name, n in row["bytes"].items()}
        lines.append(
            f"| {row['system']} {NAMES[row['system']]} | {row['actors']} | {row['gbit'] or '-'} "
            f"| {row['communication_share']:.1%} | {f'{paper:.1%}' if paper else ''} "
            f"| {_ms(row['actor_push_ms'])} | {mb['push']} | {_ms(row['actor_pull_ms'])} "
            f"| {mb['pull']} | {_ms(row['learner_set_ms'])} | {_ms(row['learner_sample_ms'])} "
            f"| {mb['sample']} | {row['learner_pull_experiences_per_s']:,.0f} "
            f"| {row['push_hz']:.2f} ({row['ideal_push_hz']:.2f}) | {notes} |"
        )
    real = [row for row in rows if not row["paced"]]
    if real:
        lines += ["", "| system | actors | steps/s | batches/s | moving data |", "|---" * 5 + "|"]
    for row in real:
        why_not = unequal(row, rows)
        share = f"not compared: {why_not}" if why_not else f"{row['moving_share']:.1%}"
        lines.append(
            f"| {row['system']} {NAMES[row['system']]} | {row['actors']} "
            f"| {row['steps_per_s']:,.0f} | {row['batches_per_s']:.1f} | {share} |"
        )
    return "\n".join([head, *lines])


def draw(rows: list[dict[str, Any]], directory: Path) -> list[Path]:
    """Every figure that the rows have something for, and table.md. Returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    tabled = directory / "table.md"
    tabled.write_text(table(rows) + "\n")
    plain = [row for row in rows if row["paced"] and not row["gbit"]]
    real = [row for row in rows if not row["paced"] and not unequal(row, rows)]
    plain.sort(key=lambda row: (list(NAMES).index(row["system"]), row["actors"]))
    made = [tabled]
    drawings: dict[str, Callable[[Any, list[dict[str, Any]]], None]] = {
        "breakdown": _breakdown, "push": _pushes, "latency": _latencies, "pull": _pulls,
        "server": _server,
    }  # fmt: skip
    from matplotlib.figure import Figure

    todo = [(name, draws, plain) for name, draws in drawings.items() if plain]
    todo += [("real", _breakdown, real)] if real else []
    for name, draws, some in todo:
        figure = Figure(figsize=(11, 6), layout="constrained")
        draws(figure, some)
        made.append(directory / f"{name}.png")
        figure.savefig(made[-1], dpi=110)
    return made


def unequal(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """What a real run did more or less than the one over shared memory, by over a tenth; or ""."""
    for other in rows:
        if not other["paced"] and (other["system"], other["actors"]) == ("e", row["actors"]):
            for name in ("steps_per_s", "batches_per_s"):
                ratio = row[name] / other[name]
                if abs(ratio - 1) > _LIKE:
                    return f"{ratio:.2f} x the {name.replace('_per_', '/')} of e"
    return ""


def _label(row: dict[str, Any]) -> str:
    actors = f"{row['actors']} actor{'s' * (row['actors'] > 1)}"
    return f"{NAMES[row['system']]}, {actors}"


def _breakdown(figure: Any, rows: list[dict[str, Any]]) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    bars = (("actor_share", "actor"), ("learner_share", "learner"))
    for axis, (key, title) in zip(axes, bars, strict=True):
        for place, row in enumerate(rows):
            left = 0.0
            for phase, color in _COLORS.items():
                width = 100 * row[key].get(phase, 0.0)
                axis.barh(place, width, left=left, color=color, height=0.7)
                left += width
        axis.set_title(f"{title}: share of its time")
        axis.set_xlabel("%")
        axis.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
        axis.axvline(100 * (1 - PAPER_SHARE[1]), color="black", lw=0.8, ls=":")
    from matplotlib.patches import Patch

    axes[0].invert_yaxis()
    names = [name for name in _COLORS if any(name in r[k] for r in rows for k, _ in bars)]
    figure.legend(
        handles=[Patch(color=_COLORS[name], label=name) for name in names], ncols=len(names),
        loc="outside lower center",
    )  # fmt: skip
    paced = bool(rows[0]["paced"])
    figure.suptitle(
        f"Where {'paced' if paced else 'real'} roles spend their time. Dotted: the paper's 14.5 % "
        "of communication with one actor"
        + (",\nwhich Redis with pairs and one actor has at this pace" if paced else "")
    )


def _plot(
    axis: Any, rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float | None],
    **how: Any,
) -> None:  # fmt: skip
    """A value over the number of actors, a line for each system. how: for the axis."""
    counts = sorted({row["actors"] for row in rows})
    for system, name in NAMES.items():
        known = {r["actors"]: value(r) for r in rows if r["system"] == system}
        points = [(n, known[n]) for n in counts if known.get(n) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", ms=4, label=name)
    axis.set(xlabel="actors", **how)
    axis.set_xticks(counts)
    axis.grid(alpha=0.3, which="both")


def _pushes(figure: Any, rows: list[dict[str, Any]]) -> None:
    left, right = figure.subplots(1, 2)
    each = rows[0]["machine"]["transitions_per_push"]
    title = f"Pushes of {each} transitions a second, all actors"
    ideal = {row["actors"]: row["ideal_push_hz"] for row in rows}
    left.plot(*zip(*sorted(ideal.items()), strict=True), "k--", label="without communication")
    _plot(left, rows, lambda row: row["push_hz"], title=title, ylabel="pushes/s")
    _plot(right, rows, lambda row: 100 * row["communication_share"],
          title="Communication, share of time", ylabel="%")  # fmt: skip
    shares = [100 * share for share in PAPER_SHARE.values()]
    right.plot(list(PAPER_SHARE), shares, "k*", ms=11, label="the paper's baseline")
    for axis in (left, right):
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)


def _latencies(figure: Any, rows: list[dict[str, Any]]) -> None:
    axes = figure.subplots(2, 2).flatten()
    for axis, (key, title) in zip(axes, _LATENCIES.items(), strict=True):
        _plot(axis, rows, lambda row, key=key: row[key].get("median"),
              title=title, ylabel="ms, median", yscale="log")  # fmt: skip
        axis.yaxis.set_major_formatter("{x:g}")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, fontsize=8, loc="outside lower center")


def _pulls(figure: Any, rows: list[dict[str, Any]]) -> None:
    axis = figure.subplots()
    title = (
        "What a learner gets for a second of sampling "
        "(its own replay: all experience; in-network: batches)"
    )
    _plot(axis, rows, lambda row: row["learner_pull_experiences_per_s"],
          title=title, ylabel="experiences/s", yscale="log")  # fmt: skip
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.legend(fontsize=8)


def _server(figure: Any, rows: list[dict[str, Any]]) -> None:
    axis = figure.subplots()
    for place, row in enumerate(rows):
        phases, seconds = row["machine"]["server_phases_s"], row["machine"]["seconds"]
        role = "server" if "server" in row["core_seconds"] else "learner"
        threads = row["core_seconds"].get(role, {})
        cpu_s = sum(thread["cpu_s"] for thread in threads.values())
        adding, sampling = phases.get("insert", 0.0), phases.get("sample", 0.0)
        redis = row["system"].startswith("a")  # where a learner adds and samples, beside Redis
        rest_s = cpu_s if redis else max(0.0, cpu_s - adding - sampling)
        parts = {
            "adding (chunks in)": (adding, "#30638e"),
            "sampling (batches out)": (sampling, "#edae49"),
            "input, output and the rest": (rest_s, "#c9d3dc"),
        }
        left = 0.0
        for name, (spent, color) in parts.items():
            label = name if not place else None
            axis.barh(place, 100 * spent / seconds, left=left, color=color, label=label)
            left += 100 * spent / seconds
    axis.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set(
        title="Time for the replay: its server's, or Redis's and its learner's",
        xlabel="% of one core",
    )
    axis.legend(fontsize=8)
