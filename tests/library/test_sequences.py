"""Sequences against plain lists of episodes: every step, start, flag, probability and priority."""

import contextlib
import copy
import itertools
import time

import numpy as np
import pytest

import zapex
from tests.library.twin import Service
from zapex import Column, PrioritizedReplay, Schema
from zapex.errors import (
    BadMessage,
    ConfigError,
    InvalidPriority,
    NotEnoughData,
    ReplayError,
    SchemaError,
)
from zapex.library.url_client import form_of
from zapex.replay.sequences import (
    MOST_STEPS,
    Sequences,
    compile_kernels,
    follow_kernel,
    gather,
    gather_sequences_kernel,
    weigh,
)
from zapex.wire import messages
from zapex.wire.batches import PackedSequences
from zapex.wire.messages import Call, Request

pytestmark = pytest.mark.timeout(300)
STREAMS, GAMMA, CAPACITY = 2, 0.5, 400
LENGTH, BURN_IN, STRIDE = 9, 3, 4
STEPS = LENGTH + BURN_IN


def schema_of(n, stack):
    return Schema(
        {
            "obs": Column((2,), np.float32, stack),
            "action": Column((), np.int64),
            "state": Column((3,), np.float32),
        },
        n_step=n,
        gamma=GAMMA,
    )


class Episode:
    """One episode as plain lists: step t has the frames t to t + stack - 1."""

    def __init__(self, frames):
        self.frames, self.actions, self.rewards = frames, [], []
        self.ends = []  # steps after which nothing is bootstrapped
        self.explored = []  # steps before which returns end
        self.over, self.known = False, 0

    def add(self, action, reward, frame, terminated, truncated, cut, explored, n):
        if explored:
            self.explored.append(len(self.actions))
            self.known = len(self.actions)
        self.actions.append(action)
        self.rewards.append(reward)
        self.frames.append(frame)
        steps = len(self.actions)
        if terminated or cut:
            self.ends.append(steps)
        self.over = terminated or truncated
        whole = terminated or truncated or cut
        self.known = steps if whole else max(self.known, steps - n + 1)

    def row(self, t, n):
        """The return, the discount and the observation of the bootstrap of step t."""
        end = min([e for e in self.ends if e > t] + [len(self.actions)])
        m = min([n, end - t] + [e - t for e in self.explored if e > t])
        g = sum(GAMMA**k * self.rewards[t + k] for k in range(m))
        return g, 0.0 if t + m in self.ends and t + m == end else GAMMA**m, t + m


def played(replay, n, stack, steps=400, seed=0):
    """Play, with ends, lost lives and resets in the middle. Returns the episodes."""
    rng, numbers = np.random.default_rng(seed), itertools.count(1 + 10_000 * seed)
    episodes, now = [], [None] * STREAMS

    def first():
        episode = Episode([float(next(numbers))] * stack)
        episodes.append(episode)
        return episode

    def seen():
        stacked = np.array([e.frames[-stack:] for e in now], np.float32)
        pairs = np.repeat(stacked[:, :, None], 2, axis=2)
        return pairs if stack > 1 else pairs[:, 0]

    with replay.writer(STREAMS, autoreset="disabled") as writer:
        now[:] = [first() for _ in now]
        writer.reset(seen())
        for _ in range(steps):
            terminated, truncated, cut, explored = rng.random((4, STREAMS)) < 0.03
            action = np.array([next(numbers) for _ in now])
            reward = rng.integers(0, 5, STREAMS).astype(np.float32)
            for i, episode in enumerate(now):
                ends = terminated[i], truncated[i], cut[i], explored[i]
                episode.add(int(action[i]), float(reward[i]), float(next(numbers)), *ends, n)
            writer.add(
                action=action, reward=reward, next_obs=seen(), terminated=terminated,
                truncated=truncated, cut=cut, exploratory=explored,
                state=np.outer(action, np.ones(3)).astype("f4"), priority=action % 7 + 1.0,
            )  # fmt: skip
            begins = terminated | truncated | (rng.random(STREAMS) < 0.01)
            if begins.any():
                now[:] = [first() if b else e for b, e in zip(begins, now, strict=True)]
                writer.reset(seen(), begins)
    return episodes


@contextlib.contextmanager
def place_of(place, schema, folder):
    """A replay's user at this place, and the core of the replay."""
    if place == "url":
        with Service(schema, CAPACITY, 0.6, 0.0, folder) as service:
            core = service._library._replay
            with zapex.connect(service.url, schema=schema) as client:
                yield client, core
        return
    replay = PrioritizedReplay(CAPACITY, schema, 0.6, 0.0, 1, streams=STREAMS, chunk=16)
    if place == "owner":
        yield replay, replay.core
        return
    with zapex.connect(replay.handle) as client:
        yield client, replay.core
    replay.close()


