"""A program that owns a replay and programs that use it by its handle, on one simulated machine.

Owner, links, writers and clients are the production classes over shared memory. What a kernel gives
them is here: sockets, descriptors, sleep. A client's call waits in a greenlet of its own, as in
library.py, and dies or stops there at the steps that it passes. The owner dies between two turns:
with it goes the memory.
"""

import time
from collections import deque
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent

from tests.simulation import library
from tests.simulation.checker import Memory
from tests.simulation.cluster import BETA, CHECK_EVERY, CHUNK, Bell, Cluster, Host, Process
from tests.simulation.truth import SCHEMA, Life, Violation
from zapex.chunks.batch import aligned_zeros
from zapex.errors import PeerDied, PeerError, PeerTimeout, ReplayError
from zapex.library import handle_client, handle_server
from zapex.library.prioritized import OwnedReplay, PrioritizedReplay

_HandleLink = handle_client.HandleLink
_LONG_S = 4.0  # a client looks for a dead owner in less


def build(cluster: Cluster) -> None:
    """An owner and programs that use its replay, instead of a run."""
    rng = cluster.time.rng
    cluster.library = SimpleNamespace(
        shards=1, capacity=rng.choice((240, 480)), samples_per_insert=rng.choice((0.0, 4.0)),
        batch=rng.choice((4, 16)), waits_s=rng.choice((0.0, 2.0)),
        sequences=rng.random() < 0.3, prefetch=0,
    )  # fmt: skip
    if cluster.time.seed % 7 in library.SOME:
        cluster.library.capacity = 160
    cluster.checker.one_learner, cluster.turn_s = False, rng.choice((0.02, 0.1, 0.3))
    owner = cluster.hosts["replay0"] = OwnerMachine(cluster)
    for i in range(rng.choice((1, 2, 3))):
        cluster.hosts[f"client{i}"] = HandleMachine(cluster, f"client{i}", i, owner)
    _Kernel(cluster, owner).install()


class _Kernel:
    """Processes by their number, sockets by their address."""

    def __init__(self, cluster: Cluster, owner: "OwnerMachine") -> None:
        self._cluster, self._owner = cluster, owner
        self._lives: list[tuple[Process, int]] = []
        self._listeners: dict[str, _File] = {}
        self._asked: dict[Process, str] = {}  # the address that each program knocked at last

    def install(self) -> None:
        """From now on the handle's modules call this kernel."""
        rng, kernel, cluster = self._cluster.time.rng, self, self._cluster

        class File(_File):
            """Of the process whose turn it is."""

            def __init__(self, *_: Any) -> None:
                super().__init__(cluster.running)

            def bind(self, address: str) -> None:
                kernel._listeners[address] = self

        class Waiter(_Waiter):
            def __init__(self, words: Any, index: int, event: Any) -> None:
                super().__init__(words, index)
                event.__self__.process = cluster.running

        class Link(_HandleLink):
            """Says what must be there: all rows that it has announced."""

            def grown(self, indices: Any, magnitudes: Any, closed: Any) -> None:
                super().grown(indices, magnitudes, closed)
                if not cluster.net.ghost:
                    kernel._owner.owe(self.store, indices)

        def eventfd(*_: Any) -> Any:
            return File().wake

        system = SimpleNamespace(
            getpid=lambda: self._number(cluster.running, cluster.running.life),
            getuid=lambda: 0, pidfd_open=self._pidfd, eventfd=eventfd, close=lambda fd: None,
            sched_yield=lambda: None, EFD_NONBLOCK=0, EFD_CLOEXEC=0,
        )  # fmt: skip
        both = {
            "os": system,
            "socket": SimpleNamespace(socket=File, AF_UNIX=0, SOCK_SEQPACKET=0, SOCK_NONBLOCK=0),
            "select": SimpleNamespace(poll=_Poll, POLLIN=0),
            "threading": SimpleNamespace(Thread=_NoThread),
            "Segment": SimpleNamespace(
                create=lambda name, nbytes: _Segment(aligned_zeros(nbytes), self._owner.blocks),
                attach=lambda fd, nbytes=None: nullcontext(fd),
            ),
            "Waiter": Waiter,
            "Waker": Bell,
            "peer_of": lambda socket: (self._number(*socket.peer.owner), 0),
            "spin_seconds": lambda *_: 0.0,
        }
        there = {
            "secrets": SimpleNamespace(token_hex=lambda n: f"{rng.getrandbits(60)}"),
            "Populator": _NoThread,
            "send_offer": lambda socket, offer: socket.peer.offers.append(offer) or True,
        }
        here = {
            "connect_unix": self._connect,
            "receive_offer": _receive_offer,
            "HandleLink": Link,
            "PeerTimeout": self._timeout,
            "PeerDied": self._died,
        }
        for module, names in (
            (handle_server, both | there),
            (handle_client, both | here),
            (OwnedReplay, {"_share": lambda replay: _Segment(replay.memory, self._owner.blocks)}),
        ):
            for name, value in names.items():
                setattr(module, name, value)

    def _number(self, process: Process, life: int) -> int:
        if (process, life) not in self._lives:
            self._lives.append((process, life))
        return 1 + self._lives.index((process, life))

    def _pidfd(self, pid: int) -> "_File":
        process, life = self._lives[pid - 1]
        if process.life != life:
            raise ProcessLookupError(pid)
        fd = _File(self._cluster.running)
        fd.peer = _File(process)
        return fd

    def _serves(self) -> bool:
        """Whether the owner lives at whose address the running program knocked last."""
        listener = self._listeners.get(self._asked.get(self._cluster.running, ""))
        return listener is not None and listener.is_open

    def _timeout(self, text: str) -> Exception:
        """A client says that its owner lives and does not answer."""
        if not self._serves() and self._cluster.time.now_s > self._owner.gone_s + _LONG_S:
            raise Violation(f"foreign: of a dead owner: {text}")
        return PeerTimeout(text)

    def _died(self, text: str) -> Exception:
        """A client says that its owner is gone, or repeats why it does not go on."""
        if self._serves() and not text.startswith("this client failed before"):
            raise Violation(f"foreign: of a living owner: {text}")
        return PeerDied(text)

    def _connect(self, socket: "_File", address: str, timeout_s: float) -> None:
        self._asked[self._cluster.running] = address
        listener = self._listeners.get(address)
        if listener is None or not listener.is_open:
            raise ConnectionRefusedError(address)
        socket.peer = there = _File(listener.process)
        there.peer = socket
        if not self._cluster.net.ghost:
            listener.offers.append(there)
            listener.process.wake()


