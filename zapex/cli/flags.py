"""Flags and settings files: text in, values or one clear line out."""

import ast
import dataclasses
import inspect
import itertools
import json
import shutil
import textwrap
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from zapex.config.fields import flag_of, parse_count
from zapex.config.settings import FIELDS, Config, flatten, merged
from zapex.config.words import did_you_mean
from zapex.errors import ConfigError

T = TypeVar("T")
Flags = Mapping[str, tuple[Any, ...]]  # field -> its types; a Literal's are its values

HELP = {"-h": "help", "--help": "help", "--help-all": "help_all"}
ALIASES = {"env_id": "env", "learning_rate": "lr", "optimizer": "optimiser"}
_METAVARS = {
    int: "COUNT", float: "NUMBER", str: "TEXT", dict: "KEY=VALUE ...", list: "MODULE:NAME",
}  # fmt: skip
_COLUMN = 30  # where help texts begin


def flags_of(*kinds: type) -> dict[str, tuple[Any, ...]]:
    """The flags of dataclasses of options."""
    hints = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind).items()}
    return {
        name: (origin,)
        if (origin := typing.get_origin(hint)) in (dict, list)
        else typing.get_args(hint) or (hint,)
        for name, hint in hints.items()
    }


def read(args: Sequence[str], known: Flags, command: str, positional: str = "") -> dict[str, Any]:
    """Values by field out of the words of a command line; of equal flags the last one counts.

    positional: the field that a word without a flag sets; a tuple takes all such words.

    Raises:
        ConfigError: an unknown flag (with the nearest one), or a value of another type.
    """
    values: dict[str, Any] = {}
    words = list(reversed(args))
    while words:
        word = words.pop()
        head, equals, text = word.partition("=")
        name = head.removeprefix("--").replace("-", "_")
        name = ALIASES.get(name, name)
        switch = name.removeprefix("no_")
        if word in HELP:
            values[HELP[word]] = True
        elif not word.startswith("-") and Ellipsis in known.get(positional, ()):
            values[positional] = (*values.get(positional, ()), word)
        elif not word.startswith("-") and positional and positional not in values:
            values[positional] = word
        elif bool in known.get(switch, ()) and not equals:
            values[switch] = switch == name
        elif name not in known or not word.startswith("--"):
            if not word.startswith("-") and positional in values:
                raise ConfigError(
                    f"{head!r} is not a flag of `zapex {command}`, and its {flag_of(positional)} "
                    f"is given already: {values[positional]!r}"
                )
            near = did_you_mean(head, map(flag_of, known)) if word.startswith("-") else ""
            raise ConfigError(
                f"{head!r} is not a flag of `zapex {command}`{near or '; --help lists them'}"
            )
        else:
            table = dict in known[name]
            following = [text] if equals else []
            while words and not equals and not words[-1].startswith("--"):
                following.append(words.pop())
                if not table:
                    break
            if not following:
                raise ConfigError(f"{head} needs a value: {_usage(name, known[name])}")
            value = _value(name, known[name], following)
            values[name] = [*values.get(name, ()), value] if list in known[name] else value
    return values


def _value(name: str, kinds: tuple[Any, ...], words: list[str]) -> Any:
    """The words after a flag as a value of its type; its range is checked later."""
    text = words[-1]
    if dict in kinds:
        return key_values(words)
    try:
        if bool in kinds:
            return {"true": True, "false": False}[text.lower()]
        if int in kinds:
            return parse_count(text)
        return float(text) if float in kinds else text
    except ConfigError as error:
        raise ConfigError(f"{flag_of(name)}: {error}") from None
    except (KeyError, ValueError):
        what = "true or false" if bool in kinds else "a number"
        raise ConfigError(f"{flag_of(name)} must be {what}, got {text!r}") from None


