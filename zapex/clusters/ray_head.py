"""Ray itself, connected to its head, or one line that says why it is not."""

import socket
from importlib import import_module
from typing import Any

from zapex.errors import ConfigError

_ANSWER_S = 5.0


def connected(address: str, namespace: str) -> Any:
    """The module `ray`, connected to the cluster at `address`. Raises ConfigError."""
    try:
        ray = import_module("ray")
        import_module("nacl.public")
    except ModuleNotFoundError as error:
        raise ConfigError(f'this needs {error.name}: pip install "zapex[ray]"') from None
    if not ray.is_initialized():
        _demand_head(address)
        try:
            ray.init(address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"[ray] address {address}: {error}") from None
    return ray


def _demand_head(address: str) -> None:
    """Raise ConfigError if nobody listens at Ray's head; Ray itself tries for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdigit():  # else "auto": Ray looks by itself
        try:
            socket.create_connection((host, int(port)), _ANSWER_S).close()
        except OSError as error:
            raise ConfigError(
                f"[ray] address {address}: Ray's head does not answer ({error}). If it was lost, "
                "Ray ends all its nodes after a minute, and a run with them: launch it again"
            ) from None
