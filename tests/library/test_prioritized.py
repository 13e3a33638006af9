"""Draws by priority, weights by the closed form, priorities only for their own transitions."""

import numpy as np
import pytest

from tests.support.keys import indices_of
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.keys import NO_KEY
from zapex.chunks.layout import COMMITTED, COUNT, STATE
from zapex.chunks.schema import Column, Schema
from zapex.errors import ConfigError, InvalidPriority, NotEnoughData
from zapex.library.prioritized import PrioritizedReplay
from zapex.replay.core import ReplayLayout

SCHEMA = Schema({"obs": Column((2,), np.float32), "action": Column((), np.int64)}, n_step=1)


def new_replay(capacity=32, **options):
    options = {"seed": 0, "chunk": 4, "streams": 1, **options}
    return PrioritizedReplay(capacity, SCHEMA, **options)


def put(replay, priorities):
    """A chunk as an actor hands it over; the keys of its transitions."""
    (slot,) = replay.core.ledger.grant(1, 0, 1).tolist()
    replay.core.store.column(slot, "obs_frames")[:] = 0
    replay.core.store.column(slot, "next_obs_frames")[:] = 1
    replay.core.store.column(slot, "priority")[: len(priorities)] = priorities
    replay.core.store.header_rows[slot, [COUNT, STATE]] = len(priorities), COMMITTED
    replay.core.accept(slot)
    return replay.core.store.keys_of(slot * replay.core.layout.chunk + np.arange(len(priorities)))


def leaves_of(replay, keys):
    return replay.core.tree[indices_of(replay.core.store, keys)[0]]


def state_of(replay):
    """Everything that a refused call must leave as it was."""
    return (
        replay.core.store.mem.tobytes(),
        replay.core.tree.arrays[0].tobytes(),
        replay.core.rng.bit_generator.state,
    )


def test_a_leaf_is_the_priority_and_eps_to_the_alpha_once():
    replay = new_replay(alpha=0.5, eps=0.01)
    keys = put(replay, [0.0, 1.0, 4.0, 9.0])
    expected = (np.array([0.0, 1.0, 4.0, 9.0]) + 0.01) ** 0.5
    np.testing.assert_allclose(leaves_of(replay, keys), expected)
    replay.update_priorities(keys, np.array([-4.0, 0.0, 1e9, 1e-9]))
    expected = (np.array([4.0, 0.0, 1e9, 1e-9]) + 0.01) ** 0.5
    np.testing.assert_allclose(leaves_of(replay, keys), expected)


def test_rows_that_come_together_see_the_priorities_before_them():
    replay = new_replay(32)
    leaves = leaves_of(replay, put(replay, [-1.0, 5.0, -1.0, 2.0]))
    np.testing.assert_allclose(leaves, (np.array([1.0, 5.0, 5.0, 2.0]) + 1e-6) ** 0.6)


def test_an_outlier_is_forgotten_when_the_memory_has_filled_twice():
    replay = new_replay(32, alpha=1.0, eps=0.0)
    keys = put(replay, [1.0] * 4)
    replay.update_priorities(keys, [1e9] * 4)
    for _ in range(15):
        assert leaves_of(replay, put(replay, [-1.0, 2.0, 3.0, 2.0]))[0] == 1e9
        replay.core.make_room()
        replay.core.ledger.release(0)
    put(replay, [2.0] * 4)
    np.testing.assert_array_equal(
        leaves_of(replay, put(replay, [-1.0, 1.0, -1.0])), [3.0, 1.0, 3.0]
    )


def test_new_transitions_stay_alike_while_no_priority_is_given():
    replay = new_replay(32, alpha=1.0, eps=0.0)
    for largest in (1.0, 3.0):
        for _ in range(40):
            keys = put(replay, [-1.0] * 4)
            replay.core.make_room()
            replay.core.ledger.release(0)
        np.testing.assert_array_equal(leaves_of(replay, keys), [largest] * 4)
        replay.update_priorities(keys, [3.0] * 4)


