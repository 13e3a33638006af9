"""`zapex.train`: runs from a Python program, and from a notebook."""

import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

import zapex
from zapex.errors import CheckpointError, ConfigError
from zapex.machine import supervisor
from zapex.run import checkpoints

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")

ROOT = Path(__file__).parents[2]
FEW: dict[str, Any] = {
    "env": "CartPole-v1", "preset": "smoke", "inline": True, "run_dir": "run", "max_frames": 600,
}  # fmt: skip


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(supervisor.Supervisor, "start", started)


def test_a_run_has_a_result_and_a_policy() -> None:
    result = zapex.train(zapex.TrainConfig(**FEW, eval_period_s=1, eval_episodes=1))
    assert result.run_dir == Path("run")
    assert result.steps >= 600
    assert result.reason == "600 frames are played"
    assert result.best_return is not None
    assert result.last_return is not None
    assert result.best_return >= result.last_return > 0
    stored = json.loads(Path("run/result.json").read_text())
    assert stored["versions"]["numpy"] == np.__version__
    assert stored["command"] == shlex.join(sys.argv)
    assert stored["commit"] is None  # the directory is no repository
    policy = zapex.load_policy("run")
    obs = np.array([0.1, 0.0, 0.05, 0.0], np.float32)
    assert policy(obs) == policy.q_values(obs).argmax()
    assert policy.q_values(np.stack([obs, obs])).shape == (2, 2)
    np.testing.assert_array_equal(policy(np.stack([obs, obs])), [policy(obs)] * 2)
    assert policy.checkpoint == checkpoints.best(Path("run"))
    assert zapex.load_policy("run", "latest").checkpoint == checkpoints.latest(Path("run"))
    with pytest.raises(ConfigError, match=r"must have shape \(4,\), or \(B, 4\)"):
        policy(obs[:3])


def test_a_policy_loads_from_its_file_alone() -> None:
    zapex.train(zapex.TrainConfig(**FEW))
    file = checkpoints.latest(Path("run"))
    assert file is not None
    elsewhere = Path("elsewhere.safetensors")
    file.rename(elsewhere)
    obs = np.zeros(4, np.float32)
    assert zapex.load_policy(elsewhere)(obs) in (0, 1)
    with pytest.raises(CheckpointError, match="no checkpoint 'best'"):
        zapex.load_policy("run")


def test_on_report_sees_the_run_and_ends_it() -> None:
    seen: list[zapex.Report] = []

    def stop(report: zapex.Report) -> bool:
        seen.append(report)
        return report.steps < 100

    result = zapex.train(zapex.TrainConfig(**FEW), stop, max_frames=0)
    assert result.reason == "on_report returned False"
    assert seen[-1].steps >= 100
    assert seen[-1].run_dir == Path("run")
    assert [report.steps for report in seen] == sorted(report.steps for report in seen)
    assert checkpoints.latest(Path("run")) is not None


def test_an_exception_of_on_report_ends_the_run_and_is_raised() -> None:
    def fail(report: zapex.Report) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        zapex.train(zapex.TrainConfig(**FEW), fail)
    fresh = zapex.TrainConfig(**FEW).replace(run_dir="again")
    assert zapex.train(fresh).steps >= 600  # nothing of the first is left


def test_a_run_counts_its_time_from_the_call() -> None:
    times: list[float] = []
    zapex.train(zapex.TrainConfig(**FEW), lambda report: times.append(report.wall_s))
    assert times[0] < 30.0  # the process of the tests is older, or was started just now
    assert times == sorted(times)


def test_a_run_prints_nothing_with_verbose_0(capfd: pytest.CaptureFixture[str]) -> None:
    assert zapex.train(zapex.TrainConfig(**FEW), verbose=0).steps >= 600
    assert capfd.readouterr().out == ""


def test_a_run_works_in_another_thread() -> None:
    results: list[zapex.Result] = []
    call = threading.Thread(target=lambda: results.append(zapex.train(zapex.TrainConfig(**FEW))))
    call.start()
    call.join(100.0)
    assert results[0].steps >= 600


def test_a_run_is_resumed() -> None:
    first = zapex.train(zapex.TrainConfig(**FEW))
    second = zapex.train(zapex.TrainConfig(resume=Path("run"), max_frames=2e3))
    assert second.steps >= 2000 > first.steps


