"""The settings and options of a command, from defaults, preset, file or saved run, and flags."""

import contextlib
import itertools
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zapex.cli.flags import flags_of, read, read_settings, show_help
from zapex.config.fields import SettingsGroup, flag_of, setting
from zapex.config.settings import (
    FIELDS,
    NETWORK_FIELDS,
    SECTIONS,
    Config,
    EnvConfig,
    LearnerConfig,
    ReplayConfig,
)
from zapex.errors import CheckpointError, ConfigError
from zapex.host.parts import PARTS, Part

if TYPE_CHECKING:
    from zapex.config.layers import Choice, Layers
    from zapex.envs.environments import EnvironmentSpec
    from zapex.machine.resources import Machine
    from zapex.run.preflight import Finding

AUTO = "auto"
"""A value of --actors, and of --resume for a command that is started several times."""
_RUNS_CODE = ("env", "env_kwargs", "wrapper", "network", "loss")  # they may name modules


@dataclass(frozen=True)
class Options(SettingsGroup):
    """Options of the command."""

    config: str = ""
    """A TOML file of settings, as `zapex config` prints it; flags override it."""
    total_timesteps: int = setting(0, low=0)
    """Stop after this many steps of all environments, i.e. --max-frames in steps; 0: no limit."""
    trust: bool = False
    """Allow the modules that a saved run, or the file of --config, names."""
    more_minutes: float = setting(0.0, low=0.0)
    """With --resume: stop after this many minutes more, instead of --max-minutes."""
    more_frames: int = setting(0, low=0)
    """With --resume: stop after this many frames more, instead of --max-frames."""

    @property
    def runs_at_once(self) -> int:
        """How many runs with these settings share this machine."""
        return 1


@dataclass(frozen=True)
class Resolved:
    """What a command runs with.

    config: complete. chosen: every setting that is not a default, with its reason. more: the
    command's Options.
    """

    config: Config
    spec: "EnvironmentSpec"
    chosen: "Mapping[str, Choice]"
    more: Any
    machine: "Machine"


def resolve(
    args: list[str],
    command: str,
    what: str,
    options: type[Options] = Options,
    part: Part = PARTS["all"],
    unread: Collection[str] = (),
) -> Resolved:
    """The settings and options of a command line, checked against the environment and the memory.

    Args:
        args: the words after the command.
        command: the command, for messages.
        what: its help.
        options: what the command takes besides the settings.
        part: what this host runs; a part without the replay needs no memory for it.
        unread: settings and options that the command does not use, and has no flags for.

    Raises:
        ConfigError: anything that cannot work, before any process starts.
    """
    kinds = (options, *SECTIONS.values())
    known = {name: types for name, types in flags_of(*kinds).items() if name not in unread}
    given = read(args, known, command, ["env"])
    help_wanted = given.pop("help", False)
    more = options(**{name: given.pop(name) for name in flags_of(options) if name in given})
    layers, spec, machine = _layered(given, more, command, part, not help_wanted)
    if help_wanted:
        values = vars(more) | {name: layers[name] for name in FIELDS}
        groups = {
            (kind.__doc__ or "").partition(".")[0]: [
                name
                for name in flags_of(kind)
                if name in known and (name not in FIELDS or _concerns(part, name))
            ]
            for kind in kinds
        }
        shown = {heading: names for heading, names in groups.items() if names}
        show_help(f"{command} [ENV]", what, values, shown, kinds)
    return _checked(layers, spec, machine, more, part)


def settled(given: dict[str, Any], more: Options) -> Resolved:
    """As `resolve` for `zapex train`, from values by name; `given` is used up."""
    part = PARTS["all"]
    return _checked(*_layered(given, more, "train", part, True), more, part)


