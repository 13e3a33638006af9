"""The command line: what wins over what, and one clear line for each mistake."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path

import pytest

from zapex import checkpoint, cli
from zapex.config import Config
from zapex.environments import EnvironmentSpec
from zapex.errors import PeerDied
from zapex.version import __version__

ROOT = Path(__file__).parent.parent
SMALL = ["--env", "CartPole-v1", "--preset", "smoke"]


class Launched:
    """Stands in for zapex.launch: what `train` was called with."""

    def __init__(self) -> None:
        self.config: Config | None = None
        self.spec: EnvironmentSpec | None = None

    def train(self, config: Config, spec: EnvironmentSpec) -> int:
        self.config, self.spec = config, spec
        return 0


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    seen = Launched()
    module = types.ModuleType("zapex.launch")
    module.train = seen.train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "zapex.launch", module)
    monkeypatch.setattr("zapex.launch", module, raising=False)
    return seen


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line on stderr of a command that must end with exit code 2."""
    assert cli.main(list(args)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("zapex: ")
    return lines[0]


def settings_of(capsys: pytest.CaptureFixture[str], *args: str) -> Config:
    """What `zapex config` prints."""
    assert cli.main(["config", *args]) == 0
    return Config.from_dict(tomllib.loads(capsys.readouterr().out))


def test_version_and_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"zapex {__version__}\n"
    assert cli.main([]) == 0
    overview = capsys.readouterr().out
    assert all(f"zapex {name}" in overview for name in cli._COMMANDS)


def test_help_shows_every_flag_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from zapex.cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'numba', 'gymnasium', 'numpy', 'rich'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)  # noqa: PLW1510
    assert done.returncode == 0, done.stderr
    for flag in ("--env ", "--capacity COUNT", "--stop-at-return", "--resume", "--config"):
        assert flag in done.stdout


def test_flags_win_over_the_file_the_file_over_the_preset_the_preset_over_the_paper(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[learner]\nlr = 0.5\nbatch_size = "16"\n[replay]\nlearning_starts = 99\n')
    config = settings_of(capsys, *SMALL, "--config", str(file), "--lr", "0.25", "--seed=2k")
    assert config.learner.lr == 0.25  # the flag's
    assert config.learner.batch_size == 16  # the file's
    assert config.replay.capacity == 4_096  # the preset's
    assert config.replay.n_step == 3  # the paper's
    assert config.run.seed == 2_000


def test_environment_and_preset_of_a_file_are_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[env]\nenv = "CartPole-v1"\n[run]\npreset = "smoke"\n')
    config = settings_of(capsys, "--config", str(file))
    assert (config.env.env, config.run.preset) == ("CartPole-v1", "smoke")
    assert not config.env.reward_clip


def test_auto_is_the_preset_of_a_command_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    config = settings_of(capsys, "--env", "CartPole-v1")
    assert config.run.preset in ("laptop", "workstation")


def test_what_config_prints_makes_the_same_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = [*SMALL, "--gamma", "0.9", "--env-kwargs", "sutton_barto_reward=true"]
    config = settings_of(capsys, *args)
    assert config.env.env_kwargs == {"sutton_barto_reward": True}
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml())
    assert settings_of(capsys, "--config", str(file)) == config


def test_train_gets_the_settings_the_facts_and_a_directory_of_its_own(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *SMALL, "--exp", "trial", "--seed", "3"]) == 0
    assert launched.config is not None
    assert launched.spec is not None
    assert re.fullmatch(r"runs/CartPole-v1__trial__3__[-0-9]+", launched.config.run.run_dir)
    assert launched.spec.num_actions == 2
    assert "--batch-size" in capsys.readouterr().out


