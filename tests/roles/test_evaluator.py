"""The evaluator: whole games, counted without bias, filmed as they were played."""

import dataclasses
import os
import resource
import sys

import numpy as np
import pytest

from zapex.envs.environments import check
from zapex.envs.streams import make
from zapex.envs.video import Mp4Writer
from zapex.errors import ConfigError, ZapexError
from zapex.roles.evaluator import RunningEvaluation, evaluate

LENGTHS = "tests.support.toy_env:Lengths"


def prefer_last(obs):
    """Q values of a policy that always takes the last of two actions."""
    return np.tile([0.0, 1.0], (len(obs), 1))


@pytest.mark.parametrize(("num_streams", "episodes"), [(3, 7), (4, 2), (1, 5), (5, 5)])
def test_each_stream_plays_its_share_of_episodes(num_streams, episodes):
    lengths = [50, 1, 2, 9, 30]
    streams = make(check(LENGTHS, {"lengths": lengths}), num_streams, seed=0)
    evaluation = RunningEvaluation(prefer_last, streams, episodes, seed=0)
    steps = 0
    while not evaluation.done:
        steps += evaluation.do_work()
    assert evaluation.do_work() == 0
    shares = [len(range(i, episodes, num_streams)) for i in range(num_streams)]
    expected = [float(n) for share in shares for n in lengths[:share]]
    result = evaluation.result()
    assert list(result.returns) == expected
    assert result.steps == result.frames == steps == sum(expected)
    assert (result.mean, result.std) == (np.mean(expected), np.std(expected))


class Seen:
    """A spectator that keeps what it sees, and leaves after `leave` moments."""

    def __init__(self, leave=1_000_000):
        self.moments, self.names, self._leave = [], (), leave

    def begin(self, screens_per_s, action_names):
        self.screens_per_s, self.names = screens_per_s, action_names

    def see(self, moment):
        self.moments.append(moment)
        return len(self.moments) < self._leave


def test_spectator_sees_every_step_with_q_values():
    seen = Seen()
    result = evaluate(prefer_last, check("CartPole-v1"), 2, seed=3, epsilon=0.0, spectator=seen)
    steps = [m for m in seen.moments if m.q is not None]
    assert len(steps) == result.steps
    assert [m.game for m in seen.moments] == sorted(m.game for m in seen.moments)
    ends = [max(m.score for m in steps if m.game == game) for game in (1, 2)]
    assert tuple(ends) == result.returns
    assert all(m.action == 1 and m.q.tolist() == [0.0, 1.0] for m in steps)
    assert all(m.screens[0].shape == (400, 600, 3) for m in seen.moments)
    assert (seen.names, seen.screens_per_s) == (("0", "1"), 50.0)


def test_atari_has_action_names_and_four_screens_a_step():
    seen = Seen(leave=4)
    spec = check("ALE/Breakout-v5")
    result = evaluate(lambda obs: np.zeros((1, 4)), spec, 1, seed=0, epsilon=0.0, spectator=seen)
    assert result.returns == ()  # the spectator left before a game was over
    assert seen.names == ("NOOP", "FIRE", "RIGHT", "LEFT")
    assert [len(m.screens) for m in seen.moments] == [1, 4, 4, 4]


def test_second_evaluation_reuses_the_streams():
    streams = make(check(LENGTHS, {"lengths": [2, 3, 4, 5]}), 1, seed=0)
    for expected in ((2.0, 3.0), (5.0, 2.0)):  # the third was begun and dropped
        evaluation = RunningEvaluation(prefer_last, streams, 2, seed=0)
        while not evaluation.done:
            evaluation.do_work()
        assert evaluation.result().returns == expected
        streams.step(np.zeros(1, np.int64))


def test_actions_are_greedy_but_for_epsilon():
    spec = check(LENGTHS, {"lengths": [100_000]})

    def share_of_others(epsilon):
        streams = make(spec, 50, seed=0)
        taken = []
        step = streams.step
        streams.step = lambda actions: (taken.append(actions), step(actions))[1]
        evaluation = RunningEvaluation(prefer_last, streams, 50, seed=0, epsilon=epsilon)
        for _ in range(200):
            evaluation.do_work()
        return float(np.mean(np.stack(taken) == 0))

    assert share_of_others(0.0) == 0.0
    assert share_of_others(0.2) == pytest.approx(0.1, abs=0.02)  # half of the random are the last


