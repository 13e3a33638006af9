"""zapex.sb3 beside Stable-Baselines3's own buffers and its DQN, which are the naive twins."""

import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces

from zapex.errors import ConfigError, NotEnoughData

pytest.importorskip("stable_baselines3")
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize
from stable_baselines3.common.vec_env.stacked_observations import StackedObservations

from zapex.sb3 import PrioritizedDQN, PrioritizedReplayBuffer

pytestmark = pytest.mark.slow  # Stable-Baselines3 is installed for `make test-slow`
BOX = spaces.Box(-10, 10, (3,), np.float32)


def small(**more):
    """Arguments of a model that trains in no time."""
    return {"learning_starts": 20, "policy_kwargs": {"net_arch": [16]}, "seed": 3, **more}


def play(buffers, steps=90, envs=2, seed=0):
    """The same random steps of `envs` environments into each buffer."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(envs, 3)).astype(np.float32)
    for _ in range(steps):
        last = rng.normal(size=(envs, 3)).astype(np.float32)
        action = rng.normal(size=(envs, 2)).astype(np.float32)
        reward = rng.normal(size=envs).astype(np.float32)
        done = rng.random(envs) < 0.2
        infos = [{"TimeLimit.truncated": bool(d and rng.random() < 0.5)} for d in done]
        for buffer in buffers:
            buffer.add(obs, last, action, reward, done, infos)
        first = rng.normal(size=(envs, 3)).astype(np.float32)
        obs = np.where(done[:, None], first, last)


def rows_of(samples, gamma=0.99):
    """The transitions of some samples, each once, in one order."""
    discounts = samples.discounts
    if discounts is None:
        discounts = torch.full_like(samples.rewards, gamma)
    table = torch.cat(
        [
            samples.observations, samples.actions, samples.next_observations, samples.rewards,
            samples.dones, discounts * (1 - samples.dones),
        ], dim=1,
    ).numpy()  # fmt: skip
    return np.unique(table.round(4), axis=0)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_transitions_are_those_of_sb3s_buffers(n_steps):
    spaces_of = (400, BOX, spaces.Box(-1, 1, (2,)), "cpu", 2)
    ours = PrioritizedReplayBuffer(*spaces_of, n_steps=n_steps)
    theirs = (
        NStepReplayBuffer(*spaces_of, n_steps=n_steps) if n_steps > 1 else ReplayBuffer(*spaces_of)
    )
    play([ours, theirs])
    drawn = rows_of(ours.sample(4000))
    known = {tuple(row) for row in rows_of(theirs.sample(20_000))}
    # SB3 also draws the last steps of the memory, whose returns are not whole.
    assert len(known) - len(drawn) <= 2 * (n_steps - 1)
    assert all(tuple(row) in known for row in drawn)
    assert ours.size() >= theirs.size() - n_steps


def test_an_environment_that_was_reset_begins_an_episode():
    buffer = PrioritizedReplayBuffer(400, BOX, spaces.Discrete(2), n_steps=3)
    for learn in range(3):
        for step in range(10):
            obs = np.full((1, 3), 100 * learn + step, np.float32)
            ones = np.ones(1)
            buffer.add(obs, obs + 1, np.zeros(1, int), ones, np.zeros(1, bool), [{}])
    samples = buffer.sample(200)
    assert set((samples.next_observations - samples.observations).unique().tolist()) == {3.0}
    assert samples.rewards.unique().tolist() == pytest.approx([1 + 0.99 + 0.99**2])


@pytest.mark.parametrize(
    ("shape", "order", "frame"),
    [
        ((1, 40, 40), "first", (1, 40, 40)),
        ((3, 40, 40), "first", (3, 40, 40)),
        ((40, 40, 1), "last", (40, 40)),
    ],
)
def test_frames_of_a_stack_are_stored_once_and_come_back_whole(shape, order, frame):
    image = spaces.Box(0, 255, shape, np.uint8)
    stacks = StackedObservations(1, 4, image, order)
    space = stacks.stacked_observation_space
    ours = PrioritizedReplayBuffer(2000, space, spaces.Discrete(2))
    theirs = ReplayBuffer(2000, space, spaces.Discrete(2))
    assert ours.replay.schema.columns["obs"].shape == frame
    assert ours.replay.schema.columns["obs"].stack == 4
    obs = stacks.reset(image.sample()[None]).copy()
    for step in range(200):
        done, infos = np.array([step % 30 == 29]), [{"terminal_observation": image.sample()}]
        following = stacks.update(image.sample()[None], done, infos)[0].copy()
        last = infos[0]["terminal_observation"][None] if done[0] else following
        for buffer in (ours, theirs):
            buffer.add(obs, last, np.array([step % 2]), np.array([float(step)]), done, infos)
        obs = following
    samples = ours.sample(64)
    for i, step in enumerate(samples.rewards[:, 0].long().tolist()):
        assert np.array_equal(samples.observations[i], theirs.observations[step, 0])
        assert np.array_equal(samples.next_observations[i], theirs.next_observations[step, 0])
        assert samples.actions[i] == step % 2
    nbytes = ours.replay.stats()["bytes"]
    assert nbytes < (theirs.observations.nbytes + theirs.next_observations.nbytes) / 5


def test_an_image_whose_channels_are_no_frames_is_stored_whole():
    space = spaces.Box(0, 255, (2, 40, 40), np.uint8)
    buffer = PrioritizedReplayBuffer(1, space, spaces.Discrete(2))
    obs = space.sample()[None]
    for _ in range(3):
        following = space.sample()[None]
        buffer.add(obs, following, np.zeros(1, int), np.ones(1), np.zeros(1, bool), [{}])
        samples = buffer.sample(1)
        obs = following
    assert buffer.replay.schema.stack == 1
    assert samples.observations.shape == (1, 2, 40, 40)


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, np.float16, np.float64])
def test_dtypes_are_those_of_sb3(dtype):
    action = spaces.Box(-1, 1, (2,), np.float64)
    buffers = [
        kind(9, spaces.Box(0, 9, (1,), dtype), action)
        for kind in (PrioritizedReplayBuffer, ReplayBuffer)
    ]
    for buffer in buffers:
        buffer.add(
            np.ones((1, 1), dtype),
            np.ones((1, 1), dtype),
            np.ones((1, 2)),
            np.ones(1),
            np.zeros(1),
            [{}],
        )
    ours, theirs = (buffer.sample(4) for buffer in buffers)
    for name in ("observations", "actions", "next_observations", "dones", "rewards"):
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        assert getattr(ours, name).shape == getattr(theirs, name).shape


def test_a_dict_of_observations_keeps_its_parts():
    space = spaces.Dict({"seen": BOX, "at": spaces.Discrete(5)})
    buffer = PrioritizedReplayBuffer(300, space, spaces.MultiBinary(2))
    for step in range(50):
        obs, last = (
            {"seen": np.full((1, 3), i, np.float32), "at": np.array([i % 5])}
            for i in (step, step + 1)
        )
        done = np.zeros(1, bool)
        buffer.add(obs, last, np.array([[0, 1]]), np.array([1.0]), done, [{}])
    samples = buffer.sample(32)
    assert samples.observations["at"].shape == (32, 1)
    assert torch.equal(
        samples.observations["at"][:, 0], samples.observations["seen"][:, 0].long() % 5
    )
    assert torch.equal(samples.next_observations["seen"], samples.observations["seen"] + 1)


def test_a_pickle_continues_the_draws_and_begins_new_episodes():
    buffer = PrioritizedReplayBuffer(400, BOX, spaces.Box(-1, 1, (2,)), "cpu", 2, n_steps=3)
    play([buffer])
    buffer.update_priorities(buffer.sample(64).keys, np.arange(64.0))
    again = pickle.loads(pickle.dumps(buffer))
    mine, theirs = buffer.sample(32), again.sample(32)
    assert torch.equal(mine.observations, theirs.observations)
    assert torch.equal(mine.weights, theirs.weights)
    size = again.size()
    play([again], steps=20, seed=1)
    assert again.size() > size


def test_a_buffer_that_is_saved_and_loaded_goes_on_learning(tmp_path):
    model = PrioritizedDQN("MlpPolicy", "CartPole-v1", **small())
    model.learn(100)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    again = PrioritizedDQN.load(tmp_path / "model", env=model.get_env())
    again.load_replay_buffer(tmp_path / "buffer")
    again.learn(100, reset_num_timesteps=False)
    assert again.replay_buffer.size() == 200
    assert again.replay_buffer.replay.stats()["updates_applied"] > 0


def test_an_algorithm_without_priorities_draws_uniformly_and_more_than_there_is():
    model = SAC(
        "MlpPolicy", "Pendulum-v1", replay_buffer_class=PrioritizedReplayBuffer, batch_size=64,
        **small(),
    )  # fmt: skip
    model.learn(60)
    samples = model.replay_buffer.sample(500)
    assert samples.observations.shape == (500, 3)
    assert torch.all(samples.weights == 1)
    counts = np.unique(samples.keys, return_counts=True)[1]
    assert len(counts) == 60
    assert counts.max() < 40


def test_dqn_learns_as_sb3s_where_weights_are_one(monkeypatch):
    theirs = DQN("MlpPolicy", "CartPole-v1", **small(gamma=0.9))
    ours = PrioritizedDQN(
        "MlpPolicy", "CartPole-v1", **small(gamma=0.9, replay_buffer_kwargs={"alpha": 0.0})
    )
    ours.learn(200)
    theirs.learn(10)  # makes its logger
    theirs.policy.load_state_dict(ours.policy.state_dict())
    theirs.policy.optimizer.load_state_dict(ours.policy.optimizer.state_dict())
    samples = ours.replay_buffer.sample(64)
    assert torch.all(samples.weights == 1)
    for model in (ours, theirs):
        monkeypatch.setattr(model.replay_buffer, "sample", lambda *_, **__: samples)
        model.train(1, 64)
    for mine, other in zip(ours.q_net.parameters(), theirs.q_net.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, atol=1e-6)


def test_td_errors_become_priorities_and_weights():
    model = PrioritizedDQN("MlpPolicy", make_vec_env("CartPole-v1", 2), n_steps=3, **small())
    model.learn(300)
    samples = model.replay_buffer.sample(128)
    assert samples.weights.min() < samples.weights.max() == 1
    assert samples.discounts.max() == pytest.approx(0.99**3)
    assert model.replay_buffer.replay.schema.n_step == 3


@pytest.mark.filterwarnings("error")
def test_dqn_passes_n_steps_to_a_buffer_that_is_named():
    model = PrioritizedDQN(
        "MlpPolicy", "CartPole-v1", n_steps=4, gamma=0.9,
        replay_buffer_class=PrioritizedReplayBuffer, **small(),
    )  # fmt: skip
    assert (model.replay_buffer.n_steps, model.replay_buffer.gamma) == (4, 0.9)


def test_equal_seeds_repeat():
    def weights():
        model = PrioritizedDQN("MlpPolicy", "CartPole-v1", **small())
        model.learn(150)
        return torch.cat([p.flatten() for p in model.q_net.parameters()])

    assert torch.equal(weights(), weights())


def test_observations_and_rewards_are_normalized_when_they_are_drawn():
    env = VecNormalize(make_vec_env("CartPole-v1"))
    model = PrioritizedDQN("MlpPolicy", env, **small())
    model.learn(200)
    plain, normal = model.replay_buffer.sample(100), model.replay_buffer.sample(100, env)
    assert torch.all(plain.rewards == 1)
    assert normal.rewards.unique().numel() == 1
    assert not torch.any(normal.rewards == 1)
    assert normal.observations.abs().mean() > plain.observations.abs().mean()


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="optimize_memory_usage"):
        PrioritizedReplayBuffer(100, BOX, BOX, optimize_memory_usage=True)
    with pytest.raises(ConfigError, match="stack=2"):
        PrioritizedReplayBuffer(100, BOX, BOX, stack=2)
    with pytest.raises(ConfigError, match="replay_buffer_class"):
        PrioritizedDQN("MlpPolicy", "CartPole-v1", replay_buffer_class=ReplayBuffer)
    with pytest.raises(NotEnoughData):
        PrioritizedReplayBuffer(100, BOX, BOX).sample(1)


def test_a_frame_stack_of_images_plays_through_dqn():
    from stable_baselines3.common.envs import FakeImageEnv

    def make():
        return FakeImageEnv(screen_height=40, screen_width=40, n_channels=1, discrete=True)

    env = VecFrameStack(DummyVecEnv([make, make]), 4)
    model = PrioritizedDQN("CnnPolicy", env, buffer_size=500, learning_starts=20, seed=3)
    model.learn(60)
    assert model.replay_buffer.replay.schema.stack == 4
    assert model.replay_buffer.sample(4).observations.shape == (4, 4, 40, 40)