def test_settings_are_read_as_attributes() -> None:
    config = zapex.TrainConfig(
        env="CartPole-v1", preset="laptop", run_dir=Path("run"), max_frames=1e5, capacity="20k",
        wrapper="mine:Wrap", batch_size=np.int64(64), eps_end=np.float32(0.5), optimizer="adam",
    )  # fmt: skip
    given = config.max_frames, config.capacity, config.batch_size, config.eps_end
    assert given == (100_000, 20_000, 64, 0.5)
    assert {type(value) for value in given} == {int, float}
    assert (config.run_dir, config.wrapper, config.optimiser) == ("run", ["mine:Wrap"], "adam")
    assert config.trust is False
    config = config.replace(wrapper=[])
    assert config.lr == 5e-4  # the preset's, for an environment of vectors
    assert config.env_kwargs == {}
    assert {"lr", "max_frames", "replace"} <= set(dir(config))
    with pytest.raises(AttributeError, match="did you mean lr"):
        config.learning_rte  # noqa: B018
    for wrong in ({"max_frames": 1.5}, {"seed": True}, {"lr": "x"}):
        with pytest.raises(ConfigError):
            zapex.TrainConfig(**wrong)  # type: ignore[arg-type]


def test_type_checkers_see_the_settings_with_their_types() -> None:
    from zapex.cli.from_python import Code, Count, Settings, Text
    from zapex.cli.resolve import Options
    from zapex.config.settings import SECTIONS

    kinds = (*SECTIONS.values(), Options)
    wanted = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
    typed = get_type_hints(Settings)
    assert typed.keys() == wanted.keys()
    for name, hint in wanted.items():
        wider = {int: (Count,), int | None: (Count | None,), str: (str, Code, Text)}
        assert typed[name] in wider.get(hint, (hint,)) or name == "wrapper"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"learning_rte": 1}, "TrainConfig has no setting 'learning_rte'; did you mean lr"),
        ({"num_workers": 2}, "did you mean actors?"),
        ({"lr": -1.0}, "-1.0"),
        ({"max_frames": "10x"}, "'10x'"),
        ({"env": "CartPol-v1"}, "did you mean CartPole-v1?"),
        ({"env": lambda: None}, "--env"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_a_mistake_is_one_clear_error(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        zapex.train(zapex.TrainConfig(**{**FEW, **settings}))
    assert says in str(caught.value)
    assert not Path("run").exists()


def test_only_a_train_config_is_accepted() -> None:
    with pytest.raises(ConfigError, match=r"TrainConfig.*dict"):
        zapex.train(FEW)  # type: ignore[arg-type]


ENV = """
import gymnasium
class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2, start=5)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.n = 0
        return self.observation_space.sample(), {}
    def step(self, action):
        assert action in (5, 6)
        self.n += 1
        return self.observation_space.sample(), float(action == 6), self.n == 9, False, {}
"""


def python(program: str, name: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a script, or without a name cells of a notebook: a main module that is no file."""
    words = [sys.executable, "-c", program]
    if name:
        Path(name).write_text(program)
        words = [sys.executable, name]
    return subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip


def test_a_notebooks_class_is_played_inline_and_otherwise_an_error() -> None:
    cells = ENV + (
        "import zapex\n"
        "few = dict(preset='smoke', max_frames=300)\n"
        "done = zapex.train(zapex.TrainConfig(env=Mine, inline=True, run_dir='run', **few))\n"
        "policy = zapex.load_policy(done.run_dir)\n"
        "print('acts', policy([0, 0, 0]))\n"
        "try: zapex.train(zapex.TrainConfig(env=Mine, **few))\n"
        "except zapex.errors.ConfigError as error: print('error:', error)\n"
    )
    done = python(cells)
    assert done.returncode == 0, done.stderr
    assert "acts 5" in done.stdout or "acts 6" in done.stdout
    assert "error: --env Mine" in done.stdout


CALL = "import zapex\nzapex.train(zapex.TrainConfig(env=Mine, preset='smoke', max_frames=300))\n"


def test_a_script_without_a_main_guard_is_an_error() -> None:
    done = python(ENV + CALL, "mine.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("zapex.errors.ConfigError: mine:Mine")
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_script_that_no_process_imports_needs_no_main_guard() -> None:
    done = python(CALL.replace("Mine,", "'CartPole-v1',"), "mine.py")
    assert done.returncode == 0, done.stderr


def test_a_script_trains_on_its_own_class_from_any_directory() -> None:
    Path("there").mkdir()
    guarded = "if __name__ == '__main__':\n    " + CALL.replace("\n", "\n    ")
    done = python(ENV + guarded, "there/mine.py")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "300 frames are played" in done.stdout
