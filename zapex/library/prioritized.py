"""PrioritizedReplay: the replay in the process that uses it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.arguments import whole
from zapex.chunks.batch import Batch
from zapex.chunks.schema import Schema
from zapex.errors import ConfigError
from zapex.library.handle import Handle, check_main_guard
from zapex.library.interface import Extender, ReplayInterface, Rows
from zapex.library.owner import OwnedReplay
from zapex.library.snapshot import load
from zapex.library.writer import Autoreset, Writer
from zapex.machine.segment import Segment
from zapex.replay.core import ReplayLayout
from zapex.replay.snapshots import Saves, save
from zapex.sumtree_numba import Method

if TYPE_CHECKING:
    from zapex.library.handle_server import HandleServer


class PrioritizedReplay(ReplayInterface):
    """Prioritized experience replay (Schaul et al. 2016) that stores each frame once.

    Transitions come in through a `writer` (steps of vector environments; n-step returns are
    computed) or `extend` (whole transitions). `sample` draws a batch by priority,
    `update_priorities` sets new priorities from TD errors. When the memory is full the oldest
    chunk of transitions is evicted. Public methods are thread-safe. For example:

        import numpy as np
        from zapex import Column, PrioritizedReplay, Schema

        schema = Schema({"obs": Column((4,), np.float32), "action": Column((), np.int64)}, n_step=1)
        replay = PrioritizedReplay(100_000, schema, alpha=0.6, seed=1)
        states = np.random.default_rng(0).normal(size=(65, 4)).astype(np.float32)
        replay.extend(
            obs=states[:-1], action=np.zeros(64, np.int64), reward=np.ones(64),
            next_obs=states[1:], terminated=np.zeros(64, bool),
        )
        batch = replay.sample(32, beta=0.4)
        # A target is batch.reward + batch.discount * Q(batch.next_obs).
        # Multiply each loss by batch.weights.
        td_errors = np.ones(32)
        applied, stale = replay.update_priorities(batch.keys, td_errors)

    `Schema.from_spaces` makes the schema of an environment. `batch.torch()` gives tensors. Other
    processes use the same replay through `zapex.connect(replay.handle)`.

    Args:
        capacity: how many transitions to keep. Transitions that share no frames take more memory;
            `stats()["effective_capacity"]` says how many of those fit.
        schema: the columns of a transition.
        alpha: how much priorities matter: a transition is drawn in proportion to
            (|priority| + eps)^alpha. 0 draws uniformly.
        eps: added to each |priority|, so that every transition can be drawn.
        seed: of the draws; None: different each time.
        streams: about how many environments will write; more streams need shorter chunks.
        chunk: transitions per chunk; 0: chosen automatically.
        min_size_to_sample: `sample` raises NotEnoughData with fewer transitions.
        samples_per_insert: how often a transition is drawn on average; 0 sets no limit. The side
            that is ahead by more than `tolerance` waits for the other, at most `timeout_s`. With
            one thread, call `can_sample` first.
        tolerance: of samples_per_insert, in samples; 0: chosen automatically.
        timeout_s: how long a call waits for the limiter, in seconds.
        shard: 0 to 127, part of every key; it distinguishes several replays.
        buffer: uint8 memory to use, aligned to a cache line, zero when new; transitions in it are
            kept. None: allocate.

    Raises:
        ConfigError: a value is out of range, or values do not fit together.
        SharedMemoryError: the buffer is too small, read-only or not aligned.
    """

    def __init__(
        self,
        capacity: int,
        schema: Schema,
        alpha: float = 0.6,
        eps: float = 1e-6,
        seed: int | None = None,
        *,
        streams: int = 8,
        chunk: int = 0,
        min_size_to_sample: int = 1,
        samples_per_insert: float = 0.0,
        tolerance: int = 0,
        timeout_s: float = 0.0,
        shard: int = 0,
        buffer: NDArray[np.uint8] | None = None,
    ) -> None:
        super().__init__(schema)
        layout = ReplayLayout(
            schema, whole(capacity, "capacity"), whole(streams, "streams"), whole(chunk, "chunk")
        )
        self.core = OwnedReplay(
            layout, alpha, eps, seed, whole(min_size_to_sample, "min_size_to_sample"),
            whole(shard, "shard"), buffer, samples_per_insert=samples_per_insert,
            tolerance=whole(tolerance, "tolerance"), timeout_s=timeout_s,
        )  # fmt: skip
        if layout.capacity < 2 * layout.chunk:
            raise ConfigError(
                f"capacity must be at least {2 * layout.chunk}, two chunks of {layout.chunk} "
                f"transitions, got {layout.capacity}"
            )
        self._extender = Extender(self.core)
        self._saves = Saves()
        self._segment: Segment | None = None
        self._server: HandleServer | None = None

    def can_sample(self, batch_size: int) -> bool:
        """Whether `sample(batch_size)` would return at once."""
        return self.core.can_sample(batch_size)

    def stats(self) -> dict[str, float]:
        """Counters by name. See ReplayInterface.stats."""
        return self.core.stats()

    def __repr__(self) -> str:
        capacity = self.core.layout.capacity
        return f"{super().__repr__()[:-1]}; {len(self.core)} of {capacity} transitions>"

    def __len__(self) -> int:
        with self.core.lock:
            self.core.catch_up()
            return len(self.core)

    def _writer(self, num_envs: int, autoreset: Autoreset) -> Writer:
        with self.core.lock:
            self.core.reserve_streams(num_envs)
            return Writer(self.core, num_envs, autoreset)

    def _take(self, rows: Rows) -> NDArray[np.int64]:
        with self.core.lock:
            return self._extender.extend(rows)

    def _holds(self, key: int) -> bool:
        return self.core.store.holds(key)

    def _draw(self, batch: Batch, beta: float, method: Method, by_memory: bool) -> None:
        self.core.fill(batch, beta, method, by_memory)

    def _update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> tuple[int, int]:
        return self.core.reprioritise(keys, priorities)

    # For other processes.

    @property
    def handle(self) -> Handle:
        """A small object that other processes of this host give to `zapex.connect`.

        Send it as an argument of `multiprocessing.Process` or through a pipe. The first access
        moves the memory into shared memory (used parts are copied once) and starts a thread
        that serves clients until `close`.

        Raises:
            SharedMemoryError: there is too little memory.
            ConfigError: the replay was made with `buffer`, or a child process has imported a script
                that has no main guard.
        """
        check_main_guard()
        with self.core.lock:
            if self._server is None or not self._server.serves:
                if self._segment is None:
                    self._segment = self.core.share()
                from zapex.library.handle_server import HandleServer

                self._server = HandleServer(self.core, self._segment)
            return self._server.handle

    @property
    def links(self) -> int:
        """Links of clients: one per sampling client, one per extending client, one per writer."""
        return 0 if self._server is None else self._server.links

    def close(self) -> None:
        """Stop serving other processes: their next calls raise PeerDied. This one continues."""
        with self.core.lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    # Snapshots.

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot into a directory; a later save writes only what is new.

        Other threads may write and sample during the save. The previous snapshot stays valid until
        this one is whole. Steps that wait for their n-step return are not saved.

        Args:
            path: the directory; it is created if it is missing.

        Raises:
            CheckpointError: it cannot be written.
        """
        with self.core.lock:
            self.core.catch_up()
            self._extender.close()  # as after a load, so that both replays continue in the same way
        save(self.core, self._saves, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], buffer: NDArray[np.uint8] | None = None
    ) -> PrioritizedReplay:
        """Make a replay from a snapshot. Draws continue bit for bit; old keys are stale.

        Args:
            path: the directory of `save`.
            buffer: as in the constructor.

        Raises:
            CheckpointError: there is no snapshot, or it is damaged.
        """
        loaded, saves = load(cls, path, buffer)
        loaded._saves = saves
        return loaded
