"""A learner's own replay: it drains what has come, waits for enough, and applies priorities."""

import numpy as np

from tests.support.transport_rigs import BATCH, BETA, SCHEMA, Direct, layout_of
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.layout import COMMITTED, COUNT, STATE, BatchLayout
from zapex.host.metrics import RoleMetrics
from zapex.replay.core import ReplayCore
from zapex.replay.limiter import LimiterConfig
from zapex.roles.intake import Intake
from zapex.roles.local_samples import LocalSampleSource

LAYOUT = layout_of(400)
STREAMS = LAYOUT.streams


class Own:
    """A source of chunks in this process, and the learner's samples over it."""

    def __init__(self, ratio: float = 0.0, least: int = 2 * BATCH) -> None:
        self.replay = ReplayCore(LAYOUT, seed=1)
        self.source = Direct(self.replay)
        limits = LimiterConfig(
            samples_per_insert=ratio, min_size_to_sample=least, tolerance=1000, batch=BATCH,
            grant=STREAMS * LAYOUT.chunk, capacity=LAYOUT.capacity,
        )  # fmt: skip
        intake = Intake(self.source, self.replay, limits, actors=1, streams_per_actor=STREAMS)
        self.metrics = RoleMetrics(
            aligned_zeros(RoleMetrics.required_bytes()), "replay", create=True
        )
        self.samples = LocalSampleSource(
            self.replay, intake, self.metrics, batch_size=BATCH, method="stratified", beta=BETA
        )
        self.batch = Batch.empty(BatchLayout(SCHEMA, BATCH))

    def play(self) -> int:
        """Fill what the actor may fill; how many transitions."""
        rows = 0
        while (slots := self.source.try_claim()) is not None:
            for slot in slots.tolist():
                store = self.replay.store
                store.column(slot, "priority")[:] = 1.0
                store.column(slot, "obs_frames")[:] = store.column(slot, "next_obs_frames")[:] = 0
                store.header_rows[slot, COUNT] = LAYOUT.chunk
                store.header_rows[slot, STATE] = COMMITTED
                rows += LAYOUT.chunk
            self.source.commit(slots)
        return rows


def test_a_batch_waits_for_enough_transitions_and_for_a_request() -> None:
    own = Own()
    own.samples.request()
    assert own.samples.poll(own.batch) is None  # this grants the actor its first slots
    played = own.play()
    assert 0 < played < 2 * BATCH
    assert own.samples.poll(own.batch) is None
    while len(own.replay) < 2 * BATCH:
        own.play()
        own.samples.drain()
    sampled = own.samples.poll(own.batch)
    assert sampled is not None
    assert sampled.torn == 0
    assert sampled.live == len(own.replay)
    assert own.samples.outstanding == 0
    assert own.samples.poll(own.batch) is None


def test_it_takes_no_more_in_than_the_limiter_lets_it() -> None:
    own = Own(ratio=16.0, least=BATCH)
    for _ in range(50):
        own.samples.drain()
        own.play()
    waiting = len(own.replay)
    assert own.play() == 0
    own.samples.request()
    for _ in range(40):  # samples are owed, so these make room for inserts
        if own.samples.poll(own.batch) is not None:
            own.samples.request()
        own.play()
    assert len(own.replay) > waiting or own.metrics.snapshot()["evicted"] > 0


def test_priorities_are_applied_at_once_and_bad_ones_are_counted() -> None:
    own = Own(least=BATCH)
    while len(own.replay) < BATCH:
        own.samples.drain()
        own.play()
    own.samples.request()
    assert own.samples.poll(own.batch) is not None
    total = own.replay.tree.total
    keys = own.batch.keys.copy()
    assert own.samples.update(keys, np.full(BATCH, 9.0, np.float32))
    assert own.replay.tree.total > total
    bad = np.full(BATCH, np.nan, np.float32)
    assert own.samples.update(keys, bad)
    own.samples.close()
    facts = own.metrics.snapshot(alive=False)
    assert facts["updates_refused"] == 1
    assert facts["updates_applied"] == BATCH
    assert facts["sampled"] == BATCH
    assert facts["live"] == len(own.replay)
    assert facts["phase/insert"] > 0
    assert facts["phase/sample"] > 0


def test_ready_says_when_something_came() -> None:
    own = Own()
    assert own.samples.ready()  # slots were granted
    assert not own.samples.ready()
    own.play()
    assert own.samples.ready()
