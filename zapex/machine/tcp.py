"""TCP connections on Linux: their send buffers, and what they have received."""

import os
import socket
import struct
from contextlib import suppress

# A connection's send buffer in the kernel (docs/decisions.md). From this round trip on the kernel
# chooses the size again.
SEND_BUFFER_BYTES, FAR_US = 160 << 10, 200
_SO_BUF_LOCK, _SNDBUF_LOCKED = 72, 1  # of Linux, from 5.15 on
_MIN_RTT_AT = 148  # tcpi_min_rtt, microseconds, in Linux's struct tcp_info
_RECEIVED_AT = 128  # tcpi_bytes_received, the same


def let_grow_if_far(fd: int) -> None:
    """Let the send buffer of a connection grow again, if that helps.

    With a distant peer a small buffer limits the speed, because the bytes in flight must fit into
    it. Call this when a connection is no longer new: then the kernel knows the shortest round
    trip.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as link:
        if link.family not in (socket.AF_INET, socket.AF_INET6):
            return
        facts = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
        (min_rtt_us,) = struct.unpack_from("=I", facts, _MIN_RTT_AT)
        if min_rtt_us >= FAR_US:
            locked = link.getsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK)
            link.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, locked & ~_SNDBUF_LOCKED)


def received_bytes(connection: socket.socket) -> int:
    """How many bytes the kernel has received over a connection. Raises OSError if not tcp."""
    facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
    return int(struct.unpack_from("<Q", facts, _RECEIVED_AT)[0])
