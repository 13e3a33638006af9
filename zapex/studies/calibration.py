"""What each piece of work of a run takes on this machine, in seconds of one core.

A replay server, as `zapex replay` has it, is a child; this process is its actor host's relay and
its learner, over loopback. Processor time is what counts, so other work here matters little; only
`hop_s`, how long a message waits for its reader to wake, is taken by the clock.
"""

import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.layout import (
    ACTOR,
    COMMITTED,
    COUNT,
    INCARNATION,
    SEQUENCE,
    STATE,
    BatchLayout,
)
from zapex.chunks.store import ChunkStore
from zapex.errors import PeerDied, PeerTimeout
from zapex.machine.child import PARENT_VARIABLE
from zapex.net.link import ZmqLink
from zapex.net.sample_source import ZmqSampleSource
from zapex.run.run import Run
from zapex.run.topology import thread_environment
from zapex.studies.cluster import Times
from zapex.studies.replay_worker import CLOSED, STREAMS, form_of, layout_of
from zapex.wire.header import Kind
from zapex.zmq_transport import ChunkSender, ZmqParameterSink, ZmqParameterSource

_START_S, _DEADLINE_S = 120.0, 60.0
_AHEAD = 2  # of batches and pushes


class Sizes(NamedTuple):
    """Bytes of messages: a whole chunk's, a batch's."""

    chunk_bytes: int
    batch_bytes: int


class _Spent(NamedTuple):
    """Processor seconds: of the replay's own thread, of its other threads, of ours."""

    role_s: float
    others_s: float
    here_s: float


class _Peer:
    """The relay of an actor host and a learner, both in this thread."""

    def __init__(self, run: Run, url: str) -> None:
        layout = layout_of(run.config, run.spec)
        form = form_of(run, layout)
        self.batch_rows, self.nbytes = form.batch_size, dict.fromkeys(Kind, 0)

        def link(role: str, host: int, actors: int) -> ZmqLink:
            return ZmqLink(
                url, role, host, 1, form, {}, CLOSED, schema_hash=layout.schema.hash, actors=actors
            )

        self.relay, self.learner = link("relay", 1, 1), link("learner", 2, 0)
        slots, chunk = 2 * STREAMS, layout.chunk_layout
        nbytes = ChunkStore.required_bytes(chunk, slots)
        self.store = ChunkStore(aligned_zeros(nbytes), chunk, slots)
        self._fill()
        self.sender = ChunkSender(self.relay, self.store)
        self._source, self._sink = ZmqParameterSource(self.relay), ZmqParameterSink(self.learner)
        self.samples = ZmqSampleSource(self.learner, run.config.replay.beta)
        self._count(self.learner, Kind.BATCH)
        self._parameters = np.zeros(form.parameter_bytes, np.uint8)
        self._version = 0
        self._free, self._sequence = list(range(slots)), 0
        self.relay.open(_DEADLINE_S)
        self.learner.open(_DEADLINE_S)
        self.batch = Batch.empty(BatchLayout(layout.schema, form.batch_size))

    def close(self) -> None:
        """Leave."""
        self.relay.close()
        self.learner.close()

    def _count(self, link: ZmqLink, kind: Kind) -> None:
        take = link.handlers[kind]

        def counted(message: Any) -> None:
            self.nbytes[kind] += sum(memoryview(part).nbytes for part in message.body)
            take(message)

        link.handlers[kind] = counted

    def _fill(self) -> None:
        """Whole chunks of random frames."""
        store, layout = self.store, self.store.layout
        schema, rng = layout.schema, np.random.default_rng(1)
        first = np.arange(layout.chunk, dtype=np.uint16)[:, None]
        frames: Any = first + np.arange(schema.stack, dtype=np.uint16)
        for slot in range(store.slots):
            for name in schema.obs_columns:
                column = store.column(slot, name)
                column[...] = rng.integers(0, 100, column.shape).astype(column.dtype)
            store.column(slot, "obs_frames")[:] = frames
            store.column(slot, "next_obs_frames")[:] = frames + np.uint16(schema.n_step)
            for name, value in (("reward", 0.0), ("discount", 0.5), ("priority", 1.0)):
                store.column(slot, name)[:] = value
            header = store.header_rows[slot]
            header[COUNT], header[ACTOR], header[INCARNATION] = layout.chunk, 0, 1
            header[STATE] = COMMITTED

    def _until(self, done: Callable[[], object], link: ZmqLink) -> None:
        if not link.wait(done, _DEADLINE_S):
            raise PeerTimeout(link.waiting or "a calibration's message was not answered")

    def _turn(self) -> bool:
        self.relay.do_work()
        self.sender.do_work()
        self._free += self.sender.take_freed()
        return bool(self._free)

    def push(self, chunks: int) -> None:
        """So many chunks, sent as there is room, all acknowledged."""
        for _ in range(chunks):
            if not self._free:
                self._until(self._turn, self.relay)
            slot = self._free.pop()
            self.store.header_rows[slot, SEQUENCE] = self._sequence
            self._sequence += 1
            self.sender.offer([slot])
            self._turn()
        self._until(lambda: self._turn() and not self.sender.unacknowledged, self.relay)

    def sample(self, batches: int) -> None:
        """So many batches, some asked for ahead."""
        for _ in range(min(_AHEAD, batches)):
            self.samples.request()
        for number in range(batches):
            self._until(lambda: self.samples.poll(self.batch) is not None, self.learner)
            if number + _AHEAD < batches:
                self.samples.request()

    def update(self, count: int) -> None:
        """So many updates of the last batch's priorities, one after the other."""
        priorities = np.ones(self.batch_rows, np.float32)
        for _ in range(count):
            self.samples.update(self.batch.keys.copy(), priorities)
            self._until(
                lambda: self.learner.do_work() < 0 or not self.samples.updates_under_way,
                self.learner,
            )

    def publish(self) -> None:
        """New parameters; the replay has them."""
        self._sink.publish(self._version + 1, self._parameters)
        self._until(lambda: self.learner.do_work() < 0 or not self._sink.under_way, self.learner)

    def pull(self) -> None:
        """The newest parameters are here."""

        def newer() -> bool:
            version = self._source.newer_than(self._version, self._parameters)
            self._version = max(version, self._version)
            return version > 0

        self._until(newer, self.relay)


