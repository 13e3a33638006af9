"""One suite for every transport: the same operations give the same batches, bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.chunks.test_builder import Game
from tests.support.transport_rigs import (
    BATCH,
    PARAMETER_BYTES,
    SCHEMA,
    STREAMS,
    Rig,
    make_rig,
    nothing_left_open,
    until,
)
from zapex.chunks.batch import Batch
from zapex.chunks.builder import ChunkBuilder
from zapex.chunks.layout import COUNT, LIVE, SEQUENCE, STATE, BatchLayout
from zapex.replay.draw import Draw

KINDS = ["shm", "ipc", "tcp", "zmtp", "fstack"]

__all__ = ["nothing_left_open"]  # a fixture of every test here


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = make_rig(request.param, tmp_path, 4000)
    yield rig
    rig.close()


def play(rig: Rig, steps: int) -> int:
    """The same random game through an actor's face; how many transitions it made."""
    rng = np.random.default_rng(3)
    sink = rig.experience_sink
    builder = ChunkBuilder(sink.store, STREAMS, actor=0, incarnation=9)
    game = Game(STREAMS, 4, "zero")
    everyone, made = np.ones(STREAMS, bool), 0

    def until_done(call) -> None:
        nonlocal made
        while True:
            done = call() == STREAMS
            closed = builder.take_closed()
            made += int(sink.store.header_rows[closed, COUNT].sum())
            sink.commit(closed)
            if done:
                return
            slots: list[np.ndarray] = []

            def claim(slots=slots) -> bool:
                slots += [s for s in [sink.try_claim()] if s is not None]
                return bool(slots)

            until(claim, rig.turn, "credit")
            builder.provide(slots[0])

    for i in range(STREAMS):
        game.reset(i)
    until_done(lambda: builder.begin(everyone, {"obs": game.seen}))
    over = np.zeros(STREAMS, bool)
    for _ in range(steps):
        begun, over = over, rng.random(STREAMS) < 0.1
        for i in range(STREAMS):
            game.reset(i) if begun[i] else game.step(i)
        over &= ~begun
        builder.staged["action"] = rng.integers(5, size=STREAMS)
        builder.staged["mask"] = rng.random((STREAMS, 2))
        reward, *values = rng.normal(size=(3, STREAMS))
        until_done(
            lambda r=reward, o=over, v=values: builder.add(
                {"obs": game.seen}, r, o, o, values=np.array(v)
            )
        )
        if begun.any():
            until_done(lambda begun=begun: builder.begin(begun, {"obs": game.seen}))
    builder.flush()
    closed = builder.take_closed()
    made += int(sink.store.header_rows[closed, COUNT].sum())
    sink.commit(closed)
    until(lambda: rig.intake.inserted == made, rig.turn, "all transitions")
    return made


def transitions(rig: Rig) -> np.ndarray:
    """Indices of all live transitions in the order in which the actor made their chunks."""
    rows = rig.replay.store.header_rows
    live = np.flatnonzero(rows[:, STATE] == LIVE)
    live = live[np.argsort(rows[live, SEQUENCE])]
    chunk = rig.replay.layout.chunk
    return np.concatenate([s * chunk + np.arange(rows[s, COUNT]) for s in live])


def draw_of(rig: Rig, indices: np.ndarray) -> Draw:
    replay = rig.replay
    return Draw(
        replay.store.keys_of(indices), indices, replay.tree[indices], replay.tree.total,
        len(replay), replay.tree.min_positive,
    )  # fmt: skip


def batches(rig: Rig, channels_last: bool) -> list[Batch]:
    """Two batches of known transitions, the second with the priorities that the first sent back."""
    rng = np.random.default_rng(5)
    everything = transitions(rig)
    out = []
    for _ in range(2):
        batch = Batch.empty(BatchLayout(SCHEMA, BATCH, channels_last))
        indices = everything[rng.integers(len(everything), size=BATCH)]
        rig.sample_source.request()
        until(lambda: rig.sample_sink.requests() == 1, rig.turn, "a request")
        rig.sample_sink.answer(draw_of(rig, indices))
        sampled = []

        def poll(batch=batch, sampled=sampled) -> bool:
            sampled += [s for s in [rig.sample_source.poll(batch)] if s is not None]
            return bool(sampled)

        until(poll, rig.turn, "a batch")
        assert sampled[0].torn == 0
        assert sampled[0].live == len(everything)
        assert (batch.indices == indices).all()
        td_errors = rng.normal(size=BATCH).astype(np.float32)
        assert rig.sample_source.update(batch.keys.copy(), td_errors)
        got: list = []
        until(lambda got=got: got or got.extend(rig.sample_sink.updates()), rig.turn, "an update")
        for keys, priorities in got:
            assert rig.replay.reprioritise(keys, priorities.astype(np.float64)) == (BATCH, 0)
        out.append(batch)
    return out


@pytest.mark.parametrize("channels_last", [False, True])
def test_every_transport_gives_the_same_batches_bit_for_bit(
    tmp_path: Path, channels_last: bool
) -> None:
    seen = {}
    for kind in KINDS:
        rig = make_rig(kind, tmp_path, 4000)
        made = play(rig, 100)
        seen[kind] = made, batches(rig, channels_last), rig.replay.tree[transitions(rig)]
        rig.close()
    made, wanted, leaves = seen.pop("shm")
    for kind, (made_too, got, leaves_too) in seen.items():
        assert made_too == made, kind
        assert (leaves_too == leaves).all(), kind
        for a, b in zip(wanted, got, strict=True):
            for name in a.layout.sections:
                if name not in ("keys", "indices"):  # where a slot lies is the transport's business
                    first, second = (x.layout.sections[name].view(x.memory) for x in (a, b))
                    assert first.tobytes() == second.tobytes(), (kind, name)


def test_parameters_arrive_whole_and_only_newer_ones(rig: Rig) -> None:
    sink, source = rig.parameter_sink, rig.parameter_source
    out = np.zeros(PARAMETER_BYTES, np.uint8)
    assert source.newer_than(0, out) == 0
    for version in (1, 2, 7):
        value = np.random.default_rng(version).integers(0, 256, PARAMETER_BYTES).astype(np.uint8)
        sink.publish(version, value)
        assert sink.version == version
        got: list[int] = []

        def take(got=got, version=version) -> bool:
            got.append(source.newer_than(version - 1, out))
            return got[-1] == version

        until(take, rig.turn, "parameters")
        assert (out == value).all()
        assert source.version == version
        assert source.newer_than(version, out) == 0


def test_actor_without_credit_waits(rig: Rig) -> None:
    sink = rig.experience_sink
    claimed = []

    def claim() -> bool:
        slots = sink.try_claim()
        claimed.extend([] if slots is None else slots.tolist())
        return len(claimed) >= STREAMS

    until(claim, rig.turn, "credit")
    for _ in range(20):
        rig.turn()
        claim()
    assert len(set(claimed)) == len(claimed) <= 3 * STREAMS
