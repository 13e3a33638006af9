"""The command line: its commands, what they run with, and how their failures are told.

The only reader of `sys.argv` and `os.environ`. Nothing heavy is imported before it is needed, so
that `zapex --help` is quick and a mistake is told before any process starts.
"""

import contextlib
import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zapex
from zapex import cli_hosts
from zapex.config import Config
from zapex.errors import CheckpointError, ConfigError, ZapexError
from zapex.flags import nearest, parse, read_settings
from zapex.settings import (
    Resolved,
    check_checkpoint,
    new_run_directory,
    resolve,
    run_directory,
)

if TYPE_CHECKING:
    from zapex.environments import EnvironmentSpec
    from zapex.preflight import Finding


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 1 for a failure, 2 for bad input."""
    args = list(sys.argv[1:] if argv is None else argv)
    # An installed script has no working directory on its path, and `module:Id` is found there.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with _every_interrupt():
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


@contextlib.contextmanager
def _every_interrupt() -> Iterator[None]:
    """A Ctrl-C at any moment ends the command, and by a KeyboardInterrupt.

    Numba loads kernels through callbacks from C, and what is raised in one of those goes nowhere:
    it comes again a moment later. An extension that is being imported makes another error of it.
    """
    former_handler, former_hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    if former_handler is not signal.default_int_handler:
        yield  # whoever has called us decides what a Ctrl-C means
        return
    main_thread = threading.main_thread().ident or 0
    interrupted = False

    def handler(number: int, frame: Any) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def hook(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            again = threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            former_hook(lost)

    signal.signal(signal.SIGINT, handler)
    sys.unraisablehook = hook
    try:
        yield
    except Exception:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        sys.unraisablehook = former_hook
        signal.signal(signal.SIGINT, former_handler)


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


# --- the commands --------------------------------------------------------------------------------


def _train(args: list[str]) -> int:
    run = resolve(args, "train", "Train on one host until stopped, or until a limit is reached.")
    config = run.config
    if config.run.resume:
        check_checkpoint(Path(config.run.resume), run.spec)
    else:
        config = config.replace(run_dir=str(new_run_directory(config)))
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
    run_dir = run_directory(args[0])
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
    if args and args[0] in cli_hosts.PARTS:
        return cli_hosts.doctor(args[0], args[1:])
    what = (
        "Say whether this machine has what `zapex train` would need. `zapex doctor replay`, "
        "`zapex doctor actor` and `zapex doctor learner` do it for one host of several."
    )
    run = resolve(args, "doctor", what)
    from zapex import preflight

    return preflight.doctor(_findings(run))


def _findings(run: Resolved) -> "list[Finding]":
    """What the machine has for this run and what it lacks."""
    from zapex import preflight
    from zapex.presets import replay_bytes

    config = run.config
    schema = run.spec.schema(config.replay.n_step, config.replay.gamma)
    return preflight.check(
        replay_bytes(schema, config),
        processes=1 if config.run.inline else config.actor.actors + 4,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        huge_pages=config.replay.huge_pages,
    )


def _config(args: list[str]) -> int:
    run = resolve(args, "config", "Print the settings that `zapex train` would run with, as TOML.")
    from zapex.presets import explain

    print(*(f"#{line}" for line in explain(run.chosen).splitlines()), sep="\n")
    print(run.config.to_toml(), end="")
    return 0


def _demo(args: list[str]) -> int:
    from zapex import demo

    return demo.command(args)


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
    "replay": (cli_hosts.replay, "one run on many hosts: keep its experience, serve it"),
    "actor": (cli_hosts.actor, "one run on many hosts: play for it on this host"),
    "learner": (cli_hosts.learner, "one run on many hosts: learn, evaluate, end it"),
    "keygen": (cli_hosts.keygen, "make the keys of a run on many hosts: zapex keygen DIR"),
    "doctor": (_doctor, "say whether this machine has what a run needs, or one host of several"),
    "demo": (_demo, "watch a run that is hurt, or one on four hosts: zapex demo kill, cluster"),
    "config": (_config, "print the settings of a run as TOML, for --config"),
    "bench": (_bench, "measure this machine, from the source tree"),
}
"""Command -> (what runs it, what it is for)."""

if __name__ == "__main__":
    sys.exit(main())
