"""`zapex.connect`: a replay of another process or host, with the names of PrioritizedReplay."""

from pathlib import Path
from typing import TYPE_CHECKING, overload

from zapex.errors import ConfigError
from zapex.handle import Handle
from zapex.schema import Schema

if TYPE_CHECKING:
    from zapex.handle_client import HandleClient
    from zapex.url_client import UrlClient


@overload
def connect(target: Handle, *, timeout_s: float = 10.0) -> "HandleClient": ...


@overload
def connect(
    target: str,
    *,
    schema: Schema | str | Path,
    timeout_s: float = 10.0,
    prefetch: int = 0,
    keys: str | Path = "",
    insecure_network: bool = False,
) -> "UrlClient": ...


def connect(
    target: Handle | str,
    *,
    schema: Schema | str | Path | None = None,
    timeout_s: float = 10.0,
    prefetch: int = 0,
    keys: str | Path = "",
    insecure_network: bool = False,
) -> "HandleClient | UrlClient":
    """A client of the replay that `target` names; close it when done.

    target: `replay.handle`, of another process of this host; or the URL of `zapex replay --schema`,
    tcp://HOST:PORT or ipc:///PATH. timeout_s: how long a call waits for an answer (PeerTimeout).

    For a URL: schema, a Schema or the file that the replay was started with; prefetch, batches that
    `sample` asks for ahead; keys, a directory of `zapex keygen` with client.key and public.json,
    without which only addresses of this machine will do, unless insecure_network says otherwise.

    Raises PeerDied, PeerTimeout, Refused (another schema), ConfigError.
    """
    if isinstance(target, Handle):
        from zapex.handle_client import HandleClient

        return HandleClient(target, timeout_s)
    if not isinstance(target, str):
        raise ConfigError(f"connect needs a replay's handle or URL, got {target!r}")
    if schema is None:
        raise ConfigError(
            "connect(url) needs schema=, a Schema or the JSON file of `zapex replay --schema`: "
            "what a peer sends is checked against it"
        )
    if not isinstance(schema, Schema):
        try:
            schema = Schema.from_json(Path(schema).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"the schema {schema} cannot be read: {error.strerror}") from None
    from zapex.url_client import UrlClient
    from zapex.zmq_socket import Security

    security = Security.load(str(keys), "client", insecure_network)
    return UrlClient(target, schema, timeout_s=timeout_s, prefetch=prefetch, security=security)
