"""`zapex.connect`: a client of a replay that another process or host owns."""

from pathlib import Path
from typing import TYPE_CHECKING, overload

from zapex.chunks.schema import Schema
from zapex.errors import ConfigError
from zapex.library.handle import Handle
from zapex.machine.reading import read_regular

_MOST_SCHEMA_BYTES = 1 << 20  # more is no schema

if TYPE_CHECKING:
    from zapex.library.handle_client import HandleClient
    from zapex.library.url_client import UrlClient


@overload
def connect(target: Handle, *, timeout_s: float = 10.0) -> "HandleClient": ...


@overload
def connect(
    target: str | list[str] | tuple[str, ...],
    *,
    schema: Schema | str | Path,
    timeout_s: float = 10.0,
    prefetch: int = 0,
    keys: str | Path = "",
    insecure_network: bool = False,
    shard_timeout_s: float = 2.0,
    compress: bool = False,
) -> "UrlClient": ...


def connect(
    target: Handle | str | list[str] | tuple[str, ...],
    *,
    schema: Schema | str | Path | None = None,
    timeout_s: float = 10.0,
    prefetch: int = 0,
    keys: str | Path = "",
    insecure_network: bool = False,
    shard_timeout_s: float = 2.0,
    compress: bool = False,
) -> "HandleClient | UrlClient":
    """Connect to a replay that another process or host owns.

    The client has the methods of PrioritizedReplay that use a replay: `writer`, `extend`, `sample`,
    `update_priorities`, `can_sample`, `empty_batch`, `stats` and `len`. Use it in a `with` block,
    or call `close`:

        with zapex.connect(replay.handle) as client:  # in another process of this host
            batch = client.sample(512)
            client.update_priorities(batch.keys, td_errors)

    Args:
        target: `replay.handle`, sent by a process of this host; or the URL of
            `zapex replay --schema`, tcp://HOST:PORT or ipc:///PATH; or a list of such URLs, which
            are then used as one replay. All clients need the same list in the same order.
        schema: for a URL: the Schema, or the JSON file that the replay was started with.
        timeout_s: how long a call waits for an answer, in seconds.
        prefetch: for a URL: how many batches `sample` requests ahead.
        keys: for a URL: a directory of `zapex keygen` with client.key and public.json. Without keys
            only addresses of this machine are allowed.
        insecure_network: allow other addresses without keys.
        shard_timeout_s: for a list: a replay that has said nothing for so long has no share in the
            batches until it answers again, in seconds; 1.5 or more.
        compress: for a URL: batches and added transitions cross the network compressed with zstd.
            Both ends need `pip install 'zapex[compress]'`.

    Returns:
        A HandleClient or a UrlClient. Their public methods are thread-safe.

    Raises:
        PeerDied: the owner is gone.
        PeerTimeout: no answer within `timeout_s`.
        Refused: the replay has another schema, or serves no library.
        ConfigError: a bad target, address, schema file or key.
    """
    if isinstance(target, Handle):
        from zapex.library.handle_client import HandleClient

        return HandleClient(target, timeout_s)
    urls = [target] if isinstance(target, str) else target
    if not isinstance(urls, list | tuple) or not all(isinstance(url, str) for url in urls):
        raise ConfigError(
            f"connect needs a replay's handle or URL, or a list of URLs, got {urls!r}"
        )
    if schema is None:
        raise ConfigError(
            "connect(url) needs schema=, a Schema or the JSON file of `zapex replay --schema`: "
            "what a peer sends is checked against it"
        )
    if not isinstance(schema, Schema | str | Path):
        raise ConfigError(f"schema must be a Schema or the name of its file, got {schema!r}")
    if isinstance(schema, str | Path):
        schema = Schema.from_json(schema_text(schema, "the schema"))
    from zapex.library.url_client import UrlClient
    from zapex.net import addresses
    from zapex.net.keys import Security

    for url in urls:
        addresses.parse(url, "the target of connect")
    security = Security.load(str(keys), "client", insecure_network)
    return UrlClient(
        urls,
        schema,
        timeout_s=timeout_s,
        prefetch=prefetch,
        security=security,
        shard_timeout_s=shard_timeout_s,
        compress=compress,
    )


def schema_text(path: str | Path, what: str) -> str:
    """The text of a schema's file; `what` names it in the error. Raises ConfigError."""
    try:
        return read_regular(Path(path), _MOST_SCHEMA_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{what} {path} cannot be read: {reason}") from None
