"""Own environments, wrappers, networks and losses: trained, evaluated, resumed, used elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import zapex
from zapex.cli import main as cli
from zapex.envs import environments, streams
from zapex.envs.wrappers import Grey84
from zapex.errors import ConfigError
from zapex.run import checkpoints

ROOT = Path(__file__).parents[2]
MINE = """
import gymnasium, numpy as np, torch
from torch import nn
Box, Dict = gymnasium.spaces.Box, gymnasium.spaces.Dict
class Env(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(3, start=4)
    def __init__(self, space="dict", side=10):
        image = Box(0, 255, (side, side + 2, 3), np.uint8)
        both = Dict({"eye": image, "speed": Box(-1, 1, (2,))})
        stack, words = Box(0, 255, (2, 9, 9, 3), np.uint8), Dict({"text": gymnasium.spaces.Text(3)})
        spaces = {"dict": both, "image": image, "stack": stack, "words": words}
        self.observation_space = spaces[space]
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.n = 0
        return self.observation_space.sample(), {}
    def step(self, action):
        self.n += 1
        return self.observation_space.sample(), float(action - 4), self.n == 20, False, {}
class Half(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward / 2
class Minus(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward - 1
def broken(env):
    raise ValueError("not this one")
class Network(nn.Module):
    def __init__(self, observation_space, action_space):
        super().__init__()
        assert observation_space["eye"].shape == (10, 12, 3)
        self.eye, self.speed = nn.Linear(360, 16), nn.Linear(2, 16)
        self.q = nn.Linear(32, int(action_space.n))
    def forward(self, obs):
        assert obs["eye"].shape[1:] == (10, 12, 3)
        eye = self.eye(obs["eye"].flatten(1) / 255)
        return self.q(torch.cat([eye, self.speed(obs["speed"])], 1).relu())
def loss(predictions, targets):
    return (predictions - targets).abs()
"""
FEW = ["--preset", "smoke", "--plain", "--max-frames", "600", "--run-dir", "run"]
OWN = ["--network", "mine:Network", "--loss", "mine:loss"]


@pytest.fixture(autouse=True)
def in_a_directory_with_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("mine.py").write_text(MINE)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert cli.main([*args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_an_own_dict_environment_network_and_loss_train_resume_and_are_evaluated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["train", "mine:Env", "--inline", *OWN, *FEW]) == 0
    out = capsys.readouterr().out
    assert "the Dict of mine:Env (eye, speed) is kept as one vector" in out
    assert "zapex train --resume run" in out
    monkeypatch.setenv("XDG_STATE_HOME", "elsewhere")  # as another user, who did not start it
    for command in (["eval", "run", "--env", "mine:Env"], ["train", "--resume", "run"]):
        assert "names" in (line := refused(capsys, *command))
        assert "'mine:Network'" in line
    assert cli.main(["eval", "run", "--episodes", "2", "--trust"]) == 0
    more = ["--trust", "--inline", "--plain", "--max-frames", "900"]
    assert cli.main(["train", "--resume", "run", *more]) == 0
    says = refused(capsys, "train", "--resume", "run", *more[:-1], "1200", "--network", "impala")
    assert "--network cannot change in a resumed run" in says

    import mine

    env = mine.Env()
    obs, _ = env.reset(seed=1)
    monkeypatch.setenv("XDG_STATE_HOME", "third")  # the resumed run was one's own, too
    with pytest.raises(ConfigError, match="'mine:Network', code on this machine"):
        zapex.load_policy("run")
    policy = zapex.load_policy("run", trust=True)
    assert policy(obs) in (4, 5, 6)
    both = {key: np.stack([part, part]) for key, part in obs.items()}
    assert policy(both).tolist() == [policy(obs)] * 2
    with pytest.raises(ConfigError, match="must be a dict with the key 'eye'"):
        policy(obs["eye"])
    path = checkpoints.latest(Path("run"))
    assert path is not None
    Path("mine.py").rename("gone.py")
    sys.modules.pop("mine")
    with pytest.raises(ConfigError, match="there is no module 'mine'"):
        zapex.load_policy(path, trust=True)


@pytest.mark.slow
def test_they_train_in_processes_of_their_own() -> None:
    words = ["train", "mine:Env", *OWN, "--wrapper", "mine:Half", *FEW, "--eval-period-s", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "zapex", *words], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "600 frames are played" in done.stdout


def test_wrappers_go_around_in_the_order_of_the_flags() -> None:
    for wrappers, expected in (
        (["mine:Half", "mine:Minus"], 0.0),
        (["mine:Minus", "mine:Half"], 0.5),
    ):
        spec = environments.check("mine:Env", {}, wrappers)
        played = streams.make(spec, 2, seed=1)
        played.reset()
        reward = played.step(np.array([2, 2])).reward
        np.testing.assert_array_equal(reward, [expected, expected])
        played.close()


def test_a_run_takes_its_wrappers_along(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrappers = ["--wrapper", "mine:Half", "--wrapper", "mine:Minus"]
    args = ["--env-kwargs", "space=image", *wrappers, "--inline", *FEW]
    assert cli.main(["train", "mine:Env", *args]) == 0
    assert 'wrapper = ["mine:Half", "mine:Minus"]' in Path("run/config.toml").read_text()
    monkeypatch.setenv("XDG_STATE_HOME", "elsewhere")
    assert "'mine:Half'" in refused(capsys, "eval", "run", "--env", "mine:Env")
    assert cli.main(["eval", "run", "--trust", "--episodes", "1"]) == 0
    mean = float(re.search(r"mean (-?[\d.]+)", capsys.readouterr().out).group(1))  # type: ignore[union-attr]
    assert -20 <= mean <= 0


@pytest.mark.parametrize(
    "side", [7, *(pytest.param(side, marks=pytest.mark.slow) for side in (10, 40))]
)
def test_the_built_in_network_fits_images_of_any_size(side: int) -> None:
    args = ["--env-kwargs", "space=image", f"side={side}", "--inline", *FEW]
    assert cli.main(["train", "mine:Env", *args]) == 0
    image = np.zeros((side, side + 2, 3), np.uint8)
    assert zapex.load_policy("run").q_values(image).shape == (3,)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["space=image", "side=5"], "--wrapper gymnasium.wrappers:FlattenObservation"),
        (["space=image", "side=400"], "--wrapper zapex.envs.wrappers:Grey84"),
        (["space=stack"], "--wrapper zapex.envs.wrappers:Grey84"),
        (["space=words"], "your own --wrapper"),
        (
            ["--wrapper", "mine:broken"],
            "--wrapper mine:broken cannot wrap mine:Env: ValueError: not this one",
        ),
        (["--wrapper", "mine:Hlf"], "'Hlf' is not there in module mine"),
        (["--wrapper", "Half"], "--wrapper must be module:name, got 'Half'"),
        (["--wrapper", "math:sin"], "--wrapper math:sin cannot wrap mine:Env: TypeError"),
        (["--network", "mine:Env"], "--network mine:Env cannot be made"),
        (["--loss", "mine:Loss"], "'Loss' is not there"),
        (["--network", "dueling"], "must be nature, impala or module:name"),
    ],
)
def test_what_cannot_work_is_one_line_that_says_what_to_do(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [] if args[0].startswith("--") else ["--env-kwargs"]
    assert says in refused(capsys, "train", "mine:Env", *pairs, *args, *FEW)
    assert not Path("run").exists()


def test_grey84_is_the_mean_of_each_pixels_area() -> None:
    import mine

    env = Grey84(mine.Env("image", 168))
    assert env.observation_space.shape == (84, 84)
    image = np.random.default_rng(1).integers(0, 256, (168, 168, 3)).astype(np.uint8)
    wide = np.concatenate([image, image[:, :2]], 1)
    grey = wide @ np.array([0.299, 0.587, 0.114])
    found = env.observation(wide)
    assert found.dtype == np.uint8
    columns = np.linspace(0, 170, 85)
    first = grey[:2, :2].sum() + grey[:2, 2].sum() * (columns[1] - 2)
    assert abs(int(found[0, 0]) - first / (2 * columns[1])) <= 1
    assert abs(found.mean() - grey.mean()) < 1


def test_a_game_of_ale_with_a_wrapper_is_grey_and_84_pixels_wide() -> None:
    spec = environments.check("ALE/Pong-v5", {}, ["zapex.envs.wrappers:Grey84"])
    assert (spec.observation_shape, spec.frames_per_step, spec.atari) == ((1, 84, 84), 4, False)
    played = streams.make(spec, 1, seed=1)
    assert played.reset().std() > 1
    played.close()
