"""Flags and settings files: text in, values or one clear error out."""

import ast
import dataclasses
import inspect
import itertools
import json
import shutil
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from zapex.config.fields import flag_of, parse_count, shown
from zapex.config.settings import FIELDS, Config, flatten, merged
from zapex.config.words import did_you_mean
from zapex.errors import ConfigError
from zapex.machine.reading import read_toml

T = TypeVar("T")
Flags = Mapping[str, tuple[Any, ...]]  # field -> its types; a Literal's are its values

HELP = ("-h", "--help")
_YES_OR_NO = {"true", "false", "yes", "no", "on", "off", "0", "1"}
ALIASES = {"env_id": "env", "learning_rate": "lr", "optimizer": "optimiser"}
_METAVARS = {
    int: "COUNT",
    float: "NUMBER",
    str: "TEXT",
    dict: "KEY=VALUE ...",
    list: "MODULE:NAME",
}
_COLUMN = 30  # where help texts begin


def flags_of(*kinds: type) -> dict[str, tuple[Any, ...]]:
    """The flags of dataclasses of options: field -> its types."""
    hints = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind).items()}
    return {
        name: (origin,)
        if (origin := typing.get_origin(hint)) in (dict, list)
        else typing.get_args(hint) or (hint,)
        for name, hint in hints.items()
    }


def read(
    args: Sequence[str], known: Flags, command: str, positional: Sequence[str] = ()
) -> dict[str, Any]:
    """Values by field from the words of a command line; of equal flags the last one counts.

    Args:
        args: the words.
        known: the flags.
        command: for messages.
        positional: fields that words without a flag set, in this order; a tuple takes all that
            are left.

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
            values["help"] = True
        elif not word.startswith("-"):
            free = (one for one in positional if one not in values or Ellipsis in known[one])
            place = next(free, "")
            if not place:
                raise ConfigError(_not_a_flag(word, known, command, positional, values))
            many = Ellipsis in known[place]
            values[place] = (*values.get(place, ()), word) if many else word
        elif bool in known.get(switch, ()) and not equals:
            if words and words[-1].lower() in _YES_OR_NO:
                raise ConfigError(
                    f"{flag_of(switch)} takes no value, got {words[-1]!r}: give {flag_of(switch)} "
                    f"or {flag_of(f'no_{switch}')}"
                )
            values[switch] = switch == name
        elif name not in known or not word.startswith("--"):
            raise ConfigError(_not_a_flag(head, known, command))
        else:
            table = dict in known[name]
            following = [text] if equals else []
            while words and not equals and not words[-1].startswith("--"):
                following.append(words.pop())
                if not table:
                    break
            if not following:
                raise ConfigError(f"{head} needs a value: {usage_of(name, known[name])}")
            value = _value(name, known[name], following)
            values[name] = [*values.get(name, ()), value] if list in known[name] else value
    return values


def _not_a_flag(
    word: str,
    known: Flags,
    command: str,
    positional: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
) -> str:
    text = f"{word!r} is not a flag of `zapex {command}`"
    if positional and values is not None:
        last = positional[-1]
        return f"{text}, and {flag_of(last)} is given already: {values[last]!r}"
    near = did_you_mean(word, map(flag_of, known)) if word.startswith("-") else ""
    return text + (near or "; --help lists them")


def _value(name: str, kinds: tuple[Any, ...], words: list[str]) -> Any:
    """The words after a flag as a value of its type; its range is checked later."""
    text = words[-1]
    if dict in kinds:
        return key_values(words)
    try:
        if bool in kinds:
            return {"true": True, "false": False}[text.lower()]
        if int in kinds:
            return text if (name, text) == ("actors", "auto") else parse_count(text)
        return float(text) if float in kinds else text
    except ConfigError as error:
        raise ConfigError(f"{flag_of(name)}: {error}") from None
    except (KeyError, ValueError):
        what = "true or false" if bool in kinds else "a number"
        raise ConfigError(f"{flag_of(name)} must be {what}, got {text!r}") from None


def parse(default: T, args: Sequence[str], command: str, what: str, positional: str = "") -> T:
    """A dataclass of options: flags over the values of `default`.

    Args:
        default: the options with their default values.
        args: the words after the command.
        command: the command, for messages.
        what: its help.
        positional: the fields that words without a flag set, as "role [run]": those in brackets
            may be left out.

    Raises:
        ConfigError: an unknown flag (with the nearest one), or a value that cannot work.
    """
    kind: Any = type(default)
    known = flags_of(kind)
    places = positional.replace("[", "").replace("]", "").split()
    given = read(args, known, command, places)
    shown = positional.upper()
    if places and Ellipsis in known[places[-1]]:
        shown = shown.removesuffix("S") + " ..."
    usage = f"{command} {shown}".rstrip()
    if given.pop("help", False):
        show_help(usage, what, vars(default), {"Options": list(known)}, [kind])
    for place in places:
        if place not in given and f"[{place}]" not in positional:
            needed = place if place in ("file", "role") else "directory"
            raise ConfigError(f"`zapex {command}` needs a {needed}: zapex {usage}")
    return dataclasses.replace(default, **given)  # type: ignore[type-var]


def show_help(
    usage: str,
    what: str,
    values: Mapping[str, Any],
    groups: Mapping[str, Iterable[str]],
    kinds: Sequence[type],
) -> NoReturn:
    """Print a command's help, with the values that its flags have here, and end the command.

    Args:
        usage: the command with its words.
        what: what it does.
        values: of the flags.
        groups: heading -> the flags below it.
        kinds: the dataclasses of these flags.
    """
    width = min(100, shutil.get_terminal_size().columns)
    known = flags_of(*kinds)
    texts = {name: text for kind in kinds for name, text in texts_of(kind).items()}
    print(textwrap.fill(what, width), f"\nUsage: zapex {usage} [OPTIONS]", sep="\n")
    for heading, names in groups.items():
        print("", f"{heading}:", sep="\n")
        for name in names:
            value = values.get(name)
            value = "" if value is False else shown(value)
            text = texts[name] + (f" [{value}]" if value else "")
            left = f"  {usage_of(name, known[name])} "
            if len(left) > _COLUMN:
                print(left.rstrip())
                left = ""
            start = left.ljust(_COLUMN)
            print(textwrap.fill(text, width, initial_indent=start, subsequent_indent=" " * _COLUMN))
    raise SystemExit(0)


@cache
def texts_of(kind: type) -> dict[str, str]:
    """Field -> the docstring under it, which is the flag's help."""
    texts = {}
    for owner in reversed(kind.__mro__[:-1]):
        definition = ast.parse(inspect.getsource(owner)).body[0]
        assert isinstance(definition, ast.ClassDef)
        for field, below in itertools.pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                texts[ast.unparse(field.target)] = " ".join(text.split())
    return texts


