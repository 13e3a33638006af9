"""A real redis-server on loopback, for tests; they are skipped, and say so, where there is none."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BINARY = shutil.which("redis-server")
MISSING = (
    "no redis-server: apt-get install redis-server"
    if BINARY is None
    else "no redis-py: pip install 'zapex[redis]'"
    if find_spec("redis") is None
    else ""
)
needs_redis = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """Started and stopped at will; always at the same port, with nothing kept on disk."""

    def __init__(self, directory: Path, **options: str) -> None:
        self.port, self._directory = free_port(), directory
        self._options = {
            "bind": "127.0.0.1", "port": str(self.port), "save": "", "appendonly": "no",
            "dir": str(directory), **options,
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        words = [word for name, value in self._options.items() for word in (f"--{name}", value)]
        assert BINARY
        log = (self._directory / "redis.log").open("ab")
        self._process = subprocess.Popen([BINARY, *words], stdout=log, stderr=log)
        log.close()
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            assert time.monotonic() < deadline, (self._directory / "redis.log").read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def client(self, **more: Any) -> Any:
        import redis

        return redis.Redis(port=self.port, socket_timeout=30, **more)


@contextlib.contextmanager
def running(directory: Path, **options: str) -> Iterator[RedisServer]:
    server = RedisServer(directory, **options)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    if MISSING:
        pytest.skip(MISSING)
    with running(tmp_path) as server:
        yield server
