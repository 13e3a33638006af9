"""Optional: zmtp:// and fstack://, listeners without libzmq for the clients of tcp://.

They speak ZeroMQ's protocol over sockets of the kernel or of F-Stack (TCP/IP in user space, over
DPDK). The rest of zapex knows only `Setup`, and imports `listener` where a user names such a URL
(docs/fstack.md).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Setup:
    """What a user names for fstack://. arguments: more of them for DPDK, separated by spaces."""

    library: str
    config: str
    arguments: str = ""