class _File:
    """A descriptor, which is its own number: an end of a socket, a pidfd, an event."""

    def __init__(self, process: Process) -> None:
        self.process, self._life, self._closed = process, process.life, False
        self.peer: _File | None = None
        self.offers: deque[Any] = deque()  # what has come
        self._timeout_s = 0.0

    @property
    def owner(self) -> tuple[Process, int]:
        """The process, and which of its lives."""
        return self.process, self._life

    @property
    def is_open(self) -> bool:
        """Whether its process lives and has not closed it."""
        return not self._closed and self.process.life == self._life

    @property
    def is_readable(self) -> bool:
        """Whether something has come, or its peer is gone."""
        return bool(self.offers) or (self.peer is not None and not self.peer.is_open)

    def wake(self) -> None:
        """Of an event: its waiter sleeps no longer."""
        if not self.process.host.cluster.net.ghost:
            self.process.wake()

    def fileno(self) -> "_File":
        return self

    def listen(self, most: int) -> None: ...

    def setblocking(self, wanted: bool) -> None: ...

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def accept(self) -> tuple["_File", str]:
        if not self.offers:
            raise BlockingIOError
        return self.offers.popleft(), ""

    def close(self) -> None:
        self._closed = True

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _receive_offer(socket: _File, address: str) -> Any:
    until_s = time.monotonic() + socket._timeout_s
    while not socket.offers:
        if socket.is_readable:
            raise ConnectionResetError(address)
        if time.monotonic() > until_s:
            raise TimeoutError(address)
        getcurrent().wait()
    return socket.offers.popleft()


class _Segment:
    """Memory of the machine while it is open; its descriptor is the object itself."""

    def __init__(self, memory: Any, blocks: list[Any]) -> None:
        self.buffer, self._blocks, self.fd = memory, blocks, self
        blocks.append(memory)

    def __enter__(self) -> "_Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks[:] = [block for block in self._blocks if block is not self.buffer]


class _Poll:
    def __init__(self) -> None:
        self.files: list[_File] = []

    def register(self, file: _File, what: int = 0) -> None:
        self.files.append(file)

    def poll(self, timeout_ms: float = 0) -> list[_File]:
        return [file for file in self.files if file.is_readable]


class _Waiter:
    """A process that sleeps ends its turn; it is woken by its event, and looks now and then."""

    def __init__(self, words: Any, index: int) -> None:
        self._words, self._index, self._poll = words, index, _Poll()
        self.watch, self.forget = self._poll.register, self._poll.files.remove

    def sleep(self, ready: Any, timeout_s: float) -> list[_File]:
        self._words[self._index] = 1
        if timeout_s > 0.0 and not ready():
            getcurrent().wait()
        self._words[self._index] = 0
        return self._poll.poll()


