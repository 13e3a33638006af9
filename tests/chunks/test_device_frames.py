"""Frames that are on a device: batches are those of the host's gather, bit for bit."""

from collections import deque
from typing import Any

import numpy as np
import pytest

from tests.support.late_device import LateQueues
from zapex.chunks.batch import Batch
from zapex.chunks.device_frames import DeviceFrames
from zapex.chunks.layout import COMMITTED, COUNT, NO_FRAME, STATE, BatchLayout
from zapex.chunks.schema import Column, Schema
from zapex.errors import ConfigError
from zapex.replay.core import ReplayCore, ReplayLayout
from zapex.replay.draw import Draw, Gatherer

torch = pytest.importorskip("torch")
CPU = torch.device("cpu")
BETA = 0.4


def schema_of(stack: int, axis: int = 0) -> Schema:
    columns = {"obs": Column((6, 5), np.uint8, stack, axis), "action": Column((), np.int64),
               "mask": Column((3,), np.float32)}  # fmt: skip
    return Schema(columns, n_step=3)


class Game:
    """A replay whose chunks are noise: filled, evicted, taken back; draws wait for the learner."""

    def __init__(self, schema: Schema, seed: int, capacity: int = 400) -> None:
        self.rng = np.random.default_rng(seed)
        self.core = ReplayCore(ReplayLayout(schema, capacity, 4, chunk=16), seed=seed)
        self.store, self.ledger = self.core.store, self.core.ledger
        self.draws: deque[Draw] = deque()
        self.issued = self.released = 0
        for _ in range(2 * self.core.layout.live_slots):
            self.fill()

    def fill(self) -> None:
        """One more chunk of random length, with random frames."""
        self.ledger.release(self.released)
        if not self.ledger.free:
            return
        (slot,) = self.ledger.grant(1, 0, 1).tolist()
        if self.rng.random() < 0.1:  # its actor dies
            self.ledger.reclaim([slot])
            return
        store, rng = self.store, self.rng
        body = store.mem[store.body(slot) :][: store.layout.body_bytes]
        body[:] = rng.integers(0, 256, body.size, np.uint8)
        for name in ("obs_frames", "next_obs_frames"):
            numbers = store.column(slot, name)
            numbers[:] = rng.integers(0, store.layout.frames, numbers.shape)
            numbers[rng.random(numbers.shape) < 0.1] = NO_FRAME
        store.column(slot, "priority")[:] = rng.random(store.layout.chunk)
        store.header_rows[slot, COUNT] = rng.integers(1, store.layout.chunk + 1)
        store.header_rows[slot, STATE] = COMMITTED
        self.core.accept(slot)
        self.core.make_room(self.issued)

    def draw(self, rows: int) -> None:
        self.draws.append(self.core.draw(rows))
        self.issued += 1

    def next_draw(self) -> Draw:
        self.released += 1
        return self.draws.popleft()


def check(game: Game, batches: int, rows: int) -> int:
    """Batches from both gathers; how many rows were torn."""
    store, schema = game.store, game.store.layout.schema
    expected = Batch.empty(BatchLayout(schema, rows))
    apart = [Batch.empty(BatchLayout(schema, rows, frames_apart=True)) for _ in range(2)]
    frames = DeviceFrames(store, CPU)
    gatherer, all_torn, lives = Gatherer(store, BETA, 0, frames), 0, 0
    for number in range(batches):
        for _ in range(game.rng.integers(3)):
            game.fill()
        if game.rng.random() < 0.02:  # the memory is robbed: evicted slots are not waited for
            for _ in game.ledger.quarantined:
                game.ledger.release_oldest()
        if game.rng.random() < 0.01:  # the learner dies
            frames = DeviceFrames(store, CPU)
            gatherer, lives = Gatherer(store, BETA, 0, frames), lives + 1
        while len(game.draws) < 3:
            game.draw(rows)
        draw, batch = game.next_draw(), apart[number % 2]
        torn = draw.gather(store, expected, BETA)
        gatherer.begin(draw, batch)
        assert gatherer.finish(batch) == (torn, draw.count)
        frames.put_in_place(batch)
        tensors = frames.complete(batch.torch())
        assert set(tensors) == set(expected)
        whole = expected.keys >= 0
        for name in expected:
            np.testing.assert_array_equal(tensors[name].numpy()[whole], expected[name][whole])
        np.testing.assert_array_equal(batch.keys, expected.keys)
        all_torn += torn
    assert lives or batches < 500
    return all_torn


