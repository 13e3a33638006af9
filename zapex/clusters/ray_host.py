"""A Ray actor for one host: it starts the host's process as a child, which never outlives it."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from zapex.clusters.host import FACTS, KEYS, OVER, published, url_name
from zapex.clusters.placement import host_words
from zapex.machine.child import PARENT_VARIABLE
from zapex.machine.disk import replace_whole

_TAIL_BYTES = 1 << 20


class RayHost:
    """Made by Ray, also again elsewhere; it then waits for its keys, which it must be given.

    Keys reach it sealed for a key pair of its own, which never leaves this process: neither Ray's
    messages nor its object store or logs have them in the clear.
    """

    def __init__(self, role: str, index: int) -> None:
        from nacl.public import PrivateKey

        self.role, self.index = role, index
        self._private = PrivateKey.generate()
        self._home: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._ends, self._facts = False, dict[str, Any]()
        self._log = ""

    def start(self, sealed: bytes) -> None:
        """Write the settings and keys into a directory of mode 0700, and start the host."""
        from nacl.public import SealedBox

        if self._child is not None:
            return
        told = json.loads(SealedBox(self._private).decrypt(sealed))
        home = Path(tempfile.mkdtemp(prefix="zapex-"))  # its mode is 0700
        (home / KEYS).mkdir(mode=0o700)
        facts = told["facts"] | {"advertise": _own_address()}
        for name, text in {**told["settings"], FACTS: json.dumps(facts)}.items():
            replace_whole(home / name, [text.encode()])
        for name, text in told["keys"].items():
            descriptor = os.open(home / KEYS / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        self._ends, self._facts = facts["ends"] == self.role, facts
        logs = Path(facts["runs"]) / "logs"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log = str(home / "logs" / f"{self.role}-{self.index}.log")
        # The child dies with this thread, which is the main one: Ray runs a plain actor there.
        with (logs / f"{self.role}-{self.index}.host").open("ab") as output:
            self._child = subprocess.Popen(
                host_words(home, self.role, self.index),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            )  # fmt: skip
        self._home = home

    def replay_is_at(self, url: str) -> None:
        """The replay's address, also a new one; those of all shards, with commas."""
        for shard, one in enumerate(url.split(",") if self._home is not None else ()):
            replace_whole(Path(self._home or "") / url_name(shard), [f"{one}\n".encode()])

    def poll(self) -> dict[str, Any]:
        """How it is. code: the exit code of a host that has ended, else None."""
        code = self._child.poll() if self._child is not None else None
        return {
            "state": "working" if self._child is not None else "waiting for keys",
            "public": bytes(self._private.public_key),
            "code": code,
            "ends": self._ends,
            "url": self._url(),
            "node": _own_address(),
        }

    def _url(self) -> str:
        if self._home is None:
            return ""
        if self.role != "replay":
            return published(self._home, self._facts)
        try:
            return (self._home / url_name(self.index)).read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def tail(self, lines: int) -> str:
        """The last lines that the command printed."""
        try:
            with open(self._log, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(it has not printed anything)"

    def stop(self, grace_s: float) -> None:
        """End the host in order; SIGKILL after `grace_s`."""
        if self._child is not None and self._home is not None:
            replace_whole(self._home / OVER, [b"stopped\n"])
            self._child.send_signal(signal.SIGTERM)
            try:
                self._child.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait(grace_s)
            shutil.rmtree(self._home, ignore_errors=True)


def _own_address() -> str:
    from importlib import import_module

    return str(import_module("ray.util").get_node_ip_address())
