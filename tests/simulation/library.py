"""`zapex replay --schema` and programs that use it by its URL, on machines of a simulated run.

Server, links, writers and clients are the production classes. A client's call waits in a greenlet
of its own: where a process would sleep, its turn is over.
"""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from tests.simulation.checker import Memory
from tests.simulation.cluster import (
    BETA,
    CHECK_EVERY,
    CHUNK,
    STREAMS,
    Cluster,
    Host,
    Process,
    in_vain,
)
from tests.simulation.truth import SCHEMA, TableStreams, Violation, length_of
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.keys import by_shard, without_shard
from zapex.chunks.store import ChunkStore
from zapex.errors import NotEnoughData, PeerError, PeerTimeout
from zapex.library import url_client, url_server
from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.net.server import LinkServer
from zapex.net.shard_samples import ShardedSampleSource

SOME = 1, 3, 5
"""Of seven seeds."""
_WRITERS = 8
_UrlSlots = url_client.UrlSlots
_NETWORK = Security(insecure_network=True)
_ROOM = 1600  # transitions: nothing is evicted
_LIMITED_S = 5.0  # a replay says by then that its limiter allows no batch
_FEW = 0.5  # samples per insert: programs wait for each other


def build(cluster: Cluster) -> None:
    """Served replays and programs that use them, instead of a run."""
    rng, hosts = cluster.time.rng, cluster.hosts
    shards = rng.choice((1, 1, 2))
    shape = SimpleNamespace(
        shards=shards, capacity=rng.choice((_ROOM, 2 * _ROOM)),
        samples_per_insert=rng.choice((0.0, 4.0)),
        batch=rng.choice((4, 16)), prefetch=rng.choice((0, 2)),
        sequences=random.Random(f"recurrent {cluster.time.seed}").random() < 0.3,
    )  # fmt: skip
    if cluster.time.seed % 7 in SOME:
        shape.capacity = 96  # which they fill
    elif cluster.time.seed % 7 == 0 and shards == 1 and not shape.sequences:
        shape.samples_per_insert = min(shape.samples_per_insert, _FEW)
    cluster.library, cluster.checker.one_learner = shape, False
    for shard in range(shards):
        hosts[f"replay{shard}"] = ServedMachine(cluster, f"replay{shard}", shard)
    for i in range(rng.choice((1, 2, 3))):
        hosts[f"client{i}"] = ClientMachine(cluster, f"client{i}", i)

    def listen(*args: Any, **more: Any) -> Any:
        return cluster.running.listen(*args, **more)

    def dial(*args: Any) -> Any:
        return cluster.running.dial(*args)

    def tell(text: str) -> None:
        if shape.samples_per_insert == _FEW:  # a replay whose limiter holds a batch counts as away
            cluster.time.say(f"said: {text}")
        else:
            cluster.tell(text)

    class Slots(_UrlSlots):
        """Says what must be there: all chunks that were closed before `settle` returned."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._closed: list[Any] = []
            self._open: set[int] = set()
            self._title = cluster.running.title

        def open_slot(self) -> int:
            slot = super().open_slot()
            self._open.add(slot)
            if 2 * len(self._open) + 4 > self.store.slots:
                raise Violation(f"lost: {self._title} fills {self._open}, and one more")
            return slot

        def grown(self, indices: Any, magnitudes: Any, closed: Any) -> None:
            self._open.difference_update(closed.tolist())
            self._closed += [cluster.checker.look_at(self.store, slot)[:2] for slot in closed]
            super().grown(indices, magnitudes, closed)

        def settle(self) -> None:
            super().settle()
            cluster.checker.owed |= dict.fromkeys(self._closed, self._title)
            self._closed.clear()

        def release_streams(self, streams: int, slots: Any) -> None:
            self.settle()
            held = [chunk.slot for chunk in self._sender.leaving]  # acknowledged, and not let go
            if sorted([*self._free, *slots.tolist(), *held]) != list(range(self.store.slots)):
                raise Violation(f"lost: {self._title} has the slots {self._free} and {slots}")
            super().release_streams(streams, slots)

    def look_while_idle(link: Any) -> None:
        cluster.running.role.links.append(link)

    class Shards(ShardedSampleSource):
        """Its draws repeat."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._rng = np.random.default_rng(rng.getrandbits(60))

    replaced: dict[Any, dict[str, Any]] = {
        url_server: {
            "listen": listen,
            "LinkServer": partial(LinkServer, tell=cluster.tell),
            "compile_kernels": lambda store: None,
        },
        url_client: {
            "ZmqLink": partial(ZmqLink, dial=dial),
            "ProcessLock": _Lock,
            "UrlSlots": Slots,
            "ShardedSampleSource": Shards,
            "secrets": SimpleNamespace(randbits=rng.getrandbits, randbelow=rng.randrange),
        },
        url_client.UrlLink: {"look_while_idle": look_while_idle},
        url_client.UrlClient: {"_tell": lambda client, text: tell(text)},
    }
    for owner, names in replaced.items():
        for name, value in names.items():
            setattr(owner, name, value)


