"""`zapex train`: one host has the whole run."""

from pathlib import Path

from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.run import directory, preflight
from zapex.run.collector import Caller, Ending
from zapex.run.parent import run_inline, run_processes
from zapex.run.run import Run


def train(config: Config, spec: EnvironmentSpec, wrap: str = "") -> int:
    """Run until a limit, a signal, or a role that is given up. Returns the exit code.

    wrap: as in Run.
    """
    return int(ending_of(config, spec, wrap).failed)


@preflight.limits_explained()
def ending_of(
    config: Config, spec: EnvironmentSpec, wrap: str = "", caller: Caller | None = None
) -> Ending:
    """The same, for a program that trains by a call. Returns why the run ended."""
    run = Run(config, spec, Path(config.run.resume or config.run.run_dir), wrap=wrap)
    with directory.opened(run) as (run, base):
        return (run_inline if config.run.inline else run_processes)(run, base, caller)
