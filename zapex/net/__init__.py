"""Sockets and keys: the two ends of a link between hosts, and the guard of a server."""
