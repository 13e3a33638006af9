"""The command line: its commands, and how errors are reported.

Nothing heavy is imported before it is needed, so that `zapex --help` is fast and a mistake is
reported before any process starts.
"""

import argparse
import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import zapex
from zapex.cli import balance, card, hosts, launch, play, runs, saved, train
from zapex.config.words import did_you_mean
from zapex.errors import CheckpointError, ConfigError, ZapexError
from zapex.machine.child import LostInCallbacks
from zapex.machine.reading import say

_SHELLS = ("bash", "zsh", "fish", "tcsh")
_FLAG = re.compile(r"^  --(\[no-\])?([a-z][a-z-]*)(?: (\S+))?", re.M)  # in a command's help


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 1 for a failure, 2 for bad input."""
    args = list(sys.argv[1:] if argv is None else argv)
    # An installed script's path lacks the working directory, where `module:Id` is found. It goes
    # last: a file there, perhaps part of someone's run, must not replace an installed module.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with _every_interrupt():
            code = _dispatch(args)
            sys.stdout.flush()
            return code
    except ZapexError as error:
        say("zapex: " + " ".join(str(error).split()), sys.stderr)
        return 2 if isinstance(error, (ConfigError, CheckpointError)) else 1
    except OSError as error:
        broken = isinstance(error, BrokenPipeError)
        if not broken and (error.errno != errno.ENOSPC or error.filename):
            raise
        # Python would report it again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if broken:  # nobody reads our output any more
            return 1
        print("zapex: no space is left where the output is written", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        # The library works without the other dependencies.
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
    """Make Ctrl-C end the command with a KeyboardInterrupt at any moment.

    If a callback from C swallows it, it is raised again a moment later. If an extension that is
    being imported turns it into another error, it is turned back.
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
        commands = "\n".join(f"  {name:<11} {purpose}" for name, (_, purpose) in COMMANDS.items())
        print(
            "Ape-X: distributed prioritized experience replay\n\n"
            f"Usage: zapex COMMAND [OPTIONS]\n\nCommands:\n{commands}\n\n"
            "Options:\n  --help      Show this help, or a command's\n  --version   Show the version"
        )
        return 0
    if name == "--version":
        print(f"zapex {zapex.__version__}")
        return 0
    if name not in COMMANDS:
        raise ConfigError(
            f"there is no command {name!r}{did_you_mean(name, COMMANDS)}; `zapex --help` lists them"
        )
    return COMMANDS[name][0](args[1:])


def bench(args: list[str]) -> int:
    """`zapex bench [NAME]`: benchmarks, which are part of the source tree and not of the wheel."""
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


def completion(args: list[str]) -> int:
    """`zapex completion SHELL`."""
    wanted = args[0] if len(args) == 1 else "none" if not args else " ".join(args)
    if wanted in ("-h", "--help", "help"):
        print(
            "Print a shell completion script.\n\n"
            f"Usage: zapex completion {'|'.join(_SHELLS)}\n\n"
            'For this shell: eval "$(zapex completion bash)"; for all, add this to ~/.bashrc'
        )
        return 0
    if wanted not in _SHELLS:
        raise ConfigError(
            f"`zapex completion` takes the name of a shell, {', '.join(_SHELLS)}; got {wanted}"
            f"{did_you_mean(wanted, _SHELLS)}"
        )
    import shtab

    print(shtab.complete(_parser(), wanted))
    return 0


@cache
def _parser() -> argparse.ArgumentParser:
    """The commands as an argparse parser, with the flags that their help shows."""
    import shtab

    top = argparse.ArgumentParser("zapex")
    top.add_argument("--version", action="store_true")
    below = top.add_subparsers()
    for name, (function, purpose) in COMMANDS.items():
        # shtab writes text in backquotes into the shell's script.
        one = below.add_parser(name, help=purpose.replace("`", ""))
        for either, flag, value in _FLAG.findall(help_of(function)):
            if value:
                choices = value.split("|") if "|" in value else None
                option = one.add_argument(f"--{flag}", choices=choices)
                if choices is None:
                    option.complete = shtab.FILE  # type: ignore[attr-defined]
            else:
                both = [f"--{flag}", *([f"--no-{flag}"] if either else [])]
                one.add_argument(*both, action="store_true")
        word = one.add_argument("word", nargs="*")
        word.complete = shtab.FILE  # type: ignore[attr-defined]
    return top


def help_of(function: Callable[[list[str]], int]) -> str:
    """What a command prints with --help."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        function(["--help"])
    return said.getvalue()


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (train.train, "Train on this host"),
    "runs": (runs.runs, "List runs"),
    "watch": (runs.watch, "Watch a run from another terminal"),
    "eval": (play.command, "Evaluate a run's saved network"),
    "export": (saved.command, "Export a run's network as ONNX, or its games to Minari"),
    "card": (card.command, "Write a folder that publishes a run, with a model card"),
    "plot": (runs.plot, "Compare scores and curves of runs over their seeds"),
    "compare": (runs.compare, "Show the settings in which runs differ"),
    "replay": (partial(hosts.command, "replay"), "Many hosts: keep and serve the experience"),
    "actor": (partial(hosts.command, "actor"), "Many hosts: run actors on this host"),
    "learner": (partial(hosts.command, "learner"), "Many hosts: train, evaluate and end the run"),
    "keygen": (hosts.keygen, "Many hosts: create the keys of a run"),
    "launch": (launch.launch, "Many hosts: launch a run on SLURM, Kubernetes or Ray"),
    "status": (launch.status, "Show the hosts of a launched run"),
    "logs": (launch.logs, "Show the logs of a launched run"),
    "stop": (launch.stop, "Stop a run; the learner saves first"),
    "balance": (balance.command, "Measure how many actors this machine's learner needs"),
    "doctor": (train.doctor, "Check whether this machine has what a run needs"),
    "demo": (train.demo, "Train CartPole, which takes about a minute"),
    "config": (train.config, "Print the settings of a run as TOML"),
    "bench": (bench, "Run a benchmark (source tree only)"),
    "completion": (completion, "Print a shell completion script"),
}
"""Command -> (its function, its purpose)."""

if __name__ == "__main__":
    sys.exit(main())