def test_a_resumed_run_brings_its_settings_and_keeps_its_place(
    launched: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    config = settings_of(capsys, *SMALL, "--lr", "0.5")
    (run / "config.toml").write_text(config.to_toml())
    assert "runs/a has no checkpoint" in refusal(capsys, "train", "--resume", "runs/a")
    schema = {"env_id": "CartPole-v1", "num_actions": 2}
    path = checkpoint.save(run / "checkpoints", checkpoint.step_name(1), {}, {"schema": schema})
    assert cli.main(["train", "--resume", "runs/a", "--max-frames", "1M"]) == 0
    assert launched.config == config.replace(
        resume="runs/a", run_dir="runs/a", max_frames=1_000_000
    )
    capsys.readouterr()
    line = refusal(capsys, "train", "--resume", "runs/a", "--env", "Acrobot-v1")
    assert "--env cannot change in a run that goes on" in line
    path.write_bytes(path.read_bytes()[:-1])
    assert "is damaged" in refusal(capsys, "train", "--resume", "runs/a")
    checkpoint.save(run / "checkpoints", path.stem, {}, {"schema": {"num_actions": 3}})
    assert "was made for num_actions 3" in refusal(capsys, "train", "--resume", "runs/a")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["trian"], "there is no command 'trian'; did you mean train?"),
        (["train", "--env", "Brekout-v5"], "did you mean ALE/Breakout-v5"),
        (["train", "--env", "Pendulum-v1"], "Discrete actions"),
        (["train", *SMALL, "--lrr", "1"], "'--lrr' is no flag of `zapex train`; did you mean --lr"),
        (["train", *SMALL, "12"], "'12' is no flag"),
        (["train", *SMALL, "--lr", "fast"], "--lr: could not convert string to float: 'fast'"),
        (["train", *SMALL, "--lr", "nan"], "--lr must be a finite number, got nan"),
        (["train", *SMALL, "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["train", *SMALL, "--actors", "some"], "--actors: a count must be a whole number"),
        (["train", *SMALL, "--actors"], "--actors"),
        (["train", *SMALL, "--optimiser", "sgd"], "'rmsprop', 'adam'"),
        (["train", *SMALL, "--max-frames", "-5"], "--max-frames must be at least 0, got -5"),
        (["train", *SMALL, "--capacity", "100"], "--learning-starts must be at most --capacity"),
        (["train", "--capacity", "4M", "--env-kwargs", "img_width=160"], "--capacity"),
        (["train", *SMALL, "--env-kwargs", "oops"], "pairs like key=value, got 'oops'"),
        (["train", *SMALL, "--env-kwargs", "wings=2"], "wings"),
        (["train", "--env", "CartPole-v1", "--preset", "desktop"], "'laptop', 'smoke'"),
        (["train", "--config", "none.toml"], "none.toml cannot be read: No such file"),
        (["train", "--resume", "nowhere"], "nowhere is no run"),
        (["train", "--resume", "a", "--config", "b"], "leave --config out"),
        (["train", *SMALL, "--stop-at-return", "9", "--eval-period-s", "0"], "--eval-period-s"),
        (["eval"], "zapex eval RUN"),
        (["eval", "nowhere"], "nowhere is no run"),
        (["bench", "sumtre"], "did you mean sumtree"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *args)
    assert not list(Path.cwd().iterdir()), "nothing may have been written"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr = 3", "the tables env, actor"),
        ("[learner]\nlrr = 3", "did you mean 'lr'"),
        ("[replay]\nlr = 3", "belongs in the table [learner]"),
        ("[learner]\nlr = 'x'", "--lr must be a finite number, got 'x'"),
        ("[learner", "is not TOML"),
        ("\xff", "is not TOML"),
    ],
)
def test_a_bad_settings_file_is_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert said in refusal(capsys, "train", *SMALL, "--config", str(file))


def test_a_run_directory_that_exists_is_refused_with_the_way_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    line = refusal(capsys, "train", *SMALL, "--run-dir", "taken")
    assert "zapex train --resume taken" in line


