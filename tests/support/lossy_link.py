"""A TCP proxy that cuts, freezes, delays and truncates: a bad network for tests."""

import contextlib
import selectors
import socket
import threading
import time
from collections import deque


class LossyLink:
    """Forwards tcp://127.0.0.1:`port` to another port as long as it is whole.

    cut(): hang up on everybody, refuse newcomers. freeze(): connections stay and nothing passes
    (half open). heal(): all well again. truncate_after: each connection ends after so many bytes.
    captured: where it is a bytearray, all that passes is added to it.
    """

    def __init__(
        self, target_port: int, *, delay_s: float = 0.0, target_host: str = "127.0.0.1"
    ) -> None:
        self._target, self._delay_s = (target_host, target_port), delay_s
        self.truncate_after: int | None = None
        self.captured: bytearray | None = None
        self.frozen = self.down = False
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peer: dict[socket.socket, socket.socket] = {}
        self._passed: dict[socket.socket, int] = {}
        self._late: deque[tuple[float, socket.socket, bytes]] = deque()
        self._stop = threading.Event()
        self._cut = threading.Event()
        self._still = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def cut(self) -> None:
        self.down = True
        self._cut.set()
        while self._cut.is_set():
            time.sleep(0.005)

    def freeze(self) -> None:
        self._still.clear()
        self.frozen = True
        self._still.wait(10)  # what is being forwarded has passed

    def heal(self) -> None:
        self.frozen = self.down = False
        self.truncate_after = None

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def __enter__(self) -> "LossyLink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._cut.is_set():
                for end in list(self._peer):
                    self._drop(end)
                self._cut.clear()
            if self.frozen:
                self._still.set()
                time.sleep(0.005)
                continue
            for key, _ in self._selector.select(0.005):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._forward(key.fileobj)
            while self._late and self._late[0][0] <= time.monotonic():
                self._deliver(*self._late.popleft()[1:])
        for end in list(self._peer):
            self._drop(end)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            if self.down:
                raise ConnectionRefusedError
            server = socket.create_connection(self._target, 2)
        except OSError:
            client.close()
            return
        self.connections += 1
        for end, other in ((client, server), (server, client)):
            end.settimeout(5)
            self._peer[end], self._passed[end] = other, 0
            self._selector.register(end, selectors.EVENT_READ)

    def _forward(self, end: socket.socket) -> None:
        if end not in self._peer:
            return
        try:
            data = end.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._drop(end)
            return
        limit = self.truncate_after
        if limit is not None and self._passed[end] + len(data) > limit:
            with contextlib.suppress(OSError):
                self._peer[end].sendall(data[: max(0, limit - self._passed[end])])
            self._drop(end)
            return
        self._passed[end] += len(data)
        if self.captured is not None:
            self.captured += data
        if self._delay_s:
            self._late.append((time.monotonic() + self._delay_s, end, data))
        else:
            self._deliver(end, data)

    def _deliver(self, end: socket.socket, data: bytes) -> None:
        if end in self._peer:
            try:
                self._peer[end].sendall(data)
            except OSError:
                self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        other = self._peer.pop(end, None)
        for sock in (end, other):
            if sock is not None:
                self._peer.pop(sock, None)
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(sock)
                sock.close()