class _NoThread:
    """What it would do is done by turns, or only makes things faster."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def start(self) -> None: ...

    def is_alive(self) -> bool:
        return True


class OwnerMachine(Host):
    """The owner's program. Its memory dies with it."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, "replay0")
        self.watch = self._look
        self.handle: Any = None  # as it was sent to the others last
        self.gone_s = -_LONG_S  # when the last owner died
        self._owed: dict[Life, int] = {}  # the end of the rows that were announced
        self._looks = 0

    def begin(self) -> None:
        self.start({"owner": self._make})

    def bury(self, process: Process) -> None:
        self.forget()

    def forget(self) -> None:
        self.gone_s = self.cluster.time.now_s
        self._owed.clear()
        self.blocks.clear()

    def owe(self, store: Any, indices: Any) -> None:
        """These rows can be drawn from now on, unless they are in a dead owner's memory."""
        if not self.blocks or store.mem.ctypes.data != self.blocks[0].ctypes.data:
            return
        for slot in set((indices // CHUNK).tolist()):
            life, first, table = self.cluster.checker.look_at(store, slot)
            self._owed[life] = max(self._owed.get(life, 0), first + len(table))

    def _make(self, process: Process) -> "Owner":
        return Owner(self, process)

    def _look(self, process: Process) -> None:
        role, checker = process.role, self.cluster.checker
        core, known = role.replay.core, role.known
        checker.take(core.store, known)
        for life, end in self._owed.items():
            checker.demand(known, life, end)
        self._owed.clear()
        self._looks += 1
        if self._looks % CHECK_EVERY == 0:
            checker.check_leaves(core, known)
            checker.check_owner(process.title, core)


class Owner:
    """The role of the owner's process: it serves, and draws sometimes."""

    def __init__(self, machine: OwnerMachine, process: Process) -> None:
        cluster, shape = machine.cluster, machine.cluster.library
        self._cluster, rng = cluster, cluster.time.rng
        cluster.learners += 1
        self._who = cluster.learners
        self.replay = PrioritizedReplay(
            shape.capacity, SCHEMA, alpha=1.0, eps=0.0, seed=rng.getrandbits(60), chunk=CHUNK,
            min_size_to_sample=2 * shape.batch, samples_per_insert=shape.samples_per_insert,
            timeout_s=shape.waits_s,
        )  # fmt: skip
        core = self.replay.core
        core.warn = cluster.time.say
        machine.blocks.clear()
        machine.handle = self.replay.handle
        self.known = Memory(
            f"{machine.name} {process.life}", False, networked=False, with_learner=False,
            served=True, taken=core.ledger.taken,
        )  # fmt: skip
        self.known.limiter = core._limiter
        cluster.checker.watch(core, self.known, lambda: cluster.net.ghost)

    def do_work(self) -> int:
        """What the server's thread does when it is woken; then perhaps a batch."""
        server, replay, rng = self.replay.core.server, self.replay, self._cluster.time.rng
        assert server is not None
        woken: Any = server._waiter.sleep(lambda: True, 0.0)
        if woken:
            server._come_and_go(woken)
        server._do_work()
        batch_size = self._cluster.library.batch
        if rng.random() < 0.1 and replay.can_sample(batch_size):
            batch = replay.sample(batch_size, BETA)
            errors = self._cluster.checker.batch(batch, self._who, BETA)
            replay.update_priorities(batch.keys, errors)
        return 1

    def ready(self) -> bool:
        """Never asked: it always works."""
        raise AssertionError


class HandleMachine(library.ClientMachine):
    """A program beside the owner: a place of its own for faults, on the same machine."""

    def __init__(self, cluster: Cluster, name: str, number: int, owner: OwnerMachine) -> None:
        super().__init__(cluster, name, number)
        self.owner, self.blocks = owner, owner.blocks

    def begin(self) -> None:
        self.start({"program": partial(self.make, HandleProgram)})


class HandleProgram(library.Program):
    """It connects again when its link has ended."""

    ends, again, pause_s = (PeerError,), (ReplayError,), 1.0

    def connect(self) -> Any:
        handle, self._connected_s = self._host.owner.handle, self._cluster.time.now_s
        if handle is None:
            raise PeerDied("no owner has begun yet")
        return handle_client.HandleClient(handle, self._rng.choice((3.0, 10.0)))

    def use_once_more(self, client: Any) -> None:
        cluster = self._cluster
        cluster.learners += 1
        self._idle(self._rng.choice((0.0, 10.0)))
        try:
            batch = client.sample(cluster.library.batch, BETA)
            errors = cluster.checker.batch(batch, cluster.learners, BETA)
            self._update(client, batch.keys, errors)
        except (PeerError, ReplayError):
            return

    def ready(self) -> bool:
        return False

    def _failed(self, error: Exception, *, limited: bool = True) -> None:
        if isinstance(error, PeerTimeout) and self._connected_s < self._host.owner.gone_s:
            raise Violation(f"foreign: the owner of {self._process.title} is dead: {error}")
        super()._failed(error, limited=limited)
