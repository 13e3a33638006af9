"""A balance as a picture: throughput by environments and by cores, and what the learner takes."""

from pathlib import Path
from typing import Any

from zapex.errors import ConfigError
from zapex.studies.advice import Advice
from zapex.studies.plan import INFERENCE
from zapex.studies.saturation import MOST_ENVS, Model

_COLOURS = {"cpu": "#2f7ed8", "gpu": "#1b9e5a", "central": "#8e44ad"}
_LEARNER, _USE = "#c0392b", "#6b7280"


def draw(report: dict[str, Any], advice: Advice, threads: int, path: Path) -> None:
    """Write a PNG. report: as of `advice.report_of`. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("the figure needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(12, 7.5), dpi=150, layout="constrained")
    by_envs, by_cores = figure.subplots(1, 2)
    models = {where: Model(**numbers) for where, numbers in report["models"].items()}
    _by_envs(by_envs, report, models, advice)
    _by_cores(by_cores, report, models, advice, threads)
    for axes in (by_envs, by_cores):
        axes.set_ylim(bottom=0)
        axes.set_ylabel("steps a second")
        axes.spines[["right", "top"]].set_visible(False)
        axes.grid(linewidth=0.4, alpha=0.5)
        # Below: inside, it would hide the lines of three places.
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    quick = "; quick form: not to be relied on" if report["quick"] else ""
    machine = report["machine"]
    figure.suptitle(
        f"{report['env']} on {machine['cpu']}, {machine['cores']} cores, GPU: {machine['gpu']}"
        f"{quick}",
        fontsize=10,
    )
    figure.savefig(path)


def _points(axes: Any, report: dict[str, Any], x: str, alone: bool) -> None:
    for where, colour in _COLOURS.items():
        for held_out, text in ((False, "measured"), (True, "measured, not used for the model")):
            found = [
                p
                for p in report["points"]
                if p["do"] == "play"
                and p["where"] == where
                and p["held_out"] == held_out
                and (p["actors"] == 1) == alone
            ]
            if found:
                there = _there(where)
                axes.plot(
                    [p[x] for p in found], [p["steps_per_s"] for p in found], "o", color=colour,
                    fillstyle="none" if held_out else "full", label=text + there,
                )  # fmt: skip


def _there(where: str) -> str:
    return "" if where == "cpu" else f", {INFERENCE[where]}"


def _by_envs(axes: Any, report: dict[str, Any], models: dict[str, Model], advice: Advice) -> None:
    envs = [2 ** (i / 8) for i in range(8 * MOST_ENVS.bit_length() - 7)]
    for where, model in models.items():
        rates = [e / (model.fixed_s + e * model.each_s) for e in envs]
        axes.plot(envs, rates, color=_COLOURS[where], linewidth=1.2, label="model" + _there(where))
    _points(axes, report, "envs", alone=True)
    axes.axvline(advice.envs_per_actor, color=_USE, linestyle=":", label="use this many")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("environments of one actor, which has a core to itself")
    axes.set_title("More environments for each forward pass", fontsize=10, loc="left")


def _by_cores(
    axes: Any, report: dict[str, Any], models: dict[str, Model], advice: Advice, threads: int
) -> None:
    most = max([threads, *(p["actors"] for p in report["points"] if p["do"] == "play")])
    actors = list(range(1, most + 1))
    shown = sorted({p["envs"] for p in report["points"] if p["do"] == "play" and p["actors"] > 1})
    for where, model in models.items():
        for envs, style in zip(shown, ("-", "--"), strict=False):
            rates = [model.rate(n, envs, min(n, threads)) for n in actors]
            text = f"model, {envs} environments each{_there(where)}"
            axes.plot(actors, rates, style, color=_COLOURS[where], linewidth=1.2, label=text)
    _points(axes, report, "actors", alone=False)
    learner = report["learner"]
    wanted = advice.batches_per_s * learner["batch_size"] / advice.samples_per_insert
    how = "a paced learner" if learner["paced"] else f"the learner ({learner['device']})"
    text = f"{how} takes, at {advice.samples_per_insert:g} samples per insert"
    axes.axhline(wanted, color=_LEARNER, linestyle="--", linewidth=1.2, label=text)
    axes.axvline(advice.actors, color=_USE, linestyle=":", label="use this many")
    axes.set_xlabel(f"actors; this machine has {threads} hardware threads")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title("More actors, a hardware thread each as long as there are some", fontsize=10,
                   loc="left")  # fmt: skip
