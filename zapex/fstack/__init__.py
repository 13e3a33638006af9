"""F-Stack (TCP/IP in user space, over DPDK): its binding, its loop, and sockets on it for zmtp.

It is used only where a user names the library (docs/fstack.md).
"""
