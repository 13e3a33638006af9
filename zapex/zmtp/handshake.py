"""What both ends of a ZMTP connection agree on before the first message; without keys: NULL."""

from dataclasses import dataclass
from typing import Protocol

from zapex.errors import BadMessage
from zapex.zmtp import frames

_MEETS = {
    b"ROUTER": (b"REQ", b"DEALER", b"ROUTER"),
    b"DEALER": (b"REP", b"DEALER", b"ROUTER"),
}
_MOST_IDENTITY_BYTES = 255


@dataclass(frozen=True)
class Local:
    """What this end says of itself. socket_type: b"ROUTER" or b"DEALER"."""

    socket_type: bytes
    identity: bytes = b""

    def properties(self) -> bytes:
        """The properties that this end sends."""
        return frames.properties({b"Socket-Type": self.socket_type, b"Identity": self.identity})

    def identity_in(self, data: bytes) -> bytes:
        """The identity in a peer's properties. Raises BadMessage if the peer does not fit."""
        found = frames.parse_properties(data)
        socket_type = found.get(b"socket-type", b"")
        if socket_type not in _MEETS[self.socket_type]:
            raise BadMessage(f"a {_text(self.socket_type)} cannot talk to a {_text(socket_type)}")
        identity = found.get(b"identity", b"")
        if len(identity) > _MOST_IDENTITY_BYTES:
            raise BadMessage(
                f"an identity has {len(identity)} bytes, at most {_MOST_IDENTITY_BYTES} are allowed"
            )
        return identity


def _text(name: bytes) -> str:
    return name[:32].decode("ascii", "replace") or "socket of no type"


class Mechanism(Protocol):
    """One connection's handshake, and what becomes of its frames afterwards.

    added_bytes: what it adds to each frame. done: the handshake is over. refused: why this end
    refuses the peer; an ERROR is the last command then. identity, user: of the peer.
    """

    name: bytes
    as_server: bool
    added_bytes: int
    done: bool
    refused: str
    identity: bytes
    user: str | None

    def start(self) -> list[bytes]:
        """The commands to send after the greetings."""

    def take(self, name: bytes, data: bytes) -> list[bytes]:
        """A command of the peer came: the commands to send. Raises BadMessage."""

    def seal(self, flags: int, body: frames.Buffer) -> tuple[int, frames.Buffer]:
        """Flags and body of a frame as they are sent."""

    def open(self, flags: int, body: frames.Buffer) -> tuple[int, frames.Buffer]:
        """The inverse. Raises BadMessage."""


class Null:
    """No keys: every peer with a fitting socket type is admitted, and frames stay as they are."""

    name, as_server, added_bytes = b"NULL", False, 0

    def __init__(self, local: Local) -> None:
        self._local = local
        self.done, self.refused, self.identity = False, "", b""
        self.user: str | None = None

    def start(self) -> list[bytes]:
        """READY, from both ends at once."""
        return [frames.command(b"READY", self._local.properties())]

    def take(self, name: bytes, data: bytes) -> list[bytes]:
        """The peer's READY."""
        if name != b"READY":
            raise BadMessage(f"the peer sent the command {_text(name)}, not READY")
        self.identity = self._local.identity_in(data)
        self.done = True
        return []

    def seal(self, flags: int, body: frames.Buffer) -> tuple[int, frames.Buffer]:
        """As they are."""
        return flags, body

    def open(self, flags: int, body: frames.Buffer) -> tuple[int, frames.Buffer]:
        """As they are."""
        return flags, body
