"""Two places for a benchmark's processes: network namespaces joined by veth, or loopback."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.support.processes import Process, start_with_result

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_PORT = 7000


class Places:
    """Where servers and clients of one benchmark live; made on entering, removed on leaving.

    As root with `ip`: two network namespaces and a veth pair between them. Otherwise loopback.
    """

    def __init__(self) -> None:
        able = os.geteuid() == 0 and shutil.which("ip") is not None
        self.names = [f"zapex-bench-{side}-{os.getpid()}" for side in "sc"] if able else []
        self.kind = (
            "one machine, two network namespaces over veth" if able else "one machine, loopback"
        )
        self.address = "10.97.0.1" if able else "127.0.0.1"
        self._directory = ""
        self._port = _PORT + os.getpid() % 1000

    def __enter__(self) -> "Places":
        self._directory = tempfile.mkdtemp(prefix="zapex-bench-")
        if self.names:
            ends = [f"zb{side}{os.getpid()}" for side in "sc"]
            for name in self.names:
                _ip("netns", "add", name)
            _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for host, (name, end) in enumerate(zip(self.names, ends, strict=True), 1):
                _ip("link", "set", end, "netns", name)
                _ip("-n", name, "addr", "add", f"10.97.0.{host}/24", "dev", end)
                _ip("-n", name, "link", "set", end, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def path(self, name: str) -> Path:
        """A file of this benchmark alone."""
        return Path(self._directory, name)

    def port(self) -> int:
        """Another one each time."""
        self._port += 1
        return self._port

    def start(self, side: int | None, work: Callable[[], Any]) -> Process:
        """Fork a child that does `work` on one side (0 server, 1 clients) and hands its JSON back.

        side: None: outside of both, where this process is. The caller must have no threads of its
        own yet: no ZeroMQ context, no running kernel.
        """

        def enter() -> None:
            if self.names and side is not None:
                fd = os.open(f"/var/run/netns/{self.names[side]}", os.O_RDONLY)
                if _LIBC.setns(fd, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
                os.close(fd)

        return start_with_result(work, enter)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
