"""The cells of the transport benchmark: each measurement has a server and clients of its own."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.transport import ends, network_process, paced, redis_server, rig, roofs
from benchmarks.transport import server as served
from benchmarks.transport.fstack_place import FstackPlace
from benchmarks.transport.places import Places, Process
from zapex.host.metrics import RoleMetrics
from zapex.machine.segment import Segment

Result = dict[str, Any]
_FORK = multiprocessing.get_context("fork")


class Cells:
    """Every measurement at `places`, of `seconds` an operation. fstack: where it runs, if it can.

    The port of a real F-Stack can be reached where this process is, not from a place made here.
    """

    def __init__(self, places: Places, seconds: float, fstack: FstackPlace | None = None) -> None:
        self._places, self._seconds, self.fstack = places, seconds, fstack

    def _address(self, kind: str) -> tuple[str, bool]:
        """Where a server of this kind listens, and whether both ends are at `places`."""
        real = self.fstack.address if kind.startswith("fstack") and self.fstack else None
        return real or self._places.address, real is None

    def _url(self, kind: str) -> str:
        if kind == "ipc":
            return f"ipc://{self._places.path(f'link-{self._places.port()}')}"
        return f"tcp://{self._address(kind)[0]}:{self._places.port()}"

    def _with_server(
        self, server: Callable[[], Any], *clients: Callable[[], Any], apart: bool = True,
        beside: Callable[[], Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        """The results of clients of a server. apart: each end in its place, or both outside.

        beside: a second process of the server.
        """
        running: list[Process] = []
        try:
            running.append(self._places.start(0 if apart else None, server))
            asking = [self._places.start(1 if apart else None, client) for client in clients]
            running += asking
            if beside is not None:
                running.append(self._places.start(0 if apart else None, beside))
            return [client.result(running[0]) for client in asking]
        finally:
            for process in running:
                process.kill()

    def zapex(self, kind: str, setting: served.Setting) -> Result:
        """Every operation of one client."""
        seconds = self._seconds
        if kind == "shm":
            host = served.make_host(setting)
            return self._with_server(
                lambda: served.serve_shm(setting, host),
                lambda: rig.measure_shm(rig.ShmClient(setting, host, 0), setting, seconds),
            )[0]
        url, security = self._url(kind), self._security(kind)
        scheme = next((one for one in ("zmtp", "fstack") if kind.startswith(one)), "tcp")
        listen = url.replace("tcp", scheme, 1)
        fstack = self.fstack.setup if self.fstack is not None and scheme == "fstack" else None
        return self._with_server(
            lambda: served.serve_network(setting, listen, security["replay"], fstack=fstack),
            lambda: rig.measure_network(
                rig.NetworkClient(setting, url, security, 0), setting, seconds
            ),
            apart=self._address(kind)[1],
        )[0]

    def network_process(self, kind: str, setting: served.Setting) -> Result:
        """The same, with the server's sockets in a process of their own."""
        url, security = self._url(kind), self._security(kind)
        host = served.make_host(setting)
        packed = network_process.Packed(setting, host.plan.rings["answers"][0])
        listen = url.replace("tcp", "zmtp", 1)
        return self._with_server(
            lambda: network_process.serve_sockets(
                setting, host, packed, listen, security["replay"]
            ),
            lambda: rig.measure_network(
                rig.NetworkClient(setting, url, security, 0), setting, self._seconds
            ),
            beside=lambda: network_process.serve_replay(setting, host, packed),
        )[0]

    def _security(self, kind: str) -> dict[str, Any]:
        return served.securities(self._places.path("keys") if kind.endswith("+curve") else None)

    def bare_zmq(
        self, kind: str, sizes: list[int], send_buffer_bytes: int | None = None
    ) -> list[Result]:
        """The same bytes as one bare message."""
        url, keys = self._url(kind), None
        if kind == "tcp+curve":
            import zmq

            keys = zmq.curve_keypair()
        return self._with_server(
            lambda: roofs.zmq_server(url, keys, send_buffer_bytes),
            lambda: roofs.zmq_client(
                url, sizes, self._seconds, keys and keys[0], send_buffer_bytes
            ),
        )[0]

    def bare_tcp(self, sizes: list[int]) -> list[Result]:
        """The same bytes over a socket."""
        address, port = self._places.address, self._places.port()
        return self._with_server(
            lambda: roofs.tcp_server(address, port),
            lambda: roofs.tcp_client(address, port, sizes, self._seconds),
        )[0]

    def router_end(self, router: str, polling: bool, with_keys: bool) -> Result:
        """libzmq's router, or zapex's on the kernel or F-Stack, with nothing behind it."""
        (address, apart), port, keys = self._address(router), self._places.port(), None
        fstack = self.fstack.setup if self.fstack is not None and router == "fstack" else None
        url = f"tcp://{address}:{port}"
        if with_keys:
            import zmq

            keys = zmq.curve_keypair()
        return self._with_server(
            lambda: (
                ends.libzmq_server(url, polling, keys)
                if router == "libzmq"
                else ends.zmtp_server(address, port, polling, keys, fstack)
            ),
            lambda: ends.zmq_client(url, polling, self._seconds, keys and keys[0]),
            apart=apart,
        )[0]

    def socket_end(self, polling: bool, busy_poll_us: int, zerocopy: bool) -> Result:
        """A bare socket, as a roof."""
        where = self._places.address, self._places.port()
        return self._with_server(
            lambda: ends.socket_server(*where, polling, busy_poll_us),
            lambda: ends.socket_client(*where, polling, self._seconds, busy_poll_us, zerocopy),
        )[0]

    def uring_end(self) -> Result:
        """A bare socket by io_uring."""
        where = self._places.address, self._places.port()
        return self._with_server(
            lambda: ends.uring_server(*where),
            lambda: ends.socket_client(*where, False, self._seconds),
        )[0]

    def memcpy(self, sizes: list[int]) -> list[Result]:
        """The same bytes copied."""
        return self._places.start(1, lambda: roofs.memcpy(sizes, self._seconds)).result()

    def redis(self, actors: int = 1) -> list[Result]:
        """Redis with the paper's messages, of each of several actors at once."""
        address, port = self._places.address, self._places.port()
        client = lambda: redis_server.client(  # noqa: E731
            address, port, self._seconds, served.PARAMETER_BYTES
        )
        directory = str(self._places.path("."))
        return self._with_server(
            lambda: redis_server.server(address, port, directory), *[client] * actors
        )

    def paced(self, kind: str, step_s: float, seconds: float) -> Result:
        """Roles' shares of time beside a learner that takes `step_s` for a batch."""
        setting, url, security = served.atari(2), self._url(kind), self._security(kind)
        words = Segment.create("bench-metrics", RoleMetrics.required_bytes()).buffer
        learned = Segment.create("bench-learned", 4096).buffer[:8].view(np.int64)
        learner, actor = self._with_server(
            lambda: served.serve_network(setting, url, security["replay"], words),
            lambda: paced.learner(setting, url, security, step_s, seconds, words, learned),
            lambda: paced.actor(setting, url, security, seconds, learned),
        )
        return {**learner, **actor}

    def crowd(self, kind: str, actors: int) -> Result:
        """Several relays at once: all push, then all pull."""
        if kind == "redis":
            found = self.redis(actors)
            pushed = sum(one["rpush_per_s"] for one in found) * redis_server.PAIRS_BYTES
            return {
                "push_us": _mean([one["rpush_us"]["p50"] for one in found]),
                "push_mb_per_s": pushed / 1e6,
                "push_bytes": redis_server.PAIRS_BYTES,
                "pull_us": _mean([one["get_us"]["p50"] for one in found]),
            }
        setting = served.atari(actors, 16_000 + 4_000 * actors)
        url, security, barrier = self._url(kind), self._security(kind), _FORK.Barrier(actors)

        def client(number: int) -> Result:
            ours = rig.NetworkClient(setting, url, security, number)
            for _ in range(4):
                ours.push()
            barrier.wait(60)
            latency = roofs.timed(ours.push, self._seconds)
            barrier.wait(60)
            speed = roofs.rate(ours.push_on, 2 * self._seconds)
            ours.push()
            barrier.wait(60)
            return {
                "push_us": latency["p50"], "push_mb_per_s": speed, "push_bytes": ours.push_bytes,
                "pull_us": roofs.pulls(ours.pull, self._seconds)["p50"],
            }  # fmt: skip

        found = self._with_server(
            lambda: served.serve_network(setting, url, security["replay"]),
            *[lambda n=n: client(n) for n in range(actors)],
        )
        joined = {key: _mean([one[key] for one in found]) for key in ("push_us", "pull_us")}
        speed = sum(one["push_mb_per_s"] for one in found)
        return {**joined, "push_mb_per_s": speed, "push_bytes": found[0]["push_bytes"]}


def _mean(values: list[float]) -> float:
    return float(np.mean(values))
