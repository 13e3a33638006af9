"""`zapex train`: one host has the whole run."""

from pathlib import Path

from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.run import directory, preflight
from zapex.run.inline import run_inline
from zapex.run.parent import run_processes
from zapex.run.run import Run


@preflight.limits_told()
def train(config: Config, spec: EnvironmentSpec, wrap: str = "") -> int:
    """Run until a limit, a signal, or a role that is given up. Returns the exit code.

    wrap: as in Run.
    """
    run = Run(config, spec, Path(config.run.resume or config.run.run_dir), wrap=wrap)
    with directory.opened(run) as (run, base):
        ending = run_inline(run, base) if config.run.inline else run_processes(run, base)
    return int(ending.failed)
