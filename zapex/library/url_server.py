"""`zapex replay --schema`: the replay as a library, served to any host, without an environment.

The parent only owns the memory. If the process that serves dies, it is started again over the same
memory. Clients only wait until then.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.arguments import MOST_TIMEOUT_S
from zapex.chunks.keys import NO_KEY
from zapex.chunks.layout import ACTOR, COMMIT_SEQUENCE, LIVE, SEQUENCE, STATE
from zapex.chunks.schema import Schema
from zapex.config.fields import SettingsGroup, setting
from zapex.errors import ConfigError, NotEnoughData, ZapexError, tell
from zapex.fstack import Setup
from zapex.host.roster import Roster
from zapex.library.connect import schema_text
from zapex.library.prioritized import OwnedReplay
from zapex.library.url_client import CONFIG, form_of
from zapex.machine.child import Stop, child_setup, end_by_sigterm, run_until_stopped
from zapex.machine.memory import align
from zapex.machine.segment import Populator, Segment
from zapex.machine.supervisor import GaveUp, ProcessSpec, Supervisor
from zapex.net.addresses import check_free
from zapex.net.keys import Security
from zapex.net.replay_ends import ZmqExperienceSource, ZmqSampleSink
from zapex.net.server import End, LinkServer
from zapex.net.sessions import Session
from zapex.net.sockets import listen
from zapex.replay.core import ReplayLayout
from zapex.replay.draw import METHODS
from zapex.replay.limiter import LimiterConfig
from zapex.replay.sequences import Sequences, compile_kernels
from zapex.roles.intake import Intake
from zapex.wire.batches import PackedSequences
from zapex.wire.messages import BULK, MAX_TEXT_BYTES, PRESENT, SMALL, Call, Reply, Request
from zapex.wire.protocol import Kind, as_buffer

_TICK_S = 0.2
_GRACE_S = 3.0
CREDIT = 4  # twice the chunks that a writer may have in flight


@dataclass(frozen=True)
class LibraryConfig(SettingsGroup):
    """Options of a replay without an environment."""

    schema: str
    """File of the schema, JSON: `zapex.Schema.to_json()` writes it. Clients: zapex.connect(URL)."""
    listen: str
    """Address to serve at: tcp://ADDRESS:PORT or ipc:///PATH. Any but loopback needs --keys.
    zmtp://ADDRESS:PORT serves the same clients without libzmq; they connect with tcp://. So does
    fstack://ADDRESS:PORT, on F-Stack (docs/fstack.md)."""
    capacity: int = setting(1_000_000, low=1)
    """Transitions."""
    alpha: float = setting(0.6, low=0.0)
    """How much priorities matter."""
    eps: float = setting(1e-6, low=0.0)
    """Added to each |priority|."""
    floor: float = setting(0.0, low=0.0)
    """A |priority| below this counts as this much."""
    recency: float = setting(0.0, low=0.0, high=40.0)
    """How much rarer the oldest transition is drawn than a new one of equal priority: exp(recency)
    times; 0: equally often."""
    seed: int = setting(0, low=0, high=2**63 - 1)
    """Seed of the draws."""
    writers: int = setting(16, low=1, high=4096)
    """Writers at a time, over all clients; a client that extends counts as one."""
    min_size_to_sample: int = setting(1, low=1)
    """Transitions that there must be before the first batch."""
    samples_per_insert: float = setting(0.0, low=0.0)
    """How often a transition is drawn on average; 0: no limit."""
    tolerance: int = setting(0, low=0)
    """Samples by which either side may be ahead; 0: chosen automatically."""
    timeout_s: float = setting(5.0, low=0.0, high=MOST_TIMEOUT_S)
    """Seconds that a batch may wait for samples per insert."""
    keys: str = ""
    """Directory of `zapex keygen` with replay.key and public.json; clients have client.key."""
    insecure_network: bool = False
    """Use no keys: every machine on the network can then read and change everything."""
    fstack_lib: str = ""
    """F-Stack's shared library, for fstack://; or the variable ZAPEX_FSTACK_LIB."""
    fstack_conf: str = ""
    """F-Stack's configuration, for fstack://; or ZAPEX_FSTACK_CONF."""
    fstack_eal: str = ""
    """More arguments for its DPDK, --fstack-eal="--no-pci --vdev=..."; or ZAPEX_FSTACK_EAL."""

    def read(self) -> "LibraryConfig":
        """A copy with the schema's text in place of its file's name. Raises ConfigError."""
        return replace(self, schema=schema_text(self.schema, "--schema"))

    def check(self) -> None:
        """Raise ConfigError if the options are invalid, or this machine cannot serve them."""
        self.security.check(self.listen, "--listen")
        check_free(self.listen, self.fstack)
        if 2 * self.writers * CREDIT * self.layout.chunk > self.layout.capacity:
            raise ConfigError(
                f"{self.writers} writers with {CREDIT} chunks of {self.layout.chunk} transitions "
                f"under way take more than half of the capacity of {self.capacity}: raise "
                "--capacity or lower --writers"
            )

    @property
    def layout(self) -> ReplayLayout:
        """The layout of the replay's memory, once the schema is read."""
        schema = Schema.from_json(self.schema)
        return ReplayLayout(schema, self.capacity, self.writers * CREDIT)

    @property
    def fstack(self) -> Setup:
        """What F-Stack is started with, if `listen` asks for it."""
        return Setup(self.fstack_lib, self.fstack_conf, self.fstack_eal)

    @property
    def security(self) -> Security:
        """How far the network is trusted. Raises ConfigError."""
        return Security.load(self.keys, "replay", self.insecure_network)

    @property
    def nbytes(self) -> int:
        """Bytes of the replay and of the roster after it."""
        return align(self.layout.nbytes) + Roster.required_bytes(self.writers)


