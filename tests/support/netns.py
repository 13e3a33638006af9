"""Several hosts on one machine: network namespaces, each with a virtual cable to one bridge.

Needs root and `ip` (iproute2); a rate limit needs `tc`, which comes with it. The bridge is in a
namespace too, so the machine's own network does not change.
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Self

from zapex.errors import ZapexError

_NETWORK = "10.97.0"
_NAME = re.compile(r"zapex-(\d+)-")
_PATIENCE_S = 20.0


def can_have_namespaces() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces need ip and tc (Debian: apt install iproute2)"
    try:
        with Namespaces(["trial"]):
            return ""
    except ZapexError as error:
        return str(error)


class Namespaces:
    """Namespaces by name, created on entry and removed on exit.

    with Namespaces(["replay", "actors"], rate="1gbit") as hosts:
        subprocess.Popen([*hosts.prefix("replay"), "zapex", "replay", ...])
        hosts.cut("actors"); hosts.heal("actors")

    rate: of each cable in each direction, as `tc` writes it; "" is no limit.
    """

    def __init__(self, names: Sequence[str], rate: str = "") -> None:
        self.names, self._rate = list(names), rate
        self._switch = f"zapex-{os.getpid()}-switch"

    def address(self, name: str) -> str:
        """The IPv4 address of a host."""
        return f"{_NETWORK}.{self.names.index(name) + 1}"

    def prefix(self, name: str) -> list[str]:
        """The words before a command that shall run on this host; the process id stays the same."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def cut(self, name: str) -> None:
        """Cut the host's cable: nothing passes, and no process is told."""
        _run("ip", "-n", self._switch, "link", "set", self._port(name), "down")

    def heal(self, name: str) -> None:
        """Connect the cable again."""
        _run("ip", "-n", self._switch, "link", "set", self._port(name), "up")

    def __enter__(self) -> Self:
        _remove_leftovers()
        try:
            _run("ip", "netns", "add", self._switch)
            _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
            for name in self.names:
                self._plug_in(name)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _plug_in(self, name: str) -> None:
        there, port = self._namespace(name), self._port(name)
        _run("ip", "netns", "add", there)
        in_switch, in_host = ["ip", "-n", self._switch], ["ip", "-n", there]
        _run(*in_switch, *f"link add {port} type veth peer name eth0 netns {there}".split())
        _run(*in_switch, *f"link set {port} master bridge up".split())
        _run(*in_host, *f"addr add {self.address(name)}/24 dev eth0".split())
        for device in ("eth0", "lo"):
            _run(*in_host, "link", "set", device, "up")
        if self._rate:
            for namespace, device in ((there, "eth0"), (self._switch, port)):
                limit = f"qdisc add dev {device} root tbf rate {self._rate} burst 1mb latency 50ms"
                _run("tc", "-n", namespace, *limit.split())

    def _namespace(self, name: str) -> str:
        return f"zapex-{os.getpid()}-{name}"

    def _port(self, name: str) -> str:
        return f"port{self.names.index(name)}"

    def _remove(self) -> None:
        for namespace in (*map(self._namespace, self.names), self._switch):
            with contextlib.suppress(ZapexError):
                _run("ip", "netns", "del", namespace)


def _remove_leftovers() -> None:
    """Namespaces of processes that were killed before they could remove them."""
    for line in _run("ip", "netns", "list").splitlines():
        match = _NAME.match(line)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            with contextlib.suppress(ZapexError):
                _run("ip", "netns", "del", line.split()[0])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    if done.returncode:
        raise ZapexError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