def starts_of(core, episodes):
    """Of each step that can be drawn: the first step and the number of steps it is drawn with."""
    store, at = core.store, {}
    for slot in range(store.slots):
        for index in store.indices(slot) if store.state(slot) == 3 else []:
            at[int(store.column(slot, "action")[index - slot * core.layout.chunk])] = slot
    starts = {}
    for episode in episodes:
        known = [(a, at.get(a)) for a in episode.actions]
        for _, group in itertools.groupby(known, lambda pair: pair[1]):
            actions = [a for a, slot in group if slot is not None]
            for first in range(0, len(actions), STRIDE):
                span = actions[first : first + STRIDE]
                starts |= dict.fromkeys(span, (span[0], len(span)))
    return starts


def wait_until_taken_in(replay, episodes):
    """A server acknowledges a chunk before its replay counts it."""
    deadline = time.monotonic() + 60
    while replay.stats()["inserted"] < sum(e.known for e in episodes):
        assert time.monotonic() < deadline, replay.stats()
        time.sleep(0.01)


def check(batch, episodes, starts, n, stack):
    """Every value of a batch is that of the lists."""
    where = {a: (e, t) for e in episodes for t, a in enumerate(e.actions)}
    for b in range(len(batch.keys)):
        episode, t0 = where[int(batch.action[b, 0])]
        first = episode.actions[t0]
        assert starts[first] == (first, batch.spans[b])
        steps = min(STEPS, episode.known - t0)
        assert batch.valid[b].tolist() == [t < steps for t in range(STEPS)]
        assert batch.reset[b] == (t0 == 0)
        assert batch.action[b, :steps].tolist() == episode.actions[t0 : t0 + steps]
        assert (batch["state"][b, :steps] == batch.action[b, :steps, None]).all()
        assert not batch.action[b, steps:].any()
        assert not batch.reward[b, steps:].any()
        observations = steps
        for t in range(steps):
            g, discount, follows = episode.row(t0 + t, n)
            assert (batch.reward[b, t], batch.discount[b, t]) == (g, discount)
            if discount:
                assert batch.bootstrap[b, t] == follows - t0
            observations = max(observations, follows - t0 + 1)
        frames = episode.frames[t0 : t0 + observations + stack - 1]
        assert batch.obs[b, : len(frames), 0].tolist() == frames
        assert not batch.obs[b, len(frames) :].any()


@pytest.mark.parametrize("place", ["owner", "handle", "url"])
@pytest.mark.parametrize(("n", "stack"), [(1, 1), (3, 1), (3, 4)])
def test_sequences_are_the_steps_of_the_episodes(place, n, stack, tmp_path):
    with place_of(place, schema_of(n, stack), tmp_path) as (replay, core):
        episodes = played(replay, n, stack)
        wait_until_taken_in(replay, episodes)
        assert len(replay) <= CAPACITY < sum(e.known for e in episodes)
        starts, batch, firsts = starts_of(core, episodes), None, set()
        for _ in range(10):
            batch = replay.sample_sequences(
                16, LENGTH, burn_in=BURN_IN, stride=STRIDE, out=batch, beta=0.0
            )
            check(batch, episodes, starts, n, stack)
            assert (batch.weights == 1.0).all()
            firsts |= set(batch.action[:, 0].tolist())
        assert len(firsts) > 30
        assert batch.valid.all(axis=1).any()
        with replay.writer(1, autoreset="disabled"):  # a stream without a step changes nothing
            check(replay.sample_sequences(16, LENGTH, burn_in=BURN_IN, stride=STRIDE), episodes,
                  starts, n, stack)  # fmt: skip