class _Lock:
    """A ProcessLock: taken again by its owner; who only looks does not get it."""

    def __init__(self) -> None:
        self._taken = 0

    def acquire(self, blocking: bool = True) -> bool:
        if self._taken and not blocking:
            return False
        self._taken += 1
        return True

    def release(self) -> None:
        self._taken -= 1

    def __enter__(self) -> None:
        self._taken += 1

    def __exit__(self, *_: object) -> None:
        self._taken -= 1


class ServedMachine(Host):
    """A served replay. Its memory outlives its processes."""

    def __init__(self, cluster: Cluster, name: str, shard: int) -> None:
        super().__init__(cluster, name)
        self.watch = self._look
        self._shard, self._looks = shard, 0

    def begin(self) -> None:
        shape = self.cluster.library
        self.config = url_server.LibraryConfig(
            schema=SCHEMA.to_json(), listen=f"tcp://{self._shard}:1", capacity=shape.capacity,
            alpha=1.0, eps=0.0, writers=_WRITERS, min_size_to_sample=2 * shape.batch,
            samples_per_insert=shape.samples_per_insert, insecure_network=True,
        )  # fmt: skip
        self.blocks = [aligned_zeros(self.config.nbytes)]
        self.known = Memory(
            f"{self.name} {self.boots}", shape.shards > 1, networked=False, with_learner=False,
            served=True,
        )  # fmt: skip
        self.start({"replay": self._make})

    @property
    def store(self) -> ChunkStore:
        layout = self.config.layout
        return ChunkStore(self.blocks[0][: layout.tree_offset], layout.chunk_layout, layout.slots)

    def forget(self) -> None:
        self.cluster.checker.lose(self.store, self.known)

    def _make(self, process: Process) -> Any:
        cluster, known = self.cluster, self.known
        served: Any = url_server.make_server(self.config, self.blocks[0], process.incarnation)
        served.wasted = partial(in_vain, served._intake._source)
        served.server.guard.close()  # its thread has nothing to guard here
        known.limiter, known.began = served._limiter, len(served._replay)
        served._replay.warn = cluster.time.say
        cluster.checker.watch(served._replay, known, lambda: cluster.net.ghost)
        return served

    def _look(self, process: Process) -> None:
        served, checker = process.role, self.cluster.checker
        checker.take(served._replay.store, self.known)
        self._looks += 1
        if self._looks % CHECK_EVERY == 0:
            checker.check_leaves(served._replay, self.known)
            checker.check_slots(process.title, served._intake, served._replay)
            self.cluster.look_for_silence(served.server)


class ClientMachine(Host):
    """A program that adds, draws and updates, visit after visit."""

    def __init__(self, cluster: Cluster, name: str, number: int) -> None:
        super().__init__(cluster, name)
        self.place = number
        self.calls = 0  # that were answered
        self.programs: list[Program] = []  # those of the dead too: what they hold is not released

    def begin(self) -> None:
        self.start({"client": partial(self.make, UrlProgram)})

    def make(self, kind: "type[Program]", process: Process) -> "Program":
        """A new life of its program."""
        self.programs.append(kind(self, process))
        return self.programs[-1]


class _Calls(greenlet):
    """Where a program's calls wait."""

    over = False

    def wait(self) -> None:
        """The turn is over."""
        if self.over:
            raise GreenletExit
        self.parent.switch()


