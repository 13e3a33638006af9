"""ZeroMQ's protocol without libzmq: connections as state machines, and many of them over sockets."""