def test_a_sequence_is_drawn_by_the_leaves_of_the_steps_it_stands_for():
    with place_of("owner", schema_of(3, 1), "") as (replay, core):
        episodes = played(replay, 3, 1)
        starts, leaf_sums = starts_of(core, episodes), {}
        for action, (first, _) in starts.items():
            leaf = (action % 7 + 1.0) ** 0.6
            leaf_sums[first] = leaf_sums.get(first, 0.0) + leaf
        total, counts = sum(leaf_sums.values()), dict.fromkeys(leaf_sums, 0)
        assert total == pytest.approx(core.tree.total)
        draws = 40_000
        for _ in range(draws // 100):
            batch = replay.sample_sequences(100, LENGTH, burn_in=BURN_IN, stride=STRIDE, beta=0.7)
            firsts = batch.action[:, 0].tolist()
            sums = np.array([leaf_sums[a] for a in firsts])
            assert batch.weights == pytest.approx((sums / sums.min()) ** -0.7, rel=1e-5)
            for a in firsts:
                counts[a] += 1
        expected = np.array(list(leaf_sums.values())) * draws / total
        # Chi-square has about this mean, and the variance 2 * mean. Stratified draws vary less.
        statistic = ((np.array(list(counts.values())) - expected) ** 2 / expected).sum()
        assert statistic < len(expected) + 3 * np.sqrt(2 * len(expected))


@pytest.mark.parametrize("place", ["owner", "handle", "url"])
def test_priorities_mix_the_largest_and_the_mean_error(place, tmp_path):
    with place_of(place, schema_of(3, 1), tmp_path) as (replay, core):
        played(replay, 3, 1)
        batch = replay.sample_sequences(12, LENGTH, burn_in=BURN_IN, stride=STRIDE)
        errors = np.random.default_rng(3).normal(size=(12, LENGTH))
        masked = np.where(batch.valid[:, BURN_IN:], errors, np.nan)
        applied, stale = replay.update_sequences(batch, masked, eta=0.8)
        assert (applied, stale) == (batch.spans.sum(), 0)
        leaves = core.tree.leaves
        for key, index, span, row, valid in zip(
            batch.keys, batch.indices, batch.spans, errors, batch.valid[:, BURN_IN:], strict=True
        ):
            if (batch.keys == key).sum() > 1 or not valid.any():
                continue
            own = np.abs(row[valid])
            wanted = (0.8 * own.max() + 0.2 * own.mean()) ** 0.6
            assert leaves[index : index + span] == pytest.approx(wanted)


def test_several_replays_share_the_sequences_out(tmp_path):
    schema = schema_of(3, 4)
    with contextlib.ExitStack() as opened:
        services = []
        for name in "ab":
            (tmp_path / name).mkdir()
            service = Service(schema, CAPACITY, 0.6, 0.0, tmp_path / name)
            services.append(opened.enter_context(service))
        urls = [s.url for s in services]
        client = zapex.connect(urls, schema=schema, timeout_s=60.0, shard_timeout_s=60.0)
        opened.enter_context(client)
        episodes = [e for seed in range(4) for e in played(client, 3, 4, seed=seed)]
        wait_until_taken_in(client, episodes)
        first, second = (s._library._replay for s in services)
        starts = starts_of(first, episodes) | starts_of(second, episodes)
        batch = client.sample_sequences(64, LENGTH, burn_in=BURN_IN, stride=STRIDE)
        check(batch, episodes, starts, 3, 4)
        assert set(np.unique(batch.keys >> 55)) == {0, 1}
        assert client.update_sequences(batch, np.ones((64, LENGTH))) == (batch.spans.sum(), 0)
        assert len(starts) == len(first) + len(second)


def test_an_evicted_sequence_is_stale_and_never_wrong():
    with place_of("owner", schema_of(1, 1), "") as (replay, _core):
        played(replay, 1, 1)
        batch = replay.sample_sequences(8, LENGTH, stride=STRIDE)
        played(replay, 1, 1, seed=1)
        applied, stale = replay.update_sequences(batch, np.ones((8, LENGTH)))
        assert (applied, stale) == (0, batch.spans.sum())


def test_a_sequence_whose_chunk_was_evicted_after_the_draw_is_torn():
    with place_of("owner", schema_of(1, 1), "") as (replay, core):
        played(replay, 1, 1)
        asked = Sequences(LENGTH, 0, STRIDE)
        batch = replay.sample_sequences(8, LENGTH, stride=STRIDE)
        draw = core.draw_sequences(8, asked)
        oldest = core.ledger.oldest
        core.evict_oldest()
        pieces = len(draw.keys) // 8
        slots = np.where(draw.keys >= 0, draw.indices // core.layout.chunk, -1).reshape(8, pieces)
        gone = (slots == oldest).any(axis=1)
        assert gather(draw, core.store, batch, STRIDE) == gone.sum()
        weigh(batch, draw.leaves[::pieces], 0.4)
        assert ((batch.keys == -1) == gone).all()
        assert ((batch.weights == 0) == gone).all()
        assert not batch.valid[gone].any()
        assert replay.update_sequences(batch, np.ones((8, LENGTH)))[1] == 0


def test_what_is_compiled_ahead_is_all_that_a_call_needs():
    with place_of("owner", schema_of(1, 1), "") as (replay, core):
        compile_kernels(core.store)
        played(replay, 1, 1)
        replay.sample_sequences(8, LENGTH, stride=STRIDE)
        assert [len(k.signatures) for k in (follow_kernel, gather_sequences_kernel)] == [1, 1]
    columns = {"obs": Column((2,), np.float32), "action": Column((), np.int64)}
    taken = Schema({**columns, "valid": Column((), np.int64)})
    compile_kernels(PrioritizedReplay(400, taken).core.store)  # nothing to draw, and no error


def test_a_snapshot_keeps_the_links(tmp_path):
    with place_of("owner", schema_of(3, 4), "") as (replay, _):
        episodes = played(replay, 3, 4)
        replay.save(tmp_path / "replay")
        loaded = PrioritizedReplay.load(tmp_path / "replay")
        batch = loaded.sample_sequences(32, LENGTH, burn_in=BURN_IN, stride=STRIDE)
        check(batch, episodes, starts_of(loaded.core, episodes), 3, 4)


def test_a_copy_has_its_own_memory():
    with place_of("owner", schema_of(1, 1), "") as (replay, _):
        played(replay, 1, 1)
        batch = replay.sample_sequences(8, LENGTH)
        other = copy.deepcopy(batch)
        batch.obs[:] = 0
        assert type(other) is type(batch)
        assert other.obs.any()
        assert other.valid.any()
        assert batch.torch()["valid"].shape == (8, LENGTH)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"n": 0}, "n"),
        ({"length": 0}, "length"),
        ({"length": 2.5}, "length"),
        ({"burn_in": -1}, "burn_in"),
        ({"stride": -1}, "stride"),
        ({"beta": np.nan}, "beta"),
        ({"burn_in": 1 << 20}, "burn_in"),
    ],
)
def test_wrong_arguments_are_named(arguments, name):
    replay = PrioritizedReplay(CAPACITY, schema_of(1, 1))
    with pytest.raises(ConfigError, match=name):
        replay.sample_sequences(**{"n": 4, "length": 8, **arguments})


