"""Streams: every step compared with a naive game."""

import sys

import ale_py
import numpy as np
import pytest
from ale_py import roms

from tests.support import naive
from tests.support.toy_env import Spaces
from zapex.envs.environments import check
from zapex.envs.streams import make
from zapex.errors import ConfigError

TOY = "tests.support.toy_env"
LENGTHS = f"{TOY}:Lengths"
MASK64 = (1 << 64) - 1


def play(streams, rng, steps):
    """Random steps: yields the actions and the Step."""
    for _ in range(steps):
        actions = rng.integers(streams.spec.num_actions, size=streams.num_streams)
        yield actions, streams.step(actions)


@pytest.mark.parametrize(
    ("env_id", "env_kwargs", "max_frames", "steps"),
    [
        ("ALE/Breakout-v5", {}, 108_000, 700),  # five lives
        ("ALE/BankHeist-v5", {}, 1_002, 500),  # its last life counts as 0; cut within a step
        ("ALE/Pong-v5", {"frameskip": 3, "full_action_space": True}, 1_000, 400),  # no lives
    ],
)
def test_streams_are_plain_games_step_by_step(env_id, env_kwargs, max_frames, steps):
    spec = check(env_id, env_kwargs | {"repeat_action_probability": 0.0})
    streams = make(spec, 3, seed=1, max_episode_frames=max_frames, noop_max=0)
    twins = [naive.AtariGame(spec, max_frames) for _ in range(3)]
    assert not streams.reset()[:, :-1].any()  # frames before the game are black
    seen = dict.fromkeys(("terminated", "truncated", "life_lost", "started"), 0)
    over = [False] * 3
    played = [[0.0, 0] for _ in range(3)]
    for actions, step in play(streams, np.random.default_rng(0), steps):
        ended = []
        for i, twin in enumerate(twins):
            if over[i]:
                twin.begin()
                expected = (0.0, False, False, False)
                assert not step.obs[i, :-1].any()
            else:
                expected = twin.step(int(actions[i]))
                played[i][0] += expected[0]
                played[i][1] += 1
            assert step.started[i] == over[i]
            got = (step.reward[i], step.terminated[i], step.truncated[i], step.life_lost[i])
            assert got == expected
            over[i] = bool(expected[1] or expected[2])
            if over[i]:
                score, count = played[i]
                ended.append((i, score, count, count * spec.frames_per_step))
                played[i] = [0.0, 0]
        assert streams.finished == ended
        for name in seen:
            seen[name] += int(getattr(step, name).sum())
    assert seen["started"] > 0
    if env_id == "ALE/Breakout-v5":
        assert seen["terminated"] >= 3
        assert seen["life_lost"] >= 4 * seen["terminated"]
    else:
        assert seen["truncated"] > 0
    if env_id == "ALE/BankHeist-v5":
        assert seen["life_lost"] > 0


def test_a_life_lost_in_a_truncated_step_is_both():
    spec = check("ALE/Breakout-v5")
    streams = make(spec, 1, seed=1, noop_max=0)
    streams.reset()
    lost_at = next(
        t
        for t, (_, step) in enumerate(play(streams, np.random.default_rng(2), 200), start=1)
        if step.life_lost[0]
    )
    streams = make(spec, 1, seed=1, noop_max=0, max_episode_frames=4 * lost_at)
    streams.reset()
    *_, (_, last) = play(streams, np.random.default_rng(2), lost_at)
    assert last.life_lost[0]
    assert last.truncated[0]
    assert not last.terminated[0]
    assert last.episode_ends[0]
    assert [episode.steps for episode in streams.finished] == [lost_at]
    assert streams.step(np.zeros(1, np.int64)).started[0]


@pytest.mark.parametrize("noop_max", [0, 2])
def test_a_game_begins_with_no_ops_up_to_the_given_number(noop_max):
    streams = make(check("ALE/Freeway-v5"), 1, seed=3, noop_max=noop_max, film=True)
    seen = set()
    for _ in range(40):
        streams.reset()
        seen.add(streams.screens[-1].tobytes())
    bare = ale_py.ALEInterface()
    bare.loadROM(roms.get_rom_path("freeway"))
    expected = []
    for _ in range(noop_max + 1):  # its cars move in every frame
        expected.append(bare.getScreenRGB().tobytes())
        bare.act(0)
    assert seen == set(expected)
    assert len(seen) == noop_max + 1


@pytest.mark.parametrize(("env_id", "kwargs"), [("ALE/Pong-v5", {}), ("CartPole-v1", {})])
def test_the_seed_decides_every_step(env_id, kwargs):
    spec = check(env_id, kwargs)

    def trace(seed):
        streams = make(spec, 2, seed=seed)
        parts = [streams.reset().copy()]
        parts += [s.obs.copy() for _, s in play(streams, np.random.default_rng(5), 40)]
        streams.close()
        return np.stack(parts)

    first = trace(MASK64)
    assert np.array_equal(first, trace(MASK64))
    assert not np.array_equal(first, trace(1))
    assert not np.array_equal(first[:, 0], first[:, 1])  # streams differ from each other