def usage_of(name: str, kinds: tuple[Any, ...]) -> str:
    """A flag and its value; settings that are switches can be turned off, too."""
    if bool in kinds:
        return flag_of(f"[no_]{name}" if name in FIELDS else name)
    choices = "|".join(kind for kind in kinds if isinstance(kind, str))
    return f"{flag_of(name)} {choices or _METAVARS[kinds[0]]}"


def key_values(args: list[str]) -> dict[str, Any]:
    """`["a=1", "b=true", "c=text"]` -> a table; values are JSON if possible, else text."""
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
    """Settings by name from a TOML file. Raises ConfigError."""
    tables = read_toml(Path(path))
    try:
        values = flatten(tables)
        for name in values:
            if FIELDS[name][1].metadata.get("invocation", False):
                raise ConfigError(f"{name} belongs on the command line: give {flag_of(name)} there")
        merged(vars(Config()), values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return values


def check_output(flag: str, file: str, *suffixes: str) -> None:
    """Raise ConfigError if a flag names a file that cannot be written; "": none."""
    if file and suffixes and Path(file).suffix not in suffixes:
        raise ConfigError(f"{flag} must end in {', '.join(suffixes)}, got {file!r}")
    if not Path(file).parent.is_dir():
        raise ConfigError(f"{flag} {file} is in a directory that does not exist")
