"""A simulated run as a picture: rates, ages and loads by the number of actors."""

from collections.abc import Sequence
from pathlib import Path

from zapex.errors import ConfigError
from zapex.studies.cluster import Cluster
from zapex.studies.outcome import Outcome

_BUSY = 0.10  # what is never busier than this is left out


def draw(cluster: Cluster, found: Sequence[Outcome], title: str, path: Path) -> None:
    """Write a PNG. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("the figure needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(13, 4.6), dpi=150, layout="constrained")
    rates, ages, loads = figure.subplots(1, 3)
    actors = [one.actors for one in found]
    rates.plot(actors, [one.steps_per_s for one in found], "o-", ms=3, label="steps a second")
    rates.plot(
        actors, [cluster.of(n).own_steps_per_s for n in actors], ":", color="#6b7280",
        label="actors that never wait",
    )  # fmt: skip
    rates.plot(actors, [one.batches_per_s for one in found], "s-", ms=3, color="#c0392b",
               label="batches a second")  # fmt: skip
    for name, values, style in (
        ("parameters that actors use", [one.parameters_age_s for one in found], "o-"),
        ("batches: from draw to use", [one.batch_age_s for one in found], "s-"),
        ("pushes: until acknowledged", [one.push_s for one in found], "^-"),
    ):
        ages.plot(actors, values, style, ms=3, label=name)
    for number, kind in enumerate(found[0].loads):
        values = [one.loads[kind] for one in found]
        if max(values) > _BUSY:
            loads.plot(actors, values, "-", marker="osv^D"[number % 5], ms=3, label=kind)
    loads.set_ylim(0, 1.05)
    for axes, label in (
        (rates, "a second"), (ages, "seconds old"), (loads, "busy, share of time"),
    ):  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlabel("actors")
        axes.set_ylabel(label)
        axes.spines[["right", "top"]].set_visible(False)
        axes.grid(linewidth=0.4, alpha=0.5)
        axes.legend(fontsize=7, framealpha=0.9, edgecolor="none")
    for axes in (rates, ages):
        axes.set_yscale("log")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)