def test_frame_limit_ends_an_endless_episode():
    streams = make(check(LENGTHS, {"lengths": [1000]}), 2, seed=0, max_episode_frames=20)
    evaluation = RunningEvaluation(prefer_last, streams, 2, seed=0)
    while not evaluation.done:
        evaluation.do_work()
    assert evaluation.result().returns == (20.0, 20.0)


def test_seed_decides_the_result():
    def result(seed):
        def q_values(obs):  # depends on the observation, so that a difference would grow
            return np.stack([obs.sum(axis=1), -obs.sum(axis=1)], axis=1)

        played = evaluate(q_values, check("CartPole-v1"), 10, seed=seed, epsilon=0.3)
        return dataclasses.replace(played, seconds=0.0)

    assert result(1) == result(1)
    assert result(1) != result(2)


def test_many_games_share_ten_streams_and_report_progress():
    told = []
    spec = check(LENGTHS, {"lengths": [3]})
    result = evaluate(prefer_last, spec, 25, seed=0, epsilon=0.0, progress=told.append)
    assert result.returns == (3.0,) * 25
    assert told == sorted(told)
    assert (told[0], told[2], told[-1]) == (0, 10, 25)


def test_breakout_is_scored_over_all_lives():
    def q_values(obs):  # FIRE, else stay where the paddle is: scores a little, loses five balls
        return np.tile([0.0, 1.0, 0.0, 0.0], (len(obs), 1))

    result = evaluate(q_values, check("ALE/Breakout-v5"), 3, seed=1, num_threads=2)
    assert result.frames == 4 * result.steps
    assert all(score >= 0.0 for score in result.returns)
    assert result.steps > 3 * 5 * 20  # five balls fall for at least 20 steps each


@pytest.mark.parametrize(
    ("episodes", "epsilon", "says"), [(0, 0.1, "episodes must be"), (1, 1.5, "epsilon must be")]
)
def test_numbers_out_of_range_are_refused(episodes, epsilon, says):
    with pytest.raises(ConfigError, match=says):
        evaluate(prefer_last, check("CartPole-v1"), episodes, seed=0, epsilon=epsilon)


def test_video_shows_the_scored_games(tmp_path):
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "game.mp4"
    spec = check(LENGTHS, {"lengths": [60, 90]})
    result = evaluate(prefer_last, spec, 2, seed=0, video=path)
    assert result.returns == (60.0, 90.0)
    frames = imageio_ffmpeg.read_frames(str(path))
    facts = next(frames)
    width, height = facts["size"]
    assert (width, height) == (15 * 32, 9 * 32)
    assert facts["fps"] == 20.0
    shown = [np.frombuffer(f, np.uint8).reshape(height, width, 3).mean() for f in frames]
    assert len(shown) == 61 + 91
    assert np.allclose(shown, [*range(61), *range(91)], atol=4.0)


def test_missing_encoder_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    spec = check(LENGTHS, {"lengths": [5]})
    with pytest.raises(ConfigError, match=r'pip install "zapex\[video\]"'):
        evaluate(prefer_last, spec, 1, seed=0, video=tmp_path / "game.mp4")


def test_failed_encoder_is_an_error_and_leaves_the_old_video(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "game.mp4"
    path.write_text("before")
    spec = check(LENGTHS, {"lengths": [300]})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as on a full disk
    try:
        with pytest.raises(ZapexError, match=r"game\.mp4"):
            evaluate(prefer_last, spec, 1, seed=0, video=path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["game.mp4"]


@pytest.mark.parametrize(
    ("name", "says"), [("game.gif", r"must end in \.mp4"), ("nowhere/game.mp4", "there is no")]
)
def test_unwritable_video_is_refused(tmp_path, name, says):
    pytest.importorskip("imageio_ffmpeg")
    with pytest.raises(ConfigError, match=says):
        Mp4Writer(tmp_path / name, 60.0)
