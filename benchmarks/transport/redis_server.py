"""A redis-server for the paper's baseline."""

import os
import shutil

BINARY = shutil.which("redis-server")


def missing() -> str:
    """Why there is no Redis to measure; "" where there is."""
    try:
        import redis  # noqa: F401
    except ImportError:
        return "redis-py is missing: pip install -r benchmarks/requirements.txt"
    return "" if BINARY else "no redis-server was found"


def server(address: str, port: int, directory: str) -> None:
    """Become a Redis server that keeps nothing on disk."""
    assert BINARY
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    options = {
        "bind": address, "port": port, "save": "", "appendonly": "no", "protected-mode": "no",
        "dir": directory, "io-threads": 1,
    }  # fmt: skip
    os.execv(BINARY, [BINARY, *(str(w) for k, v in options.items() for w in (f"--{k}", v))])