def test_what_cannot_be_drawn_or_updated_is_refused():
    with place_of("owner", schema_of(1, 1), "") as (replay, _):
        with pytest.raises(NotEnoughData):
            replay.sample_sequences(4, 8)
        played(replay, 1, 1)
        batch = replay.sample_sequences(4, 8)
        with pytest.raises(ConfigError, match="out"):
            replay.sample_sequences(4, 9, out=batch)
        with pytest.raises(SchemaError, match="td_errors"):
            replay.update_sequences(batch, np.ones((4, 7)))
        with pytest.raises(ConfigError, match="eta"):
            replay.update_sequences(batch, np.ones((4, 8)), eta=1.5)
        with pytest.raises(InvalidPriority):
            replay.update_sequences(batch, np.where(batch.valid, np.nan, 0.0))
    schema = Schema({**schema_of(1, 1).columns, "valid": Column((), np.int64)}, n_step=1)
    with pytest.raises(SchemaError, match="valid"):
        PrioritizedReplay(CAPACITY, schema).sample_sequences(4, 8)


def test_rows_of_extend_make_no_sequences():
    schema = Schema({"obs": Column((), np.float32), "action": Column((), np.int64)}, n_step=1)
    replay = PrioritizedReplay(CAPACITY, schema)
    obs = np.arange(33, dtype=np.float32)
    replay.extend(
        obs=obs[:-1], next_obs=obs[1:], action=np.zeros(32, np.int64), reward=np.ones(32),
        terminated=np.zeros(32, bool),
    )  # fmt: skip
    with pytest.raises(ReplayError, match="writer"):
        replay.sample_sequences(4, 8)


@pytest.mark.parametrize("asked", [(0, 1, 1), (1, 0, 0), (MOST_STEPS, 1, 1)])
def test_a_peer_cannot_ask_for_impossible_sequences(asked):
    form = form_of(PrioritizedReplay(CAPACITY, schema_of(1, 1)).core.layout)
    call = Call(0, Request.SEQUENCES, 4, Sequences(*asked).option)
    with pytest.raises(BadMessage, match="sequences"):
        messages.decode(messages.encode(call), form)


def test_a_sequence_too_long_for_a_message_is_refused():
    form = form_of(PrioritizedReplay(CAPACITY, schema_of(1, 1)).core.layout)
    with pytest.raises(ConfigError, match="5000"):
        PackedSequences.most(form, Sequences(5000, 0, 1))
    assert PackedSequences.most(form, Sequences(4000, 0, 1)) == 1


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_a_server_cannot_send_impossible_leaves_or_totals(at, value):
    with place_of("owner", schema_of(1, 1), "") as (replay, core):
        played(replay, 1, 1)
        asked = Sequences(LENGTH, 0, STRIDE)
        batch = replay.sample_sequences(3, LENGTH, stride=STRIDE)
        packed = PackedSequences(form_of(core.layout), 3, asked)
        body = packed.pack(core.draw_sequences(3, asked), core.store)
        leaves, total = packed.unpack(memoryview(body), batch, 0)
        assert 0.0 < leaves.min() <= leaves.max() <= total
        body[: 8 * 4].view(np.float64)[at] = value
        with pytest.raises(BadMessage, match="leaves"):
            packed.unpack(memoryview(body), batch, 0)
