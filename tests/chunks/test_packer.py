"""Whole transitions in: every row comes back as it was, shared frames are stored once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chunks.test_builder import Game
from tests.support.keys import indices_of
from zapex.chunks.layout import COUNT
from zapex.chunks.schema import Column, Schema
from zapex.errors import ConfigError, InvalidPriority, SchemaError
from zapex.library.prioritized import PrioritizedReplay


def new_replay(stack=2, n=1, capacity=2000, chunk=8, **options):
    schema = Schema(
        {"obs": Column((3, 2), np.uint8, stack=stack), "action": Column((), np.int64)},
        n_step=n, gamma=0.9,
    )  # fmt: skip
    return PrioritizedReplay(capacity, schema, chunk=chunk, **{"seed": 0, **options})


def stream_of_rows(rng, stack, n, count, padding="zero", end=0.05):
    """Transitions (obs, next_obs n steps later) as one stream plays them."""
    game = Game(1, stack, padding)
    rows, episode = [], []
    game.reset(0)
    while len(rows) < count:
        episode.append(game.seen[0].copy())
        if len(episode) > n:
            rows.append((episode[-1 - n], episode[-1]))
        if rng.random() < end:
            game.reset(0)
            episode = []
        else:
            game.step(0)
    obs, next_obs = zip(*rows, strict=True)
    return np.array(obs), np.array(next_obs)


def extend(replay, obs, next_obs, **columns):
    count = len(obs)
    given = {
        "action": np.arange(count), "reward": np.arange(count) / 4,
        "terminated": np.zeros(count, bool), **columns,
    }  # fmt: skip
    return replay.extend(obs=obs, next_obs=next_obs, **given)


def rows_of(replay, keys):
    batch = replay.empty_batch(len(keys))
    assert replay.core.store.gather(keys, batch.layout, batch.memory, batch.keys) == 0
    return batch


def frames_in_use(replay, name="obs"):
    """Distinct frames that the rows of each live chunk refer to, in all."""
    store, total = replay.core.store, 0
    for slot in np.flatnonzero(store.header_rows[:, COUNT]):
        count = store.header_rows[slot, COUNT]
        places = [store.column(slot, f"{side}_frames")[:count] for side in ("obs", "next_obs")]
        total += len(np.setdiff1d(np.unique(places), [0xFFFF]))
    return total


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31), stack=st.integers(1, 4), n=st.integers(1, 4),
    padding=st.sampled_from(["zero", "repeat", "distinct"]), shuffled=st.booleans(),
    parts=st.integers(1, 4), end=st.sampled_from([0.0, 0.1, 0.5]),
)  # fmt: skip
def test_rows_come_back_as_they_were_whatever_they_share(
    seed, stack, n, padding, shuffled, parts, end
):
    rng = np.random.default_rng(seed)
    replay = new_replay(stack, n, alpha=1.0, eps=0.0)
    obs, next_obs = stream_of_rows(rng, stack, n, 40, padding, end if n == 1 else 0.02)
    if shuffled:
        order = rng.permutation(len(obs))
        obs, next_obs = obs[order], next_obs[order]
    action, reward = rng.integers(9, size=40), rng.normal(size=40).astype(np.float32)
    terminated, priorities = rng.random(40) < 0.2, rng.normal(size=40)
    keys = np.concatenate(
        [
            extend(
                replay, obs[part], next_obs[part], action=action[part], reward=reward[part],
                terminated=terminated[part], priorities=priorities[part],
            )
            for part in np.array_split(np.arange(40), parts)
        ]
    )  # fmt: skip
    assert len(replay) == len(set(keys.tolist())) == 40
    batch = rows_of(replay, keys)
    np.testing.assert_array_equal(batch.obs, obs)
    np.testing.assert_array_equal(batch.next_obs, next_obs)
    np.testing.assert_array_equal(batch.action, action)
    np.testing.assert_array_equal(batch.reward, reward)
    np.testing.assert_allclose(batch.discount, np.where(terminated, 0.0, 0.9**n), rtol=1e-6)
    indices, fit = indices_of(replay.core.store, keys)
    assert fit == 40
    np.testing.assert_allclose(replay.core.tree[indices], abs(priorities))


@pytest.mark.parametrize(("stack", "n"), [(4, 1), (4, 3), (4, 4), (2, 3), (1, 1), (1, 3)])
def test_rows_of_one_episode_store_each_frame_once_in_a_chunk(stack, n):
    rng = np.random.default_rng(0)
    replay = new_replay(stack, n, chunk=32)
    obs, next_obs = stream_of_rows(rng, stack, n, 32, "distinct", end=0.0)
    extend(replay, obs, next_obs)
    assert frames_in_use(replay) == 32 + n + stack - 1
    assert replay.core.ledger.counts["granted"] == 1


def test_rows_that_share_nothing_fill_a_chunk_early_and_stats_say_what_fits():
    rng = np.random.default_rng(1)
    replay = new_replay(4, 1, capacity=3200, chunk=32)
    rows = rng.integers(1, 255, (2, 300, 4, 3, 2), np.uint8)
    keys = extend(replay, *rows)
    per_chunk = replay.core.layout.chunk_layout.frames // 8
    assert replay.core.ledger.counts["live"] + 1 == -(-300 // per_chunk)
    live = keys[indices_of(replay.core.store, keys)[0] >= 0]
    np.testing.assert_array_equal(rows_of(replay, live).obs, rows[0][-len(live) :])
    assert 300 <= replay.stats()["effective_capacity"] <= per_chunk * replay.core.store.slots


def test_frames_of_zeros_take_no_room():
    replay = new_replay(4, 1)
    zeros = np.zeros((3, 4, 3, 2), np.uint8)
    keys = extend(replay, zeros, zeros)
    assert frames_in_use(replay) == 0
    assert not rows_of(replay, keys).obs.any()


@pytest.mark.parametrize("size", [1, 7, 8, 9, 19, 64, 200])
def test_frames_that_differ_in_one_byte_are_told_apart_wherever_it_is(size):
    schema = Schema(
        {"obs": Column((size,), np.uint8, stack=2), "action": Column((), np.int64)}, n_step=1
    )
    replay = PrioritizedReplay(2000, schema, seed=0, chunk=250)
    seen = set()
    for base in (0, 7):
        frames = np.full((size, size), base, np.uint8)
        frames[np.arange(size), np.arange(size)] = base + 128
        # Shuffled: no row follows another, so that each frame is looked for by its hash.
        first, second = np.random.default_rng(size + base).integers(0, size, (2, 40))
        obs = np.stack([frames[first], frames[second]], axis=1)
        next_obs = obs[:, ::-1].copy()
        seen |= {frame.tobytes() for frame in obs.reshape(-1, size)}
        batch = rows_of(replay, extend(replay, obs, next_obs))
        np.testing.assert_array_equal(batch.obs, obs)
        np.testing.assert_array_equal(batch.next_obs, next_obs)
    assert frames_in_use(replay) == len(seen)


def test_a_stack_of_two_depths_never_takes_a_hole_for_a_frame():
    schema = Schema(
        {"obs/deep": Column((2,), np.uint8, stack=3), "obs/flat": Column((), np.float32),
         "action": Column((), np.int64)},
        n_step=1,
    )  # fmt: skip
    replay = PrioritizedReplay(400, schema, seed=0, chunk=16)
    rng = np.random.default_rng(2)
    # Few different values, so that frames meet again in every combination.
    obs, next_obs = (
        {"deep": rng.integers(0, 2, (60, 3, 2), np.uint8),
         "flat": rng.integers(0, 2, 60).astype(np.float32)}
        for _ in range(2)
    )  # fmt: skip
    keys = replay.extend(
        obs=obs, next_obs=next_obs, action=np.arange(60), reward=np.zeros(60),
        terminated=np.zeros(60, bool),
    )  # fmt: skip
    batch = rows_of(replay, keys)
    for name in ("deep", "flat"):
        np.testing.assert_array_equal(batch.obs[name], obs[name])
        np.testing.assert_array_equal(batch.next_obs[name], next_obs[name])


def test_more_rows_than_the_memory_holds_leave_the_newest_and_stale_keys():
    rng = np.random.default_rng(3)
    replay = new_replay(2, 1, capacity=32, chunk=4)
    obs, next_obs = stream_of_rows(rng, 2, 1, 200)
    keys = extend(replay, obs, next_obs)
    indices, fit = indices_of(replay.core.store, keys)
    assert fit == len(replay) <= 32
    assert (indices[-fit:] >= 0).all()
    assert (indices[:-fit] == -1).all()
    np.testing.assert_array_equal(rows_of(replay, keys[-fit:]).obs, obs[-fit:])
    assert replay.update_priorities(keys, np.ones(200)) == (fit, 200 - fit)
    assert replay.core.tree.check_valid() == (True, "")


def test_the_discount_that_is_given_is_kept_and_terminals_never_bootstrap():
    replay = new_replay(1, 3)
    obs = np.ones((3, 3, 2), np.uint8)
    discount = np.array([0.9, 0.81, 0.5])
    keys = extend(
        replay, obs, obs, discount=discount, terminated=np.array([False, False, True]),
        truncated=np.array([False, True, False]),
    )  # fmt: skip
    np.testing.assert_allclose(rows_of(replay, keys).discount, [0.9, 0.81, 0.0])
    with pytest.raises(SchemaError, match="needs terminated or discount"):
        extend(replay, obs, obs, terminated=None)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"obs": np.zeros((2, 2, 3, 2), np.uint8)}, SchemaError, "obs must have shape"),
        ({"next_obs": np.zeros((3, 2, 3, 2))}, SchemaError, "next_obs must be uint8"),
        ({"action": np.zeros(3)}, SchemaError, "action must be int64"),
        ({"reward": np.zeros((3, 1))}, SchemaError, "reward must have shape"),
        ({"discount": np.zeros(2)}, SchemaError, "discount must have shape"),
        ({"terminated": np.zeros(3)}, SchemaError, "terminated must be bool"),
        ({"priorities": np.array([1.0, 2.0, np.nan])}, InvalidPriority, "got nan in row 2"),
        ({"extra": np.zeros(3)}, SchemaError, r"extra columns are \[\]"),
    ],
)
def test_rows_that_do_not_fit_are_one_clear_error_and_change_nothing(change, error, message):
    replay = new_replay()
    rows = {
        "obs": np.ones((3, 2, 3, 2), np.uint8), "next_obs": np.ones((3, 2, 3, 2), np.uint8),
        "action": np.zeros(3, np.int64), "reward": np.zeros(3), "terminated": np.zeros(3, bool),
    }  # fmt: skip
    replay.extend(**rows)
    before = replay.core.store.mem.tobytes(), replay.core.tree.leaves.tobytes(), replay.stats()
    with pytest.raises(error, match=message):
        replay.extend(**{**rows, **change})
    assert before == (
        replay.core.store.mem.tobytes(),
        replay.core.tree.leaves.tobytes(),
        replay.stats(),
    )


def test_a_chunk_with_no_room_for_one_whole_transition_is_refused():
    replay = new_replay(8, 1, capacity=64, chunk=2)
    with pytest.raises(ConfigError, match="chunk=8 or more"):
        extend(replay, *np.ones((2, 1, 8, 3, 2), np.uint8))


def test_successive_atari_rows_take_at_most_9_kb_each():
    schema = Schema({"obs": Column((84, 84), np.uint8, stack=4), "action": Column((), np.int64)})
    replay = PrioritizedReplay(2000, schema, chunk=64, seed=0)
    rng = np.random.default_rng(0)
    frames = rng.integers(1, 255, (400, 84, 84), np.uint8)
    at = np.arange(256)[:, None] + np.arange(4)
    extend(replay, frames[at], frames[at + 3])
    used = replay.core.ledger.counts["live"] + replay.core.ledger.counts["granted"]
    assert used * replay.core.store.layout.body_bytes / 256 <= 9000
