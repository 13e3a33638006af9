"""Gathers draws into batches, if asked with threads, also beside the caller's other work."""

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from zapex.chunks.batch import Batch
from zapex.chunks.device_frames import DeviceFrames
from zapex.chunks.keys import NO_KEY
from zapex.chunks.store import ChunkStore
from zapex.replay.draw import Draw

_DEADLINE_S = 60.0  # for work that takes milliseconds


class Gatherer:
    """Copies the rows of a draw, with weights, from a store into a batch. Use it from one thread.

    The kernels release the GIL, so the threads copy while Python runs. Each copies an equal part of
    the rows.

    threads: its own; 0: the caller's thread copies, in `finish`. frames: if the frames are on a
    device, and batches only name them; then one thread does all.
    """

    def __init__(
        self, store: ChunkStore, beta: float, threads: int = 0, frames: DeviceFrames | None = None
    ) -> None:
        self._store, self._beta, self.threads, self._frames = store, beta, threads, frames
        self._pool = ThreadPoolExecutor(threads, "gather") if threads else None
        self._work: tuple[Batch, Draw] | None = None
        self._parts: list[Future[int]] = []

    @property
    def under_way(self) -> bool:
        """Whether a draw was begun and not finished."""
        return self._work is not None

    def begin(self, draw: Draw, batch: Batch) -> None:
        """Begin to gather. Until `finish`, the draw's memory stays as it is."""
        self._work = batch, draw
        if self._pool is not None:
            self._parts = [self._pool.submit(part) for part in self._split(draw, batch)]

    def _split(self, draw: Draw, batch: Batch) -> list[Callable[[], int]]:
        frames = self._frames
        if frames is not None:
            return [lambda: frames.gather(draw.keys, batch, batch.keys)]
        rows, parts = len(draw.keys), max(1, self.threads)
        bounds = [rows * i // parts for i in range(parts + 1)]

        def part(first: int, end: int) -> Callable[[], int]:
            return lambda: self._store.gather(
                draw.keys[first:end], batch.layout, batch.memory, batch.keys[first:end], first
            )

        return [part(*pair) for pair in itertools.pairwise(bounds)]

    def finish(self, batch: Batch) -> tuple[int, int]:
        """The draw begun is in `batch`. Returns how many rows are torn, and `Draw.count`.

        If it was begun for another batch, it is gathered again.
        """
        assert self._work is not None
        (begun, draw), parts = self._work, self._parts
        self._work, self._parts = None, []
        torn = sum(part.result(_DEADLINE_S) for part in parts)
        if begun is not batch:
            batch.fresh.extend(begun.fresh)
            begun.fresh.clear()
        if not parts or begun is not batch:
            torn = sum(part() for part in self._split(draw, batch))
        draw.weigh(batch.weights, self._beta)
        batch.indices[:] = draw.indices
        if torn:
            batch.weights[batch.keys == NO_KEY] = 0.0
        return torn, draw.count
