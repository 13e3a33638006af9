"""What a command runs with: flags over a file over a preset over the paper's own values."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zapex.cli import auto
from zapex.cli.flags import HELP, flags_of, read, read_settings, show_help
from zapex.cli.trust import check_trust
from zapex.config.fields import flag_of
from zapex.config.learner import NETWORK_FIELDS
from zapex.config.settings import (
    FIELDS,
    SECTIONS,
    Config,
    EnvConfig,
    ReplayConfig,
    merged,
)
from zapex.config.words import did_you_mean
from zapex.errors import CheckpointError, ConfigError
from zapex.host.parts import PARTS, Part

if TYPE_CHECKING:
    from zapex.config.presets import Choice
    from zapex.envs.environments import EnvironmentSpec
    from zapex.machine.resources import Machine
    from zapex.run.preflight import Finding

FIRST = (
    "env", "preset", "config", "max_minutes", "max_frames", "stop_at_return", "run_dir", "resume",
    "actors", "capacity", "lr", "seed",
)  # fmt: skip
"""The flags that `zapex train --help` shows; --help-all shows all."""
AUTO = "auto"
"""The value of --resume for a command that may be started again by whoever placed it."""
MACHINE = (
    "env",
    "preset",
    "config",
    "actors",
    "envs_per_actor",
    "capacity",
    "device",
    "huge_pages",
)
"""The flags that `zapex doctor --help` shows: what decides how much a run needs."""


@dataclass(frozen=True)
class Options:
    """What a command takes besides the settings."""

    config: str = ""
    """A file of settings, as `zapex config` prints it; flags override it."""
    total_timesteps: int = 0
    """Stop after this many steps of all environments: --max-frames in steps; 0: no limit."""
    trust: bool = False
    """Run the modules that a stored run, or the file of --config, names."""

    def __post_init__(self) -> None:
        if self.total_timesteps < 0:
            raise ConfigError(f"--total-timesteps must be at least 0, got {self.total_timesteps}")


@dataclass(frozen=True)
class Resolved:
    """config: complete. chosen: every setting that is not a default, with its reason."""

    config: Config
    spec: "EnvironmentSpec"
    chosen: "dict[str, Choice]"
    more: Any  # the command's Options
    machine: "Machine"


def resolve(
    args: list[str],
    command: str,
    what: str,
    options: type[Options] = Options,
    first: tuple[str, ...] = FIRST,
    part: Part = PARTS["all"],
) -> Resolved:
    """Flags over file over preset over defaults, checked against environment and memory.

    options: what the command takes besides the settings. first: the flags that --help shows.
    part: what this host runs; a part without the replay needs no memory for it.

    Raises:
        ConfigError: anything that cannot work, before any process starts.
    """
    kinds = (options, *SECTIONS.values())
    args, by_balance = auto.taken(args) if "actor" in part.roles else (args, False)
    given = read(args, flags_of(*kinds), command, "env")
    help_wanted = [name for name in HELP.values() if given.pop(name, False)]
    more = options(**{name: given.pop(name) for name in flags_of(options) if name in given})

    def show(sections: dict[str, Any]) -> None:
        shown = {name: getattr(sections[section], name) for name, (section, _) in FIELDS.items()}
        show_help(
            f"{command} [ENV]", what, vars(more) | shown, kinds,
            () if "help_all" in help_wanted else first,
        )  # fmt: skip

    return settled(given, more, command, part, by_balance, show if help_wanted else None)


def settled(
    given: dict[str, Any],
    more: Options,
    command: str = "train",
    part: Part = PARTS["all"],
    by_balance: bool = False,
    show: Callable[[dict[str, Any]], None] | None = None,
) -> Resolved:
    """The same, from values by name in place of words; `given` is used up.

    by_balance: whether actors are as a balance found. show: takes all settings by section, instead
    of a check whether they fit together.
    """
    either = given.get("resume") == AUTO
    resume = _what_goes_on(given, part)
    if resume and resume != AUTO and not (part.learns or part.holds_replay):
        raise ConfigError(
            f"`zapex {command}` has nothing to resume, and takes only --resume {AUTO}: --resume "
            "RUN is the learner's, and the replay's"
        )
    if given.get("save_replay", "never") != "never" and not part.holds_replay:
        raise ConfigError(
            f"--save-replay is for the host with the memory: `zapex {command}` has none to save"
        )
    path = _settings_file(more.config, resume, either)
    values = read_settings(path) if path else {}
    check_trust(path, values, given, more.trust)

    from zapex.checkpoints import network
    from zapex.config import presets
    from zapex.envs import environments

    spec = environments.check(
        given.get("env", values.get("env", EnvConfig.env)),
        given.get("env_kwargs", values.get("env_kwargs", {})),
        given.get("wrapper", values.get("wrapper", [])),
    )
    if more.total_timesteps:
        if "max_frames" in given:
            raise ConfigError("--total-timesteps and --max-frames set one limit: give one of them")
        given["max_frames"] = more.total_timesteps * spec.frames_per_step
    machine = _machine(part, values | given, ask=show is None)
    sections, chosen = _choose(spec, machine, part, values, f"from {path}", given)
    if by_balance:
        asked = {*values, *given} - {"actors"}
        sections = auto.balanced(sections, chosen, asked, spec, machine)
    if show is not None:
        show(sections)
    config = Config(**sections)
    network.check(spec, config.learner, part.learns)
    if part.holds_replay:
        schema = spec.schema(config.replay.n_step, config.replay.gamma)
        presets.check_memory(config, schema, machine)
    return Resolved(config, spec, chosen, more, machine)


def _machine(part: Part, asked: dict[str, Any], ask: bool) -> "Machine":
    """This machine, without GPUs where no role uses one. ask: torch, which takes seconds."""
    from zapex.machine import gpu
    from zapex.machine.resources import Machine

    machine = Machine.look(os.environ.get("CUDA_VISIBLE_DEVICES"))
    learns_there = part.learns and asked.get("device") != "cpu"
    acting = asked.get("inference")
    central = acting == "central" and asked.get("inference_device") != "cpu"
    acts_there = "actor" in part.roles and (acting == "gpu" or central)
    if not (learns_there or acts_there):
        return replace(machine, gpus=0)
    return replace(machine, gpu=gpu.look()) if machine.gpus and ask else machine


def _choose(
    spec: "EnvironmentSpec",
    machine: "Machine",
    part: Part,
    values: dict[str, Any],
    source: str,
    given: dict[str, Any],
) -> tuple[dict[str, Any], "dict[str, Choice]"]:
    """All settings by section, and each that is not a default with its reason.

    values: of a file, which is the `source`. given: by flags.
    """
    from zapex.config import presets

    preset = given.pop("preset", values.pop("preset", "auto"))
    sections = merged(vars(Config()), {"preset": preset})  # a misspelt one is reported here
    task = presets.Task(spec.schema(ReplayConfig.n_step, ReplayConfig.gamma), spec.atari)
    chosen = presets.choose(preset, task, machine, part.name)
    sections = merged(sections, {name: value for name, (value, _) in chosen.items()})
    changed: dict[str, Choice] = {}
    for more, reason in ((values, source), (given, "you gave it")):
        before, sections = sections, merged(sections, more)
        changed = _changes(before, sections, reason)
        chosen |= changed
    half_s = 30 * sections["run"].max_minutes
    asked = "eval_period_s" in values.keys() | given.keys()
    if not asked and 0 < half_s < sections["evaluator"].eval_period_s:
        chosen["eval_period_s"] = presets.Choice(half_s, "half of --max-minutes: one in any run")
        sections = merged(sections, {"eval_period_s": half_s})
    if given.get("resume", AUTO) != AUTO:
        _check_resumable(changed)
        sections = merged(sections, {"run_dir": given["resume"]})
    return sections, chosen


def _what_goes_on(given: dict[str, Any], part: Part) -> str:
    """The run to resume, "" or AUTO: then nothing can go on, and the run is started."""
    resume = str(given.get("resume", ""))
    if resume != AUTO:
        return resume
    if not given.get("run_dir"):
        raise ConfigError(f"--resume {AUTO} needs --run-dir: the run that goes on, or is started")
    run_dir = Path(given["run_dir"])
    if (run_dir / "config.toml").is_file() and _has_more(run_dir, part):
        given["resume"] = given.pop("run_dir")
    return str(given["resume"])


def _has_more(run_dir: Path, part: Part) -> bool:
    """Whether this part of a run has something to go on with: a checkpoint, or saved memory."""
    from zapex.checkpoints import file as checkpoint
    from zapex.run import keeping

    if part.learns:
        return checkpoint.latest(run_dir) is not None
    return part.holds_replay and keeping.is_saved(run_dir)


def _settings_file(config: str, resume: str, either: bool) -> str:
    """Where settings come from besides flags and preset; "": nowhere. either: --resume auto."""
    if resume in ("", AUTO):
        return config
    if config and not either:
        raise ConfigError("--resume brings its own settings: leave --config out")
    return str(run_directory(resume) / "config.toml")


def _check_resumable(changed: "dict[str, Choice]") -> None:
    """Raise ConfigError if a resumed run would need another network or another directory."""
    for name in ("env", "env_kwargs", "wrapper", *NETWORK_FIELDS, "run_dir"):
        if name in changed:
            raise ConfigError(
                f"{flag_of(name)} cannot change in a run that goes on, got "
                f"{changed[name].value!r}: leave it out, or start a new run"
            )


def _changes(before: dict[str, Any], after: dict[str, Any], reason: str) -> "dict[str, Choice]":
    """Settings that differ, with one reason for all."""
    from zapex.config.presets import Choice

    return {
        name: Choice(getattr(after[section], name), reason)
        for name, (section, _) in FIELDS.items()
        if getattr(after[section], name) != getattr(before[section], name)
    }


def findings(run: Resolved, part: Part = PARTS["all"]) -> "list[Finding]":
    """What the machine has for its part of this run and what it lacks."""
    from zapex.config.presets import replay_bytes
    from zapex.run import preflight

    config = run.config
    actor, acting = config.actor, part.acting(config.actor.inference)
    on_gpu = actor.inference == "gpu" or (
        actor.inference == "central" and actor.inference_device == "cuda"
    )
    schema = run.spec.schema(config.replay.n_step, config.replay.gamma)
    return preflight.check(
        replay_bytes(schema, config) if part.holds_replay else 1,
        processes=1 if config.run.inline else acting.processes(config.actor.actors),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        huge_pages=config.replay.huge_pages and part.holds_replay,
        cuda=(part.learns and config.learner.device == "cuda")
        or ("actor" in part.roles and on_gpu),
        gpu=run.machine.gpu,
        without_torch=actor.actors if "inference" in acting.roles and not config.run.inline else 0,
    )


def prepared(run: Resolved, part: Part = PARTS["all"]) -> Config:
    """The settings with a run directory, once this machine has what its part needs."""
    from zapex.config import places
    from zapex.config.presets import explain
    from zapex.run import directory, preflight
    from zapex.watch import visdom
    from zapex.watch.terminal import print_table

    config = run.config
    if config.run.resume == AUTO:
        # What a former start has left there can go on with nothing.
        moved = directory.set_aside(Path(config.run.run_dir))
        if moved is not None:
            print(f"{config.run.run_dir} has nothing to resume from: it is {moved} now", flush=True)
        config = config.replace(resume="")
        _check_writable(Path(config.run.run_dir))
    elif config.run.resume:
        _check_can_go_on(Path(config.run.resume), run, part)
    else:
        new = _new_run_directory(config, "" if part.learns else part.name)
        config = config.replace(run_dir=str(new))
    if part.learns and config.run.track and find_spec("wandb") is None:
        raise ConfigError('--track needs wandb: pip install "zapex[wandb]"')
    if part.learns and config.run.visdom:
        visdom.check(config.run.visdom)
    preflight.demand(findings(run, part))
    found = run.machine.gpu
    if found is not None and found.problem:
        text = f"WARNING: the learner uses the CPU. {found}; to mend it: {found.mend}"
        print(text, file=sys.stderr, flush=True)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no role may try it
    own = {name: choice for name, choice in run.chosen.items() if _concerns(part, name)}
    image = run.spec.observation_dtype == "uint8"
    where = places.describe(config, run.machine, part.roles, image)
    print_table("\n".join([run.spec.describe, *run.spec.notes, explain(own), *where]))
    return config


def _concerns(part: Part, name: str) -> bool:
    """Whether a role of this part uses the setting; its host prints no others."""
    section, _ = FIELDS[name]
    if part.holds_replay and (section == "replay" or name == "actors"):
        return True  # the replay's host numbers the actors of all hosts
    return section in {"env", "run", *part.roles}


def run_directory(text: str) -> Path:
    """The directory of a run that exists."""
    path = Path(text)
    if not (path / "config.toml").is_file():
        runs = [p.parent.name for p in path.parent.glob("*/config.toml")]
        raise ConfigError(
            f"{text} is not a run: it has no config.toml{did_you_mean(path.name, runs)}"
        )
    return path


def _new_run_directory(config: Config, part: str) -> Path:
    """The directory of a new run, or of a part of one; refuses one that exists."""
    env, run = config.env.env.replace("/", "-"), config.run
    now = time.strftime("%Y%m%d-%H%M%S")
    path = Path(run.run_dir or f"runs/{env}__{run.exp}__{run.seed}__{now}{part and '__' + part}")
    if path.exists():
        raise ConfigError(
            f"--run-dir must be new, and {path} exists: choose another, or go on with "
            f"`zapex train --resume {path}`"
        )
    _check_writable(path)
    return path


def _check_writable(directory: Path) -> None:
    """Raise ConfigError if this new directory cannot be made; leaves nothing behind."""
    top = directory
    while not top.parent.exists():
        top = top.parent
    try:
        top.mkdir()
        top.rmdir()
    except OSError as error:
        raise ConfigError(
            f"--run-dir {directory} cannot be made: {error.strerror}; choose another"
        ) from None


def _check_can_go_on(run_dir: Path, run: Resolved, part: Part) -> None:
    """Raise CheckpointError if what is needed is missing, damaged, or of other settings."""
    from zapex.checkpoints import file as checkpoint
    from zapex.checkpoints import network

    if not _has_more(run_dir, part) and not part.learns:
        raise CheckpointError(
            f"{run_dir} has no saved memory to resume from (--save-replay stop saves it): start a "
            "new run"
        )
    if not part.learns:
        return
    path = checkpoint.latest(run_dir)
    if path is None:
        raise CheckpointError(f"{run_dir} has no checkpoint to resume from: start a new run")
    spec, learner = run.spec, run.config.learner
    loaded, facts = checkpoint.load(path), asdict(spec)
    made_for = loaded.state.get("schema", {})
    checkpoint.check_schema(loaded, {name: facts[name] for name in made_for if name in facts})
    checkpoint.check_tensors(loaded, network.state_shapes(spec, learner))