def serve_library(config: LibraryConfig) -> int:
    """Own the memory and keep a server running over it until a signal. Returns the exit code.

    config: as the user gave it, with the schema's file name. Raises ConfigError.
    """
    config = config.read()
    config.check()
    with (
        Segment.create("zapex-library", config.nbytes) as segment,
        tempfile.TemporaryDirectory(prefix="zapex-") as folder,
        Supervisor() as supervisor,
    ):
        supervisor.install_signal_handlers()
        log = Path(folder) / "replay.log"
        populator = Populator(segment)
        failed = False
        supervisor.start(
            ProcessSpec(
                name="replay",
                argv=[
                    sys.executable,
                    "-m",
                    "zapex.library.url_server",
                    json.dumps(asdict(config)),
                    str(segment.fd),
                ],
                log_path=log,
                pass_fds=[segment.fd],
                restart=True,
            )
        )
        populator.start()
        said = 0
        try:
            while supervisor.stop_signal is None and not failed:
                for event in supervisor.poll(_TICK_S):
                    print(event, flush=True)
                    failed = failed or isinstance(event, GaveUp)
                said = _pass_on(log, said)
        finally:
            supervisor.shutdown(_GRACE_S)
            populator.stop()
            _pass_on(log, said)
    return 1 if failed else 0


def _pass_on(log: Path, said: int) -> int:
    """Print the server's new output."""
    if not log.exists():
        return said
    with log.open() as file:
        file.seek(said)
        print(file.read(), end="", flush=True)
        return file.tell()