def parse(
    default: T,
    args: list[str],
    command: str,
    what: str,
    positional: str = "",
    optional: bool = False,
) -> T:
    """A dataclass of options: flags over the values of `default`.

    positional: the field that a word without a flag sets; it must be given unless it is `optional`.

    Raises:
        ConfigError: an unknown flag (with the nearest one), or a value that cannot work.
    """
    kind: Any = type(default)
    given = read(args, flags_of(kind), command, positional)
    many = Ellipsis in flags_of(kind).get(positional, ())
    name = positional.upper().removesuffix("S") + " ..." if many else positional.upper()
    usage = f"{command} {f'[{name}]' if optional else name}".rstrip()
    if given.keys() & HELP.values():
        show_help(usage, what, vars(default), [kind])
    if positional and not optional and positional not in given:
        needed = "file" if positional == "file" else "directory"
        raise ConfigError(f"`zapex {command}` needs a {needed}: zapex {usage}")
    return dataclasses.replace(default, **given)  # type: ignore[type-var]


def show_help(
    usage: str,
    what: str,
    values: Mapping[str, Any],
    kinds: Sequence[type],
    first: Sequence[str] = (),
) -> NoReturn:
    """Print a command's flags with the values that they have here, and end the command.

    first: the flags to show; none: all, with a heading for each of `kinds`.
    """
    width = min(100, shutil.get_terminal_size().columns)
    known = flags_of(*kinds)
    texts = {name: text for kind in kinds for name, text in _texts(kind).items()}
    groups = {"Flags, with their values here:": first}
    if not first:
        groups = {(kind.__doc__ or "").partition("\n")[0]: list(flags_of(kind)) for kind in kinds}
    print(f"zapex {usage} [flags]", textwrap.fill(what, width), sep="\n\n")
    for heading, names in groups.items():
        print("", heading, sep="\n")
        for name in names:
            value = _shown(values.get(name))
            text = texts[name] + (f" [{value}]" if value else "")
            left = f"  {_usage(name, known[name])} "
            if len(left) > _COLUMN:
                print(left.rstrip())
                left = ""
            indent = " " * _COLUMN
            print(
                textwrap.fill(
                    text, width, initial_indent=left + indent[len(left) :], subsequent_indent=indent
                )
            )
    if first:
        print(f"\n`zapex {usage.split(maxsplit=1)[0]} --help-all` shows all {len(known)} flags.")
    raise SystemExit(0)


def _texts(kind: type) -> dict[str, str]:
    """Field -> the text under it."""
    texts = {}
    for owner in reversed(kind.__mro__[:-1]):
        definition = ast.parse(inspect.getsource(owner)).body[0]
        assert isinstance(definition, ast.ClassDef)
        for field, below in itertools.pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                texts[ast.unparse(field.target)] = " ".join(text.split())
    return texts


def _usage(name: str, kinds: tuple[Any, ...]) -> str:
    """A flag with what follows it."""
    if bool in kinds:
        return flag_of(name)
    choices = "|".join(kind for kind in kinds if isinstance(kind, str))
    return f"{flag_of(name)} {choices or _METAVARS[kinds[0]]}"


def _shown(value: Any) -> str:
    """A value as the help shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value or "")


def key_values(args: list[str]) -> dict[str, Any]:
    """`["a=1", "b=true", "c=text"]` -> a table; values are read as JSON if possible."""
    table: dict[str, Any] = {}
    for arg in args:
        key, equals, text = arg.partition("=")
        if not key or not equals:
            raise ConfigError(f"--env-kwargs takes pairs like key=value, got {arg!r}")
        try:
            table[key] = json.loads(text)
        except ValueError:
            table[key] = text
    return table


def read_settings(path: str) -> dict[str, Any]:
    """Settings by name out of a TOML file."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    try:
        values = flatten(tables)
        for name in values:
            if FIELDS[name][1].metadata.get("invocation", False):
                raise ConfigError(f"{name} is for the command line: give {flag_of(name)} there")
        merged(vars(Config()), values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return values


def check_outputs(json: str, figure: str) -> None:
    """Raise ConfigError for values of --json and --figure that cannot be written; "" is none."""
    if figure and not figure.endswith(".png"):
        raise ConfigError(f"--figure must end in .png, got {figure}")
    for flag, file in (("--json", json), ("--figure", figure)):
        if not Path(file).parent.is_dir():
            raise ConfigError(f"{flag} {file} lies in a directory that does not exist")
