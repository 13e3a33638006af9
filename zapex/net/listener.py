"""What the replay's server needs of a transport: peers, their messages, and disconnecting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from zapex.fstack.loop import Setup
from zapex.net import addresses
from zapex.net.keys import Security
from zapex.wire.header import Buffer


class Tracker(Protocol):
    """Follows a message that was sent."""

    @property
    def done(self) -> bool:
        """Whether the transport has released its buffers."""


@dataclass(frozen=True)
class Received:
    """A message, unchecked. peer: the id of its connection; each connection has its own id."""

    peer: bytes
    buffers: list[Any]


Place = Callable[[bytes, Sequence[Buffer], int], Buffer | None]
"""Memory for the next buffer of a message: its peer, the buffers before it, its bytes.

None: the transport takes memory of its own.
"""


class Listener(Protocol):
    """The listening end of a transport. Only `wait` blocks.

    on_gone: called with a peer whose connection has ended. place: is asked for the memory of a
    message's buffers, where the transport can receive into memory that others name.
    """

    url: str
    on_gone: Callable[[bytes], object]
    place: Place

    @property
    def fds(self) -> list[int] | None:
        """Descriptors that become readable when a message may have come; then call `ready`.

        None: there is none, so `ready` must be called all the time.
        """

    def ready(self) -> bool:
        """Whether a message has come."""

    def wait(self, timeout_s: float) -> None:
        """Wait until a message may have come, at most timeout_s."""

    def do_work(self) -> object:
        """Regular work in each duty cycle: admit new peers, notice those that are gone."""

    def receive(self) -> Received | None:
        """The next message, or None."""

    def role_of(self, received: Received) -> str | None:
        """The role that the sender's key stands for; None if there are no keys."""

    def address_of(self, received: Received) -> str:
        """The address of the sender's machine; "" if it is not known."""

    def send(self, peer: bytes, buffers: Sequence[Buffer]) -> Tracker | None:
        """Send without waiting; None: not now. Raises PeerError if the peer is gone."""

    def queued(self, peer: bytes) -> int:
        """How many large messages a peer has not received yet."""

    def settled(self, peer: bytes) -> None:
        """This connection is no longer new: buffers may adapt to the distance of the peer."""

    def held(self) -> list[tuple[int, bytes | int]]:
        """Bytes that are held for each connection, in and out, and its peer.

        A connection without a whole message so far has a number in place of a peer.
        """

    def hang_up(self, connection: bytes | int) -> None:
        """Close a connection of `held`; its peer's earlier messages are dropped.

        After this nothing is written into memory that `place` has named for it.
        """

    def close(self) -> None:
        """Close all connections."""


def no_place(peer: bytes, earlier: Sequence[Buffer], nbytes: int) -> None:
    """No memory is named."""


def check_free(url: str, fstack: Setup | None = None) -> None:
    """Raise ConfigError if this machine cannot listen there; F-Stack is tried in a child."""
    address = addresses.parse(url, "--listen")
    if url.startswith("fstack:"):
        from zapex.net.fstack_listener import check_free

        check_free(address, fstack)
    else:
        addresses.check_free(address)


def listen(
    url: str,
    security: Security,
    largest_buffer_bytes: int,
    *,
    large_bytes: int = 1 << 16,
    fstack: Setup | None = None,
) -> Listener:
    """A listener at a URL of any scheme.

    large_bytes: a message of this size or more counts in `queued`. fstack: what fstack:// needs.
    Raises ConfigError if the address is taken, or not safe without keys.
    """
    if url.startswith("fstack:") and fstack is not None:
        from zapex.net.fstack_listener import FstackListener

        return FstackListener(
            url, security, largest_buffer_bytes, large_bytes=large_bytes, setup=fstack
        )
    if url.startswith("zmtp:"):
        from zapex.net.zmtp_listener import ZmtpListener

        return ZmtpListener(url, security, largest_buffer_bytes, large_bytes=large_bytes)
    from zapex.net.sockets import RouterListener

    return RouterListener(url, security, largest_buffer_bytes, large_bytes=large_bytes)