class _Calls(End):
    """Calls that have come, and when, until they are answered."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self.come: dict[tuple[Session, int], tuple[Call, float]] = {}
        self._clock_s = clock_s
        self.handlers = {Kind.CALL: self._take}

    def _take(self, session: Session, call: Call) -> None:
        self.come.setdefault((session, call.sequence), (call, self._clock_s()))


class LibraryServer:
    """The duty cycle of the process that serves: takes in chunks, answers requests and calls.

    A batch waits, at most timeout_s, while the limiter does not allow it. Calls are answered after
    the intake, so that the answers include new chunks. All answers are copies: evicted slots are
    free at once.

    Args:
        server: closed with this one.
        replay: is served.
        limits: of samples per insert.
        credit: chunks that a writer may have under way.
        timeout_s: as above, in seconds.
        clock_s: monotonic, in seconds; for tests.
    """

    def __init__(
        self,
        server: LinkServer,
        replay: OwnedReplay,
        limits: LimiterConfig,
        *,
        credit: int,
        timeout_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.server, self._replay = server, replay
        self._timeout_s, self._clock_s = timeout_s, clock_s
        self._sink, self._calls = ZmqSampleSink(server, replay.store, clock_s), _Calls(clock_s)
        source = ZmqExperienceSource(server, replay.store, [self._sink, self._calls])
        self._intake = Intake(source, replay, limits, streams_per_actor=credit)
        self._limiter = self._intake.limiter

    def do_work(self) -> int:
        """Take in chunks, answer calls and requests. Returns how much it was."""
        work = self._intake.do_work(0, 0)
        calls = [
            (key, call)
            for key, (call, came_s) in self._calls.come.items()
            if call.what != Request.SEQUENCES or not self._must_wait(key[0], call, came_s)
        ]
        for key, call in calls:
            del self._calls.come[key]
            channel = BULK if call.what == Request.SEQUENCES else SMALL
            self.server.send(key[0], channel, self._reply(call))
        return work + len(calls) + sum(self._sample() for _ in range(self._sink.requests()))

    def ready(self) -> bool:
        """Whether a message has come."""
        return self.server.listener.ready()

    def wait(self, ready: Callable[[], bool]) -> bool:
        """Wait for `ready`; only shortly while a request waits for its batch."""
        waits = self._sink.waits or self._calls.come
        return self.server.wait(ready, 0.001 if waits else _TICK_S)

    def close(self) -> None:
        """Stop serving."""
        self.server.close()

    def _allows(self, rows: int) -> bool:
        # Below the minimum size the replay itself raises at once.
        return not self._limiter.open or self._limiter.can_sample(rows)

    def _must_wait(self, session: Session, call: Call, came_s: float) -> bool:
        """Whether sequences can't be drawn or sent now, and the call has time left."""
        drawn = call.rows * Sequences.of_option(call.option).length
        can = self.server.room(session, BULK) and self._allows(drawn)
        return not can and self._clock_s() - came_s < self._timeout_s

    def _sample(self) -> bool:
        """Answer the oldest request, unless it must wait."""
        asked = self._sink.oldest()
        if asked is None:
            return False
        replay, rows = self._replay, asked.rows
        try:
            if not self._allows(rows):
                if self._clock_s() - asked.came_s < self._timeout_s:
                    return False
                why = self._limiter.explain(rows)
                raise NotEnoughData(f"after {self._timeout_s:g} s: {why}")
            # Of a part, the client knows whether all replays together hold enough.
            replay.demand(max(1 if asked.part else rows, replay.min_size_to_sample))
            draw = replay.draw(rows, METHODS[asked.method])
        except ZapexError as error:
            self._sink.refuse(error)
            return True
        self._sink.answer(draw)
        replay.sampled += rows
        if self._limiter.open:
            self._limiter.sample(rows)
        return True

    def _reply(self, call: Call) -> Reply:
        try:
            a, b, body = self._answer(call)
        except ZapexError as error:
            words = str(error).encode(errors="replace")[:MAX_TEXT_BYTES]
            return Reply(call.sequence, tell(error), body=as_buffer(words))
        return Reply(call.sequence, 0, a, b, as_buffer(body))

    def _answer(self, call: Call) -> tuple[int, int, Any]:
        """Two counts and the body."""
        replay = self._replay
        if call.what == Request.SEQUENCES:
            return 0, 0, self._sequences(call.rows, Sequences.of_option(call.option))
        if call.what == Request.STATS:
            return len(replay), 0, json.dumps(replay.stats()).encode()
        if call.what == Request.KEYS:
            return 0, 0, self._keys(call.rows, call.option).astype("<i8").tobytes()
        a, b = 0, 0
        if call.what == Request.CAN_SAMPLE:
            a = int(replay.can_sample(call.rows) and self._allows(call.rows))
        elif call.epoch == self.server.roster.epoch:
            # Copies: received arrays are read-only, and kernels are compiled for writable ones.
            a, b = replay.reprioritise(call.keys.copy(), call.priorities.copy())
        else:  # keys of a former memory
            b = int((call.keys != NO_KEY).sum())
        return a, b, PRESENT.pack(replay.total, len(replay), replay.smallest)

    def _sequences(self, rows: int, asked: Sequences) -> NDArray[np.uint8]:
        """Sequences as `PackedSequences` says."""
        replay, drawn = self._replay, rows * asked.length
        if not self._allows(drawn):
            why = self._limiter.explain(drawn)
            raise NotEnoughData(f"after {self._timeout_s:g} s: {why}")
        packed = PackedSequences(self.server.form, rows, asked)
        draw = replay.draw_sequences(rows, asked)
        if self._limiter.open:
            self._limiter.sample(drawn)
        return packed.pack(draw, replay.store)

    def _keys(self, actor: int, sequence: int) -> NDArray[np.int64]:
        """The keys of a chunk's transitions while it is in the memory; after that none."""
        store = self._replay.store
        rows = store.header_rows
        there = (
            (rows[:, STATE] == LIVE) & (rows[:, ACTOR] == actor) & (rows[:, SEQUENCE] == sequence)
        )
        slots = np.flatnonzero(there)
        if not len(slots):
            return np.empty(0, np.int64)
        # A client that has gone had the same number: the newest chunk is the one asked for.
        newest = slots[rows[slots, COMMIT_SEQUENCE].argmax()]
        return store.keys_of(store.indices(int(newest)), self._replay.shard)


