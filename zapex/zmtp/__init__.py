"""ZeroMQ's protocol without libzmq: connections as state machines, and many over sockets."""
