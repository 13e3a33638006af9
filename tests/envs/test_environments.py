"""Environments: what is played, and what is refused with which message."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from zapex.envs.atari_scores import RANDOM_AND_HUMAN
from zapex.envs.environments import EnvironmentSpec, check
from zapex.errors import ConfigError, UnknownEnvironment

TOY = "tests.support.toy_env"


def test_breakout_has_the_facts_that_everybody_expects():
    spec = check("ALE/Breakout-v5")
    assert (spec.observation_shape, spec.observation_dtype) == ((4, 84, 84), "uint8")
    assert (spec.stack, spec.num_actions, spec.frames_per_step) == (4, 4, 4)
    assert spec.atari
    assert "probability 0.25;" in spec.describe
    assert spec.references == {"random": 1.7, "human": 30.5}
    assert not spec.notes
    column = spec.schema(3, 0.99).obs_columns["obs"]
    assert (column.shape, column.stack) == ((84, 84), 4)


def test_an_environment_without_frames_is_its_own_observation():
    spec = check("CartPole-v1")
    assert (spec.observation_shape, spec.observation_dtype) == ((4,), "float32")
    assert (spec.stack, spec.num_actions, spec.frames_per_step) == (1, 2, 1)
    assert spec.references == {"solved": 475.0}
    assert not spec.notes
    assert not spec.atari
    assert spec.schema(3, 0.99).obs_columns["obs"].value_shape == (4,)


@pytest.mark.parametrize(
    ("env_id", "env_kwargs"),
    [("ALE/Pong-v5", {"repeat_action_probability": 0.0}), ("CartPole-v1", {})],
)
def test_a_spec_survives_json(env_id, env_kwargs):
    spec = check(env_id, env_kwargs)
    assert EnvironmentSpec(**json.loads(json.dumps(dataclasses.asdict(spec)))) == spec


@pytest.mark.parametrize(
    ("env_id", "theirs", "sticky"),
    [
        ("BreakoutNoFrameskip-v4", "own: 1", "probability 0;"),
        ("Breakout-v4", "own: 2 to 4", "probability 0;"),
        ("Breakout-v0", "own: 2 to 4", "probability 0.25;"),
        ("BreakoutNoFrameskip-v0", "own: 1", "probability 0.25;"),
    ],
)
def test_old_ids_are_played_like_v5_and_say_so(env_id, theirs, sticky):
    spec = check(env_id)
    assert spec.observation_shape == (4, 84, 84)
    assert len(spec.notes) == 1
    assert "AtariVectorEnv" in spec.notes[0]
    assert theirs in spec.notes[0]
    assert sticky in spec.describe


def test_arguments_of_an_atari_game_change_what_is_described():
    spec = check("ALE/Pong-v5", {"frameskip": 2, "full_action_space": True, "stack_num": 3})
    assert (spec.frames_per_step, spec.num_actions) == (2, 18)
    assert spec.observation_shape == (3, 84, 84)
    assert "2 frames a step" in spec.describe


def test_every_reference_belongs_to_a_game_that_is_there():
    from ale_py import roms

    assert len(RANDOM_AND_HUMAN) == 57
    assert set(RANDOM_AND_HUMAN) <= set(roms.get_all_rom_ids())


@pytest.mark.parametrize(
    ("env_id", "meant"),
    [
        ("ALE/Brekout-v5", "ALE/Breakout-v5"),
        ("breakout", "ALE/Breakout-v5"),
        ("BreakoutDeterministic-v4", "ALE/Breakout-v5"),
        ("PongNoFrameskip-v5", "ALE/Pong-v5"),
        ("ALE/Space_Invaders-v5", "ALE/SpaceInvaders-v5"),
        ("CartPole", "CartPole-v1"),
        ("cartpole-v2", "CartPole-v1"),
    ],
)
def test_a_misspelt_id_is_answered_with_the_nearest(env_id, meant):
    with pytest.raises(UnknownEnvironment, match=f"did you mean .*{meant}"):
        check(env_id)


def test_an_id_like_no_other_says_how_to_give_ones_own():
    with pytest.raises(UnknownEnvironment, match="module:callable") as caught:
        check("Xyzzyplugh-v0")
    assert "did you mean" not in str(caught.value)


def test_modules_give_ids_and_callables():
    assert check(f"{TOY}:Lengths-v0", {"lengths": [3]}).references == {"solved": 7.0}
    assert check(f"{TOY}:Lengths", {"lengths": [3]}).observation_dtype == "float32"
    assert check("ale_py:ALE/Pong-v5").atari


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("no_such_module:Env-v0", "no module 'no_such_module'"),
        (f"{TOY}:Lenghts-v0", "did you mean Lengths-v0"),
        (f"{TOY}:no_such_thing_at_all", "no callable 'no_such_thing_at_all'"),
    ],
)
def test_a_module_that_does_not_have_it_is_unknown(env_id, says):
    with pytest.raises(UnknownEnvironment, match=says):
        check(env_id)


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("Pendulum-v1", r"Discrete actions .* are Box\(-2.0, 2.0"),
        (f"{TOY}:many_actions", r"Discrete actions .* are MultiDiscrete"),
        (f"{TOY}:dict_observations", r"Dict of Box observations, but 'a' .* is Discrete"),
        ("FrozenLake-v1", r"Box observations .* are Discrete\(16\)"),
        (f"{TOY}:not_an_environment", r"must be a gymnasium.Env class, or a function whose"),
        ("subprocess:run", r"that it returns one: def run\(...\) -> gymnasium.Env"),
        ("os:system", "must be a gymnasium.Env class"),
        ("functools:partial", "must be a gymnasium.Env class"),
        (f"{TOY}:liar", "must return a gymnasium.Env, got str"),
        (f"{TOY}:Lengths", "missing 1 required positional argument: 'lengths'"),
    ],
)
def test_what_training_cannot_do_is_refused_in_words(env_id, says):
    with pytest.raises(ConfigError, match=says):
        check(env_id)


@pytest.mark.parametrize(
    ("env_kwargs", "says"),
    [
        ({"reward_clipping": True}, "takes no argument 'reward_clipping'"),
        ({"frameskip": 0}, "frameskip must be 1 to 60, got 0"),
        ({"frameskip": 2.5}, "frameskip must be 1 to 60, got 2.5"),
        ({"frameskip": True}, "frameskip must be 1 to 60, got True"),
        ({"repeat_action_probability": 1.5}, "must be 0.0 to 1.0, got 1.5"),
        ({"repeat_action_probability": float("nan")}, "must be 0.0 to 1.0, got nan"),
        ({"full_action_space": "yes"}, "must be true or false, got 'yes'"),
        ({"img_height": 5}, "must be 7 to 210, got 5"),
    ],
)
def test_wrong_arguments_of_an_atari_game_are_refused(env_kwargs, says):
    with pytest.raises(ConfigError, match=says):
        check("ALE/Breakout-v5", env_kwargs)


def test_images_are_turned_to_channels_first():
    spec = check(f"{TOY}:colour_images")
    assert (spec.observation_shape, spec.observation_dtype) == ((3, 40, 48), "uint8")
    assert "(40, 48, 3) to (3, 40, 48)" in spec.notes[0]
    assert check(f"{TOY}:grey_images").observation_shape == (1, 40, 48)


def test_whole_numbers_are_learned_as_float32_and_that_is_said():
    spec = check(f"{TOY}:whole_numbers")
    assert spec.observation_dtype == "float32"
    assert "int64, are learned as float32" in spec.notes[0]


def test_modules_of_the_working_directory_are_found_from_an_installed_script(tmp_path: Path):
    """-I keeps the working directory off the path, as it is for an installed script."""
    (tmp_path / "mine.py").write_text(
        "import gymnasium\ndef env() -> gymnasium.Env:\n    return gymnasium.make('CartPole-v1')\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    root = Path(__file__).parents[2]
    script = (
        f"import sys; sys.path.append({str(root)!r})\n"
        "from zapex.envs.environments import check\n"
        "print(check('mine:env').num_actions)\n"
        "try:\n    check('broken:env')\nexcept Exception as error:\n    print(error)\n"
        "print(sorted({'torch', 'numba'} & set(sys.modules)))\n"
    )
    out = subprocess.run(
        [sys.executable, "-I", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert out.stdout.splitlines() == [
        "2",
        "broken:env: importing broken failed: ZeroDivisionError: division by zero",
        "[]",  # the parent of a run checks, and must stay small
    ]


MINE = """
import gymnasium
import numpy as np