def _layered(
    given: dict[str, Any], more: Options, command: str, part: Part, ask_torch: bool
) -> "tuple[Layers, EnvironmentSpec, Machine]":
    """The settings, layer over layer: defaults, preset, file or saved run, flags.

    Three rules follow, for settings that neither file nor flags give: what a balance found (with
    `--actors auto`), an evaluation in a short run, and the directory of a resumed run.
    """
    if given.get("save_replay", "never") != "never" and not part.holds_replay:
        raise ConfigError(
            f"--save-replay is for the host with the replay, and `zapex {command}` has none to save"
        )
    named = given.get("resume", "") not in ("", AUTO)
    balanced = given.get("actors") == AUTO and "actor" in part.roles
    if balanced:
        del given["actors"]
    path = _settings_file(given, more.config, command, part)
    values = read_settings(path) if path else {}
    check_trust(path, values, given, more.trust)

    from zapex.config import presets
    from zapex.config.layers import Layers
    from zapex.envs import environments

    asked = values | given
    spec = environments.check(
        asked.get("env", EnvConfig.env), asked.get("env_kwargs", {}), asked.get("wrapper", [])
    )
    if more.total_timesteps:
        if "max_frames" in given:
            raise ConfigError("--total-timesteps and --max-frames set one limit: give one of them")
        given["max_frames"] = more.total_timesteps * spec.frames_per_step
    machine = _machine(part, asked, ask_torch).share(more.runs_at_once)
    reason = "you gave it" if "preset" in given else f"from {path}"
    preset = given.pop("preset", values.pop("preset", "auto"))
    task = presets.Task(
        spec.schema(ReplayConfig.n_step, ReplayConfig.gamma),
        spec.atari,
        nature=asked.get("network", LearnerConfig.network) == "nature",
        any_loss="loss" not in asked,
    )
    layers = Layers(presets.choose(preset, task, machine, part.name, reason))
    layers.put(values, f"from {path}")
    if named and part.learns:
        _put_limits(layers, given, more)
    elif more.more_minutes or more.more_frames:
        raise ConfigError("--more-minutes and --more-frames are for the learner's --resume RUN")
    changed = layers.put(given, "you gave it")
    if balanced:
        _put_balance(layers, {*values, *given} - {"actors"}, spec, machine)
    half_s = 30 * layers["max_minutes"]
    if "eval_period_s" not in asked and 0 < half_s < layers["eval_period_s"]:
        layers.put({"eval_period_s": half_s}, "half of --max-minutes, so that any run has one")
    if given.get("resume", "") not in ("", AUTO):
        for name in ("env", "env_kwargs", "wrapper", *NETWORK_FIELDS, "run_dir"):
            if name in changed:
                raise ConfigError(
                    f"{flag_of(name)} cannot change in a resumed run, got {layers[name]!r}: leave "
                    "it out, or start a new run"
                )
        layers.put({"run_dir": given["resume"]}, "the resumed run's")
    return layers, spec, machine


def _put_limits(layers: "Layers", given: dict[str, Any], more: Options) -> None:
    """The limits of a resumed run, into `given`. Raises ConfigError if nothing is left of one."""
    from zapex.run import directory

    base = directory.counters(Path(given["resume"]))
    for limit, added, unit, done in (
        ("max_minutes", more.more_minutes, "minutes", base.get("wall_s", 0.0) / 60),
        ("max_frames", more.more_frames, "frames", base.get("frames", 0.0)),
    ):
        instead = flag_of(f"more_{unit}")
        if added and limit in given:
            raise ConfigError(f"{instead} and {flag_of(limit)} set one limit: give one of them")
        if added:
            given[limit] = done + added if unit == "minutes" else int(done) + added
        value = given.get(limit, layers[limit])
        if 0 < value <= done:
            raise ConfigError(
                f"{given['resume']} has had its {value:,.12g} {unit}: give {flag_of(limit)} above "
                f"{math.ceil(100 * done) / 100:,.12g}, or {instead}"
            )


def _checked(
    layers: "Layers", spec: "EnvironmentSpec", machine: "Machine", more: Options, part: Part
) -> Resolved:
    """The same, once its values fit together, and with the environment and the memory."""
    from zapex.config import presets
    from zapex.run import network

    config = layers.config()
    network.check(spec, config.learner, part.learns)
    if part.holds_replay:
        schema = spec.schema(config.replay.n_step, config.replay.gamma)
        presets.check_memory(config, schema, machine)
    return Resolved(config, spec, layers.chosen, more, machine)


def _settings_file(given: dict[str, Any], config: str, command: str, part: Part) -> str:
    """The file of settings below the flags: the resumed run's, or --config; "": none.

    `--resume auto` is replaced in `given` by the run, if there is something to resume.
    """
    resume = str(given.get("resume", ""))
    auto = resume == AUTO
    if auto:
        resume = str(given.get("run_dir", ""))
        if not resume:
            raise ConfigError(f"--resume {AUTO} needs --run-dir: the run to resume, or to start")
        if not ((Path(resume) / "config.toml").is_file() and _has_saved(Path(resume), part)):
            return config
        given["resume"] = given.pop("run_dir")
    if not resume:
        return config
    if not (part.learns or part.holds_replay):
        raise ConfigError(
            f"`zapex {command}` has nothing to resume and takes only --resume {AUTO}: --resume RUN "
            "is for the learner and the replay"
        )
    if config and not auto:
        raise ConfigError("--resume brings its own settings: leave --config out")
    from zapex.watch.runs import find

    given["resume"] = str(find(resume))
    return str(Path(given["resume"]) / "config.toml")


