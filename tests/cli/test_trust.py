"""A saved run's modules are not imported before the user agrees."""

import builtins
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.stored_run import store_run
from zapex.cli import main as cli

ROOT = Path(__file__).parents[2]
MINE = """
import gymnasium
from pathlib import Path
Path("imported").touch()
gymnasium.register("Mine-v0", entry_point=lambda: gymnasium.make("CartPole-v1"))
def env(**options) -> gymnasium.Env:
    Path("called").touch()
    return gymnasium.make("CartPole-v1")
"""
COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "eval": lambda run: ["eval", run, "--episodes", "1"],
    "train --resume": lambda run: ["train", "--resume", run, "--plain"],
    "learner --resume": lambda run: ["learner", "--resume", run],
    "config --config": lambda run: ["config", "--config", f"{run}/config.toml"],
    "doctor --config": lambda run: ["doctor", "--config", f"{run}/config.toml"],
}


@pytest.fixture(autouse=True)
def a_module(in_an_empty_directory: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)


def store(env: str, kwargs: dict[str, Any] | None = None) -> str:
    """A run of CartPole whose settings name another environment."""
    store_run(Path("run"), env=env, env_kwargs=kwargs or {})
    return "run"


def refused(capsys: pytest.CaptureFixture[str], args: list[str]) -> str:
    assert cli.main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def left() -> set[str]:
    """What the module has left behind."""
    return {path.name for path in Path().iterdir()} - {"mine.py", "run", "__pycache__"}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("env", ["subprocess:run", "mine:env", "mine:Mine-v0"])
def test_a_saved_runs_module_is_not_imported(
    command: str, env: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kwargs = {"args": ["touch", "pwned"]} if env.startswith("subprocess") else {}
    line = refused(capsys, COMMANDS[command](store(env, kwargs)))
    assert f"run/config.toml names '{env}'" in line
    assert "give --trust" in line
    assert left() == set()


def test_a_trusted_run_calls_only_functions_that_return_environments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = store("subprocess:run", {"args": ["touch", "pwned"]})
    for flags in (["--trust"], ["--env", "subprocess:run"]):
        assert "must be a gymnasium.Env class" in refused(capsys, ["eval", run, *flags])
    assert left() == set()


@pytest.mark.parametrize("flags", [["--trust"], ["--env", "mine:env"]])
def test_a_module_that_the_user_trusts_or_names_is_imported(flags: list[str]) -> None:
    assert cli.main(["eval", store("mine:env"), "--episodes", "1", *flags]) == 0
    assert left() == {"imported", "called"}


def test_a_run_that_was_started_here_is_not_asked_about_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    few = ["--preset", "smoke", "--inline", "--max-frames", "300", "--quiet", "--run-dir", "run"]
    assert cli.main(["train", "mine:env", *few]) == 0
    assert capsys.readouterr().out == ""
    assert cli.main(["eval", "run", "--episodes", "1"]) == 0
    assert cli.main(["config", "--config", "run/config.toml"]) == 0
    # With other arguments, or elsewhere, it is other code.
    settings = Path("run/config.toml").read_text()
    Path("run/config.toml").write_text(settings.replace("env_kwargs = {}", "env_kwargs = {a = 1}"))
    assert "mine:env" in refused(capsys, ["eval", "run"])
    Path("run/config.toml").write_text(settings)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert "mine:env" in refused(capsys, ["eval", "../run"])


def test_another_environment_than_the_runs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, ["eval", store("CartPole-v1"), "--env", "mine:env"])
    assert "--env is 'mine:env', but run plays 'CartPole-v1'" in line
    assert left() == set()


@pytest.mark.parametrize("kwargs", [{"env_id": "mine:env"}, {"a": {"b": ["mine:env"]}}])
def test_arguments_that_name_a_module_need_trust_too(
    kwargs: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "names 'mine:env'" in refused(capsys, ["eval", store("CartPole-v1", kwargs)])


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 2), ("n", 2)])
def test_the_user_is_asked_at_a_terminal(
    answer: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answered(question: str) -> str:
        asked.append(question)
        return answer

    monkeypatch.setattr(builtins, "input", answered)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert cli.main(["eval", store("mine:env"), "--episodes", "1"]) == code
    assert asked[0].endswith("Run it? [y/N] ")
    assert bool(left()) is (code == 0)


@pytest.mark.parametrize("line", ['resume = "elsewhere"', 'run_dir = "elsewhere"'])
def test_a_file_cannot_set_the_run_directory(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(f"[run]\n{line}\n")
    name = line.split(" = ", maxsplit=1)[0].replace("_", "-")
    assert f"--{name}" in refused(capsys, ["train", "--config", "run.toml"])


def test_the_working_directory_does_not_replace_installed_modules(
    tmp_path: Path,
) -> None:
    """`cd` into somebody else's run, `zapex eval .`: its numpy.py is not imported."""
    for name in ("numpy", "gymnasium", "tomllib", "safetensors"):
        Path(f"{name}.py").write_text("raise SystemExit('planted')\n")
    script = (
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "from zapex.cli.main import main; sys.exit(main(['config', 'CartPole-v1']))\n"
    )
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "planted" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("depth", [300, 480, 20_000])
def test_deeply_nested_toml_is_one_line(depth: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Some depths parse, and then are not an argument of CartPole."""
    Path("run.toml").write_text("[env]\nenv_kwargs = {a = " + "[" * depth + "]" * depth + "}\n")
    line = refused(capsys, ["config", "CartPole-v1", "--config", "run.toml"])
    assert "run.toml is not TOML" in line or "cannot be made with" in line
