"""Steps become chunks: every transition as the naive twin has it, frames stored once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.naive import NaiveNStep
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.builder import MOST_REWARD, ChunkBuilder
from zapex.chunks.layout import (
    ACTOR,
    COMMITTED,
    COUNT,
    INCARNATION,
    NO_FRAME,
    SEQUENCE,
    STATE,
    STREAM,
    BatchLayout,
    ChunkLayout,
)
from zapex.chunks.ledger import SlotLedger
from zapex.chunks.schema import Column, Schema
from zapex.chunks.store import ChunkStore
from zapex.errors import ConfigError


class Game:
    """Streams of numbered frames with ends, lost lives and stacks padded as a reset pads them.

    level: a frame is two float32, not 3x2 bytes.
    """

    def __init__(self, streams, stack, padding, level=False):
        self.padding, self.clock = padding, 0
        shape, dtype = ((2,), np.float32) if level else ((3, 2), np.uint8)
        self.obs = np.zeros((streams, stack, *shape), dtype)

    @property
    def seen(self):
        return self.obs[:, 0] if self.obs.shape[1] == 1 else self.obs

    def frame(self):
        self.clock += 1
        if self.obs.dtype == np.float32:
            return np.float32([self.clock, -self.clock])
        return np.frombuffer(np.int64(self.clock).tobytes()[:6], np.uint8).reshape(3, 2)

    def reset(self, i):
        if self.padding == "distinct":
            for j in range(self.obs.shape[1]):
                self.obs[i, j] = self.frame()
            return
        frame = self.frame()
        self.obs[i] = frame if self.padding == "repeat" else 0
        self.obs[i, -1] = frame

    def step(self, i):
        self.obs[i, :-1] = self.obs[i, 1:].copy()
        self.obs[i, -1] = self.frame()


LEVEL = "obs/level"
FIRST_STREAM = 30


def play(rng, *, streams, stack, n, chunk, steps, padding="zero", end=0.1, cut=0.1, max_age=0,
         slots=None, flush_at=(), actions=5, level=0, level_padding="zero",
         given=False, abandoned=0.0, explored=0.0):  # fmt: skip
    """Random play through a builder that gets few slots at a time; chunks, oracle and store.

    level: the stack of a second column of the observation; 0: there is none. given: the caller
    gives priorities. abandoned: the share of steps after which a stream is reset in the middle of
    its episode. explored: the share of exploratory actions.
    """
    image = "obs/image" if level else "obs"
    columns = {image: Column((3, 2), np.uint8, stack=stack)}
    if level:
        columns[LEVEL] = Column((2,), np.float32, stack=level)
    schema = Schema(
        {**columns, "action": Column((), np.int64), "mask": Column((2,), np.float32)},
        n_step=n, gamma=0.9,
    )  # fmt: skip
    layout = ChunkLayout(schema, chunk)
    slots = slots or steps * streams + 4 * streams
    store = ChunkStore(aligned_zeros(ChunkStore.required_bytes(layout, slots)), layout, slots)
    ledger = SlotLedger(store)
    builder = ChunkBuilder(
        store,
        streams,
        actor=7,
        incarnation=9,
        first_stream=FIRST_STREAM,
        max_chunk_age_steps=max_age,
    )
    naive = [NaiveNStep(n, 0.9) for _ in range(streams)]
    games = {image: Game(streams, stack, padding)}
    if level:
        games[LEVEL] = Game(streams, level, level_padding, level=True)
    seen = {name: game.seen for name, game in games.items()}
    everyone = np.ones(streams, bool)
    closed, completed = [], {}

    def of(i):
        """The observation of stream i, as its twin keeps it."""
        return [array[i].copy() for array in seen.values()]

    def until_done(call):
        while call() < streams:
            builder.provide(ledger.grant(1, 7, 9))
            closed.extend(builder.take_closed())
        closed.extend(builder.take_closed())

    def begin(mask):
        until_done(lambda: builder.begin(mask, seen))
        for i in np.flatnonzero(mask):
            naive[i].begin(of(i))

    def add(reward, terminated, truncated, cut, exploratory, values, priority):
        until_done(
            lambda: builder.add(
                seen, reward, terminated, truncated, cut=cut, exploratory=exploratory,
                values=values, priority=priority if given else None,
            )
        )  # fmt: skip
        indices, magnitudes = builder.last_completed()
        assert not completed.keys() & set(indices)
        completed.update(zip(indices, magnitudes, strict=True))

    for i in range(streams):
        for game in games.values():
            game.reset(i)
    begin(everyone)
    over = np.zeros(streams, bool)
    for step in range(steps):
        begun, over = over, np.zeros(streams, bool)
        for i in range(streams):
            for game in games.values():
                game.reset(i) if begun[i] else game.step(i)
        terminated, truncated, cuts = (rng.random(streams) < p for p in (end / 2, end / 2, cut))
        reward = rng.integers(-3, 4, streams).astype(np.float64)
        values, priority = rng.normal(size=(2, streams)), rng.random(streams)
        builder.staged["action"] = action = rng.integers(actions, size=streams)
        builder.staged["mask"] = mask = rng.random((streams, 2)).astype(np.float32)
        np.testing.assert_array_equal(builder.idle(), begun)
        exploratory = rng.random(streams) < explored
        add(
            reward, terminated, truncated, cuts if cut else None,
            exploratory if explored else None, values, priority,
        )  # fmt: skip
        over = ~begun & (terminated | truncated)
        assert builder.ended == over.sum()
        for i in np.flatnonzero(~begun):
            naive[i].add(
                (action[i], mask[i]), reward[i], of(i), bool(terminated[i] | cuts[i]),
                bool(over[i]), *values[:, i], priority[i] if given else None, exploratory[i],
            )  # fmt: skip
        reset = begun | (~over & (rng.random(streams) < abandoned))
        for i in np.flatnonzero(reset & ~begun):
            for game in games.values():
                game.reset(i)
        if reset.any():
            begin(reset)
        if step in flush_at:
            builder.flush()
            closed.extend(builder.take_closed())
        assert builder.wanted == streams - len(builder.held)
    builder.flush()
    closed.extend(builder.take_closed())
    check_completed(store, closed, completed)
    return store, closed, naive, builder, ledger


def check_completed(store, closed, completed):
    """Each row was told when it was complete, with its priority, and chunks are stamped."""
    chunk, rows = store.layout.chunk, {}
    for sequence, slot in enumerate(closed):
        header = store.header_rows[slot]
        assert (header[STATE], header[ACTOR], header[INCARNATION]) == (COMMITTED, 7, 9)
        assert header[SEQUENCE] == sequence
        priority = store.column(slot, "priority")[: header[COUNT]]
        rows.update(zip(slot * chunk + np.arange(header[COUNT]), priority, strict=True))
    assert rows == {index: np.float32(priority) for index, priority in completed.items()}


def parts(obs, row):
    """One row of each column of an observation."""
    columns = obs.values() if isinstance(obs, dict) else [obs]
    return [column[row].copy() for column in columns]


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
            out.setdefault(int(store.header_rows[slot, STREAM]) - FIRST_STREAM, []).append(
                (parts(batch.obs, r), batch.action[r], batch["mask"][r].copy(), batch.reward[r],
                 batch.discount[r], parts(batch.next_obs, r), priority[r])
            )  # fmt: skip
    return out


def check_against_twin(store, closed, naive):
    rows = rows_of(store, closed)
    for i, twin in enumerate(naive):
        mine = rows.get(i, [])
        assert len(mine) == len(twin.transitions)
        for got, want in zip(mine, twin.transitions, strict=True):
            obs, (action, mask), reward, discount, next_obs, priority = want
            for one, other in zip(got[0] + got[5], obs + next_obs, strict=True):
                np.testing.assert_array_equal(one, other)
            assert got[1] == action
            np.testing.assert_array_equal(got[2], mask)
            np.testing.assert_allclose(got[3], reward, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(got[4], discount, rtol=1e-6)
            np.testing.assert_allclose(got[6], priority, rtol=1e-5, atol=1e-6)


def check_frames(store, closed):
    """A chunk begins with a frame that it needs, has none twice, and none that is all zeros."""
    images = [name for name in store.layout.schema.obs_columns if name != LEVEL]
    for slot in closed:
        count = store.header_rows[slot, COUNT]
        used = np.unique([store.column(slot, f"{s}_frames")[:count] for s in ("obs", "next_obs")])
        used = used[used != NO_FRAME]
        assert used.min(initial=0) == 0
        kept = store.column(slot, images[0])[used]
        assert len(np.unique(kept, axis=0)) == len(used)
        assert kept.reshape(len(used), -1).any(1).all()


SEEDS = st.integers(0, 2**31)
PADDINGS = st.sampled_from(["zero", "repeat", "distinct"])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=SEEDS, streams=st.integers(1, 4), stack=st.integers(1, 4), level=st.integers(-3, 4),
    n=st.integers(1, 4), more=st.integers(0, 9), padding=PADDINGS, level_padding=PADDINGS,
    end=st.sampled_from([0.0, 0.05, 0.5, 1.0]), cut=st.sampled_from([0.0, 0.1, 0.6]),
    max_age=st.sampled_from([0, 1, 5]), flush_at=st.sets(st.integers(0, 39), max_size=3),
    given=st.booleans(), abandoned=st.sampled_from([0.0, 0.2]),
    explored=st.sampled_from([0.0, 0.2, 1.0]),
)  # fmt: skip
def test_chunks_hold_what_the_naive_twin_has(
    seed, streams, stack, level, n, more, padding, level_padding, end, cut, max_age, flush_at,
    given, abandoned, explored,
):  # fmt: skip
    """level: the stack of a second column of the observation; 0 or less: there is none."""
    level = max(0, level)
    store, closed, naive, _, _ = play(
        np.random.default_rng(seed), streams=streams, stack=stack, n=n, chunk=n + more, steps=40,
        padding=padding, level=level, level_padding=level_padding, end=end, cut=cut,
        max_age=max_age, flush_at=flush_at, given=given, abandoned=abandoned, explored=explored,
    )  # fmt: skip
    check_against_twin(store, closed, naive)
    if not abandoned and (not level or (padding == level_padding and level == stack)):
        check_frames(store, closed)


def test_a_reward_that_is_no_number_is_refused_and_changes_nothing():
    store, builder, obs, step = one_stream(n=1, chunk=4, finite_rewards=True)
    builder.begin(ONE, obs(1))
    step(2)
    before = store.mem.copy()
    for bad in (np.nan, np.inf, -MOST_REWARD * 1.001):
        with pytest.raises(ConfigError, match="of stream 0"):
            builder.add(obs(3), np.array([bad]), NO, NO)
    np.testing.assert_array_equal(store.mem, before)
    builder.add(obs(3), np.array([MOST_REWARD]), ONE, NO)
    assert builder.add(obs(4), np.array([np.nan]), NO, NO) == 1  # no episode: it is not read


def one_stream(n, chunk, *, stack=1, slots=4, **options):
    """A builder of one stream with all slots of its store, and a function that takes a step."""
    schema = Schema(
        {"obs": Column((1,), np.uint8, stack=stack), "action": Column((), np.int64)}, n_step=n
    )
    layout = ChunkLayout(schema, chunk)
    store = ChunkStore(aligned_zeros(ChunkStore.required_bytes(layout, slots)), layout, slots)
    builder = ChunkBuilder(store, 1, stagger=False, **options)
    builder.provide(np.arange(slots))
    shape = (1, 1) if stack == 1 else (1, stack, 1)

    def obs(value):
        return {"obs": np.full(shape, value, np.uint8)}

    def step(value):
        assert builder.add(obs(value), np.ones(1), NO, NO) == 1
        return [int(store.header_rows[slot, COUNT]) for slot in builder.take_closed()]

    return store, builder, obs, step


ONE, NO = np.ones(1, bool), np.zeros(1, bool)


def test_a_chunk_with_a_row_is_closed_when_it_is_of_age():
    _, builder, obs, step = one_stream(n=3, chunk=8, max_chunk_age_steps=2)
    builder.begin(ONE, obs(1))
    # The first row is complete with the third step, and older than its age: it goes alone.
    assert [step(value) for value in range(2, 9)] == [[], [], [1], [], [2], [], [2]]


def test_a_step_after_the_end_of_an_episode_is_left_out_until_the_next_begins():
    store, builder, obs, step = one_stream(n=1, chunk=8)
    builder.begin(ONE, obs(1))
    builder.add(obs(2), np.ones(1), NO, ONE)
    step(3)
    assert len(builder.last_completed()[0]) == 0
    builder.begin(ONE, obs(4))
    step(5)
    builder.flush()
    (slot,) = builder.take_closed()
    assert store.header_rows[slot, COUNT] == 2
    assert store.column(slot, "obs")[:4].ravel().tolist() == [1, 2, 4, 5]


def test_an_observation_of_zeros_alone_is_one_stored_frame():
    store, builder, obs, step = one_stream(n=1, chunk=2, stack=3)
    builder.begin(ONE, obs(0))
    step(0)
    builder.flush()
    (slot,) = builder.take_closed()
    assert store.column(slot, "obs_frames")[0].tolist() == [NO_FRAME, NO_FRAME, 0]
    assert store.column(slot, "next_obs_frames")[0].tolist() == [NO_FRAME, 0, 1]


def test_resets_without_a_step_use_no_chunk_and_leave_no_frame_behind():
    store, builder, obs, step = one_stream(n=2, chunk=2, stack=2)
    store.header_rows[:, COUNT] = 2  # of the chunks before
    for value in range(1, 100):
        assert builder.begin(ONE, obs(value)) == 1
        assert builder.spares == 3
        assert store.header_rows[:, COUNT].tolist() == [2, 2, 2, 0]
        assert len(builder.take_closed()) == 0
    step(100)
    step(101)
    builder.flush()
    (slot,) = builder.take_closed()
    kept = store.column(slot, "obs")[store.column(slot, "obs_frames")[0]]
    assert kept.ravel().tolist() == [99, 99]


@pytest.mark.parametrize("length", range(1, 12))
def test_episodes_of_every_length_end_in_a_terminal_transition(length):
    rng = np.random.default_rng(length)
    schema = Schema({"obs": Column((1,), np.float32), "action": Column((), np.int64)}, n_step=3)
    layout = ChunkLayout(schema, 8)
    store = ChunkStore(aligned_zeros(ChunkStore.required_bytes(layout, 64)), layout, 64)
    builder = ChunkBuilder(store, 1, actor=5, incarnation=6, stagger=False)
    builder.provide(np.arange(4))
    mask = np.ones(1, bool)
    for _ in range(2):
        builder.begin(mask, {"obs": rng.random((1, 1), np.float32)})
        for step in range(length):
            last = step == length - 1
            builder.add({"obs": rng.random((1, 1), np.float32)}, np.ones(1), np.array([last]), NO)
    builder.flush()
    rows, terminal = 0, 0
    for slot in builder.take_closed():
        header = store.header_rows[slot]
        assert (header[ACTOR], header[INCARNATION]) == (5, 6)  # no ledger has written them here
        count = header[COUNT]
        rows += count
        discounts = store.column(slot, "discount")[:count]
        terminal += int((discounts == 0).sum())
    assert rows == 2 * length
    assert terminal == 2 * min(length, 3)


def test_streams_that_start_together_commit_their_first_chunks_spread_out():
    rng = np.random.default_rng(0)
    store, closed, _, _, _ = play(
        rng, streams=4, stack=1, n=1, chunk=8, steps=8, end=0.0, cut=0.0
    )  # fmt: skip
    first = {
        int(store.header_rows[s, STREAM]) - FIRST_STREAM: int(store.header_rows[s, COUNT])
        for s in closed[:4]
    }
    assert first == {0: 2, 1: 4, 2: 6, 3: 8}