def _has_saved(run_dir: Path, part: Part) -> bool:
    """Whether this part of a run can be resumed: from a checkpoint, or a saved replay."""
    from zapex.run import checkpoints, keeping

    if part.learns:
        return checkpoints.latest(run_dir) is not None
    return part.holds_replay and keeping.is_saved(run_dir)


def check_trust(
    path: str, values: Mapping[str, Any], given: Mapping[str, Any], trusted: bool
) -> None:
    """Ask before a module is imported that only a file of settings names.

    Args:
        path: the file, for the message.
        values: its settings.
        given: what the command line sets, which is trusted.
        trusted: whether the user trusts the file.

    Raises:
        ConfigError: the user does not trust it.
    """
    named = _naming_modules({n: value for n, value in values.items() if n not in given})
    modules = [text for one in named if not _used_here(one).exists() for text in _modules(one)]
    if trusted or not modules:
        return
    what = f"{path} names {', '.join(map(repr, modules))}, code on this machine that would be run"
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    if terminal and input(f"{what}. Run it? [y/N] ").strip().lower() in ("y", "yes"):
        return
    raise ConfigError(
        f"{what}: check it first. If you trust it, give --trust, or name it with --env"
    )


def _naming_modules(values: Mapping[str, Any]) -> list[Any]:
    """The settings that name modules; an environment with its arguments is one."""
    played = [values.get("env", ""), values.get("env_kwargs", {})]
    others = [values[name] for name in ("wrapper", "network", "loss") if name in values]
    return [one for one in (played, *others) if any(_modules(one))]


def _modules(value: Any) -> Iterator[str]:
    """All texts in a value of a settings file that may name a module."""
    if isinstance(value, str):
        yield from [value] if ":" in value else ()
    elif isinstance(value, (list, dict)):
        for part in [*value, *(value.values() if isinstance(value, dict) else ())]:
            yield from _modules(part)


def _used_here(named: Any) -> Path:
    """A file that exists if a run started in this directory has used a setting with modules."""
    key = json.dumps([os.getcwd(), named], sort_keys=True)
    return state_directory() / "modules" / sha256(key.encode()).hexdigest()


def _remember(config: Config) -> None:
    """Ask no more whether to trust the modules of this run, in this directory."""
    values = {name: getattr(getattr(config, FIELDS[name][0]), name) for name in _RUNS_CODE}
    with contextlib.suppress(OSError):  # then it asks
        for named in _naming_modules(values):
            _used_here(named).parent.mkdir(parents=True, exist_ok=True)
            _used_here(named).touch()


def state_directory() -> Path:
    """Where zapex remembers what this user has run and launched."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "zapex"


def cache_directory() -> Path:
    """Where results of `zapex balance` on this machine are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _put_balance(
    layers: "Layers", asked: Collection[str], spec: "EnvironmentSpec", machine: "Machine"
) -> None:
    """`--actors auto`: the actors that `zapex balance` found here; else the preset's."""
    from zapex.config.layers import Choice
    from zapex.run import balance

    config = layers.config()
    report = balance.kept(balance.kept_at(cache_directory(), config, spec, machine))
    if report is None:
        measure = shlex.join(["zapex", "balance", config.env.env])
        reason = f"the preset's; `{measure}` has not run here yet"
        layers.chosen["actors"] = Choice(config.actor.actors, reason)
        return
    found = {
        name: report["advice"][name]
        for name in ("actors", "envs_per_actor", "inference")
        if name not in asked
    }
    reason = f"`zapex balance{' --quick' if report['quick'] else ''}`, {report['time'][:10]}"
    layers.put(found, reason)
    layers.chosen["actors"] = Choice(layers["actors"], reason)


def _machine(part: Part, asked: Mapping[str, Any], ask_torch: bool) -> "Machine":
    """This machine; without GPUs if no role would use one. ask_torch: takes seconds."""
    from zapex.machine import gpu
    from zapex.machine.resources import Machine

    machine = Machine.look(os.environ.get("CUDA_VISIBLE_DEVICES"))
    learns = part.learns and asked.get("device") != "cpu"
    acting = asked.get("inference")
    central = acting == "central" and asked.get("inference_device") != "cpu"
    if not (learns or ("actor" in part.roles and (acting == "gpu" or central))):
        return replace(machine, gpus=0)
    return replace(machine, gpu=gpu.look()) if machine.gpus and ask_torch else machine


