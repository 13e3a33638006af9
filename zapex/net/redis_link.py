"""A connection to a Redis that the user runs: its keys, one-line problems, and calls that return.

The keys are listed in redis_transport.py.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from zapex.errors import BadMessage, ConfigError
from zapex.net.addresses import Address, is_redis
from zapex.wire import control as messages
from zapex.wire.header import Form, joined, split
from zapex.wire.pairs import pair_rows

EXPERIENCE, PARAMETERS, VERSION, STATISTICS, SETTINGS, RUN, OVER, NUMBERS, LEARNER = (
    "zapex:" + name
    for name in (
        "experience", "parameters", "version", "statistics", "settings", "run", "over", "numbers",
        "learner",
    )
)  # fmt: skip
HOST_KEY = "zapex:host:"
BEAT_S, EXPIRES_S = 1.0, 10
PASSWORD = "REDISCLI_AUTH"
"""The environment variable with the password, which redis-cli reads too: on no command line."""
MOST_STATISTICS = 4096  # messages in their list
_TIMEOUT_S = 5.0
_PAUSE_S = 0.3  # after a failure
_WAITING_BYTES = 256 << 20

T = TypeVar("T")


def check_url(url: str, insecure_network: bool) -> None:
    """Raise ConfigError for a URL that cannot be used, or that would not be private."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or not is_redis(url) or parts.password:
        raise ConfigError(
            "--replay must be redis://[USER@]HOST[:PORT][/DATABASE], or rediss:// with TLS (the "
            f"password is taken from REDISCLI_AUTH), got {url!r}"
        )
    if parts.scheme == "redis" and not Address(url, host).is_loopback and not insecure_network:
        raise ConfigError(
            f"--replay {url}: everything would be readable on the network. Use rediss:// (TLS), or "
            "give --insecure-network"
        )
    client_of(url, "").close()


def client_of(url: str, password: str) -> Any:
    """A redis.Redis that has not connected yet. Raises ConfigError."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise ConfigError("redis:// needs redis-py: pip install 'zapex[redis]'") from None
    try:
        return redis.Redis.from_url(
            url, password=password or None, socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S, retry=Retry(NoBackoff(), 0), protocol=2,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--replay {url}: {error}") from None


def why(error: Exception) -> str:
    """What is wrong with Redis, in one line, with what to do."""
    import redis

    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, redis.OutOfMemoryError):
        return f"it has no memory left ({text}): raise its maxmemory"
    if isinstance(error, redis.AuthenticationError) or text.startswith("NOAUTH"):
        return f"it refuses this user ({text}): give redis://USER@HOST, and REDISCLI_AUTH=PASSWORD"
    if isinstance(error, redis.exceptions.NoPermissionError) or text.startswith("NOPERM"):
        return f"its ACL does not permit this user what is needed ({text}): docs/many_hosts.md"
    if isinstance(error, redis.exceptions.BusyLoadingError):
        return "it is loading its data"
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        return f"it does not answer ({text})"
    return text


def most_waiting(form: Form, actors: int) -> int:
    """Messages that may wait in the list: 256 MiB of pairs, and two for each actor at least."""
    nbytes = form.layout.chunk * pair_rows(form.schema).itemsize
    return max(2 * actors, min(4096, _WAITING_BYTES // nbytes))


class RedisLink:
    """One process's connection. `attempt` makes calls; `do_work` says each second that it lives.

    form: None before the run is known. host: one number for one incarnation of this host's parent.
    on_beat: called each second. over: why the run has ended; "" while it runs.
    """

    def __init__(
        self, url: str, password: str, form: Form | None, host: int = 0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        import redis

        self.url, self.form, self.host, self.over = url, form, host, ""
        self.on_beat: list[Callable[[], object]] = []
        self.counts = dict.fromkeys(("calls", "failures", "bad"), 0)
        self._client, self._clock_s = client_of(url, password), clock_s
        self._errors = redis.RedisError, OSError
        self._heard_s, self._tried_s, self._beat_s = clock_s(), -_PAUSE_S, -BEAT_S
        self.problem = ""  # why the last call failed
        self.refused = False  # this user, for the last call
        self._refusals = redis.AuthenticationError, redis.exceptions.NoPermissionError
        self.lack = ""  # what is not there yet, although Redis answers

    @property
    def silent_s(self) -> float:
        """Seconds since the last call that succeeded."""
        return self._clock_s() - self._heard_s

    @property
    def waiting(self) -> str:
        """What this end waits for; "" while Redis does what it is asked to."""
        text = self.problem or self.lack
        return f"waiting for Redis at {self.url}: {text}" if text else ""

    def attempt(self, call: Callable[[Any], T], otherwise: T) -> T:
        """What `call` returns for the client, or `otherwise` if Redis does not do it now."""
        now_s = self._clock_s()
        if self.problem and now_s - self._tried_s < _PAUSE_S:
            return otherwise
        self._tried_s = now_s
        self.counts["calls"] += 1
        try:
            found = call(self._client)
        except self._errors as error:
            self.counts["failures"] += 1
            self.problem, self.refused = why(error), isinstance(error, self._refusals)
            return otherwise
        self._heard_s, self.problem, self.refused = self._clock_s(), "", False
        return found

    def get(self, name: str, nbytes: int) -> bytes:
        """Of a value at most `nbytes` + 1; b"" if there is none or Redis does not answer."""
        return self.attempt(lambda client: bytes(client.getrange(name, 0, nbytes)), b"")

    def decode(self, value: bytes, *kinds: type) -> Any | None:
        """The message in a value; None, and counted, if it is none of these."""
        try:
            message = messages.decode(split(value), self.form)
        except BadMessage:
            message = None
        if isinstance(message, kinds):
            return message
        self.counts["bad"] += 1
        return None

    def send(self, channel: int, message: Any) -> bool | None:
        """Statistics, as a StatsSender sends them. None: not now."""
        value = self.host.to_bytes(8, "little") + joined(messages.encode(message))

        def push(client: Any) -> bool:
            if client.rpush(STATISTICS, value) > MOST_STATISTICS:
                client.ltrim(STATISTICS, -MOST_STATISTICS // 2, -1)
            return True

        return self.attempt(push, False) or None

    def do_work(self) -> int:
        """Say that this end is alive, once a second."""
        now_s = self._clock_s()
        if now_s - self._beat_s < BEAT_S:
            return 0
        self._beat_s = now_s
        for beat in self.on_beat:
            beat()
        return 1

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
