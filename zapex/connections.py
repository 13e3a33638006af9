"""`zapex.connect`: a replay of another process or host, with the names of PrioritizedReplay."""

from zapex.errors import ConfigError
from zapex.handle import Handle
from zapex.handle_client import HandleClient


def connect(target: Handle, *, timeout_s: float = 10.0) -> HandleClient:
    """A client of the replay that `target` names; close it when done.

    target: `replay.handle`, of another process of this host. timeout_s: how long a call waits for
    an owner that does not answer (PeerTimeout); one that died is PeerDied at once.
    """
    if isinstance(target, Handle):
        return HandleClient(target, timeout_s)
    raise ConfigError(f"connect needs a replay's handle, got {target!r}")