def findings(run: Resolved, part: Part = PARTS["all"]) -> "list[Finding]":
    """What this machine has and lacks for its part of this run."""
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
    """The settings with a run directory, once this machine has what its part needs.

    Prints where each role computes, and where each setting comes from.

    Raises:
        ConfigError, CheckpointError: the run cannot start.
    """
    from zapex.run import directory
    from zapex.watch.terminal import print_table

    config = run.config
    if config.run.resume == AUTO:
        moved = directory.set_aside(Path(config.run.run_dir))
        if moved is not None and not config.run.quiet:
            print(f"{config.run.run_dir} has nothing to resume from: moved to {moved}", flush=True)
        config = config.replace(resume="")
        _check_writable(Path(config.run.run_dir))
    elif config.run.resume:
        _check_resumable(Path(config.run.resume), run, part)
    else:
        new = new_run_directory(config, "" if part.learns else part.name)
        config = config.replace(run_dir=str(new))
    demand(run, part)
    if not config.run.quiet:
        print_table(described(run, part))
    return config


def demand(run: Resolved, part: Part = PARTS["all"]) -> None:
    """Raise ConfigError if this machine lacks what a part of the run needs."""
    from zapex.run import preflight
    from zapex.watch import recorders

    config = run.config
    if part.learns and config.run.track and find_spec("wandb") is None:
        raise ConfigError('--track needs wandb: pip install "zapex[wandb]"')
    if part.learns and config.run.visdom:
        recorders.check_visdom(config.run.visdom)
    preflight.demand(findings(run, part))
    _remember(config)
    gpu = run.machine.gpu
    if gpu is not None and gpu.problem:
        text = f"WARNING: the learner uses the CPU. {gpu}; to fix it: {gpu.hint}"
        print(text, file=sys.stderr, flush=True)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no role may try it


def described(run: Resolved, part: Part = PARTS["all"]) -> str:
    """What is played, where each setting comes from, and where each role computes."""
    from zapex.config import places
    from zapex.config.layers import explain

    own = {name: choice for name, choice in run.chosen.items() if _concerns(part, name)}
    image = run.spec.observation_dtype == "uint8"
    where = places.describe(run.config, run.machine, part.roles, image)
    return "\n".join([run.spec.describe, *run.spec.notes, explain(own), *where])


def _concerns(part: Part, name: str) -> bool:
    """Whether a role of this part uses the setting, so that its host prints it."""
    section, _ = FIELDS[name]
    if part.holds_replay and (section == "replay" or name == "actors"):
        return True  # the replay's host numbers the actors of all hosts
    return section in {"env", "run", *part.roles}


def new_run_directory(config: Config, part: str) -> Path:
    """The directory of a new run, or of a part of one. Raises ConfigError if it exists."""
    env, run = re.sub("[/:]", "-", config.env.env), config.run
    # Runs of a sweep may start within the same second, on any host that sees the directory.
    now = time.strftime("%Y%m%d-%H%M%S") + f"-{time.time_ns() // 10**6 % 1000:03d}"
    name = f"runs/{env}__{run.exp}__{run.seed}__{now}{part and '__' + part}"
    names = (Path(name + (f"-{n}" if n else "")) for n in itertools.count())
    path = Path(run.run_dir) if run.run_dir else next(one for one in names if not one.exists())
    if path.exists():
        raise ConfigError(
            f"--run-dir must be new, and {path} exists: choose another, or continue with "
            f"`{shlex.join(['zapex', 'train', '--resume', str(path)])}`"
        )
    _check_writable(path)
    return path


def _check_writable(directory: Path) -> None:
    """Raise ConfigError if this new directory cannot be created; leaves nothing behind."""
    top = directory
    while not top.parent.exists():
        top = top.parent
    try:
        top.mkdir()
        top.rmdir()
    except OSError as error:
        raise ConfigError(
            f"--run-dir {directory} cannot be created: {error.strerror}; choose another"
        ) from None


def _check_resumable(run_dir: Path, run: Resolved, part: Part) -> None:
    """Raise CheckpointError if what the run needs is missing, damaged or of other settings."""
    from zapex.run import checkpoints, network

    if not _has_saved(run_dir, part) and not part.learns:
        raise CheckpointError(
            f"{run_dir} has no saved replay to resume from (--save-replay stop saves it): start a "
            "new run"
        )
    if not part.learns:
        return
    path = checkpoints.latest(run_dir)
    if path is None:
        raise CheckpointError(f"{run_dir} has no checkpoint to resume from: start a new run")
    spec, learner = run.spec, run.config.learner
    loaded, facts = checkpoints.load(path), asdict(spec)
    made_for = loaded.state.get("schema", {})
    checkpoints.check_schema(loaded, {name: facts[name] for name in made_for if name in facts})
    checkpoints.check_tensors(loaded, network.state_shapes(spec, learner))
