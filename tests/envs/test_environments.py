"""Environments: the facts of those that exist, and what is refused with which hint."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zapex.envs.environments import EnvironmentSpec, check
from zapex.envs.scores import RANDOM_AND_HUMAN
from zapex.envs.streams import make
from zapex.errors import ConfigError, SchemaError, UnknownEnvironment

TOY = "tests.support.toy_env"


def refused(error, env_id, env_kwargs=None):
    """The message with which an environment is refused."""
    with pytest.raises(error) as caught:
        check(env_id, env_kwargs)
    return str(caught.value)


def test_breakout_is_played_as_in_the_literature():
    spec = check("ALE/Breakout-v5")
    assert (spec.observation_shape, spec.observation_dtype) == ((4, 84, 84), "uint8")
    assert (spec.stack, spec.num_actions, spec.frames_per_step) == (4, 4, 4)
    assert spec.atari
    assert "probability 0.25;" in spec.describe
    assert spec.references == {"random": 1.7, "human": 30.5}
    assert not spec.notes
    column = spec.schema(3, 0.99).obs_columns["obs"]
    assert (column.shape, column.stack) == ((84, 84), 4)


def test_a_vector_environment_has_no_stack():
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
        ("BreakoutNoFrameskip-v0", "own: 1", "probability 0.25;"),
    ],
)
def test_old_ids_are_played_like_v5_with_a_note(env_id, theirs, sticky):
    spec = check(env_id)
    assert spec.observation_shape == (4, 84, 84)
    (note,) = spec.notes
    assert theirs in note
    assert sticky in spec.describe


def test_arguments_of_an_atari_game_change_what_is_described():
    spec = check("ALE/Pong-v5", {"frameskip": 2, "full_action_space": True, "stack_num": 3})
    assert (spec.frames_per_step, spec.num_actions) == (2, 18)
    assert spec.observation_shape == (3, 84, 84)
    assert "2 frames a step" in spec.describe


def test_every_reference_belongs_to_a_game_that_exists():
    from ale_py import roms

    assert len(RANDOM_AND_HUMAN) == 57
    assert set(RANDOM_AND_HUMAN) <= set(roms.get_all_rom_ids())


@pytest.mark.parametrize(
    ("env_id", "meant"),
    [
        ("ALE/Brekout-v5", "ALE/Breakout-v5"),
        ("BreakoutDeterministic-v4", "ALE/Breakout-v5"),
        ("PongNoFrameskip-v5", "ALE/Pong-v5"),
        ("ALE/Space_Invaders-v5", "ALE/SpaceInvaders-v5"),
        ("cartpole-v2", "CartPole-v1"),
        (f"{TOY}:Lenghts-v0", "Lengths-v0"),
        ("Xyzzyplugh-v0", "module:callable"),
        ("no_such_module:Env-v0", "'no_such_module'"),
        (f"{TOY}:no_such_thing_at_all", "'no_such_thing_at_all'"),
    ],
)
def test_an_unknown_id_is_refused_with_a_hint(env_id, meant):
    assert meant in refused(UnknownEnvironment, env_id)


def test_modules_give_ids_and_callables():
    assert check(f"{TOY}:Lengths-v0", {"lengths": [3]}).references == {"solved": 7.0}
    assert check(f"{TOY}:Lengths", {"lengths": [3]}).observation_dtype == "float32"
    assert check("ale_py:ALE/Pong-v5").atari


@pytest.mark.parametrize(
    ("env_id", "facts"),
    [
        ("Pendulum-v1", ["Discrete", "Box(-2.0, 2.0"]),
        (f"{TOY}:many_actions", ["Discrete", "MultiDiscrete"]),
        (f"{TOY}:dict_observations", ["Dict", "'a'", "Discrete"]),
        ("FrozenLake-v1", ["Box", "Discrete(16)", "FlattenObservation"]),
        (f"{TOY}:not_an_environment", ["gymnasium.Env"]),
        ("subprocess:run", ["def run(...) -> gymnasium.Env"]),
        ("os:system", ["gymnasium.Env"]),
        ("functools:partial", ["gymnasium.Env"]),
        (f"{TOY}:liar", ["gymnasium.Env", "str"]),
        (f"{TOY}:Lengths", ["'lengths'"]),
    ],
)
def test_an_environment_that_training_does_not_support_is_refused(env_id, facts):
    message = refused(ConfigError, env_id)
    for fact in facts:
        assert fact in message


@pytest.mark.parametrize(
    ("env_kwargs", "facts"),
    [
        ({"reward_clipping": True}, ["'reward_clipping'", "frameskip"]),
        ({"frameskip": 0}, ["frameskip", "1 to 60", "0"]),
        ({"frameskip": 2.5}, ["frameskip", "2.5"]),
        ({"frameskip": True}, ["frameskip", "True"]),
        ({"repeat_action_probability": 1.5}, ["repeat_action_probability", "0.0 to 1.0", "1.5"]),
        ({"repeat_action_probability": float("nan")}, ["repeat_action_probability", "nan"]),
        ({"full_action_space": "yes"}, ["full_action_space", "true or false", "'yes'"]),
        ({"img_height": 5}, ["img_height", "7 to 210", "5"]),
    ],
)
def test_wrong_arguments_of_an_atari_game_are_refused(env_kwargs, facts):
    message = refused(ConfigError, "ALE/Breakout-v5", env_kwargs)
    for fact in facts:
        assert fact in message


def test_observations_are_converted_with_a_note():
    images, numbers = check(f"{TOY}:colour_images"), check(f"{TOY}:whole_numbers")
    assert (images.observation_shape, images.observation_dtype) == ((3, 40, 48), "uint8")
    assert "(3, 40, 48)" in images.notes[0]
    assert check(f"{TOY}:grey_images").observation_shape == (1, 40, 48)
    assert numbers.observation_dtype == "float32"
    assert "int64" in numbers.notes[0]


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
    command = [sys.executable, "-I", "-c", script]
    out = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    actions, error, heavy = out.stdout.splitlines()
    assert actions == "2"
    assert "broken" in error
    assert "ZeroDivisionError" in error
    assert heavy == "[]"  # the parent of a run checks, and must stay small


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
class Whole(Right):
    def reset(self, **options):
        return np.array([1, 2]), {}
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
class Wide(Fraction):
    def reset(self, **options):
        return np.array([1000, 0], np.uint16), {}
class Long(Right):
    observation_space = gymnasium.spaces.Box(-2**31, 2**31 - 1, (2,), np.int32)
    steps = 0
    def reset(self, **options):
        return np.array([1, 2]), {}
    def step(self, action):
        self.steps += 1
        return np.array([3, 4 if self.steps == 1 else 2**40]), 1.0, False, False, {}
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
    """A working directory with the user's own environments."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("mine", None)
    yield
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("NoSpace", ["observation_space"]),
        ("NoSeed", ["reset(seed=0)", "TypeError"]),
        ("OldReset", ["reset", "ndarray"]),
        ("OldStep", ["step", "tuple of 4"]),
        ("Breaks", ["step", "RuntimeError: boom", "mine.py, line"]),
        ("Shape", ["reset", "(3,)", "(2,)"]),
        ("Fraction", ["reset", "float32", "uint8"]),
        ("Wide", ["reset", "uint8", "1000"]),
        ("NotFinite", ["reset", "finite"]),
        ("Ragged", ["reset", "array"]),
        ("NoReward", ["reward", "None"]),
        ("NoEnd", ["terminated", "None"]),
        ("Key", ["reset", "'eye'"]),
    ],
)
@pytest.mark.usefixtures("mine")
def test_an_environment_whose_first_step_fails_is_refused(name, facts):
    message = refused(ConfigError, f"mine:{name}")
    for fact in [f"mine:{name}", *facts]:
        assert fact in message
    assert ("mine.py, line" in message) == (name == "Breaks")


@pytest.mark.usefixtures("mine")
def test_whole_numbers_are_observations_of_a_space_of_floats():
    assert check("mine:Right").num_actions == 2
    assert check("mine:Whole").observation_dtype == "float32"


@pytest.mark.usefixtures("mine")
def test_wider_integers_are_taken_while_they_fit():
    played = make(check("mine:Long"), 1, seed=1)
    played.reset()
    action = np.zeros(1, np.int64)
    assert played.step(action).obs.tolist() == [[3.0, 4.0]]
    with pytest.raises(SchemaError, match=r"int32.* 1099511627776"):
        played.step(action)
    played.close()


@pytest.mark.parametrize(
    ("env_id", "meant"),
    [
        ("mne:Right", "mine:Right?"),
        ("mine:Rihgt", "mine:Right?"),
        ("mine.Right", "mine:Right?"),
        ("mine", "mine:Class"),
        ("mine.py", "mine:Class"),
        ("mine.py:Right", "give mine:Right"),
        ("./mine.py:Right", "give mine:Right"),
        ("run.toml", "--config run.toml"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_a_misspelt_name_of_a_module_is_refused_with_the_right_one(env_id, meant):
    assert meant in refused(UnknownEnvironment, env_id)
