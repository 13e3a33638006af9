"""`zapex replay --schema`: the replay as a library, served to any host, without an environment.

The parent owns the memory and does nothing else; the process that serves may die and is started
again over the same memory: clients notice a pause.
"""

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from zapex import addresses
from zapex.errors import ConfigError
from zapex.replay_core import ReplayLayout
from zapex.roster import Roster
from zapex.schema import Schema, align
from zapex.shm_segment import Populator, Segment
from zapex.supervisor import GaveUp, ProcessSpec, Supervisor, child_setup
from zapex.zmq_socket import Security

_TICK_S = 0.2
_GRACE_S = 3.0
CREDIT = 4  # chunks that a writer may have under way, twice


@dataclass(frozen=True)
class LibraryConfig:
    """Without an environment: what to keep, and where to serve it."""

    schema: str
    """File of the schema, JSON: `zapex.Schema.to_json()` writes it. Clients: zapex.connect(URL)."""
    listen: str
    """Address to serve at: tcp://ADDRESS:PORT or ipc:///PATH. Any but loopback needs --keys."""
    capacity: int = 1_000_000
    """Transitions."""
    alpha: float = 0.6
    """How much priorities matter."""
    eps: float = 1e-6
    """Added to each |priority|."""
    seed: int = 0
    writers: int = 16
    """Writers that may be there at a time, over all clients; one that extends counts as one."""
    min_size_to_sample: int = 1
    """No batch before there are so many transitions."""
    samples_per_insert: float = 0.0
    """Transitions drawn for each that comes in; 0: as many as are wanted."""
    tolerance: int = 0
    """How many samples either side may be ahead; 0: chosen."""
    timeout_s: float = 5.0
    """How long a batch may wait for samples per insert."""
    keys: str = ""
    """Directory of `zapex keygen` with replay.key and public.json; clients have client.key."""
    insecure_network: bool = False
    """Do without keys, on a network where everybody may read and change everything."""

    def read(self) -> "LibraryConfig":
        """The same with the schema itself in place of its file. Raises ConfigError."""
        try:
            text = Path(self.schema).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"--schema {self.schema} cannot be read: {reason}") from None
        return replace(self, schema=text)

    def check(self) -> None:
        """Raises ConfigError where this machine cannot serve it, or nobody can."""
        if self.capacity < 1 or not 1 <= self.writers <= 4096:
            raise ConfigError(
                "--capacity must be at least 1 and --writers 1 to 4096, got "
                f"{self.capacity} and {self.writers}"
            )
        self.security.check(self.listen, "--listen")
        addresses.check_free(addresses.parse(self.listen, "--listen"))
        if 2 * self.writers * CREDIT * self.layout.chunk > self.layout.capacity:
            raise ConfigError(
                f"{self.writers} writers with {CREDIT} chunks of {self.layout.chunk} transitions "
                f"under way take more than half of the capacity of {self.capacity}: raise "
                "--capacity or lower --writers"
            )

    @property
    def layout(self) -> ReplayLayout:
        """The replay's memory, once the schema is read."""
        schema = Schema.from_json(self.schema)
        return ReplayLayout(schema, self.capacity, self.writers * CREDIT)

    @property
    def security(self) -> Security:
        """How far the network is trusted. Raises ConfigError."""
        return Security.load(self.keys, "replay", self.insecure_network)

    @property
    def nbytes(self) -> int:
        """Of the replay and, behind it, the roster."""
        return align(self.layout.nbytes) + Roster.required_bytes(self.writers)


def serve_library(config: LibraryConfig) -> int:
    """Own the memory and keep a server over it until a signal; returns the exit code.

    config: as the user gave it, its schema a file. Raises ConfigError.
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
                argv=[sys.executable, "-m", "zapex.served_library", json.dumps(asdict(config)),
                      str(segment.fd)],
                log_path=log,
                pass_fds=[segment.fd],
                restart=True,
            )
        )  # fmt: skip
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
    """Print what the server has said since."""
    if not log.exists():
        return said
    with log.open() as file:
        file.seek(said)
        print(file.read(), end="", flush=True)
        return file.tell()


def main(text: str, fd: str) -> None:
    """The process that serves, until SIGTERM."""
    incarnation = child_setup("replay")
    from zapex.intake import Intake
    from zapex.library_desk import LibraryDesk
    from zapex.rate_limiter import LimiterConfig
    from zapex.replay import PrioritizedReplay
    from zapex.url_link import CONFIG, form_of
    from zapex.zmq_replay import ZmqExperienceSource
    from zapex.zmq_server import ZmqServer

    config = LibraryConfig(**json.loads(text))
    layout = config.layout
    memory = Segment.attach(int(fd), config.nbytes).buffer
    replay = PrioritizedReplay(
        layout.capacity, layout.schema, config.alpha, config.eps,
        config.seed, streams=layout.streams, chunk=layout.chunk,
        min_size_to_sample=config.min_size_to_sample, buffer=memory[: layout.nbytes],
    )  # fmt: skip
    if len(replay):  # a life that goes on does not draw once more what the last one drew
        replay.rng = np.random.default_rng([config.seed, incarnation])
    form = form_of(layout)
    grant = CREDIT * layout.chunk
    needed = int(-(-config.samples_per_insert * grant // 1)) + form.batch_size
    limits = LimiterConfig(
        samples_per_insert=config.samples_per_insert, min_size=config.min_size_to_sample,
        tolerance=config.tolerance or 2 * needed, grant=grant, batch=form.batch_size,
        capacity=layout.capacity,
    )  # fmt: skip
    roster = Roster(memory[align(layout.nbytes) :], config.writers, replay.store.header_rows)
    server = ZmqServer(
        config.listen, form, CONFIG, roster, config.security, incarnation=incarnation,
        params_version=lambda: 0,
    )  # fmt: skip
    source = ZmqExperienceSource(server, replay.store)
    intake = Intake(source, replay, limits, actors=config.writers, streams_per_actor=CREDIT)
    desk = LibraryDesk(server, replay, intake.limiter, timeout_s=config.timeout_s)
    stopped = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    print(f"serving a replay of {config.capacity:,} transitions at {server.url}", flush=True)
    while not stopped:
        # Answers are copies: what is evicted waits for nobody.
        work = intake.do_work(0, 0) + desk.do_work()
        replay.inserted = intake.inserted
        if not work:
            server.wait(lambda: stopped or server.ready(), 0.001 if desk.waiting else _TICK_S)
    server.close()
    # By the signal that it obeyed: status 0 would say that its work is done.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
