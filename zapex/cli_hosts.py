"""The commands of a run on many hosts: replay, actor, learner, and keygen for their keys."""

from dataclasses import dataclass
from pathlib import Path

from zapex.errors import ConfigError
from zapex.flags import parse


@dataclass(frozen=True)
class _KeygenOptions:
    """Nothing else to choose."""


def keygen(args: list[str]) -> int:
    """New keys for every role of a run."""
    if not args or args[0].startswith("-"):
        if not {"-h", "--help"} & set(args):
            raise ConfigError("`zapex keygen` needs a new directory: zapex keygen DIR")
        args = ["DIR", *args]
    what = "Make a key for each role of a run, in a new directory that only you can read."
    parse(_KeygenOptions, _KeygenOptions(), args[1:], "keygen DIR", what)
    from zapex import curve_keys

    directory = Path(args[0])
    for path in curve_keys.make(directory):
        print(path)
    for role, command in (
        (curve_keys.SERVER, "zapex replay"),
        ("relay", "zapex actor"),
        ("learner", "zapex learner"),
    ):
        print(f"{command} needs {role}.key and public.json: copy no more to its host")
    return 0