def test_a_capacity_that_does_not_fit_is_refused_with_one_that_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    big = ["--env-kwargs", "img_height=210", "img_width=160", "stack_num=16"]
    line = refusal(capsys, "train", *big, "--capacity", "30M")
    assert re.search(r"--capacity \d+ fits", line)


def test_a_failure_that_is_not_the_users_is_one_line_and_exit_code_1(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(config: Config, spec: EnvironmentSpec) -> int:
        raise PeerDied("the replay is gone:\nkilled by signal 9")

    monkeypatch.setattr("zapex.launch.train", die)
    assert cli.main(["train", *SMALL]) == 1
    assert capsys.readouterr().err == "zapex: the replay is gone: killed by signal 9\n"


def test_eval_plays_the_saved_network_and_prints_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    from zapex.agent import networks
    from zapex.agent.learning import DQN

    run = tmp_path / "run"
    run.mkdir()
    config = settings_of(capsys, *SMALL, "--hidden", "8")
    (run / "config.toml").write_text(config.to_toml())
    network = networks.build((4,), np.float32, 2, 8, device="cpu")
    checkpoint.save(
        run / "checkpoints", checkpoint.step_name(7), DQN(network).state_dict_tensors(), {}
    )
    assert cli.main(["eval", "run", "--episodes", "3", "--json", "out.json"]) == 0
    printed = capsys.readouterr().out.splitlines()
    facts = json.loads((tmp_path / "out.json").read_text())
    assert printed[-1].startswith(f"mean {facts['mean']:g}")
    assert len(facts["returns"]) == 3
    assert "step-000000000007" in facts["checkpoint"]
    (run / "config.toml").write_text(config.replace(hidden=9).to_toml())
    assert "is of another network" in refusal(capsys, "eval", "run")
    assert "there is best, latest, step-" in refusal(capsys, "eval", "run", "--checkpoint", "x")


def blocks(language: str) -> str:
    return "\n".join(
        re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    )


def test_the_readme_names_commands_flags_and_targets_that_exist() -> None:
    from zapex.checked import flag_of
    from zapex.config import FIELDS

    shell = re.sub(r"#.*", "", blocks("sh"))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"make ([a-z-]+)", shell)) <= set(targets) | {"python"}
    assert set(re.findall(r"zapex ([a-z]+)", shell)) <= cli._COMMANDS.keys() | {"make"}
    known = {flag_of(name) for name in FIELDS} | {"--config", "--help", "--episodes", "--video"}
    known |= {"--listen", "--replay", "--keys"}
    assert set(re.findall(r"(--[a-z-]+)", shell)) <= known


def test_the_readmes_python_runs() -> None:
    exec(compile(blocks("python"), "README.md", "exec"), {})


@pytest.mark.parametrize("lost", ["ignored by C", "made another error"])
def test_a_ctrl_c_that_is_lost_on_its_way_ends_the_command_all_the_same(
    lost: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)

    def command(args: list[str]) -> int:
        if lost == "ignored by C":
            ctypes.CFUNCTYPE(None)(interrupted)()  # as Numba's callbacks are
        try:
            if lost == "made another error":
                interrupted()
        except KeyboardInterrupt:
            raise ImportError("this extension failed to import") from None
        time.sleep(20)
        return 0

    monkeypatch.setitem(cli._COMMANDS, "config", (command, ""))
    began_s = time.monotonic()
    assert cli.main(["config"]) == 130
    assert time.monotonic() - began_s < 15
    assert capsys.readouterr().err == "zapex: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_keygen_says_which_key_goes_where_and_keeps_what_is_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["keygen", "keys"]) == 0
    out = capsys.readouterr().out
    assert "zapex actor needs relay.key and public.json" in out
    assert {path.name for path in (tmp_path / "keys").iterdir()} == {
        "replay.key", "relay.key", "learner.key", "reader.key", "client.key", "public.json",
    }  # fmt: skip
    assert "never overwritten" in refusal(capsys, "keygen", "keys")
    assert "zapex keygen DIR" in refusal(capsys, "keygen")
