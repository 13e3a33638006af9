"""The command line: its commands, what they run with, and how their failures are told.

The only reader of `sys.argv` and `os.environ`. Nothing heavy is imported before it is needed, so
that `zapex --help` is quick and a mistake is told before any process starts.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zapex
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
from zapex.errors import CheckpointError, ConfigError, ZapexError
from zapex.flags import key_values, nearest, parse, read_settings, value_of, values_of

if TYPE_CHECKING:
    from zapex.environments import EnvironmentSpec
    from zapex.preflight import Finding
    from zapex.presets import Choice


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 1 for a failure, 2 for bad input."""
    args = list(sys.argv[1:] if argv is None else argv)
    # An installed script has no working directory on its path, and `module:Id` is found there.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return _dispatch(args)
    except ZapexError as error:
        print("zapex: " + " ".join(str(error).split()), file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, CheckpointError)) else 1
    except BrokenPipeError:
        # Whoever read us has gone; Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("zapex: interrupted", file=sys.stderr)
        return 130


def _dispatch(args: list[str]) -> int:
    name = args[0] if args else "--help"
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    if name == "--version":
        print(f"zapex {zapex.__version__}")
        return 0
    if name not in _COMMANDS:
        raise ConfigError(
            f"there is no command {name!r}{nearest(name, _COMMANDS)}; `zapex --help` lists them"
        )
    return _COMMANDS[name][0](args[1:])


def _overview() -> str:
    commands = "\n".join(f"  zapex {name:<8} {text}" for name, (_, text) in _COMMANDS.items())
    return (
        f"zapex {zapex.__version__}: distributed prioritized experience replay\n\n{commands}\n"
        "  zapex --version\n\n`zapex COMMAND --help` tells more."
    )


@dataclass(frozen=True)
class _Options:
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
class _Resolved:
    """config: complete. chosen: every setting that is not a default, with its reason."""

    config: Config
    spec: "EnvironmentSpec"
    chosen: "dict[str, Choice]"


def _resolve(args: list[str], command: str, description: str) -> _Resolved:
    """Flags over file over preset over defaults; checked against environment and memory.

    Raises:
        ConfigError: anything that cannot work, before any process starts.
    """
    defaults = vars(Config())
    if {"-h", "--help"} & set(args):
        parse(_Options, _Options("", **defaults), args, command, description)
    from zapex import environments, presets
    from zapex.machine import Machine

    path = value_of("config", args) or ""
    resume = value_of("resume", args) or ""
    if resume:
        if path:
            raise ConfigError("--resume brings its own settings: leave --config out")
        path = str(_run_directory(resume) / "config.toml")
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
    options = parse(_Options, _Options(path, **base), args, command, description)
    sections = merged(
        {name: getattr(options, name) for name in SECTIONS}, {"preset": chosen["preset"].value}
    )
    changed = _changes(base, sections, "you gave it")
    if resume:
        _check_resumable(changed)
        sections = merged(sections, {"run_dir": resume})
    config = Config(**sections)
    chosen |= changed
    presets.check_memory(config, spec.schema(config.replay.n_step, config.replay.gamma), machine)
    return _Resolved(config, spec, chosen)


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


def _run_directory(text: str) -> Path:
    """The directory of a run that exists."""
    path = Path(text)
    if not (path / "config.toml").is_file():
        runs = [p.parent.name for p in path.parent.glob("*/config.toml")]
        raise ConfigError(f"{text} is no run: it has no config.toml{nearest(path.name, runs)}")
    return path


# --- the commands --------------------------------------------------------------------------------


def _train(args: list[str]) -> int:
    run = _resolve(args, "train", "Train on one host until stopped, or until a limit is reached.")
    config = run.config
    if config.run.resume:
        _check_checkpoint(Path(config.run.resume), run.spec)
    else:
        config = config.replace(run_dir=str(_new_run_directory(config)))
    from zapex import launch, preflight
    from zapex.presets import explain, outlook

    preflight.demand(_findings(run))
    print(run.spec.describe, *run.spec.notes, sep="\n")
    print(explain(run.chosen))
    print(_until(config, run.spec))
    preset = str(run.chosen["preset"].value)
    print(outlook(preset, run.spec.env_id, config.run.max_minutes, run.spec.atari), flush=True)
    return launch.train(config, run.spec)


def _until(config: Config, spec: "EnvironmentSpec") -> str:
    """When the run ends by itself, and what its returns compare with."""
    limits = config.run
    ends = []
    if limits.max_minutes:
        ends.append(f"{limits.max_minutes:g} minutes are over")
    if limits.max_frames:
        ends.append(f"{limits.max_frames:,} frames are played")
    if limits.stop_at_return is not None:
        ends.append(f"an evaluation's mean return reaches {limits.stop_at_return:g}")
    text = f"Runs until {' or '.join(ends or ['stopped'])}; Ctrl-C ends it and saves."
    if spec.references:
        known = ", ".join(f"{name} {value:g}" for name, value in spec.references.items())
        text += f" Returns to compare with: {known}."
    return text


def _check_checkpoint(run_dir: Path, spec: "EnvironmentSpec") -> None:
    """Raises CheckpointError for one that is missing, damaged or of another environment."""
    from zapex import checkpoint

    path = checkpoint.latest(run_dir)
    if path is None:
        raise CheckpointError(f"{run_dir} has no checkpoint to go on from: start a new run")
    loaded, facts = checkpoint.load(path), asdict(spec)
    made_for = loaded.state.get("schema", {})
    checkpoint.check_schema(loaded, {name: facts[name] for name in made_for if name in facts})