class Program:
    """The role of a client's process. A call that raises one of `again` has changed nothing."""

    ends: tuple[type[Exception], ...]
    again: tuple[type[Exception], ...]
    pause_s = 10.0  # at most, between a batch and its priorities

    def __init__(self, host: Any, process: Process) -> None:
        self._cluster, self._host, self._process = host.cluster, host, process
        self.links: list[Any] = []
        self._rng = random.Random(host.cluster.time.rng.getrandbits(60))
        self._main = _Calls(self._run)
        self._idle_until_s = 0.0

    def end(self) -> None:
        """The run is over: what it still calls ends."""
        self._main.over, self._main.parent = True, getcurrent()
        self._main.throw()

    def do_work(self) -> int:
        """Go on where it waits; beside it, idle links say hello."""
        self.links = [link for link in self.links if link.look()]
        if self._cluster.time.now_s >= self._idle_until_s:
            self._main.parent = getcurrent()  # that of another program which stands still
            self._main.switch()
        return 0

    def connect(self) -> Any:
        """A client. Raises one of `ends`."""
        raise NotImplementedError

    def use_once_more(self, client: Any) -> None:
        """Somebody catches the error, and goes on with the same client."""

    def ready(self) -> bool:
        """Whether something has come."""
        raise NotImplementedError

    def served(self) -> list[tuple[ServedMachine, Memory]]:
        """By a key's shard: whose memory it is in."""
        return []

    def _check_keys(
        self, keys: Any, table: Any, since: list[tuple[ServedMachine, Memory]], fresh: bool
    ) -> None:
        """These keys name these rows of the truth. fresh: they were drawn or added just now."""
        shards = by_shard(keys)
        there = fresh and self._cluster.library.capacity >= _ROOM
        for shard, (host, known) in enumerate(since):
            if shard in shards and host.known is known:
                mine, checker = shards[shard], self._cluster.checker
                within = without_shard(keys[mine])
                checker.check_keys(host.store, known, within, table[mine], there)

    def _idle(self, seconds: float) -> None:
        self._idle_until_s = self._cluster.time.now_s + seconds
        self._main.wait()

    def _run(self) -> None:
        visits = 0
        while not self._main.over:
            visits += 1
            client: Any = None
            try:
                client = self.connect()
                self._visit(client, self._process.incarnation + visits)
            except self.ends as error:
                self._failed(error)
                if client is not None:
                    self.use_once_more(client)
            if client is not None:
                client.close()
            self._idle(self._rng.uniform(0.0, 2.0))

    def _visit(self, client: Any, incarnation: int) -> None:
        """One client and one writer, until it has had enough."""
        cluster, rng = self._cluster, self._rng
        cluster.learners += 1
        truth, who, number = cluster.checker.truth, cluster.learners, self._host.place
        games = TableStreams(truth, number, incarnation, STREAMS)
        with client.writer(STREAMS) as writer:
            writer.reset(games.reset())
            self._extended = 0
            last, beta = rng.randint(50, 400), BETA if cluster.library.shards < 2 else 0.0
            older: Any = None  # a batch that is updated once more, after newer ones
            free = self._host.place and not cluster.library.samples_per_insert
            few = free and cluster.time.seed % 7 in SOME and rng.random() < 0.5
            draws = 2 if few else last
            for _ in range(last):
                if cluster.is_over:
                    break
                what = rng.random()
                if what < 0.7:
                    at = games._at
                    actions, priority = (truth.columns[n][at] for n in ("action", "priority"))
                    seen = games.step(actions)
                    self._until_done(
                        partial(
                            writer.add, action=actions, reward=seen.reward, next_obs=seen.obs,
                            terminated=seen.terminated, truncated=seen.truncated, priority=priority,
                        )
                    )  # fmt: skip
                elif what < 0.75:
                    self._until_done(writer.flush)
                elif what < 0.95 and draws:
                    draws -= 1
                    since, prefetch = self.served(), cluster.library.prefetch
                    try:
                        batch = client.sample(cluster.library.batch, beta)
                    except (NotEnoughData, *self.again) as error:
                        patient = client.timeout_s > _LIMITED_S * cluster.library.shards
                        self._failed(error, limited=not patient)
                        continue
                    errors = cluster.checker.batch(batch, who, beta)
                    table = truth.find(batch.obs[:, -1, :4])
                    self._check_keys(batch.keys, table, since, not prefetch)
                    self._idle(rng.choice((0.1, 0.1, 0.1, self.pause_s)))
                    self._update(client, batch.keys, errors)
                    if older is not None:
                        keys, given = older
                        self._update(client, keys, given + cluster.checker.next_number(who))
                        older = None
                    elif rng.random() < 0.3:
                        older = batch.keys.copy(), np.floor(4 * errors) / 4
                elif what < 0.98:
                    (self._follow if cluster.library.sequences else self._extend)(
                        client, who, incarnation
                    )
                elif what < 0.985 and cluster.library.sequences:
                    self._look(client)
                else:
                    self._idle(rng.uniform(0.0, 1.0))
            self._until_done(writer.close)

    def _failed(self, error: Exception, *, limited: bool = True) -> None:
        """A call has raised: who is in trouble has a reason, or whom the limiter may hold."""
        self._cluster.time.say(f"said: {self._process.title}: {error}")
        limited = limited and self._cluster.library.samples_per_insert > 0
        if self._cluster.is_calm and not limited and isinstance(error, PeerError):
            raise Violation(f"stuck: {self._process.title}: {error!r}") from error

    def _update(self, client: Any, keys: Any, errors: Any) -> None:
        applied, stale = client.update_priorities(keys, errors)
        if applied + stale != (keys >= 0).sum():
            raise Violation(f"lost: of {keys} {applied} were updated, {stale} were gone")

    def _extend(self, client: Any, who: int, incarnation: int) -> None:
        """The next whole transitions of one more stream; each key is the key of its row."""
        checker, rows = self._cluster.checker, self._rng.randint(1, 3 * CHUNK)
        stamps = np.tile(np.array([self._host.place, incarnation, 99, 0]), (rows, 1))
        stamps[:, 3] = self._extended + np.arange(rows)
        self._extended += rows
        table, known = checker.truth.find(stamps), checker.truth.columns
        table = table[known["step"][table] < length_of(stamps)]  # the last begins none
        names = ("obs", "action", "reward", "next_obs", "discount")
        priorities = known["priority"][table]
        since = self.served()
        keys = client.extend(**{name: known[name][table] for name in names}, priorities=priorities)
        self._check_keys(keys, table, since, True)
        self._update(client, keys, priorities + checker.next_number(who))

    def _follow(self, client: Any, who: int, incarnation: int) -> None:
        """Sequences, where no rows of `extend` are."""
        length, burn_in = self._rng.randint(1, 12), self._rng.randint(0, 3)
        try:
            batch = client.sample_sequences(4, length, burn_in=burn_in)
        except NotEnoughData:
            return
        self._cluster.checker.sequences(batch)

    def _look(self, client: Any) -> None:
        """What the replay says of itself."""
        facts = client.stats()
        client.can_sample(self._cluster.library.batch)
        len(client)
        if facts["size"] > facts["capacity"]:
            raise Violation(f"foreign: {facts}")

    def _until_done(self, call: Callable[[], object]) -> None:
        """Again, until the replay answers: an error has changed nothing."""
        while True:
            try:
                call()
                self._host.calls += 1
                return
            except self.again as error:
                self._failed(error)
                self._idle(self._rng.uniform(0.0, 1.0))


class UrlProgram(Program):
    """One that uses the served replays."""

    ends = again = (PeerTimeout,)

    def connect(self) -> Any:
        shape = self._cluster.library
        client = url_client.UrlClient(
            [f"tcp://{shard}:1" for shard in range(shape.shards)], SCHEMA,
            timeout_s=self._rng.choice((3.0, 10.0)), security=_NETWORK, prefetch=shape.prefetch,
        )  # fmt: skip
        client._rng = np.random.default_rng(self._cluster.time.seed)
        return client

    def served(self) -> list[tuple[ServedMachine, Memory]]:
        hosts: Any = self._cluster.hosts
        shards = range(self._cluster.library.shards)
        return [(hosts[f"replay{shard}"], hosts[f"replay{shard}"].known) for shard in shards]

    def ready(self) -> bool:
        return any(socket.ready() for socket in self._process.sockets)
