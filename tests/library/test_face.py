"""What a user sees: names, signatures, texts, and warnings."""

import inspect
import pydoc
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import zapex
from tests.library.test_writer import first_and_step
from tests.library.test_writer import new_replay as writers_replay
from zapex import Column, PrioritizedReplay, Schema
from zapex.errors import ConfigError, SchemaError

SCHEMA = Schema(
    {"obs/left": Column((2,), np.float32), "obs/right": Column((3, 3), np.uint8, stack=2),
     "action": Column((), np.int64)},
    n_step=1,
)  # fmt: skip
PLAIN = Schema({"obs": Column((8,), np.float32), "action": Column((), np.int64)}, n_step=1)
FOR_USERS = {
    "can_sample", "close", "core", "empty_batch", "extend", "extend_from", "handle", "links",
    "load", "sample", "sample_sequences", "save", "schema", "stats", "update_priorities",
    "update_sequences", "writer",
}  # fmt: skip


def rows(count, first=0):
    """Transitions that share no frames."""
    obs = np.arange(first, first + 2 * count, dtype=np.float32)[:, None] * np.ones(8, np.float32)
    return {
        "obs": 1 + obs[::2], "next_obs": 1 + obs[1::2], "action": np.zeros(count, np.int64),
        "reward": np.zeros(count), "terminated": np.zeros(count, bool),
    }  # fmt: skip


def test_dir_and_help_show_what_users_call():
    replay = PrioritizedReplay(100, SCHEMA)
    assert {name for name in dir(replay) if not name.startswith("_")} == FOR_USERS
    text = pydoc.render_doc(PrioritizedReplay, renderer=pydoc.plaintext)
    assert "reserve_streams" not in text
    for call in (replay.extend, replay.update_priorities, replay.writer, zapex.Writer.add):
        signature = str(inspect.signature(call))
        assert "_SupportsArray" not in signature
        assert len(signature) < 500
    assert "keys: 'ArrayLike'" in str(inspect.signature(replay.update_priorities))


def test_texts_of_objects_say_what_is_in_them():
    replay = PrioritizedReplay(100, SCHEMA, seed=0)
    assert repr(replay) == (
        "<PrioritizedReplay of action int64 (), obs/left float32 (2,), obs/right uint8 (2, 3, 3); "
        "n_step=1, gamma=0.99; 0 of 100 transitions>"
    )
    batch = repr(replay.empty_batch(7))
    assert batch.startswith("<Batch of 7 rows: obs/left float32 (2,), obs/right uint8 (2, 3, 3), ")
    assert batch.endswith("weights float32 (), keys int64 (), indices int64 ()>")


def test_dir_and_help_of_the_package_show_its_public_names():
    public = {name for name in dir(zapex) if not name.startswith("_")}
    assert public == {*zapex.__all__, "errors"} - {"__version__"}
    for name in public:
        assert getattr(zapex, name).__doc__
    text = pydoc.render_doc(zapex, renderer=pydoc.plaintext)
    assert text.index("training runs") < text.index("class PrioritizedReplay")
    assert "update_priorities(" in text


