"""The paper's baseline over a real redis-server: nothing is lost or changed on the way."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.paper.baseline import EXPERIENCE, Memory, PairSink, Parameters, Sender, connect
from benchmarks.transport import redis_server
from tests.support.parts import free_port
from tests.support.transport_rigs import SCHEMA, STREAMS, form_of, layout_of
from zapex.chunks.batch import Batch
from zapex.chunks.layout import COUNT, BatchLayout
from zapex.library.prioritized import PrioritizedReplay

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(bool(redis_server.missing()), reason=redis_server.missing()),
]
LAYOUT = layout_of(400)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    """A client of a new server."""
    port = free_port()
    words = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen([str(redis_server.BINARY), *words], stdout=subprocess.DEVNULL)
    try:
        made = connect(f"redis://127.0.0.1:{port}/0")
        yield made
        made.close()
    finally:
        server.kill()
        server.wait(30)


def replay_of(capacity: int = 400, **limits: Any) -> PrioritizedReplay:
    return PrioritizedReplay(capacity, SCHEMA, seed=1, chunk=LAYOUT.chunk, **limits)


def played(rows: int) -> PrioritizedReplay:
    """Successive transitions of one episode, by their numbers as rewards."""
    rng, replay = np.random.default_rng(3), replay_of()
    frames = rng.integers(0, 256, (rows + 7, 3, 2), np.uint8)
    stacks = np.lib.stride_tricks.sliding_window_view(frames, 4, axis=0)
    stacks = np.moveaxis(stacks, -1, 1)
    replay.extend(
        obs=stacks[:rows],
        next_obs=stacks[3 : rows + 3],
        action=rng.integers(5, size=rows),
        mask=rng.random((rows, 2), np.float32),
        reward=np.arange(rows, dtype=np.float32),
        discount=rng.random(rows, np.float32),
        priorities=rng.normal(size=rows),
    )
    return replay


def chunks_of(replay: PrioritizedReplay) -> list[int]:
    rows = replay.core.store.header_rows
    return np.flatnonzero(rows[:, COUNT] > 0).tolist()


def rows_of(replay: PrioritizedReplay) -> list[dict[str, np.ndarray]]:
    """All transitions by their rewards, with their leaves."""
    store = replay.core.store
    indices = np.concatenate([store.indices(slot) for slot in chunks_of(replay)])
    batch = Batch.empty(BatchLayout(SCHEMA, len(indices)))
    store.gather(store.keys_of(indices), batch.layout, batch.memory, batch.keys)
    found = batch.layout.views(batch.memory)
    order = np.argsort(found["reward"])
    names = ("obs", "next_obs", "action", "mask", "reward", "discount")
    return [
        {name: found[name][order] for name in names},
        {"leaf": replay.core.tree[indices[order]]},
    ]


@pytest.mark.parametrize("pairs", [True, False])
def test_the_learner_gets_each_transition_once_and_unchanged(client: Any, pairs: bool) -> None:
    form = None if pairs else form_of(LAYOUT)
    actor, learner = played(100), replay_of()
    sender = Sender(client, actor.core.store, 1000, form)
    for slot in chunks_of(actor):
        sender.push(slot)
    memory = Memory(client, learner, form)
    assert memory.pull() == memory.pulled == len(learner) == 100
    assert memory.pull() == 0
    for ours, theirs in zip(rows_of(actor), rows_of(learner), strict=True):
        for name, column in ours.items():
            np.testing.assert_allclose(theirs[name], column, rtol=1e-6, err_msg=name)


def test_an_actor_waits_while_the_list_is_full(client: Any) -> None:
    sink = PairSink(client, LAYOUT, STREAMS, most=STREAMS)
    slots = sink.try_claim()
    assert slots is not None
    sink.store.header_rows[slots, COUNT] = 4
    sink.commit(slots)
    assert client.llen(EXPERIENCE) == STREAMS
    assert sink.try_claim() is None
    assert Memory(client, replay_of()).pull() == 4 * STREAMS
    assert sink.try_claim() is not None


def test_the_learner_pulls_no_more_than_its_samples_per_insert_allow(client: Any) -> None:
    actor = played(300)
    sender = Sender(client, actor.core.store, 1000)
    for slot in chunks_of(actor):
        sender.push(slot)
    learner = replay_of(min_size_to_sample=16, samples_per_insert=4.0, tolerance=400)
    memory = Memory(client, learner)
    before = memory.pull()
    assert 16 <= before < 300
    while learner.can_sample(16):
        learner.sample(16)
    assert memory.pull() > 0


def test_actors_get_the_newest_parameters_once(client: Any) -> None:
    source, sink, out = Parameters(client), Parameters(client), np.zeros(8, np.uint8)
    assert source.newer_than(0, out) == 0
    for version in (1, 2):
        sink.publish(version, np.full(8, version, np.uint8))
    time.sleep(0.11)  # a source looks ten times a second
    assert source.newer_than(0, out) == 2
    assert (out == 2).all()
    assert source.newer_than(2, out) == 0
