"""Addresses of links: what may be one, whether this machine can use it, and who answers there."""

import contextlib
import errno
import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from zapex.errors import ConfigError

DEFAULT_PORT = 7711
_MOST_PATH_BYTES = 107  # of a Unix socket: sun_path of unix(7), without its last zero
_LOOSE = re.compile(r"(?:\w+:)?/*(\[[^]]+\]|[^/:\[\]@]+)(?::(\d+))?(?:/.*)?")
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
# ZMTP's greeting: signature, version, mechanism (20 bytes), as-server, 31 bytes of nothing. Whoever
# has heard signature and version says all of his; of another mechanism he would hang up.
_FIRST_WORDS = _SIGNATURE + b"\x03\x01"
_GREETING_BYTES = 64
_MENDS = {
    errno.EADDRINUSE: "; another process listens there: end it, or choose another port",
    errno.EADDRNOTAVAIL: "; it is none of this machine's (`ip address` lists those, and "
    "tcp://0.0.0.0:PORT is all of them)",
    errno.EACCES: "; ports below 1024 are the system's: choose another",
}


@dataclass(frozen=True)
class Address:
    """tcp: host and port. ipc: path, of a Unix socket."""

    url: str
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_loopback(self) -> bool:
        """Only this machine reaches it."""
        try:
            return bool(self.path) or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_ipv6(self) -> bool:
        """A literal IPv6 address: libzmq must be told."""
        return ":" in self.host


def parse(url: str, flag: str) -> Address:
    """The address that a URL names. Raises ConfigError where it names none, with what was meant."""
    address = _parse(url)
    if address is None:
        raise ConfigError(
            f"{flag} must be tcp://HOST:PORT or ipc:///PATH, got {url!r}{_meant(url)}"
        )
    if len(os.fsencode(address.path)) > _MOST_PATH_BYTES:
        raise ConfigError(
            f"{flag} {url} is too long: the path of a socket has at most {_MOST_PATH_BYTES} bytes"
        )
    return address


def _parse(url: str) -> Address | None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.query or parts.fragment or parts.username is not None:
        return None
    if parts.scheme == "ipc" and parts.path and not parts.netloc:
        return Address(url, path=parts.path)
    if parts.scheme == "tcp" and host and port is not None and not parts.path:
        return Address(url, host, port)
    return None


def _meant(url: str) -> str:
    """What a URL that is none may have been meant to be."""
    if url.startswith(("/", "ipc:")):
        return f"; did you mean ipc:///{url.removeprefix('ipc:').lstrip('/')}?"
    match = _LOOSE.fullmatch(url)
    near = f"tcp://{match[1]}:{match[2] or DEFAULT_PORT}" if match else ""
    return f"; did you mean {near}?" if near and _parse(near) else ""


def check_free(address: Address) -> None:
    """Raises ConfigError where this machine cannot listen there, or another process does."""
    where = f"--listen {address.url}"
    if not address.path and not address.port:
        raise ConfigError(
            f"{where} needs a port of its own: after a crash the others look for it there"
        )
    if not address.path and not _is_numeric(address.host):
        raise ConfigError(
            f"{where} must name an IP address: tcp://127.0.0.1:{address.port} for this machine "
            f"alone, tcp://0.0.0.0:{address.port} for all that reach it"
        )
    try:
        if address.path:
            _check_free_path(address.path)
            return
        family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("" if address.host == "*" else address.host, address.port))
    except OSError as error:
        mend = _MENDS.get(error.errno or 0, "")
        raise ConfigError(f"{where} cannot be had: {error.strerror}{mend}") from None


def _is_numeric(host: str) -> bool:
    """libzmq listens at no name."""
    try:
        return host == "*" or bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _check_free_path(path: str) -> None:
    """libzmq would take a socket from whoever listens there. Raises OSError."""
    if not os.path.isdir(os.path.dirname(path)):
        raise FileNotFoundError(errno.ENOENT, f"there is no directory {os.path.dirname(path)}")
    if not os.access(os.path.dirname(path), os.W_OK):
        raise PermissionError(errno.EPERM, f"{os.path.dirname(path)} is not yours to write in")
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    if os.path.exists(path) and not stat.S_ISSOCK(os.stat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "there is a file of this name")


def check_known(address: Address) -> None:
    """Raises ConfigError where no replay can be there, whether one is started yet or not."""
    where = f"--replay {address.url}"
    if address.path:
        if not os.path.isdir(os.path.dirname(address.path)):
            raise ConfigError(f"{where}: there is no directory {os.path.dirname(address.path)}")
        return
    if address.host in ("*", "0.0.0.0", "::") or not address.port:
        raise ConfigError(
            f"{where} is only an address to listen at: give one of the replay's host and its port, "
            f"tcp://HOST:{address.port or DEFAULT_PORT}"
        )
    if address.is_ipv6:
        return
    try:
        socket.getaddrinfo(address.host, address.port, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "this is no name of a host"
        raise ConfigError(
            f"{where}: {address.host} is not known here ({reason}): look for a typing error, or "
            "give the replay's host by its IP address"
        ) from None


def mechanism(address: Address, timeout_s: float) -> str:
    """Who answers there: "CURVE" or "NULL", as its greeting says, without becoming its peer.

    Raises ConnectionError, with the reason, where there is nobody, or nobody that speaks ZMTP.
    """
    family = socket.AF_UNIX if address.path else socket.AF_INET
    where: Any = address.path or (address.host, address.port)
    try:
        with socket.socket(socket.AF_INET6 if address.is_ipv6 else family) as probe:
            probe.settimeout(timeout_s)
            probe.connect(where)
            probe.sendall(_FIRST_WORDS)
            heard = b""
            while len(heard) < _GREETING_BYTES:
                part = probe.recv(_GREETING_BYTES - len(heard))
                if not part:
                    break
                heard += part
    except TimeoutError:
        raise ConnectionError(f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from None
    if heard[:1] != _SIGNATURE[:1] or heard[9:10] != _SIGNATURE[-1:]:
        raise ConnectionError("whoever listens there is no replay")
    return heard[12:32].rstrip(b"\0").decode(errors="replace") or "?"