@pytest.mark.parametrize("place", ["owner", "handle"])
def test_extend_that_cannot_keep_what_it_is_given_says_so_once(place):
    replay = PrioritizedReplay(1000, PLAIN, seed=0, chunk=16)
    user = replay if place == "owner" else zapex.connect(replay.handle)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        user.extend(**rows(100))
    with pytest.warns(UserWarning, match=r"got 1000 .* only (\d+) like these .* capacity of (\d+)"):
        user.extend(**rows(1000, first=10_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        user.extend(**rows(1000, first=20_000))
    replay.close()


def test_a_replay_of_the_capacity_that_the_warning_names_keeps_all():
    replay = PrioritizedReplay(1000, PLAIN, seed=0, chunk=16)
    with pytest.warns(UserWarning, match="capacity of") as caught:
        replay.extend(**rows(1000))
    capacity = int(str(caught[0].message).rsplit(" ", 1)[1])
    larger = PrioritizedReplay(capacity, PLAIN, seed=0, chunk=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        larger.extend(**rows(1000))
    assert len(larger) == 1000


def test_gymnasiums_modes_are_taken_by_their_members():
    replay = writers_replay()
    for mode in AutoresetMode:
        with replay.writer(1, mode) as writer:
            assert writer.autoreset == mode.name.lower()
    with pytest.raises(ConfigError, match=r"autoreset must be .*same_step.* got 3"):
        replay.writer(1, 3)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_environments_of_another_mode_are_noticed_once(mode):
    envs = gymnasium.make_vec(
        "CartPole-v1", 2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )
    space, actions = envs.single_observation_space, envs.single_action_space
    writer = PrioritizedReplay(1000, Schema.from_spaces(space, actions), seed=0).writer(2)
    obs, _ = envs.reset(seed=0)
    writer.reset(obs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(100):
            action = np.ones(2, np.int64)
            obs, reward, terminated, truncated, _ = envs.step(action)
            writer.add(
                action=action, reward=reward, next_obs=obs, terminated=terminated,
                truncated=truncated,
            )  # fmt: skip
    said = [str(w.message) for w in caught if "autoreset" in str(w.message)]
    assert len(said) == (mode is AutoresetMode.SAME_STEP)
    assert all("autoreset=envs" in text for text in said)
    envs.close()


class Wrapped:
    """A wrapper that passes on nothing but its environment."""

    def __init__(self, env):
        self.env = env

    def step(self, action):
        return self.env.step(action)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_mode_of_an_environment_is_its_own_whatever_its_shared_metadata_says(mode, wrapped):
    envs = gymnasium.make_vec(
        "CartPole-v1", 2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )
    envs.metadata = {**envs.metadata, "autoreset_mode": "another environment's"}
    replay = PrioritizedReplay(1000, PLAIN, seed=0)
    given = Wrapped(envs) if wrapped else envs
    assert replay.writer(2, given).autoreset == mode.name.lower()
    if not wrapped:
        with pytest.raises(ConfigError, match=r"num_envs is 3, and the environment has 2"):
            replay.writer(3, envs)
    del envs.autoreset_mode
    with pytest.raises(ConfigError, match="has no autoreset_mode"):
        replay.writer(2, given)
    envs.close()


def test_environments_that_report_lost_lives_as_terminated_are_refused():
    envs = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    envs.spec.kwargs["life_loss_info"] = True  # as ALE's have it
    with pytest.raises(ConfigError, match=r"life_loss_info.* cut="):
        PrioritizedReplay(1000, PLAIN, seed=0).writer(2, envs)
    envs.close()


@pytest.mark.parametrize("beta", [np.nan, np.inf, -0.1])
def test_a_beta_that_gives_no_weights_is_refused(beta):
    replay = PrioritizedReplay(100, PLAIN, seed=0)
    replay.extend(**rows(4))
    with pytest.raises(ConfigError, match="beta must be a finite number"):
        replay.sample(2, beta)


def test_numbers_in_other_types_are_taken_and_saved(tmp_path):
    replay = PrioritizedReplay(1e3, PLAIN, chunk=np.int32(4), min_size_to_sample=np.uint8(1))
    replay.extend(**rows(4))
    replay.save(tmp_path)
    assert PrioritizedReplay.load(tmp_path).stats()["capacity"] == 1000
    assert len(replay.sample(4.0).keys) == 4
    with pytest.raises(ConfigError, match="batch_size must be a whole number"):
        replay.sample(2.5)


def test_what_cannot_be_an_array_is_said_and_changes_nothing():
    replay = PrioritizedReplay(100, PLAIN, seed=0)
    keys = replay.extend(**rows(4))
    before = replay.core.tree.leaves.copy()
    with pytest.raises(SchemaError, match=r"priorities cannot be made an array: .*detach"):
        replay.update_priorities(keys, torch.ones(4, requires_grad=True))
    with pytest.raises(SchemaError, match="keys cannot be made an array"):
        replay.update_priorities([[1], [2, 3]], np.ones(4))
    for wrong in ([np.nan] * 4, [1e39] * 4, [np.inf] * 4):
        with pytest.raises((ConfigError, SchemaError), match="reward"), np.errstate(over="ignore"):
            replay.extend(**{**rows(4), "reward": wrong})
    with pytest.raises(ConfigError, match="discount"):
        replay.extend(**rows(4), discount=[0.9, np.nan, 0.9, 0.9])
    assert replay.update_priorities([], []) == (0, 0)
    assert len(replay) == 4
    np.testing.assert_array_equal(replay.core.tree.leaves, before)


def test_a_batch_of_another_schema_or_size_is_not_filled():
    replay, other = PrioritizedReplay(100, PLAIN, seed=0), PrioritizedReplay(100, SCHEMA)
    replay.extend(**rows(4))
    with pytest.raises(SchemaError, match="out is of another schema"):
        replay.sample(2, out=other.empty_batch(2))
    with pytest.raises(ConfigError, match="out has 3 rows, not 2"):
        replay.sample(2, out=replay.empty_batch(3))


def test_a_writer_refused_for_its_mode_takes_no_stream():
    replay = writers_replay(capacity=64, chunk=8)
    for _ in range(9):
        with pytest.raises(ConfigError, match="autoreset"):
            replay.writer(2, "sometimes")
    with replay.writer(4) as writer:
        writer.reset(first_and_step(4)[0])
