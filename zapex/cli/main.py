"""The command line: its commands, and how their failures are reported.

The only reader of `sys.argv` and `os.environ`. Nothing heavy is imported before it is needed, so
that `zapex --help` is quick and a mistake is reported before any process starts.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zapex
from zapex.cli import balance, comparing, completion, hosts, play, saved, seeds, simulate, watching
from zapex.cli import launch as launches
from zapex.cli.resolve import MACHINE, Resolved, findings, prepared, resolve
from zapex.config.settings import Config
from zapex.config.words import did_you_mean
from zapex.errors import CheckpointError, ConfigError, ZapexError
from zapex.machine.child import LostInCallbacks

if TYPE_CHECKING:
    from zapex.envs.environments import EnvironmentSpec
    from zapex.run.collector import Ending


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 1 for a failure, 2 for bad input."""
    args = list(sys.argv[1:] if argv is None else argv)
    # The path of an installed script lacks the working directory, where `module:Id` is found. It is
    # last: a file there, perhaps of a stored run, must not take the place of an installed module.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with _every_interrupt():
            code = _dispatch(args)
            sys.stdout.flush()
            return code
    except ZapexError as error:
        print("zapex: " + " ".join(str(error).split()), file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, CheckpointError)) else 1
    except OSError as error:
        broken = isinstance(error, BrokenPipeError)
        if not broken and (error.errno != errno.ENOSPC or error.filename):
            raise
        # Python would report it again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if broken:  # the reader of our output has gone
            return 1
        print("zapex: no space is left where the output is written", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        # An installation without its dependencies is enough for the library.
        package = (error.name or "zapex").partition(".")[0]
        if package == "zapex":
            raise
        print(f"zapex: this command needs {package}: pip install zapex", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("zapex: interrupted", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _every_interrupt() -> Iterator[None]:
    """Make a Ctrl-C at any moment end the command, by a KeyboardInterrupt.

    One that a callback from C has swallowed comes again a moment later. An extension that is being
    imported makes another error of it.
    """
    former_handler = signal.getsignal(signal.SIGINT)
    if former_handler is not signal.default_int_handler:
        yield  # the caller has decided what a Ctrl-C means
        return
    main_thread = threading.main_thread().ident or 0
    interrupted = False

    def handler(number: int, frame: Any) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def again() -> None:
        timer = threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT))
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGINT, handler)
    swallowed = LostInCallbacks(KeyboardInterrupt, again)
    try:
        yield
    except Exception:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        swallowed.close()
        signal.signal(signal.SIGINT, former_handler)


def _dispatch(args: list[str]) -> int:
    name = args[0] if args else "--help"
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name == "--version":
        print(f"zapex {zapex.__version__}")
        return 0
    if name not in COMMANDS:
        raise ConfigError(
            f"there is no command {name!r}{did_you_mean(name, COMMANDS)}; `zapex --help` lists them"
        )
    return COMMANDS[name][0](args[1:])


def _overview() -> str:
    commands = "\n".join(f"  zapex {name:<10} {text}" for name, (_, text) in COMMANDS.items())
    return (
        f"zapex {zapex.__version__}: distributed prioritized experience replay\n\n{commands}\n"
        "  zapex --version\n\n`zapex COMMAND --help` shows its flags."
    )


# --- the commands --------------------------------------------------------------------------------


def _train(args: list[str]) -> int:
    what = "Train on one host until stopped, or until a limit is reached."
    run = resolve(args, "train", what, seeds.TrainOptions)
    if run.more.seeds:
        return seeds.in_turn(run, args, _train_again)
    from zapex.run import train

    return train.train(_told(run), run.spec)


def _train_again(args: list[str]) -> "Ending":
    """One of several runs of this process."""
    from zapex.run import train
    from zapex.run.collector import Caller

    caller = Caller(plain=False)
    run = resolve(args, "train", "", seeds.TrainOptions)
    return train.ending_of(_told(run), run.spec, caller=caller)


def _told(run: Resolved) -> Config:
    """The settings of a run that can begin, once the user has been told what to expect."""
    config = prepared(run)
    from zapex.config.presets import outlook
    from zapex.watch.terminal import print_table

    preset = str(run.chosen["preset"].value)
    seen = outlook(preset, run.spec.env_id, config.run.max_minutes, run.spec.atari)
    print_table(f"{_until(config, run.spec)}\n{seen}")
    return config