def main(text: str, fd: str) -> None:
    """The process that serves, until SIGTERM."""
    incarnation = child_setup("replay")
    config = LibraryConfig(**json.loads(text))
    library = make_server(config, Segment.attach(int(fd), config.nbytes).buffer, incarnation)
    stop = Stop()
    url = library.server.url
    print(f"serving a replay of {config.capacity:,} transitions at {url}", flush=True)
    run_until_stopped(library, library.wait, stop)
    library.close()
    end_by_sigterm()


def make_server(
    config: LibraryConfig, memory: NDArray[np.uint8], incarnation: int
) -> LibraryServer:
    """The duty cycle of a process that serves. memory: `config.nbytes`, with what it held."""
    layout = config.layout
    replay = OwnedReplay(
        layout,
        config.alpha,
        config.eps,
        config.seed,
        config.min_size_to_sample,
        buffer=memory[: layout.nbytes],
        floor=config.floor,
        recency=config.recency,
    )
    if len(replay):  # it must not repeat the draws of a former incarnation
        replay.rng = np.random.default_rng([config.seed, incarnation])
    compile_kernels(replay.store)  # before anyone waits for an answer
    form = form_of(layout)
    grant = CREDIT * layout.chunk
    needed = int(-(-config.samples_per_insert * grant // 1)) + form.batch_size
    limits = LimiterConfig(
        samples_per_insert=config.samples_per_insert,
        min_size_to_sample=config.min_size_to_sample,
        tolerance=config.tolerance or 2 * needed,
        grant=grant,
        batch=form.batch_size,
        capacity=layout.capacity,
    )
    roster = Roster(memory[align(layout.nbytes) :], config.writers, replay.store.header_rows)
    listener = listen(
        config.listen, config.security, form.largest_request_bytes, fstack=config.fstack
    )
    server = LinkServer(
        listener, form, CONFIG, roster, incarnation=incarnation, params_version=lambda: 0
    )
    return LibraryServer(server, replay, limits, credit=CREDIT, timeout_s=config.timeout_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
