"""What a command runs with: flags over a file over a preset over the paper's own values."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zapex.checked import flag_of
from zapex.config import (
    FIELDS,
    SECTIONS,
    ActorConfig,
    Config,
    EnvConfig,
    EvaluatorConfig,
    LearnerConfig,
    ReplayConfig,
    RunConfig,
    merged,
)
from zapex.errors import CheckpointError, ConfigError
from zapex.flags import key_values, nearest, parse, read_settings, value_of, values_of

if TYPE_CHECKING:
    from zapex.environments import EnvironmentSpec
    from zapex.presets import Choice


@dataclass(frozen=True)
class Options:
    """All settings, and the file they may come from. The sections are not yet checked together."""

    config: str
    """A file of settings, as `zapex config` prints it; flags override it."""
    env: EnvConfig
    actor: ActorConfig
    replay: ReplayConfig
    learner: LearnerConfig
    evaluator: EvaluatorConfig
    run: RunConfig


@dataclass(frozen=True)
class Resolved:
    """config: complete. chosen: every setting that is not a default, with its reason."""

    config: Config
    spec: "EnvironmentSpec"
    chosen: "dict[str, Choice]"
    more: Any = None  # what a command asks for besides


def resolve(
    args: list[str],
    command: str,
    description: str,
    more: Callable[[Options], Any] = lambda options: options,
    *,
    holds_replay: bool = True,
) -> Resolved:
    """Flags over file over preset over defaults; checked against environment and memory.

    more: makes a dataclass of a command's own options, with all settings in its field `settings`.
    holds_replay: the replay's memory must fit into this machine.

    Raises:
        ConfigError: anything that cannot work, before any process starts.
    """
    defaults = vars(Config())

    def parsed(default: Options) -> Any:
        whole = more(default)
        return parse(type(whole), whole, args, command, description)

    if {"-h", "--help"} & set(args):
        parsed(Options("", **defaults))
    from zapex import environments, presets
    from zapex.machine import Machine

    path = value_of("config", args) or ""
    resume = value_of("resume", args) or ""
    if resume:
        if path:
            raise ConfigError("--resume brings its own settings: leave --config out")
        path = str(run_directory(resume) / "config.toml")
    values = read_settings(path) if path else {}
    env = value_of("env", args) or values.get("env", EnvConfig.env)
    env_kwargs = values_of("env_kwargs", args)
    spec = environments.check(
        env, values.get("env_kwargs", {}) if env_kwargs is None else key_values(env_kwargs)
    )
    machine = Machine.look(os.environ.get("CUDA_VISIBLE_DEVICES"))
    preset = value_of("preset", args) or values.get("preset", "auto")
    merged(defaults, {"preset": preset})  # a misspelt one is told here
    n_step, gamma = ReplayConfig.n_step, ReplayConfig.gamma
    task = presets.Task(spec.schema(n_step, gamma), spec.atari)
    chosen = presets.choose(preset, task, machine)

    base = merged(defaults, {name: value for name, (value, _) in chosen.items()})
    chosen |= _changes(base, merged(base, values), f"from {path}")
    base = merged(base, values)
    whole = parsed(Options(path, **base))
    options = getattr(whole, "settings", whole)
    sections = merged(
        {name: getattr(options, name) for name in SECTIONS}, {"preset": chosen["preset"].value}
    )
    changed = _changes(base, sections, "you gave it")
    if resume:
        _check_resumable(changed)
        sections = merged(sections, {"run_dir": resume})
    config = Config(**sections)
    chosen |= changed
    if holds_replay:
        schema = spec.schema(config.replay.n_step, config.replay.gamma)
        presets.check_memory(config, schema, machine)
    return Resolved(config, spec, chosen, whole)


def _check_resumable(changed: "dict[str, Choice]") -> None:
    """Raises ConfigError where a run that goes on would need another network or another place."""
    for name in ("env", "env_kwargs", "hidden", "channels", "run_dir"):
        if name in changed:
            raise ConfigError(
                f"{flag_of(name)} cannot change in a run that goes on, got "
                f"{changed[name].value!r}: leave it out, or start a new run"
            )


def _changes(before: dict[str, Any], after: dict[str, Any], reason: str) -> "dict[str, Choice]":
    """Settings that differ, with one reason for all."""
    from zapex.presets import Choice

    return {
        name: Choice(getattr(after[section], name), reason)
        for name, (section, _) in FIELDS.items()
        if getattr(after[section], name) != getattr(before[section], name)
    }


def run_directory(text: str) -> Path:
    """The directory of a run that exists."""
    path = Path(text)
    if not (path / "config.toml").is_file():
        runs = [p.parent.name for p in path.parent.glob("*/config.toml")]
        raise ConfigError(f"{text} is no run: it has no config.toml{nearest(path.name, runs)}")
    return path


def new_run_directory(config: Config, part: str = "") -> Path:
    """Where a new run is written, or the part of one; refuses a place that is taken."""
    env, run = config.env.env.replace("/", "-"), config.run
    now = time.strftime("%Y%m%d-%H%M%S")
    path = Path(run.run_dir or f"runs/{env}__{run.exp}__{run.seed}__{now}{part and '__' + part}")
    if path.exists():
        raise ConfigError(
            f"--run-dir must be new, and {path} exists: choose another, or go on with "
            f"`zapex train --resume {path}`"
        )
    return path


def check_checkpoint(run_dir: Path, spec: "EnvironmentSpec") -> None:
    """Raises CheckpointError for one that is missing, damaged or of another environment."""
    from zapex import checkpoint

    path = checkpoint.latest(run_dir)
    if path is None:
        raise CheckpointError(f"{run_dir} has no checkpoint to go on from: start a new run")
    loaded, facts = checkpoint.load(path), asdict(spec)
    made_for = loaded.state.get("schema", {})
    checkpoint.check_schema(loaded, {name: facts[name] for name in made_for if name in facts})
