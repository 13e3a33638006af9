"""The pictures of benchmarks/results, each drawn from the JSON of its name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import learning


def draw(load: Callable[[str], Any], folder: Path) -> None:
    """Draw them all. load: a stored result by its name."""
    sumtree(load("sumtree")["results"]["sweep"]).savefig(folder / "sumtree.png", dpi=120)
    parts = [load(name)["results"] for name in ("scale", "scale_restarts", "scale_crowds")]
    scale({k: v for part in parts for k, v in part.items()}).savefig(folder / "scale.png", dpi=120)
    transport(load("transport")["results"]["sizes"]).savefig(folder / "transport.png", dpi=120)
    learning.plot(load("learning")["results"]).savefig(folder / "learning.png", dpi=120)


def sumtree(cells: list[dict[str, Any]]) -> Figure:
    """The pair and the roofline over capacity and over batch."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, x, fixed, value in (
        (axes[0], "capacity", "batch", 512),
        (axes[1], "batch", "capacity", 2**21),
    ):
        chosen = [cell for cell in cells if cell[fixed] == value]
        for state, colour in (("fresh", "tab:blue"), ("cold", "tab:orange")):
            for name, style in (("pair", "o-"), ("roof", "--")):
                ys = [cell[state][name]["p50"] for cell in chosen]
                axis.plot(
                    [cell[x] for cell in chosen], ys, style, color=colour, markersize=4,
                    label=f"{name}, {state}",
                )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel=x, title=f"{fixed} {value}")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ns an item")
    axes[0].legend()
    figure.suptitle("sample + update of the sum tree, and the memory's own speed")
    return figure


def scale(results: dict[str, Any]) -> Figure:
    """One panel a part: medians with p99 and p99.9, or with p10 to p90 around them.

    A panel shows at least a factor of ten, so that noise looks like noise.
    """
    figure = Figure(figsize=(13.2, 8.4), layout="constrained")
    for axis, (part, by_call) in zip(figure.subplots(2, 3).flat, results.items(), strict=True):
        for name, found in by_call.items():
            xs, curve = [int(x) for x in found["curve"]], found["curve"].values()
            label = f"{name} (exponent {found.get('exponent', 0):.2f})"
            (line,) = axis.plot(xs, [one["p50"] for one in curve], "o-", label=label, markersize=4)
            colour = line.get_color()
            for point, style in (("p99", "--"), ("p99.9", ":")):
                if all(point in one for one in curve):
                    axis.plot(xs, [one[point] for one in curve], style, color=colour, linewidth=0.9)
            if not all("p99" in one for one in curve):
                low, high = ([one[p] for one in curve] for p in ("p10", "p90"))
                axis.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.set(yscale="log", title=part, ylabel="µs a call")
        least, most = axis.get_ylim()
        if most < 10 * least:
            middle = (least * most) ** 0.5
            axis.set_ylim(middle / 10**0.5, middle * 10**0.5)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    figure.suptitle("medians, p99 (dashed) and p99.9 (dotted); p10 to p90 of the rounds (shaded)")
    return figure


def transport(sizes: dict[str, Any]) -> Figure:
    """Latency by size."""
    figure = Figure(figsize=(15, 5), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, what in zip(axes, ("push", "pull", "sample"), strict=True):
        for kind in ("shm", "ipc", "tcp", "tcp+curve"):
            found = [sizes[f"zapex {kind} {int(size)}"] for size in sizes["bytes"]]
            at = [one["sample_bytes"] for one in found] if what == "sample" else sizes["bytes"]
            axis.plot(at, [one[f"{what}_us"]["p50"] for one in found], "o-", label=f"zapex {kind}")
        way = "push" if what == "push" else "pull"
        for name, label in (("zmq tcp", "bare ZeroMQ"), ("memcpy", "memcpy")):
            ys = [one[f"{way}_us"]["p50"] for one in sizes[name]]
            axis.plot(sizes["bytes"], ys, "--", label=label)
        axis.set(xscale="log", yscale="log", title=what, xlabel="bytes")
    axes[0].set_ylabel("µs (median)")
    axes[0].legend()
    return figure