def _new_run_directory(config: Config) -> Path:
    """Where a new run is written; refuses a place that is taken."""
    env, run = config.env.env.replace("/", "-"), config.run
    now = time.strftime("%Y%m%d-%H%M%S")
    path = Path(run.run_dir or f"runs/{env}__{run.exp}__{run.seed}__{now}")
    if path.exists():
        raise ConfigError(
            f"--run-dir must be new, and {path} exists: choose another, or go on with "
            f"`zapex train --resume {path}`"
        )
    return path


@dataclass(frozen=True)
class _EvalOptions:
    """What to evaluate, and what to leave behind."""

    episodes: int = 10
    """Games to play."""
    checkpoint: str = "best"
    """best, latest, the name of a checkpoint of the run, or a file."""
    video: str = ""
    """Film the games in this mp4; they are then played one after the other."""
    json: str = ""
    """Write the returns to this file."""
    seed: int = 1
    """Of the games."""
    epsilon: float | None = None
    """Share of random actions; None: the run's own."""


def _eval(args: list[str]) -> int:
    if not args or args[0].startswith("-"):
        if not {"-h", "--help"} & set(args):
            raise ConfigError("`zapex eval` needs a run's directory first: zapex eval RUN")
        args = ["RUN", *args]
    what = "Play whole games with the network that a run has saved, and print the mean return."
    options = parse(_EvalOptions, _EvalOptions(), args[1:], "eval RUN", what)
    if not Path(options.json).parent.is_dir():
        raise ConfigError(f"--json {options.json} lies in a directory that does not exist")
    run_dir = _run_directory(args[0])
    config = Config().replace(**read_settings(str(run_dir / "config.toml")))
    epsilon = config.evaluator.eval_epsilon if options.epsilon is None else options.epsilon
    from zapex import environments, saved_policy
    from zapex.roles import evaluator

    spec = environments.check(config.env.env, config.env.env_kwargs)
    path = saved_policy.find(run_dir, options.checkpoint)
    policy = saved_policy.load(path, spec, config.learner)
    print(spec.describe, *spec.notes, f"checkpoint {path}", sep="\n", flush=True)
    result = evaluator.evaluate(
        policy.q_values,
        spec,
        options.episodes,
        seed=options.seed,
        epsilon=epsilon,
        noop_max=config.evaluator.eval_noop_max,
        video=options.video or None,
    )
    if options.json:
        facts = {"env": spec.env_id, "checkpoint": str(path), "seed": options.seed}
        text = json.dumps({**facts, "epsilon": epsilon, **result.describe()}, indent=2)
        Path(options.json).write_text(text + "\n")
    if options.video:
        print(f"video {options.video}")
    print(f"mean {result.mean:g}  (std {result.std:.3g}, {len(result.returns)} episodes)")
    return 0


def _doctor(args: list[str]) -> int:
    run = _resolve(args, "doctor", "Say whether this machine has what `zapex train` would need.")
    from zapex import preflight

    return preflight.doctor(_findings(run))


def _findings(run: _Resolved) -> "list[Finding]":
    """What the machine has for this run and what it lacks."""
    from zapex import preflight
    from zapex.presets import replay_bytes

    config = run.config
    schema = run.spec.schema(config.replay.n_step, config.replay.gamma)
    return preflight.check(
        replay_bytes(schema, config),
        processes=1 if config.run.inline else config.actor.actors + 4,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _config(args: list[str]) -> int:
    run = _resolve(args, "config", "Print the settings that `zapex train` would run with, as TOML.")
    from zapex.presets import explain

    print(*(f"#{line}" for line in explain(run.chosen).splitlines()), sep="\n")
    print(run.config.to_toml(), end="")
    return 0


def _bench(args: list[str]) -> int:
    """Benchmarks compare with other libraries and write results of this machine: they are part of
    the source tree, not of the wheel."""
    tree = Path(zapex.__file__).parent.parent
    names = sorted(p.stem.removeprefix("bench_") for p in tree.glob("benchmarks/bench_*.py"))
    if not names:
        raise ConfigError(
            "benchmarks come with the source tree, not with the wheel: clone the repository and "
            "run `make bench`"
        )
    if not args or args[0] in ("-h", "--help"):
        print("\n".join(f"zapex bench {name}" for name in names))
        return 0
    name = args[0].replace("-", "_")
    if name not in names:
        raise ConfigError(
            f"there is no benchmark {name!r}{nearest(name, names)}; there are {', '.join(names)}"
        )
    sys.path.insert(0, str(tree))
    sys.argv = [f"zapex bench {name}", *args[1:]]
    runpy.run_module(f"benchmarks.bench_{name}", run_name="__main__")
    return 0


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (_train, "train on this host"),
    "eval": (_eval, "play with the network that a run has saved: zapex eval RUN"),
    "doctor": (_doctor, "say whether this machine has what a run needs"),
    "config": (_config, "print the settings of a run as TOML, for --config"),
    "bench": (_bench, "measure this machine, from the source tree"),
}
"""Command -> (what runs it, what it is for)."""

if __name__ == "__main__":
    sys.exit(main())