def test_the_step_after_the_end_begins_a_new_game():
    lengths = [1, 3, 1]
    spec = check(LENGTHS, {"lengths": lengths, "reward": 2.5})
    streams = make(spec, 2, seed=0)
    assert streams.reset().tolist() == [[0.0, 0.0]] * 2
    seen = []
    for _ in range(8):
        step = streams.step(np.zeros(2, np.int64))
        assert step.obs.dtype == step.reward.dtype == np.float32
        assert not step.life_lost.any()
        seen.append(
            (
                *step.obs[0].tolist(),
                float(step.reward[0]),
                bool(step.terminated[0]),
                bool(step.started[0]),
                [episode[1:] for episode in streams.finished if episode.stream == 0],
            )
        )
    assert seen == [
        (0, 1, 2.5, True, False, [(2.5, 1, 1)]),
        (1, 0, 0.0, False, True, []),
        (1, 1, 2.5, False, False, []),
        (1, 2, 2.5, False, False, []),
        (1, 3, 2.5, True, False, [(7.5, 3, 3)]),
        (2, 0, 0.0, False, True, []),
        (2, 1, 2.5, True, False, [(2.5, 1, 1)]),
        (3, 0, 0.0, False, True, []),
    ]


@pytest.mark.parametrize(
    ("env_id", "max_frames", "cut_at"),
    [
        (f"{TOY}:Lengths-v0", 0, 8),  # the id's own limit
        (f"{TOY}:Lengths-v0", 5, 5),
        (f"{TOY}:Lengths-v0", 50, 8),
        (LENGTHS, 5, 5),
        (LENGTHS, 0, None),
    ],
)
def test_an_episode_is_truncated_at_the_smaller_of_both_limits(env_id, max_frames, cut_at):
    streams = make(check(env_id, {"lengths": [1000]}), 1, seed=0, max_episode_frames=max_frames)
    streams.reset()
    cuts = [
        t
        for t, (_, s) in enumerate(play(streams, np.random.default_rng(0), 20), 1)
        if s.truncated[0]
    ]
    assert cuts[:1] == ([] if cut_at is None else [cut_at])


def test_a_reset_abandons_the_games():
    streams = make(check(LENGTHS, {"lengths": [1, 5]}), 1, seed=0)
    streams.reset()
    for _ in range(4):
        streams.step(np.zeros(1, np.int64))
    streams.reset()  # in the middle of the second episode; the third lasts one step again
    step = streams.step(np.zeros(1, np.int64))
    assert not step.started[0]
    assert streams.finished == [(0, 1.0, 1, 1)]


def test_actions_and_images_are_converted():
    streams = make(check(f"{TOY}:colour_images"), 2, seed=0)  # its actions are 5 and 6
    obs = streams.reset()
    assert obs.shape == (2, 3, 40, 48)
    raw = np.array(Spaces.drawn[-2:])
    assert np.array_equal(obs, raw.transpose(0, 3, 1, 2))
    step = streams.step(np.array([0, 1]))
    raw = np.array(Spaces.drawn[-2:])
    assert np.array_equal(step.obs, raw.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    "actions", [np.array([0, 2]), np.array([-1, 0]), np.zeros(2, np.int32), np.zeros(3, np.int64)]
)
def test_wrong_actions_are_refused(actions):
    streams = make(check("CartPole-v1"), 2, seed=0)
    streams.reset()
    with pytest.raises(ValueError, match="actions"):
        streams.step(actions)


@pytest.mark.parametrize(
    "env_kwargs", [{"repeat_action_probability": 0.0}, {"use_fire_reset": True}]
)
def test_the_film_shows_the_game_that_is_played(env_kwargs):
    streams = make(
        check("ALE/Breakout-v5", env_kwargs), 1, seed=4, film=True, max_episode_frames=302
    )
    obs = streams.reset()
    assert len(streams.screens) == 1
    assert streams.screens_per_s == 60
    starts = 0
    for _, step in play(streams, np.random.default_rng(1), 160):
        obs, screens = step.obs[0, -1], streams.screens
        assert screens[0].shape == (210, 160, 3)
        assert len(screens) == (1 if step.started[0] else 2 if step.truncated[0] else 4)
        if not step.truncated[0]:  # there the last screens are not seen by the agent
            seen = naive.downscaled(np.maximum.reduce([naive.grey(s) for s in screens[-2:]]))
            assert np.abs(seen - obs).max() <= 1.0
        starts += int(step.started[0])
    assert starts == 2


def test_an_environment_without_screens_cannot_be_filmed(monkeypatch):
    with pytest.raises(ConfigError, match="render_mode"):
        make(check(f"{TOY}:grey_images"), 1, seed=0, film=True)
    with pytest.raises(ConfigError, match="rgb_array"):
        make(check(f"{TOY}:Unseen", {"lengths": [2]}), 1, seed=0, film=True)
    with pytest.raises(ConfigError, match=r"num_streams .* 2"):
        make(check("CartPole-v1"), 2, seed=0, film=True)
    with pytest.raises(ConfigError, match=r"num_streams .* 0"):
        make(check("CartPole-v1"), 0, seed=0)
    monkeypatch.setitem(sys.modules, "pygame", None)
    streams = make(check("CartPole-v1"), 1, seed=0, film=True)
    streams.reset()
    with pytest.raises(ConfigError, match="pip install"):
        _ = streams.screens