@contextmanager
def _replay(run: Run) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The child, and its address; ended at the end."""
    about = {"config": run.config.to_dict(), "spec": asdict(run.spec)}
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "zapex.studies.replay_worker", json.dumps(about)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **thread_environment(1), PARENT_VARIABLE: str(os.getpid())},
    )  # fmt: skip
    try:
        assert child.stdout is not None
        if not select.select([child.stdout], [], [], _START_S)[0]:
            raise PeerTimeout(f"the calibration's replay did not start within {_START_S:g} s")
        line = child.stdout.readline()
        if not line:
            _, said = child.communicate(timeout=_DEADLINE_S)
            raise PeerDied(f"the calibration's replay ended: {said.strip()[-400:]}")
        yield child, json.loads(line)
    finally:
        child.kill()
        child.communicate()


def _spent(pid: int) -> _Spent:
    """So far."""
    seconds = {
        int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{pid}/task").iterdir()
    }
    return _Spent(seconds[pid], sum(seconds.values()) - seconds[pid], time.thread_time())


def measure(run: Run, seconds: float = 8.0) -> tuple[Times, Sizes]:
    """Times of this run's messages on this machine, in about so many seconds and a start.

    Raises PeerDied or PeerTimeout if the replay does not answer.
    """
    with _replay(run) as (child, url):
        peer = _Peer(run, url)
        try:
            return _measured(peer, child.pid, seconds / 5, run)
        finally:
            peer.close()


def _measured(peer: _Peer, pid: int, seconds: float, run: Run) -> tuple[Times, Sizes]:
    def each(work: Callable[[int], object], group: int) -> _Spent:
        """Processor seconds of one piece, from as many groups as fit in the time."""
        work(group)  # warm
        before, count, stop_s = _spent(pid), 0, time.monotonic() + seconds
        while not count or time.monotonic() < stop_s:
            work(group)
            count += group
        spent = zip(_spent(pid), before, strict=True)
        return _Spent(*((after - was) / count for after, was in spent))

    layout = layout_of(run.config, run.spec)
    peer.push(layout.slots)  # all of the memory is in use
    sent = peer.sender.counts["bytes"], peer.sender.counts["chunks"]
    pushed = each(peer.push, 4 * STREAMS)
    chunks = peer.sender.counts["chunks"] - sent[1]
    chunk_bytes = (peer.sender.counts["bytes"] - sent[0]) / chunks
    sampled = each(peer.sample, 8)
    peer.nbytes[Kind.BATCH] = 0
    peer.sample(8)
    batch_bytes = peer.nbytes[Kind.BATCH] / 8
    updated = each(peer.update, 8)
    trips_s = []
    for _ in range(64):
        began_s = time.perf_counter()
        peer.update(1)
        trips_s.append(time.perf_counter() - began_s)

    def renew(count: int) -> None:
        for _ in range(count):
            peer.publish()
            peer.pull()

    renewed, rows = each(renew, 2), run.config.learner.batch_size
    busy_s = updated.role_s + updated.others_s
    times = Times(
        insert_s=pushed.role_s, sample_s=0.0, row_s=sampled.role_s / rows,
        update_s=updated.role_s, serve_s=renewed.role_s / 2,
        move_s=pushed.others_s, byte_s=sampled.others_s / batch_bytes,
        push_s=pushed.here_s, unpack_s=sampled.here_s,
        hop_s=max(0.0, (statistics.median(trips_s) - busy_s) / 2),
    )  # fmt: skip
    return times, Sizes(round(chunk_bytes), round(batch_bytes))
