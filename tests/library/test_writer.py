"""The writer: every transition as the naive twin has it, as soon as it is complete."""

import threading
import warnings
from unittest import mock

import numpy as np
import pytest

import zapex
from tests.chunks.test_builder import Game
from tests.support.keys import indices_of
from tests.support.naive import NaiveNStep
from zapex.chunks.layout import COUNT
from zapex.chunks.schema import Column, Schema
from zapex.errors import (
    ConfigError,
    InvalidPriority,
    NotEnoughData,
    PeerTimeout,
    ReplayError,
    SchemaError,
)
from zapex.library.prioritized import PrioritizedReplay

GAMMA = 0.9


def new_replay(stack=2, n=2, capacity=4000, chunk=8, **options):
    columns = {
        "obs": Column((3, 2), np.uint8, stack=stack),
        "action": Column((), np.int64),
        "mask": Column((2,), np.float32),
    }
    schema = Schema(columns, n_step=n, gamma=GAMMA)
    options = {"alpha": 1.0, "eps": 0.0, "seed": 0, "streams": 4, **options}
    return PrioritizedReplay(capacity, schema, chunk=chunk, **options)


def check_rows(replay, expected):
    """Every transition that can be drawn is one of the twins'; returns how many there are."""
    positive = np.flatnonzero(replay.core.tree.leaves)
    assert len(positive) == len(replay)
    batch = replay.empty_batch(len(positive))
    keys = replay.core.store.keys_of(positive)
    assert replay.core.store.gather(keys, batch.layout, batch.memory, batch.keys) == 0
    assert indices_of(replay.core.store, keys)[1] == len(keys)
    twins = {row[1][0]: row for row in expected}
    assert len(twins) == len(expected)
    for i, index in enumerate(positive):
        obs, (_, mask, priority), reward, discount, next_obs, _ = twins[batch.action[i]]
        np.testing.assert_array_equal(batch.obs[i], obs)
        np.testing.assert_array_equal(batch.next_obs[i], next_obs)
        np.testing.assert_array_equal(batch["mask"][i], mask)
        np.testing.assert_allclose(batch.reward[i], reward, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(batch.discount[i], discount, rtol=1e-6)
        np.testing.assert_allclose(replay.core.tree.leaves[index], priority, rtol=1e-6)
    assert len(set(batch.action.tolist())) == len(positive)
    assert replay.core.tree.check_valid() == (True, "")
    return len(positive)


def test_a_slot_that_came_before_an_error_serves_the_next_step():
    replay = new_replay(stack=1, chunk=3, capacity=200)
    writer, obs, ended = replay.writer(2), np.zeros((2, 3, 2), np.uint8), np.zeros(2, bool)

    def add():
        columns = {"action": [0, 0], "mask": np.zeros((2, 2), np.float32), "reward": [0.0, 0.0]}
        writer.add(**columns, next_obs=obs, terminated=ended, truncated=ended)

    writer.reset(obs)
    add()
    add()
    writer.flush()
    assert writer._builder.wanted == 2
    slot = replay.core.ledger.free_slots[0]
    provider = mock.patch.object(writer._replay, "open_slot", side_effect=[slot, PeerTimeout()])
    with provider, pytest.raises(PeerTimeout):
        add()
    assert writer._builder.wanted == 1


@pytest.mark.parametrize("chunk", [3, 8])
def test_resets_in_mid_episode_never_close_a_chunk_without_a_row(tmp_path, chunk):
    replay = new_replay(n=3, capacity=200, chunk=chunk)
    writer, twin = replay.writer(1), NaiveNStep(3, GAMMA)
    game = Game(1, 2, "distinct")
    mask, action = np.zeros((1, 2), np.float32), 0
    for turn in range(60):
        game.reset(0)
        writer.reset(game.seen)
        twin.begin(game.seen[0].copy())
        for _ in range(1 + (turn % 2) + 4 * (turn % 13 == 12)):  # mostly fewer steps than n
            game.step(0)
            action += 1
            writer.add(
                action=[action], reward=[1.0], next_obs=game.seen, terminated=[False],
                truncated=[False], priority=[1.0], mask=mask,
            )  # fmt: skip
            twin.add((action, mask[0], 1.0), 1.0, game.seen[0].copy(), False, False, 0.0, 0.0)
        live = replay.core.ledger.live
        assert (replay.core.store.header_rows[live, COUNT] > 0).all()
    assert check_rows(replay, twin.transitions) == len(twin.transitions) > 8
    replay.save(tmp_path)
    assert check_rows(PrioritizedReplay.load(tmp_path), twin.transitions) == len(replay)


def test_keys_of_a_growing_chunk_stay_good_while_it_grows():
    rng = np.random.default_rng(0)
    replay = new_replay(n=1)
    writer = replay.writer(1)
    obs = np.zeros((1, 2, 3, 2), np.uint8)
    writer.reset(obs)
    step = {"terminated": [False], "truncated": [False], "mask": np.zeros((1, 2), np.float32)}
    seen = []
    for t in range(12):
        obs = np.concatenate([obs[:, 1:], rng.integers(1, 255, (1, 1, 3, 2), np.uint8)], 1)
        writer.add(action=[t], reward=[0.0], next_obs=obs, **step)
        seen.append(int(replay.sample(1).keys[0]))
        assert replay.update_priorities(np.array(seen), np.ones(t + 1)) == (t + 1, 0)


def first_and_step(streams=2):
    obs = np.zeros((streams, 2, 3, 2), np.uint8)
    step = {
        "action": np.zeros(streams, np.int64), "reward": np.zeros(streams), "next_obs": obs,
        "terminated": np.zeros(streams, bool), "truncated": np.zeros(streams, bool),
        "mask": np.zeros((streams, 2), np.float32),
    }  # fmt: skip
    return obs, step


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"next_obs": np.zeros((3, 2, 3, 2), np.uint8)}, SchemaError, "next_obs must have shape"),
        ({"next_obs": np.zeros((2, 2, 3, 2))}, SchemaError, "next_obs must be uint8"),
        ({"next_obs": {"a": 1}}, SchemaError, "next_obs must be uint8"),
        ({"action": np.zeros(2)}, SchemaError, "action must be int64, got float64"),
        ({"action": np.zeros((2, 1), np.int64)}, SchemaError, "action must have shape"),
        ({"reward": np.zeros(3)}, SchemaError, "reward must have shape"),
        ({"reward": np.zeros(2, complex)}, SchemaError, "reward must be float64"),
        ({"reward": np.array([0.0, np.nan])}, ConfigError, "finite float32, got nan of stream 1"),
        ({"reward": np.array([-np.inf, 0.0])}, ConfigError, "got -inf of stream 0"),
        ({"reward": np.array([1e38, 0.0])}, ConfigError, r"got 1e\+38 of stream 0"),
        ({"terminated": np.zeros(2)}, SchemaError, "terminated must be bool"),
        ({"truncated": False}, SchemaError, "truncated must have shape"),
        ({"mask": np.zeros((2, 3), np.float32)}, SchemaError, "mask must have shape"),
        ({"other": np.zeros(2)}, SchemaError, r"extra columns are \['mask'\], got \['mask', 'o"),
        ({"priority": np.array([1.0, np.nan])}, InvalidPriority, "got nan in row 1"),
        ({"priority": np.array([np.inf, 1.0])}, InvalidPriority, "got inf in row 0"),
        ({"next_obs": np.full((2, 2, 3, 2), 9, np.uint8)}, SchemaError, "shifted by one frame"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_clear_error_and_changes_nothing(change, error, message):
    replay = new_replay(n=1)
    writer = replay.writer(2)
    obs, step = first_and_step()
    writer.reset(obs)
    writer.add(**step)
    before = replay.core.store.mem.tobytes(), replay.core.tree.leaves.tobytes(), replay.stats()
    with pytest.raises(error, match=message):
        writer.add(**{**step, **change})
    assert before == (
        replay.core.store.mem.tobytes(),
        replay.core.tree.leaves.tobytes(),
        replay.stats(),
    )
    writer.add(**step)
    assert len(replay) == 4


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_a_step_before_the_first_observation_is_refused(autoreset):
    writer = new_replay().writer(2, autoreset)
    with pytest.raises(ReplayError, match="stream 0 is over or never began"):
        writer.add(**first_and_step()[1])


def test_an_episode_that_was_not_begun_again_is_refused_where_nobody_else_begins_it():
    writer = new_replay().writer(2, "disabled")
    obs, step = first_and_step()
    writer.reset(obs)
    writer.add(**{**step, "terminated": np.array([False, True])})
    with pytest.raises(ReplayError, match="stream 1 is over"):
        writer.add(**step)
    writer.reset(obs, np.array([False, True]))
    writer.add(**step)


def test_same_step_needs_the_last_observation_of_an_episode():
    writer = new_replay().writer(2, "same_step")
    obs, step = first_and_step()
    writer.reset(obs)
    with pytest.raises(ReplayError, match='give final_obs=info\\["final_obs"\\]'):
        writer.add(**{**step, "truncated": np.array([True, False])})
    writer.add(**step)


def test_what_only_another_autoreset_mode_gives_is_refused():
    obs, step = first_and_step()
    ended = {**step, "terminated": np.array([True, False])}
    writer = new_replay().writer(2)
    writer.reset(obs)
    with pytest.raises(ReplayError, match="autoreset=envs"):
        writer.add(**ended, final_obs=obs)
    writer.add(**ended)
    with pytest.raises(ReplayError, match="autoreset=envs"):
        writer.add(**ended)
    writer.add(**step)


@pytest.mark.parametrize("axis", [0, -1])
def test_planes_that_are_no_frames_are_refused_once_they_differ(axis):
    rng = np.random.default_rng(0)
    columns = {"obs": Column((3, 2), np.uint8, stack=4, stack_axis=axis),
               "action": Column((), np.int64)}  # fmt: skip
    replay = PrioritizedReplay(4000, Schema(columns, n_step=1), seed=0)
    writer = replay.writer(2)
    shape = (2, 4, 3, 2) if axis == 0 else (2, 3, 2, 4)
    step = first_and_step()[1]
    step.pop("mask")
    writer.reset(np.zeros(shape, np.uint8))
    for _ in range(100):
        writer.add(**{**step, "next_obs": np.zeros(shape, np.uint8)})
    writer.add(**{**step, "next_obs": np.zeros(shape, np.uint8)})
    with pytest.raises(SchemaError, match="stack=1"):
        writer.add(**{**step, "next_obs": rng.integers(1, 255, shape, np.uint8)})


def test_a_stack_is_looked_at_again_after_it_has_been_right_for_long():
    rng = np.random.default_rng(0)
    writer = new_replay(n=1).writer(2)
    obs, step = first_and_step()
    writer.reset(obs)
    for _ in range(100):
        frame = rng.integers(1, 255, (2, 1, 3, 2), np.uint8)
        obs = np.concatenate([obs[:, 1:], frame], 1)
        writer.add(**{**step, "next_obs": obs})
    wrong = [rng.integers(1, 255, obs.shape, np.uint8) for _ in range(2000)]
    with pytest.raises(SchemaError, match="stack=1"):
        [writer.add(**{**step, "next_obs": other}) for other in wrong]


@pytest.mark.parametrize("reused", [True, False])
def test_final_observations_that_a_reset_has_overwritten_are_noticed_once(reused):
    writer = new_replay(stack=1, n=1).writer(2, "same_step")
    obs, step = np.zeros((2, 3, 2), np.uint8), first_and_step()[1]
    writer.reset(obs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(1, 40):
            after = np.full_like(obs, number)
            final = after.copy()
            final[0] += not reused
            over = np.array([number % 3 == 0, False])
            writer.add(**{**step, "next_obs": after, "terminated": over}, final_obs=final)
    assert [True for w in caught if "final_obs" in str(w.message)] == [True] * reused


def test_dict_observations_and_their_last_ones():
    schema = Schema(
        {"obs/image": Column((2,), np.uint8, stack=2), "obs/pose": Column((), np.float32),
         "action": Column((1,), np.float32)},
        n_step=1,
    )  # fmt: skip
    replay = PrioritizedReplay(64, schema, seed=0, chunk=4)
    writer = replay.writer(2, "same_step")

    def obs(*numbers):
        images = [[[n - 1] * 2, [n] * 2] for n in numbers]
        return {"image": np.array(images, np.uint8), "pose": np.array(numbers, np.float32)}

    writer.reset(obs(1, 101))
    final = np.array([None, {"image": obs(1, 102)["image"][1], "pose": 102.0}], object)
    writer.add(
        action=np.zeros((2, 1)), reward=np.zeros(2), next_obs=obs(2, 51),
        terminated=np.zeros(2, bool), truncated=np.array([False, True]), final_obs=final,
    )  # fmt: skip
    batch = replay.sample(2, method="without_replacement")
    order = np.argsort(batch.obs["pose"])
    np.testing.assert_array_equal(batch.obs["pose"][order], [1, 101])
    np.testing.assert_array_equal(batch.next_obs["pose"][order], [2, 102])
    np.testing.assert_array_equal(batch.next_obs["image"][order][:, :, 0], [[1, 2], [101, 102]])


def test_more_streams_than_the_memory_has_room_for_are_refused_until_some_close():
    replay = new_replay(capacity=64, chunk=8)
    with pytest.raises(ConfigError, match=r"5 streams .* take more than half"):
        replay.writer(5)
    first = replay.writer(4)
    with pytest.raises(ConfigError, match="close"):
        replay.writer(1)
    first.close()
    first.close()
    with pytest.raises(ReplayError, match="closed"):
        first.reset(first_and_step(4)[0])
    with replay.writer(4) as second:
        second.reset(first_and_step(4)[0])


def test_an_unknown_autoreset_mode_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"next_step.*same_step.*disabled"):
        new_replay().writer(1, "sometimes")


def test_samples_per_insert_holds_each_side_until_the_other_has_come():
    replay = new_replay(n=1, samples_per_insert=2.0, tolerance=16, min_size_to_sample=4)
    writer = replay.writer(2)
    obs, step = first_and_step()
    writer.reset(obs)
    for _ in range(2):
        assert not replay.can_sample(2)
        writer.add(**step)
    with pytest.raises(ReplayError, match="the learner waits"):
        replay.sample(2)  # what came before min_size_to_sample is not owed for
    for _ in range(4):
        writer.add(**step)
    with pytest.raises(ReplayError, match="actors wait for the learner"):
        writer.add(**step)
    assert replay.can_sample(8)
    replay.sample(8)
    writer.add(**step)
    while replay.can_sample(4):
        replay.sample(4)
    assert (replay.core.sampled, replay.core.inserted) == (20, 14)


def test_a_step_with_a_refused_reward_leaves_nothing_behind():
    replay = new_replay(n=1)
    writer = replay.writer(2)
    obs, step = first_and_step()
    writer.reset(obs)
    writer.add(**step)
    with pytest.raises(ConfigError, match="reward"):
        writer.add(**{**step, "reward": [0.0, np.nan]})
    writer.reset(obs)  # must not announce the rows of the first step again
    writer.add(**step)
    assert len(replay) == replay.core.inserted == 4


def whole_rows(count):
    obs = np.zeros((count, 2, 3, 2), np.uint8)
    return {
        "obs": obs, "next_obs": obs, "action": np.zeros(count, np.int64),
        "mask": np.zeros((count, 2), np.float32), "reward": np.zeros(count),
        "terminated": np.zeros(count, bool),
    }  # fmt: skip


def test_the_tolerance_fits_the_writers_and_batches_in_use():
    replay = new_replay(n=3, capacity=4096, chunk=4, samples_per_insert=8.0)
    obs, step = first_and_step(256)
    writer = replay.writer(256)
    writer.reset(obs)
    for _ in range(4):
        writer.add(**step)
    assert replay.can_sample(500)
    assert len(replay.sample(500).keys) == 500
    replay.extend(**whole_rows(2000))
    assert len(replay) == 512 + 2000


def test_a_tolerance_that_does_not_fit_is_named_by_the_call_that_needs_more():
    replay = new_replay(n=3, capacity=4096, chunk=4, samples_per_insert=8.0, tolerance=1000)
    with pytest.raises(ConfigError, match=r"tolerance=1000 .* 6145"):
        replay.writer(256)
    replay.writer(4)
    with pytest.raises(ConfigError, match=r"tolerance=1000 .* 1096"):
        replay.can_sample(1000)
    with pytest.raises(ConfigError, match=r"tolerance=1000 .* 1601"):
        replay.extend(**whole_rows(200))


@pytest.mark.parametrize("place", ["owner", "handle"])
def test_a_memory_that_short_episodes_fill_early_says_so_once(place):
    replay = new_replay(n=1, capacity=2000, streams=1, min_size_to_sample=1900)
    user = replay if place == "owner" else zapex.connect(replay.handle)
    obs, step = first_and_step(2)
    final = obs.copy()
    final[:, 1] = 1
    step |= {"terminated": np.ones(2, bool), "final_obs": final}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        writer = user.writer(2, "same_step")
        writer.reset(obs)
        for _ in range(1000):
            writer.add(**step)
    (text,) = (str(w.message) for w in caught if "capacity" in str(w.message))
    assert "min_size_to_sample=1900" in text
    with pytest.raises(NotEnoughData, match=r"1900 are needed.*set the capacity to"):
        user.sample(4)
    replay.close()


def test_threads_that_write_sample_and_update_lose_nothing():
    replay = new_replay(n=1, capacity=200, chunk=8, samples_per_insert=4.0, timeout_s=30.0)
    errors, start = [], threading.Barrier(3)

    def guarded(work):
        def run():
            try:
                start.wait(30)
                work()
            except Exception as error:
                errors.append(error)

        return threading.Thread(target=run)

    def write():
        writer = replay.writer(2)
        obs, step = first_and_step()
        writer.reset(obs)
        for _ in range(300):
            writer.add(**step)

    applied = []

    def learn():
        rng = np.random.default_rng(1)
        while sum(a + s for a, s in applied) < 2000:
            if replay.can_sample(8):
                batch = replay.sample(8)
                applied.append(replay.update_priorities(batch.keys, rng.random(8)))

    threads = [guarded(write), guarded(write), guarded(learn)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors
    assert replay.core.inserted == 1200
    assert replay.core.updates_applied + replay.core.updates_stale == replay.core.sampled >= 2000
    assert replay.core.tree.check_valid() == (True, "")
