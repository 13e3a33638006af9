"""`zapex completion bash|zsh|tcsh`: a script with which a shell completes commands and flags."""

import argparse
import contextlib
import io
import re
from collections.abc import Callable, Mapping

from zapex.config.words import did_you_mean
from zapex.errors import ConfigError

Commands = Mapping[str, tuple[Callable[[list[str]], int], str]]
SHELLS = ("bash", "zsh", "tcsh")
_FLAG = re.compile(r"^  (--[a-z][a-z-]*)(?: (\S+))?", re.M)


def command(args: list[str], commands: Commands) -> int:
    """Print the script for the shell that is named."""
    wanted = args[0] if len(args) == 1 else "none" if not args else " ".join(args)
    if wanted in ("-h", "--help", "help"):
        print("zapex completion bash|zsh|tcsh: print what makes the shell complete zapex's words.")
        print(
            'For this shell: eval "$(zapex completion bash)"; for all, add that line to ~/.bashrc'
        )
        return 0
    if wanted not in SHELLS:
        raise ConfigError(
            f"`zapex completion` takes the name of a shell, {', '.join(SHELLS)}; got {wanted}"
            f"{did_you_mean(wanted, SHELLS)}"
        )
    import shtab

    print(shtab.complete(_parser(commands), wanted))
    return 0


def _parser(commands: Commands) -> argparse.ArgumentParser:
    """The commands as a parser of argparse. Their own helps say which flags they have."""
    import shtab

    top = argparse.ArgumentParser("zapex")
    top.add_argument("--version", action="store_true")
    below = top.add_subparsers()
    for name, (function, purpose) in commands.items():
        # shtab writes what stands in backquotes into a shell's script.
        one = below.add_parser(name, help=purpose.replace("`", ""))
        for flag, value in dict(_FLAG.findall(_help(function))).items():
            if value:
                choices = value.split("|") if "|" in value else None
                option = one.add_argument(flag, choices=choices)
                if choices is None:
                    option.complete = shtab.FILE  # type: ignore[attr-defined]
            else:
                one.add_argument(flag, action="store_true")
        word = one.add_argument("word", nargs="*")
        word.complete = shtab.FILE  # type: ignore[attr-defined]
    return top


def _help(function: Callable[[list[str]], int]) -> str:
    """What a command prints with --help-all."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        try:
            function(["--help-all"])
        except ConfigError:  # it has no flags of its own, as `zapex demo`
            function(["--help"])
    return said.getvalue()
