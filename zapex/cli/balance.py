"""`zapex balance`: its flags, its files and its lines."""

import json
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from zapex.cli.flags import check_outputs
from zapex.cli.resolve import Options, cache_directory, resolve
from zapex.errors import ConfigError

FIRST = (
    "env", "quick", "learner_ms", "json", "figure", "preset", "config", "hidden", "channels",
    "batch_size", "samples_per_insert", "device",
)  # fmt: skip
"""The flags that `zapex balance --help` shows."""


@dataclass(frozen=True)
class BalanceOptions(Options):
    """What to measure, and where to write it."""

    quick: bool = False
    """A short form: fewer points, half a second each. It shows that everything works."""
    learner_ms: float = 0.0
    """Do not measure the learner: it takes so many milliseconds a batch, as on a GPU elsewhere."""
    json: str = ""
    """Write the result to this file too."""
    figure: str = ""
    """Draw the result in this file, which ends in .png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.learner_ms <= 1e6:
            raise ConfigError(f"--learner-ms must be 0 to 1,000,000, got {self.learner_ms:g}")
        check_outputs(self.json, self.figure)


def command(args: list[str]) -> int:
    """Measure, print, keep, and draw."""
    what = (
        "Measure how fast actors and learner are on this machine, and say how many actors and "
        "environments to use; `zapex train --actors auto` then uses them."
    )
    run = resolve(args, "balance", what, BalanceOptions, FIRST)
    options: BalanceOptions = run.more
    from zapex.machine import gpu
    from zapex.studies import advice, figure
    from zapex.studies.balance import FULL, QUICK, Balance

    config, machine = run.config, run.machine
    if machine.gpus and machine.gpu is None:
        machine = replace(machine, gpu=gpu.look())
    path = advice.kept_at(cache_directory(), config, run.spec, machine)
    print(f"{run.spec.describe}\nthis machine: {machine}", flush=True)
    effort = QUICK if options.quick else FULL
    study = Balance(
        config, run.spec, machine, effort, step_s=options.learner_ms / 1e3,
        say=lambda line: print(line, flush=True),
    )  # fmt: skip
    result = study.run()
    threads = len(study.threads)
    found = advice.advise(result, config, run.spec, machine, threads)
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    report = advice.report_of(result, found, config, machine, when, options.quick)
    print("", *advice.lines(result, found), sep="\n")
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if options.figure:
        figure.draw(report, found, threads, Path(options.figure))
    try:
        advice.keep(path, report)
    except OSError as error:
        print(f"not kept for `--actors auto`: {error}")
    else:
        print(f"kept for `zapex train --actors auto`: {path}")
    return 0