def test_a_transition_without_a_priority_gets_the_largest_so_far():
    replay = new_replay(alpha=1.0, eps=0.0)
    np.testing.assert_array_equal(leaves_of(replay, put(replay, [-1.0, -1.0])), [1.0, 1.0])
    put(replay, [7.0, 2.0])
    keys = put(replay, [-1.0, 3.0])
    np.testing.assert_array_equal(leaves_of(replay, keys), [7.0, 3.0])
    replay.update_priorities(keys, np.array([9.0, 1.0]))
    np.testing.assert_array_equal(leaves_of(replay, put(replay, [-1.0])), [9.0])


def test_an_actors_bad_priority_counts_as_not_given():
    replay = new_replay(alpha=1.0, eps=0.0)
    keys = put(replay, [np.nan, np.inf, -5.0, 2.0])
    np.testing.assert_array_equal(leaves_of(replay, keys), [1.0, 1.0, 1.0, 2.0])


@pytest.mark.parametrize("normalise", ["batch", "memory"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_the_closed_form(normalise, beta):
    replay = new_replay(alpha=0.7)
    rng = np.random.default_rng(1)
    for _ in range(8):
        put(replay, rng.random(4) * 100)
    batch = replay.sample(16, beta, normalise=normalise)
    everything = replay.core.tree[np.arange(replay.core.tree.capacity)]
    q = everything / everything.sum()
    raw = (len(replay) * q[batch.indices]) ** -beta
    of_memory = (len(replay) * q[q > 0]) ** -beta
    largest = raw.max() if normalise == "batch" else of_memory.max()
    np.testing.assert_allclose(batch.weights, raw / largest, rtol=1e-6)


def test_stale_updates_are_counted_and_change_nothing():
    replay = new_replay(8, alpha=1.0, eps=0.0)
    old = put(replay, [1.0] * 4)
    put(replay, [2.0] * 4)
    put(replay, [3.0] * 4)
    replay.core.make_room()
    assert replay.core.evicted == 4
    before = replay.core.tree[np.arange(replay.core.tree.capacity)]
    assert replay.update_priorities(old, np.full(4, 50.0)) == (0, 4)
    np.testing.assert_array_equal(replay.core.tree[np.arange(replay.core.tree.capacity)], before)
    new = put(replay, [4.0] * 4)
    mixed = np.concatenate([old[:3], new[:1], [NO_KEY]])
    assert replay.update_priorities(mixed, np.full(5, 60.0)) == (1, 3)
    assert leaves_of(replay, new)[0] == 60.0
    assert (replay.core.updates_applied, replay.core.updates_stale) == (1, 7)


def test_of_equal_keys_the_last_priority_wins():
    replay = new_replay(alpha=1.0, eps=0.0)
    keys = put(replay, [1.0, 1.0])
    replay.update_priorities(keys[[0, 1, 0]], np.array([5.0, 6.0, 7.0]))
    np.testing.assert_array_equal(leaves_of(replay, keys), [7.0, 6.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_priority_that_is_no_number_is_refused_and_nothing_changes(bad):
    replay = new_replay()
    keys = put(replay, [1.0] * 4)
    before = state_of(replay)
    with pytest.raises(InvalidPriority):
        replay.update_priorities(keys, np.array([2.0, 3.0, bad, 4.0]))
    assert state_of(replay) == before


def test_indices_in_place_of_keys_are_refused_and_nothing_changes():
    replay = new_replay()
    keys = put(replay, [1.0] * 4)
    batch = replay.sample(4)
    before = state_of(replay)
    for wrong in (batch.indices, np.array([keys[0], 3]), [0]):
        with pytest.raises(ConfigError, match=r"takes keys \(batch.keys\), got"):
            replay.update_priorities(wrong, np.ones(len(wrong)))
    assert state_of(replay) == before
    assert keys.min() > replay.core.store.num_indices


@pytest.mark.parametrize("normalise", ["batch", "memory"])
def test_weights_of_the_most_extreme_priorities_are_numbers(normalise):
    replay = new_replay(alpha=1.0, eps=0.0)
    put(replay, [0.5] * 4)
    everything = replay.sample(4).keys
    replay.update_priorities(everything, [1e-320, 1e-300, 1.0, 1e304])
    for _ in range(20):
        weights = replay.sample(4, beta=1.0, normalise=normalise).weights
        assert np.isfinite(weights).all()
        assert (weights >= 0.0).all()
    draw = replay.core.draw(4)
    draw.weigh(weights, 1.0)
    assert np.isfinite(weights).all()


def test_a_new_batch_holds_what_one_of_zeros_holds():
    schema = Schema({"obs": Column((2, 3), np.uint8, stack=3), "action": Column((), np.int64)})
    replays = [PrioritizedReplay(64, schema, seed=1, streams=1) for _ in range(2)]
    obs = np.arange(40 * 6, dtype=np.uint8).reshape(40, 2, 3)
    stacks = np.stack([np.zeros_like(obs), np.zeros_like(obs), obs], 1)  # frames of zeros, too
    for replay in replays:
        replay.extend(obs=stacks, next_obs=stacks, action=np.arange(40), reward=np.ones(40),
                      terminated=np.zeros(40, bool))  # fmt: skip
    garbage = np.full(1 << 16, 255, np.uint8)
    del garbage  # the allocator may give it again
    new, old = replays[0].sample(16), replays[1].sample(16, out=replays[1].empty_batch(16))
    for name, column in new.columns.items():
        np.testing.assert_array_equal(column, old.columns[name], err_msg=name)


def test_eviction_takes_whole_chunks_from_the_oldest_on():
    replay = new_replay(8)
    keys = [put(replay, [1.0] * n) for n in (4, 3, 4)]
    replay.core.make_room()
    assert replay.core.evicted == 4
    assert len(replay) == 7
    assert [indices_of(replay.core.store, k)[1] for k in keys] == [0, 3, 4]
    assert replay.core.tree.total == pytest.approx(7 * (1 + 1e-6) ** 0.6)


def test_attached_to_the_same_memory_a_replay_goes_on():
    layout = ReplayLayout(SCHEMA, 32, chunk=4)
    memory = aligned_zeros(layout.nbytes)
    first = new_replay(buffer=memory)
    rng = np.random.default_rng(2)
    keys = [put(first, rng.random(4)) for _ in range(6)]
    first.update_priorities(keys[2], rng.random(4) * 50)
    second = new_replay(buffer=memory)
    assert len(second) == len(first) == 24
    assert second.core.tree.check_valid() == (True, "")
    np.testing.assert_array_equal(first.sample(16).keys, second.sample(16).keys)
    assert second.update_priorities(keys[0], np.ones(4)) == (4, 0)
    unknown = put(second, [-1.0])
    assert (
        leaves_of(second, unknown)[0]
        == second.core.tree[np.arange(second.core.tree.capacity)].max()
    )
    second.core.make_room()
    assert [indices_of(second.core.store, k)[1] for k in keys] == [4] * 6


@pytest.mark.parametrize("method", ["stratified", "independent", "without_replacement"])
def test_too_little_to_sample_is_said_and_draws_no_random_number(method):
    replay = new_replay(min_size_to_sample=5)
    before = state_of(replay)
    with pytest.raises(NotEnoughData, match="holds 0 transitions"):
        replay.sample(2, method=method)
    put(replay, [1.0] * 4)
    with pytest.raises(NotEnoughData, match="holds 4 transitions and 5 are needed"):
        replay.sample(2, method=method)
    assert before[2] == replay.core.rng.bit_generator.state


@pytest.mark.parametrize("method", ["stratified", "independent", "without_replacement"])
def test_a_sample_larger_than_the_replay_is_refused(method):
    replay = new_replay()
    put(replay, [1.0] * 3)
    before = state_of(replay)
    with pytest.raises(NotEnoughData, match="holds 3 transitions and 4 are needed"):
        replay.sample(4, method=method)
    assert state_of(replay) == before


def test_priorities_of_zero_are_never_drawn_and_too_few_others_are_refused():
    replay = new_replay(alpha=1.0, eps=0.0)
    keys = put(replay, [0.0] * 4)
    before = state_of(replay)
    with pytest.raises(NotEnoughData, match="every priority is 0"):
        replay.sample(2)
    assert state_of(replay) == before
    replay.update_priorities(keys[1:], np.ones(3))
    before = state_of(replay)
    with pytest.raises(NotEnoughData, match="only 3 have a priority > 0"):
        replay.sample(4, method="without_replacement")
    assert state_of(replay) == before
    assert state_of(replay) == before
    assert sorted(replay.sample(3, method="without_replacement").indices) == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity must be at least 1"),
        ({"alpha": 1.5}, "alpha must be in 0..1"),
        ({"alpha": np.nan}, "alpha must be in 0..1"),
        ({"eps": -1.0}, "eps must be finite"),
        ({"eps": np.inf}, "eps must be finite"),
        ({"chunk": 257}, "chunk must be n_step"),
        ({"capacity": 2**62}, "1 to 524288 slots"),
        ({"capacity": 1, "chunk": 0}, "capacity must be at least 2"),
        ({"capacity": 12.5}, "capacity must be a whole number, got 12.5"),
        ({"capacity": "many"}, "capacity must be a whole number, got 'many'"),
        ({"streams": None}, "streams must be a whole number"),
        ({"timeout_s": np.nan}, "timeout_s must be a number from 0"),
        ({"timeout_s": 1e30}, "timeout_s must be a number from 0"),
        ({"timeout_s": -1}, "timeout_s must be a number from 0"),
        ({"seed": -1}, "seed must be 0 or more, got -1"),
        ({"samples_per_insert": np.nan}, "samples_per_insert must be a number"),
        ({"samples_per_insert": -1}, "samples_per_insert must be a number"),
        ({"samples_per_insert": "8 a step"}, "samples_per_insert must be a number"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        new_replay(**options)


@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_in_a_random_stream_no_stale_update_lands_anywhere_and_the_count_is_exact(rounds):
    replay = new_replay(2000, alpha=1.0, eps=0.0, chunk=16)
    rng = np.random.default_rng(3)
    keys, priorities = np.zeros(0, np.int64), np.zeros(0)
    applied = stale = 0
    for _ in range(rounds):
        count = int(rng.integers(1, 300))
        new = 1.0 + rng.random(count)
        obs = np.arange(count + 1, dtype=np.float32)[:, None] * np.ones(2, np.float32)
        new_keys = replay.extend(
            obs=obs[:-1], next_obs=obs[1:], action=np.zeros(count, np.int64),
            reward=np.zeros(count), terminated=np.zeros(count, bool), priorities=new,
        )  # fmt: skip
        # The naive twin: everything that ever was, of which the newest len(replay) are there.
        keys, priorities = np.append(keys, new_keys), np.append(priorities, new)
        first = len(keys) - len(replay)
        drawn = rng.integers(max(0, len(keys) - 20_000), len(keys), 10_000)
        values = rng.random(10_000) + 1.0
        there = drawn >= first
        result = replay.update_priorities(keys[drawn], -values)
        assert result == (there.sum(), (~there).sum())
        applied, stale = applied + result[0], stale + result[1]
        priorities[drawn[there]] = values[there]  # of equal ones the last
        indices, fit = indices_of(replay.core.store, keys[first:])
        assert fit == len(replay)
        np.testing.assert_array_equal(replay.core.tree.leaves[indices], priorities[first:])
        assert (replay.core.tree.leaves > 0).sum() == len(replay)
    assert (replay.core.updates_applied, replay.core.updates_stale) == (applied, stale)
    assert stale > 0.5 * rounds * 10_000 or rounds < 100