def _until(config: Config, spec: "EnvironmentSpec") -> str:
    """When the run ends by itself, and returns to compare with."""
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


def _doctor(args: list[str]) -> int:
    if args and args[0] in hosts.WHAT:
        return hosts.doctor(args[0], args[1:])
    what = (
        "Say whether this machine has what `zapex train` would need. `zapex doctor replay`, "
        "`zapex doctor actor` and `zapex doctor learner` do it for one host of several."
    )
    run = resolve(args, "doctor", what, first=MACHINE)
    from zapex.run import preflight

    return preflight.doctor(findings(run))


def _config(args: list[str]) -> int:
    what = "Print the settings that `zapex train` would run with, as TOML."
    run = resolve(args, "config", what)
    from zapex.config.layers import explain

    print(*(f"#{line}" for line in explain(run.chosen).splitlines()), sep="\n")
    print(run.config.to_toml(), end="")
    return 0


def _demo(args: list[str]) -> int:
    if {"-h", "--help", "help"} & set(args):
        print("zapex demo: train CartPole to 475 of 500, then draw its learning curve")
        return 0
    return _train(["CartPole-v1", "--stop-at-return", "475", "--max-minutes", "5", *args])


def _bench(args: list[str]) -> int:
    """Benchmarks compare with other libraries and write results of this machine: they are part of
    the source tree, not of the wheel."""
    tree = Path(zapex.__file__).parent.parent
    scripts = {p.stem.removeprefix("bench_"): p for p in tree.glob("benchmarks/*/bench_*.py")}
    names = sorted(scripts)
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
        near = did_you_mean(name, names)
        raise ConfigError(f"there is no benchmark {name!r}{near}; there are {', '.join(names)}")
    sys.path.insert(0, str(tree))
    sys.argv = [f"zapex bench {name}", *args[1:]]
    # Imported, not run as __main__: its children must find its functions by name.
    module = import_module(".".join(scripts[name].relative_to(tree).with_suffix("").parts))
    return int(module.main())


_host = hosts.command
COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (_train, "train on this host"),
    "runs": (watching.runs, "list the runs of a directory with their numbers: zapex runs [DIR]"),
    "watch": (watching.watch, "the view of a run, from another terminal: zapex watch [RUN]"),
    "eval": (play.command, "evaluate a run's saved network: zapex eval RUN"),
    "export": (saved.command, "a run's network as ONNX: zapex export RUN --onnx FILE"),
    "plot": (comparing.plot, "scores and curves of runs over their seeds: zapex plot RUN ..."),
    "compare": (comparing.compare, "what the settings of runs differ in: zapex compare RUN RUN"),
    "replay": (partial(_host, "replay"), "one run on many hosts: keep and serve the experience"),
    "actor": (partial(_host, "actor"), "one run on many hosts: run actors on this host"),
    "learner": (partial(_host, "learner"), "one run on many hosts: train, evaluate, end the run"),
    "keygen": (hosts.keygen, "make the keys of a run on many hosts: zapex keygen DIR"),
    "balance": (balance.command, "measure actors and learner here: how many actors to use"),
    "simulate": (simulate.command, "model a run on many hosts: how fast, and what to buy"),
    "launch": (launches.launch, "one run on many hosts: have SLURM, Kubernetes or Ray place them"),
    "status": (launches.status, "what the hosts of a launched run do: zapex status [RUN]"),
    "logs": (launches.logs, "what they said: zapex logs ROLE [RUN]"),
    "stop": (launches.stop, "end a run, and save it: zapex stop [RUN]"),
    "doctor": (_doctor, "check whether this machine has what a run needs"),
    "demo": (_demo, "train CartPole, which takes about a minute"),
    "config": (_config, "print the settings of a run as TOML, for --config"),
    "bench": (_bench, "measure this machine (source tree only)"),
    "completion": (
        lambda args: completion.command(args, COMMANDS),
        "what makes a shell complete these words: zapex completion bash",
    ),
}
"""Command -> (its function, its purpose)."""

if __name__ == "__main__":
    sys.exit(main())
