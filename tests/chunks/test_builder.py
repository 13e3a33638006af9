"""Steps become chunks: every transition as the naive twin has it, frames stored once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.naive import NaiveNStep
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.builder import CUT, END, ChunkBuilder
from zapex.chunks.columns import Column
from zapex.chunks.layout import COUNT, FREE, STATE, STREAM, BatchLayout, ChunkLayout
from zapex.chunks.ledger import SlotLedger
from zapex.chunks.schema import Schema
from zapex.chunks.store import ChunkStore


class Game:
    """Streams of numbered frames with ends, lost lives and stacks padded as a reset pads them."""

    def __init__(self, rng, streams, stack, padding):
        self.rng, self.streams, self.stack, self.padding = rng, streams, stack, padding
        self.clock = 0
        self.obs = np.zeros((streams, stack, 3, 2), np.uint8)

    @property
    def seen(self):
        return self.obs[:, 0] if self.stack == 1 else self.obs

    def frame(self):
        self.clock += 1
        return np.frombuffer(np.int64(self.clock).tobytes()[:6], np.uint8).reshape(3, 2)

    def reset(self, i):
        if self.padding == "distinct":
            for j in range(self.stack):
                self.obs[i, j] = self.frame()
            return
        frame = self.frame()
        self.obs[i] = frame if self.padding == "repeat" else 0
        self.obs[i, -1] = frame

    def step(self, i):
        self.obs[i, :-1] = self.obs[i, 1:].copy()
        self.obs[i, -1] = self.frame()


def play(rng, *, streams, stack, n, chunk, steps, padding="zero", end=0.1, cut=0.1, max_age=0,
         slots=None, flush_at=(), actions=5):  # fmt: skip
    """Random play through a builder that gets few slots at a time; chunks, oracle and store."""
    schema = Schema(
        {"obs": Column((3, 2), np.uint8, stack=stack), "action": Column((), np.int64),
         "mask": Column((2,), np.float32)},
        n_step=n, gamma=0.9,
    )  # fmt: skip
    layout = ChunkLayout(schema, chunk)
    slots = slots or steps * streams + 4 * streams
    store = ChunkStore(aligned_zeros(ChunkStore.required_bytes(layout, slots)), layout, slots)
    ledger = SlotLedger(store)
    builder = ChunkBuilder(store, streams, actor=7, incarnation=9, max_chunk_age_steps=max_age)
    naive = [NaiveNStep(n, 0.9) for _ in range(streams)]
    game = Game(rng, streams, stack, padding)
    everyone = np.ones(streams, bool)
    closed = []

    def until_done(call):
        while call() < streams:
            builder.provide(ledger.grant(1, 7, 9))
            closed.extend(builder.take_closed())
        closed.extend(builder.take_closed())

    for i in range(streams):
        game.reset(i)
        naive[i].begin(game.seen[i].copy())
    until_done(lambda: builder.begin(everyone, {"obs": game.seen}))
    over = np.zeros(streams, bool)
    for step in range(steps):
        begun, over = over, np.zeros(streams, bool)
        for i in range(streams):
            game.reset(i) if begun[i] else game.step(i)
        if begun.any():
            until_done(lambda begun=begun: builder.begin(begun, {"obs": game.seen}))
            for i in np.flatnonzero(begun):
                naive[i].begin(game.seen[i].copy())
        flags = np.zeros(streams, np.int64)
        flags[rng.random(streams) < cut] |= CUT
        flags[rng.random(streams) < end] |= END
        reward = rng.integers(-3, 4, streams).astype(np.float64)
        value, next_value = rng.normal(size=streams), rng.normal(size=streams)
        builder.staged["action"] = action = rng.integers(actions, size=streams)
        builder.staged["mask"] = mask = rng.random((streams, 2)).astype(np.float32)
        until_done(
            lambda b=~begun, f=flags, r=reward, v=value, w=next_value: builder.add(
                b, f, {"obs": game.seen}, r, value=v, next_value=w
            )
        )
        for i in np.flatnonzero(~begun):
            naive[i].add(
                (action[i], mask[i]), reward[i], game.seen[i].copy(),
                bool(flags[i] & CUT), bool(flags[i] & END), value[i], next_value[i],
            )  # fmt: skip
            over[i] = bool(flags[i] & END)
        if step in flush_at:
            builder.flush()
            closed.extend(builder.take_closed())
    builder.flush()
    closed.extend(builder.take_closed())
    return store, closed, naive, builder, ledger


def rows_of(store, closed):
    """Every transition in the chunks, by stream, in order."""
    out = {}
    for slot in closed:
        count = int(store.header_rows[slot, COUNT])
        keys = store.keys_of(slot * store.layout.chunk + np.arange(count))
        batch = Batch.empty(BatchLayout(store.layout.schema, max(count, 1)))
        assert store.gather(keys, batch.layout, batch.memory, batch.keys) == 0
        priority = store.column(slot, "priority")
        for r in range(count):
            out.setdefault(int(store.header_rows[slot, STREAM]), []).append(
                (batch.obs[r].copy(), batch.action[r], batch["mask"][r].copy(), batch.reward[r],
                 batch.discount[r], batch.next_obs[r].copy(), priority[r])
            )  # fmt: skip
    return out


def check_against_twin(store, closed, naive):
    rows = rows_of(store, closed)
    for i, twin in enumerate(naive):
        mine = rows.get(i, [])
        assert len(mine) == len(twin.transitions)
        for got, want in zip(mine, twin.transitions, strict=True):
            obs, (action, mask), reward, discount, next_obs, priority = want
            np.testing.assert_array_equal(got[0], obs)
            assert got[1] == action
            np.testing.assert_array_equal(got[2], mask)
            np.testing.assert_allclose(got[3], reward, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(got[4], discount, rtol=1e-6)
            np.testing.assert_array_equal(got[5], next_obs)
            np.testing.assert_allclose(got[6], priority, rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31), streams=st.integers(1, 4), stack=st.integers(1, 4),
    n=st.integers(1, 4), more=st.integers(0, 9),
    padding=st.sampled_from(["zero", "repeat", "distinct"]),
    end=st.sampled_from([0.0, 0.05, 0.5, 1.0]), cut=st.sampled_from([0.0, 0.1, 0.6]),
    max_age=st.sampled_from([0, 1, 5]), flush_at=st.sets(st.integers(0, 59), max_size=3),
)  # fmt: skip
def test_chunks_hold_what_the_naive_twin_has(
    seed, streams, stack, n, more, padding, end, cut, max_age, flush_at
):
    rng = np.random.default_rng(seed)
    store, closed, naive, _, _ = play(
        rng, streams=streams, stack=stack, n=n, chunk=n + more, steps=60, padding=padding,
        end=end, cut=cut, max_age=max_age, flush_at=flush_at,
    )  # fmt: skip
    check_against_twin(store, closed, naive)


@pytest.mark.parametrize("length", range(1, 12))
def test_episodes_of_every_length_end_in_a_terminal_transition(length):
    rng = np.random.default_rng(length)
    schema = Schema({"obs": Column((1,), np.float32), "action": Column((), np.int64)}, n_step=3)
    layout = ChunkLayout(schema, 8)
    store = ChunkStore(aligned_zeros(ChunkStore.required_bytes(layout, 64)), layout, 64)
    builder = ChunkBuilder(store, 1, stagger=False)
    builder.provide(np.arange(4))
    mask = np.ones(1, bool)
    for _ in range(2):
        builder.begin(mask, {"obs": rng.random((1, 1), np.float32)})
        for step in range(length):
            last = step == length - 1
            flags = np.array([(CUT | END) * last], np.int64)
            builder.add(mask, flags, {"obs": rng.random((1, 1), np.float32)}, np.ones(1))
    builder.flush()
    rows, terminal = 0, 0
    for slot in builder.take_closed():
        count = store.header_rows[slot, COUNT]
        rows += count
        discounts = store.column(slot, "discount")[:count]
        terminal += int((discounts == 0).sum())
    assert rows == 2 * length
    assert terminal == 2 * min(length, 3)


def test_a_transition_of_84x84x4_takes_at_most_8200_bytes_in_full_chunks():
    schema = Schema({"obs": Column((84, 84), np.uint8, stack=4), "action": Column((), np.int64)})
    layout = ChunkLayout(schema, 64)
    assert layout.body_bytes / 64 <= 8200


def test_streams_that_start_together_commit_their_first_chunks_spread_out():
    rng = np.random.default_rng(0)
    store, closed, _, _, _ = play(
        rng, streams=4, stack=1, n=1, chunk=8, steps=8, end=0.0, cut=0.0
    )  # fmt: skip
    first = {
        int(store.header_rows[s, STREAM]): int(store.header_rows[s, COUNT]) for s in closed[:4]
    }
    assert first == {0: 2, 1: 4, 2: 6, 3: 8}


def test_out_of_slots_a_step_stops_and_goes_on_where_it_stopped():
    rng = np.random.default_rng(3)
    store, closed, naive, _, ledger = play(
        rng, streams=3, stack=2, n=2, chunk=2, steps=40, end=0.3, cut=0.2
    )
    check_against_twin(store, closed, naive)
    assert ledger.counts["granted"] == len(store.header_rows) - ledger.free
    assert (store.header_rows[:, STATE] == FREE).sum() == ledger.free


def test_channels_last_gathers_the_same_numbers_in_the_same_shape():
    rng = np.random.default_rng(5)
    store, closed, *_ = play(rng, streams=2, stack=4, n=3, chunk=16, steps=50, padding="zero")
    count = int(store.header_rows[closed[0], COUNT])
    keys = store.keys_of(closed[0] * 16 + np.arange(count))
    first = Batch.empty(BatchLayout(store.layout.schema, count))
    last = Batch.empty(BatchLayout(store.layout.schema, count, channels_last=True))
    for batch in (first, last):
        store.gather(keys, batch.layout, batch.memory, batch.keys)
    np.testing.assert_array_equal(first.obs, last.obs)
    np.testing.assert_array_equal(first.next_obs, last.next_obs)
    assert first.obs.any()
    assert last.obs.shape == (count, 4, 3, 2)
    assert last.obs.strides[1] == 1
