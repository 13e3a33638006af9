"""What only a real run directory or a user's own environment can get wrong: one line, exit code 2.

The plain mistakes on a command line are in test_cli.py. Here no process may start, and a run that
was there must stay as it was.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zapex import checkpoint, cli, launch, supervisor
from zapex.config import Config

SMALL = ["--env", "CartPole-v1", "--preset", "smoke"]
CARTPOLE = {
    "env_id": "CartPole-v1",
    "observation_shape": [4],
    "observation_dtype": "float32",
    "num_actions": 2,
}


@pytest.fixture(autouse=True)
def in_an_empty_directory_where_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*args: Any) -> int:
        raise AssertionError("a run was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(launch, "train", started)
    monkeypatch.setattr(supervisor.Supervisor, "start", started)


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert cli.main(["train", *args]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def a_run(**settings: Any) -> Path:
    """A run directory as an interrupted run of CartPole leaves it."""
    run = Path("run")
    run.mkdir()
    config = Config().replace(
        env="CartPole-v1", preset="smoke", capacity=4096, learning_starts=64, batch_size=32,
        actors=1, hidden=8,
    )  # fmt: skip
    (run / "config.toml").write_text(config.to_toml())
    state = {"schema": CARTPOLE | settings, "counters": {}, "params_version": 1, "totals": {}}
    directory = run / "checkpoints"
    checkpoint.save(directory, checkpoint.step_name(5), {"online.x": np.zeros(9)}, state)
    return run


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--env", "tests.toy_env:dict_observations"], "Box observations"),
        (["--env", "tests.toy_env:many_actions"], "Discrete actions"),
        (["--env", "tests.toy_env:tiny_images"], "images must be at least"),
        (["--env", "tests.toy_env:not_an_environment"], "must return a gymnasium.Env, got str"),
        (["--env", "tests.toy_env:Lengthz"], "did you mean Lengths-v0"),
        (["--env", "no_such_module:Env-v0"], "no module 'no_such_module'"),
        (["--env", "LunarLander-v2"], "LunarLander"),
        ([*SMALL, "--n-step", "64", "--capacity", "32", "--learning-starts", "32"], "--n-step"),
        ([*SMALL, "--samples-per-insert", "8", "--samples-per-insert-tolerance", "9"], "for ever"),
        ([*SMALL, "--samples-per-insert", "-1"], "--samples-per-insert must be at least 0"),
        ([*SMALL, "--gamma", "1.5"], "--gamma must be at most 1"),
        ([*SMALL, "--max-minutes", "inf"], "--max-minutes must be a finite number"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *args)
    assert not list(Path.cwd().iterdir()), "nothing may have been written"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_actions": 6}, "num_actions 6; asked for is num_actions 2"),
        ({"env_id": "Acrobot-v1", "observation_shape": [6]}, "env_id Acrobot-v1"),
    ],
)
def test_a_checkpoint_of_another_environment_is_refused_with_both_named(
    settings: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(**settings)
    assert said in refusal(capsys, "--resume", "run")


@pytest.mark.parametrize("damage", ["cut short", "a bit flipped", "no checkpoint at all"])
def test_a_damaged_checkpoint_is_refused_and_left_as_it_is(
    damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint.latest(a_run())
    assert path is not None
    content = bytearray(path.read_bytes())
    if damage == "cut short":
        content = content[:-7]
    elif damage == "a bit flipped":
        content[-3] ^= 0x10
    else:
        content = bytearray(b"hello")
    path.write_bytes(content)
    line = refusal(capsys, "--resume", "run")
    assert "is damaged" in line
    assert path.name in line
    assert path.read_bytes() == content
