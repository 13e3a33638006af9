"""`zapex balance`: how many actors this machine's learner needs, in lines, a file and a picture."""

import json
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from zapex.cli.flags import check_output, flags_of
from zapex.cli.resolve import Options, cache_directory, resolve
from zapex.config.fields import setting
from zapex.config.settings import EvaluatorConfig, RunConfig

_UNREAD = {
    *flags_of(EvaluatorConfig, RunConfig), "total_timesteps", "more_minutes", "more_frames",
} - {"preset", "seed"}  # fmt: skip
_FOREIGN = 0.05  # a share of the cores


@dataclass(frozen=True)
class BalanceOptions(Options):
    """What to measure, and where to write it."""

    quick: bool = False
    """A short form: fewer points, half a second each."""
    learner_ms: float = setting(0.0, low=0.0, high=1e6)
    """Do not measure the learner: a batch takes it so many milliseconds, as on a GPU elsewhere."""
    json: str = ""
    """Write the result to this file too."""
    figure: str = ""
    """Draw the result in this file, which ends in .png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output("--json", self.json)
        check_output("--figure", self.figure, ".png")


def command(args: list[str]) -> int:
    """Measure, print, keep, and draw."""
    what = (
        "Measure how fast actors and learner are on this machine, alone and together, and say how "
        "many actors and environments to use; `zapex train --actors auto` then uses them."
    )
    run = resolve(args, "balance", what, BalanceOptions, unread=_UNREAD)
    options: BalanceOptions = run.more
    from zapex.machine import gpu
    from zapex.run import balance

    machine = run.machine
    if machine.gpus and machine.gpu is None:
        machine = replace(machine, gpu=gpu.look())
    print(f"{run.spec.describe}\nthis machine: {machine}", flush=True)
    effort = balance.QUICK if options.quick else balance.FULL
    study = balance.Balance(
        run.config,
        run.spec,
        machine,
        effort,
        step_s=options.learner_ms / 1e3,
        say=lambda line: print(line, flush=True),
    )
    report = study.run()
    report["time"] = datetime.now().astimezone().isoformat(timespec="seconds")
    print("", *lines(report, run.spec.frames_per_step), sep="\n")
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if options.figure:
        draw(report, Path(options.figure))
    path = balance.kept_at(cache_directory(), run.config, run.spec, machine)
    try:
        balance.keep(path, report)
    except OSError as error:
        print(f"not kept for `--actors auto`: {error}")
    else:
        print(f"kept for `zapex train --actors auto`: {path}")
    return 0


def lines(report: dict[str, Any], frames_per_step: int) -> list[str]:
    """The report in words."""
    advice, together, device = report["advice"], report["together"], report["learner"]["device"]
    what = "GPU" if device == "cuda" else "learner"
    how = {"paced": "as given, not measured", "cpu": f"{advice['learner_threads']} thread(s)"}
    needed, joule = advice["threads_needed"], together["frames_per_joule"]
    ratio = (
        f"{advice['cores_per_learner']:.3g} cores per {what}"
        if needed
        else f"no number of cores keeps this {what} busy"
    )
    if advice["threads_per_sm"] is not None:
        ratio += (
            f", {advice['threads_per_sm']:.3g} hardware threads per SM "
            f"(this machine has {advice['machine_threads_per_sm']:.3g})"
        )
    one = report["steps_per_s_by_envs"][advice["inference"]]
    use = f"cores {together['cpu_share']:.0%} busy"
    if together["gpu_share"] is not None:
        use += f", GPU {together['gpu_share']:.0%}"
    rates = f"{together['steps_per_s'] * frames_per_step:,.0f} frames/s"
    if "batches_per_s" in together:
        rates += f" beside {together['batches_per_s']:,.3g} batches/s"
    text = [
        f"learner ({how.get(device, device)}): {advice['batches_per_s']:,.4g} batches of "
        f"{report['network']['batch_size']} a second",
        f"knee: more than {advice['envs_per_actor']} environments gain an actor less than 10 %; "
        f"{one[advice['envs_per_actor']]:,.0f} steps/s with a core to itself",
        f"in balance at {advice['samples_per_insert']:g} samples per insert: {ratio}",
        f"the limit here: the {advice['limit']}",
        f"together: {rates}; {use}",
        f"frames per joule: {joule:,.3g}"
        if joule
        else f"frames per joule: not readable here ({report['power']['cpu']})",
        f"use: --actors {advice['actors']} --envs-per-actor {advice['envs_per_actor']}"
        + (f" --inference {advice['inference']}" if advice["inference"] != "cpu" else ""),
    ]
    if report["foreign_share"] > _FOREIGN:
        text.append(
            f"WARNING: other processes took up to {report['foreign_share']:.0%} of the cores: "
            "measure again on a quiet machine"
        )
    return text


def draw(report: dict[str, Any], path: Path) -> None:
    """Steps a second by environments and by actors, with what the learner takes."""
    from matplotlib.figure import Figure

    advice = report["advice"]
    takes = advice["batches_per_s"] * report["network"]["batch_size"]
    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    for axes, what, used in zip(
        figure.subplots(1, 2), ("envs", "actors"), ("envs_per_actor", "actors"), strict=True
    ):
        for where, rates in report[f"steps_per_s_by_{what}"].items():
            axes.plot(list(rates), list(rates.values()), "o-", ms=4, label=f"inference {where}")
        axes.axvline(advice[used], linestyle=":", label="advice")
        axes.set(xlabel="environments of one actor" if what == "envs" else "actors")
        axes.set(ylabel="steps a second", ylim=(0, None))
    axes.axhline(takes / advice["samples_per_insert"], color="#c0392b", label="the learner takes")
    axes.legend(fontsize=8)
    figure.suptitle(f"{report['env']} on {report['machine']['cpu']}", fontsize=10)
    figure.savefig(path)
