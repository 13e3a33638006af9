"""Addresses of links: which are valid, which this machine can use, and what answers there."""

import contextlib
import errno
import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass
from urllib.parse import urlsplit

from zapex.errors import ConfigError
from zapex.fstack import Setup
from zapex.machine.segment import connect_unix

DEFAULT_PORT = 7711
_MOST_PATH_BYTES = 107  # of a Unix socket: sun_path of unix(7), without its last zero
_LOOSE = re.compile(r"(?:\w+:)?/*(\[[^]]+\]|[^/:\[\]@]+)(?::(\d+))?(?:/.*)?")
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
# ZMTP's greeting: signature, version, mechanism (20 bytes), as-server, 31 zero bytes. After the
# signature and the version, a peer sends its whole greeting. If it received another mechanism, it
# would close the connection.
_FIRST_WORDS = _SIGNATURE + b"\x03\x01"
_GREETING_BYTES = 64
_LOOK_S = 1.0
_OWN = ("zmtp:", "fstack:")  # without libzmq
_HINTS = {
    errno.EADDRINUSE: "; another process listens there: end it, or choose another port",
    errno.EADDRNOTAVAIL: "; this machine does not have that address (`ip address` lists "
    "those it has, and tcp://0.0.0.0:PORT means all of them)",
    errno.EACCES: "; ports below 1024 are for root only: choose another",
}


@dataclass(frozen=True)
class Address:
    """tcp, zmtp and fstack: host and port. ipc: path, of a Unix socket."""

    url: str
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return bool(self.path) or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_ipv6(self) -> bool:
        """Whether it is a literal IPv6 address; libzmq needs to know."""
        return ":" in self.host


def parse(url: str, flag: str) -> Address:
    """The address of a URL. Raises ConfigError for an invalid one, with the probable URL.

    zmtp:// and fstack:// are only for `--listen`: clients connect with tcp://.
    """
    address = _parse(url)
    if address is None or (url.startswith(_OWN) and flag != "--listen"):
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
    if parts.scheme in ("tcp", "zmtp", "fstack") and host and port is not None and not parts.path:
        return Address(url, host, port)
    return None


def _meant(url: str) -> str:
    """The URL that the user probably meant."""
    if url.startswith(("/", "ipc:")):
        return f"; did you mean ipc:///{url.removeprefix('ipc:').lstrip('/')}?"
    match = _LOOSE.fullmatch(url)
    near = f"tcp://{match[1]}:{match[2] or DEFAULT_PORT}" if match else ""
    return f"; did you mean {near}?" if near and _parse(near) else ""


def check_free(url: str, fstack: Setup | None = None) -> None:
    """Raise ConfigError if this machine cannot listen there, or another process listens there.

    fstack: what fstack:// needs; F-Stack is tried in a child process.
    """
    address = parse(url, "--listen")
    where = f"--listen {address.url}"
    if not address.path and not address.port:
        raise ConfigError(
            f"{where} needs a fixed port: the other hosts connect to it again after a crash"
        )
    if not address.path and not _is_numeric(address.host):
        raise ConfigError(
            f"{where} must name an IP address: tcp://127.0.0.1:{address.port} for this machine "
            f"alone, tcp://0.0.0.0:{address.port} for all that reach it"
        )
    if url.startswith("fstack:"):
        from zapex.fstack import trial

        trial.check(
            fstack, "0.0.0.0" if address.host == "*" else address.host, address.port, "--listen"
        )
        return
    try:
        if address.path:
            _check_free_path(address.path)
            return
        family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("" if address.host == "*" else address.host, address.port))
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "")
        raise ConfigError(f"{where} cannot be used: {error.strerror}{hint}") from None


def _is_numeric(host: str) -> bool:
    """Whether the host is an IP address or "*": libzmq cannot listen at a host name."""
    try:
        return host == "*" or bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _check_free_path(path: str) -> None:
    """Raises OSError if the path is in use: libzmq would replace another process's socket."""
    if not os.path.isdir(os.path.dirname(path)):
        raise FileNotFoundError(errno.ENOENT, f"there is no directory {os.path.dirname(path)}")
    if not os.access(os.path.dirname(path), os.W_OK):
        raise PermissionError(errno.EPERM, f"you may not write in {os.path.dirname(path)}")
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # very many connect there now
                probe.connect(path)
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    if os.path.exists(path) and not stat.S_ISSOCK(os.stat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "a file has this name")


def check_known(address: Address) -> None:
    """Raise ConfigError if no replay can have this address."""
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
        reason = getattr(error, "strerror", None) or "this is not a host name"
        raise ConfigError(
            f"{where}: {address.host} is not known here ({reason}): look for a typing error, or "
            "give the replay's host by its IP address"
        ) from None
    with contextlib.suppress(ConnectionError):  # it may be started later
        mechanism(address, _LOOK_S)


def mechanism(address: Address, timeout_s: float) -> str:
    """The mechanism in the greeting of what answers there: "CURVE" or "NULL". Makes no peer.

    Raises ConnectionError, with the reason, if there is no answer, and ConfigError if what answers
    does not speak ZMTP.
    """
    family = socket.AF_UNIX if address.path else socket.AF_INET
    try:
        with socket.socket(socket.AF_INET6 if address.is_ipv6 else family) as probe:
            probe.settimeout(timeout_s)
            if address.path:
                connect_unix(probe, address.path, timeout_s)
            else:
                probe.connect((address.host, address.port))
            probe.sendall(_FIRST_WORDS)
            with probe.makefile("rb") as file:
                heard = file.read(_GREETING_BYTES)
    except TimeoutError:
        raise ConnectionError(f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from None
    if heard[:1] != _SIGNATURE[:1] or heard[9:10] != _SIGNATURE[-1:]:
        raise ConfigError(
            f"the process that listens at {address.url} is not a replay: give the host and port of "
            "`zapex replay`"
        )
    return heard[12:32].rstrip(b"\0").decode(errors="replace") or "?"
