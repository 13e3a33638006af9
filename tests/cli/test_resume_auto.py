"""`--resume auto`: one command line that starts a run or resumes it."""

from pathlib import Path

import pytest

from tests.support.stored_run import store_run
from zapex.cli import main as cli
from zapex.config.settings import Config
from zapex.run import networked, train

RUN = ["--run-dir", "run", "--resume", "auto"]


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The settings of each run that is started, in a directory of its own."""
    started: list[Config] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train", lambda config, spec: started.append(config) or 0)
    Path("run.toml").write_text('[env]\nenv = "CartPole-v1"\n[run]\npreset = "smoke"\nseed = 7\n')
    return started


def zapex_train(*more: str) -> None:
    assert cli.main(["train", "--config", "run.toml", *RUN, "--plain", *more]) == 0


def test_a_missing_run_is_started(configs: list[Config]) -> None:
    zapex_train()
    (config,) = configs
    assert (config.run.resume, config.run.run_dir, config.run.seed) == ("", "run", 7)


def test_a_run_with_a_checkpoint_is_resumed_with_its_settings(configs: list[Config]) -> None:
    store_run(Path("run"), seed=3)
    zapex_train()
    (config,) = configs
    assert (config.run.resume, config.run.run_dir) == ("run", "run")
    assert (config.run.seed, config.learner.hidden) == (3, 8)


def test_a_directory_without_a_checkpoint_is_renamed(
    configs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    for n in (1, 2):
        Path("run").mkdir()
        Path("run/notes.txt").write_text(str(n))
        zapex_train()
        assert f"run.{n}" in capsys.readouterr().out
        assert Path(f"run.{n}/notes.txt").read_text() == str(n)
    assert [config.run.resume for config in configs] == ["", ""]


def test_a_replays_host_is_resumed_only_with_a_saved_replay(
    configs: list[Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(networked, "run_part", lambda config, *more: configs.append(config) or 0)
    url = ["--listen", f"ipc://{Path.cwd()}/replay", "--plain"]
    assert cli.main(["replay", "--config", "run.toml", *RUN, *url, "--seed", "3"]) == 0
    Path("run").mkdir()
    Path("run/config.toml").write_text(configs[0].to_toml())
    assert cli.main(["replay", "--config", "run.toml", *RUN, *url]) == 0
    assert (Path("run.1/config.toml").exists(), configs[1].run.resume) == (True, "")
    assert configs[1].run.seed == 7
    Path("run/replay").mkdir(parents=True)
    Path("run/config.toml").write_text(configs[0].to_toml())
    assert cli.main(["replay", "--resume", "run", *url]) == 2
    assert "--save-replay stop" in capsys.readouterr().err
    Path("run/replay/manifest.json").write_text("{}")
    for words in (["--config", "run.toml", *RUN], ["--resume", "run"]):
        assert cli.main(["replay", *words, *url, "--save-replay", "always"]) == 0
        config = configs.pop()
        assert (config.run.resume, config.run.run_dir, config.run.seed) == ("run", "run", 3)
        assert config.replay.save_replay == "always"


@pytest.mark.parametrize("command", ["actor", "learner"])
def test_a_host_without_the_replay_cannot_save_it(
    configs: list[Config], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = ["--env", "CartPole-v1", "--preset", "smoke", "--save-replay", "stop"]
    assert cli.main([command, *words]) == 2
    assert f"`zapex {command}` has none to save" in capsys.readouterr().err


def test_it_needs_a_run_directory_and_actors_resume_nothing_else(
    configs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "CartPole-v1", "--resume", "auto"]) == 2
    assert "--run-dir" in capsys.readouterr().err
    assert cli.main(["actor", "--env", "CartPole-v1", "--resume", "run"]) == 2
    assert "--resume auto" in capsys.readouterr().err
    assert configs == []
