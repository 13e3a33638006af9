"""fstack://: the listener of zmtp:// on F-Stack's sockets, and what to check before it."""

from zapex.errors import ConfigError
from zapex.fstack import trial
from zapex.fstack.loop import Setup, loop_of
from zapex.fstack.reactor import FstackReactor
from zapex.net.addresses import Address
from zapex.net.keys import Security
from zapex.net.zmtp_listener import ZmtpListener


class FstackListener(ZmtpListener):
    """fstack://, in a process that has no other F-Stack; `close` ends F-Stack.

    Packets move in `ready`, `wait`, `do_work` and `close`, so one of them must be called all the
    time. Arguments and errors: as of ZmtpListener.
    """

    def __init__(
        self,
        url: str,
        security: Security,
        largest_buffer_bytes: int,
        *,
        large_bytes: int,
        setup: Setup,
    ) -> None:
        reactor = FstackReactor(loop_of(setup))
        super().__init__(
            url, security, largest_buffer_bytes, large_bytes=large_bytes, reactor=reactor
        )

    def settled(self, peer: bytes) -> None:
        """Its buffers stay as they are."""


def check_free(address: Address, setup: Setup | None) -> None:
    """Raise ConfigError if F-Stack cannot listen there: it is started, and ended again."""
    host = "0.0.0.0" if address.host == "*" else address.host
    if not address.port:
        raise ConfigError(f"--listen {address.url} needs a fixed port: F-Stack does not choose one")
    trial.check(setup, host, address.port, "--listen")