class Right(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        return np.zeros(2, np.float32), 1, True, False, {}
class NoSpace(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
class NoSeed(Right):
    def reset(self):
        return np.zeros(2), {}
class OldReset(Right):
    def reset(self, **options):
        return np.zeros(2)
class OldStep(Right):
    def step(self, action):
        return np.zeros(2), 1.0, True, {}
class Breaks(Right):
    def step(self, action):
        raise RuntimeError("boom")
class Shape(Right):
    def reset(self, **options):
        return np.zeros(3), {}
class Fraction(Right):
    observation_space = gymnasium.spaces.Box(0, 255, (2,), np.uint8)
class NotFinite(Right):
    def reset(self, **options):
        return np.array([np.nan, 0]), {}
class Ragged(Right):
    def reset(self, **options):
        return [[1], [1, 2]], {}
class NoReward(Right):
    def step(self, action):
        return np.zeros(2), None, True, False, {}
class NoEnd(Right):
    def step(self, action):
        return np.zeros(2), 1.0, None, False, {}
class Key(Right):
    observation_space = gymnasium.spaces.Dict({"eye": Right.observation_space})
    def reset(self, **options):
        return {"ear": np.zeros(2)}, {}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A working directory with an environment of one's own."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("mine", None)
    yield
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("NoSpace", "mine:NoSpace must have an observation_space"),
        ("NoSeed", "its reset(seed=0) fails: TypeError"),
        ("OldReset", "reset must return (observation, info), got ndarray"),
        ("OldStep", "terminated, truncated, info), got a tuple of 4"),
        ("Breaks", "its step fails: RuntimeError: boom ("),
        ("Shape", "of its reset has shape (3,), and its observation_space has (2,)"),
        ("Fraction", "of its reset has dtype float32, and its observation_space has uint8"),
        ("NotFinite", "of its reset must have finite numbers"),
        ("Ragged", "cannot be made an array"),
        ("NoReward", "the reward of a step must be a number, got None"),
        ("NoEnd", "terminated of a step must be a bool, got None"),
        ("Key", "must be a dict with the key 'eye'"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_an_environment_that_cannot_take_a_step_is_refused_before_a_run(name, says):
    with pytest.raises(ConfigError) as refused:
        check(f"mine:{name}")
    assert says in str(refused.value)
    assert ("mine.py, line" in str(refused.value)) == (name == "Breaks")


@pytest.mark.usefixtures("mine")
def test_whole_and_double_numbers_are_no_mistake():
    assert check("mine:Right").num_actions == 2
    assert check(f"{TOY}:whole_numbers").observation_dtype == "float32"


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("mne:Right", "did you mean mine:Right?"),
        ("mine:Rihgt", "did you mean mine:Right?"),
        ("mine.Right", "did you mean mine:Right?"),
        ("mine", "give the class in it as mine:Class"),
        ("mine.py", "give mine:Class"),
        ("mine.py:Right", "give mine:Right"),
        ("./mine.py:Right", "give mine:Right"),
        ("run.toml", "--config run.toml"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_a_misspelt_name_of_ones_own_is_told_with_the_right_one(env_id, says):
    with pytest.raises(UnknownEnvironment) as refused:
        check(env_id)
    assert says in str(refused.value)
