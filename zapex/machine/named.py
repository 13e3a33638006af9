"""Objects that a user names as module:name."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from zapex.errors import ConfigError

_imports_under_way: ContextVar[int] = ContextVar("imports_under_way", default=0)


def import_under_way() -> bool:
    """Whether this code runs because zapex imports the user's module."""
    return _imports_under_way.get() > 0


@contextlib.contextmanager
def _under_way() -> Iterator[None]:
    token = _imports_under_way.set(_imports_under_way.get() + 1)
    try:
        yield
    finally:
        _imports_under_way.reset(token)


def module(name: str, what: str) -> ModuleType:
    """Import a user's module; the working directory is searched last. what: for the message.

    Raises ModuleNotFoundError if there is no module of this name, ConfigError if it fails.
    """
    # The path of an installed script lacks the working directory.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with _under_way():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{what}: importing {name} failed: {error}") from error
        raise
    except ConfigError as error:
        raise ConfigError(f"{what}: importing {name} failed: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{what}: importing {name} failed: {type(error).__name__}: {error}"
        ) from error


def load(text: str, flag: str) -> Any:
    """The callable that `text` names, as module:name. flag: for the message.

    Raises ConfigError: there is no such module, or it has no such callable.
    """
    module_name, _, name = text.rpartition(":")
    if not module_name or not name:
        raise ConfigError(f"{flag} must be module:name, got {text!r}")
    try:
        found = getattr(module(module_name, f"{flag} {text}"), name, None)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{flag} {text}: there is no module {error.name!r} in {os.getcwd()} or among the "
            "installed packages"
        ) from None
    if not callable(found):
        there = "is not callable" if found is not None else "is not there"
        raise ConfigError(f"{flag} {text}: {name!r} {there} in module {module_name}")
    return found