@pytest.mark.parametrize(("stack", "axis"), [(1, 0), (4, 0), (3, -1)])
def test_batches_are_those_of_the_hosts_gather(stack: int, axis: int) -> None:
    check(Game(schema_of(stack, axis), stack), 150, 64)


def test_rows_of_slots_that_have_new_content_are_torn_in_both() -> None:
    assert check(Game(schema_of(4), 5, capacity=100), 600, 64) > 0


@pytest.mark.slow  # the figure: a million rows
def test_a_million_rows_with_evictions_and_deaths_are_those_of_the_hosts_gather() -> None:
    check(Game(schema_of(4), 7), 2000, 512)


def test_a_chunks_frames_are_copied_once() -> None:
    game = Game(schema_of(4), 1)
    frames = DeviceFrames(game.store, CPU)
    batch = Batch.empty(BatchLayout(game.store.layout.schema, 2048, frames_apart=True))
    seen = set()
    for _ in range(30):
        game.fill()
        game.draw(2048)
        draw = game.next_draw()
        seen |= set((draw.keys >> 8).tolist())
        frames.gather(draw.keys, batch, batch.keys)
        frames.put_in_place(batch)
    assert frames.copied == len(seen)


class Sums:
    """In place of a DQN: the sum of each row's observations."""

    def without_unusable_rows(self, batch: Any) -> Any:
        return batch

    def step(self, batch: Any, out: Any, enter: Any) -> None:
        for i, name in enumerate(("obs", "next_obs")):
            out[i] = batch[name].float().flatten(1).sum(1).sum()

    def count(self) -> bool:
        return False

    def read(self, numbers: np.ndarray) -> Any:
        return numbers, {}


@pytest.mark.parametrize("how", ["in the device's order", "at once"])
def test_new_chunks_take_their_places_in_the_device_s_order(how: str) -> None:
    """Slots are used again so fast that each batch has chunks in the places of the last one's."""
    from zapex.agent.device import Device, Pipeline
    from zapex.chunks.batch import split

    def runs(seed: int) -> bool:
        game = Game(schema_of(4), seed, capacity=48)
        layout = BatchLayout(game.store.layout.schema, 16, frames_apart=True)
        frames, queues = DeviceFrames(game.store, CPU), LateQueues(seed)
        sums: Any = Sums()
        pipeline = Pipeline(
            sums, Device(queues, layout.nbytes, 2),
            lambda block: frames.complete(split(layout, block)),
            frames.put_in_place if how == "in the device's order" else None,
        )  # fmt: skip
        batches = deque(Batch.empty(layout) for _ in range(3))
        whole = Batch.empty(BatchLayout(game.store.layout.schema, 16))
        expected: deque[list[float]] = deque()
        same = True
        for number in range(12):
            for _ in range(game.store.slots):
                game.fill()
            game.draw(16)
            draw, batch = game.next_draw(), batches[0]
            batches.rotate(-1)
            assert draw.gather(game.store, whole, BETA) == 0
            expected.append([float(whole[name].sum()) for name in ("obs", "next_obs")])
            frames.gather(draw.keys, batch, batch.keys)
            if how == "at once":
                frames.put_in_place(batch)
            pipeline.begin(batch)
            if number:
                same &= pipeline.finish()[0].tolist() == expected.popleft()
        return same

    results = [runs(seed) for seed in range(3)]
    assert all(results) if how == "in the device's order" else not all(results)


def test_only_images_can_be_on_a_device() -> None:
    schema = Schema({"obs": Column((4,), np.float32), "action": Column((), np.int64)}, n_step=1)
    with pytest.raises(ConfigError, match="observations that are images"):
        DeviceFrames(ReplayCore(ReplayLayout(schema, 100)).store, CPU)
