"""Which F-Stack a benchmark runs on: the one that the user names, or the tests' stand-in."""

import argparse
import importlib.util
import os
import shutil
from typing import NamedTuple

from zapex.fstack import Setup

_NAMES = ("lib", "conf", "eal")


class FstackPlace(NamedTuple):
    """name: of its rows. address: of the port of a real one; the stand-in's is the server's."""

    setup: Setup
    name: str
    address: str | None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `zapex replay`, and their variables."""
    for name in _NAMES:
        parser.add_argument(
            f"--fstack-{name}", default=os.environ.get(f"ZAPEX_FSTACK_{name.upper()}", ""),
            help=f"as of zapex replay; or the variable ZAPEX_FSTACK_{name.upper()}",
        )  # fmt: skip


def find(options: argparse.Namespace) -> FstackPlace | str:
    """The F-Stack of these flags, or else the stand-in; or why there is neither."""
    if importlib.util.find_spec("greenlet") is None:
        return "pip install 'zapex[fstack]'"
    from tests.support import fstack

    library, config, arguments = (getattr(options, f"fstack_{name}") for name in _NAMES)
    if library and config:
        setup = Setup(library, config, arguments)
        return FstackPlace(setup, "fstack", fstack.addresses(setup)[0])
    if shutil.which("cc") is None:
        return "--fstack-lib and --fstack-conf name none, and the stand-in needs a C compiler"
    return FstackPlace(fstack.standin(), "fstack stand-in", None)
