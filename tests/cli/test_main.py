"""The command line: help, which value overrides which, and what each command does."""

import ctypes
import fcntl
import json
import os
import re
import signal
import sys
import time
import tomllib
import types
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import zapex
from tests.support.stored_run import store_run
from zapex.cli import main as cli
from zapex.cli import resolve, runs
from zapex.config.fields import flag_of
from zapex.config.settings import FIELDS, Config
from zapex.envs.environments import EnvironmentSpec
from zapex.errors import CheckpointError, PeerDied
from zapex.host.parts import PARTS
from zapex.machine import gpu
from zapex.machine.resources import Machine
from zapex.run import checkpoints
from zapex.version import __version__

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")

ROOT = Path(__file__).parents[2]
SMALL = ["--env", "CartPole-v1", "--preset", "smoke"]


class Launched:
    """Stands in for zapex.run.train: what `train` was called with."""

    def __init__(self) -> None:
        self.config: Config | None = None
        self.spec: EnvironmentSpec | None = None

    def train(self, config: Config, spec: EnvironmentSpec) -> int:
        self.config, self.spec = config, spec
        return 0


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    seen = Launched()
    module = types.ModuleType("zapex.run.train")
    module.train = seen.train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "zapex.run.train", module)
    monkeypatch.setattr("zapex.run.train", module, raising=False)
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
    assert set(re.findall(r"^  ([a-z]+) ", overview, re.M)) == cli.COMMANDS.keys()


def helped(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    assert not stop.value.code
    return capsys.readouterr().out


def test_help_shows_every_flag_in_groups_with_its_value_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = helped(capsys, "train", "CartPole-v1", "--preset", "laptop", "--help")
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"--lr NUMBER +.*\[0\.0005\]", text), "the preset's, not the paper's"
    shown = set(re.findall(r"^  --(?:\[no-\])?([a-z-]+)", text, re.M))
    assert {flag_of(name).removeprefix("--") for name in FIELDS} | {"seeds", "config"} <= shown
    assert "\n  --[no-]dueling " in text
    headings = re.findall(r"^(\w.+):$", text, re.M)
    assert headings[0] == "Options"
    assert {"Replay", "Learner", "Run, limits and output"} < set(headings)


@pytest.mark.parametrize(
    ("command", "own", "others"),
    [
        ("replay", "--listen", "--lr"),
        ("actor", "--replay", "--capacity"),
        ("learner", "--stop-at-return", "--env-threads"),
        ("doctor", "--env", "--listen"),
    ],
)
def test_each_command_shows_its_own_flags(
    command: str, own: str, others: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = helped(capsys, command, "--help")
    assert f"  {own} " in text
    assert f"  {others} " not in text


def test_a_short_run_is_evaluated_before_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    laptop = ["--preset", "laptop"]
    assert settings_of(capsys, *laptop, "--max-minutes", "3").evaluator.eval_period_s == 90
    assert settings_of(capsys, *laptop, "--max-minutes", "60").evaluator.eval_period_s == 240
    asked = [*laptop, "--max-minutes", "3", "--eval-period-s", "200"]
    assert settings_of(capsys, *asked).evaluator.eval_period_s == 200


def test_names_of_other_libraries_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    config = settings_of(capsys, "Acrobot-v1", "--learning_rate", "0.25")
    assert (config.env.env, config.learner.lr) == ("Acrobot-v1", 0.25)
    config = settings_of(capsys, "--env-id", "ALE/Pong-v5", "--total-timesteps", "1M", "--track")
    assert (config.env.env, config.run.max_frames) == ("ALE/Pong-v5", 4_000_000)
    assert config.run.track


def test_output_on_a_full_disk_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["config", *SMALL]) == 2
    assert capsys.readouterr().err == "zapex: no space is left where the output is written\n"


def test_flags_override_the_file_the_preset_and_the_defaults(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[learner]\nlr = 0.5\nbatch_size = "16"\n[replay]\nlearning_starts = 99\n')
    flags = [*SMALL, "--config", str(file), "--lr", "0.25", "--seed=2k"]
    assert cli.main(["config", *flags]) == 0
    reasons = dict(re.findall(r"^#  --(\S+) +\S+  (.+)$", capsys.readouterr().out, re.M))
    assert reasons["lr"] == reasons["preset"] == "you gave it"
    assert reasons["batch-size"] == f"from {file}"
    assert "tiny" in reasons["capacity"]
    assert "n-step" not in reasons
    config = settings_of(capsys, *flags)
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


def test_the_output_of_config_gives_the_same_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = [*SMALL, "--gamma", "0.9", "--env-kwargs", "sutton_barto_reward=true"]
    config = settings_of(capsys, *args)
    assert config.env.env_kwargs == {"sutton_barto_reward": True}
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml())
    assert settings_of(capsys, "--config", str(file)) == config


def test_train_gets_settings_environment_and_a_new_directory(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *SMALL, "--exp", "trial", "--seed", "3"]) == 0
    assert launched.config is not None
    assert launched.spec is not None
    assert re.fullmatch(r"runs/CartPole-v1__trial__3__[-0-9]+", launched.config.run.run_dir)
    assert launched.spec.num_actions == 2
    assert "--batch-size" in capsys.readouterr().out


def test_a_file_for_many_hosts_leaves_out_what_a_host_chooses_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, several = tmp_path / "run.toml", ["--many-hosts", "CartPole-v1", "--device", "cpu"]
    assert cli.main(["config", *several]) == 0
    written = capsys.readouterr().out
    file.write_text(written)
    keys = {key for table in tomllib.loads(written).values() for key in table}
    assert not keys & {"actors", "capacity", "learner_threads", "max_minutes"}
    assert keys >= {"preset", "n_step", "batch_size", "device"}  # device is given
    whole = resolve.resolve(["--config", str(file)], "replay", "", part=PARTS["replay"]).config
    actor = resolve.resolve(["--config", str(file)], "actor", "", part=PARTS["actor"]).config
    assert whole.shared() == actor.shared()
    assert whole.actor.actors >= 32  # of all hosts
    assert whole.run.preset == "workstation"


@pytest.mark.parametrize(
    ("part", "has", "lacks"),
    [
        ("replay", {"--capacity", "--actors"}, {"--lr", "--envs-per-actor"}),
        ("actor", {"--envs-per-actor", "--actors"}, {"--lr", "--capacity", "--eval-episodes"}),
        ("learner", {"--lr", "--eval-episodes"}, {"--capacity", "--envs-per-actor"}),
        ("all", {"--lr", "--capacity", "--envs-per-actor", "--eval-episodes"}, set()),
    ],
)
def test_a_host_prints_the_settings_that_its_roles_use(
    part: str, has: set[str], lacks: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    resolve.prepared(resolve.resolve(SMALL, "train", ""), PARTS[part])
    shown = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert has <= shown
    assert not lacks & shown


def test_a_resumed_run_keeps_its_settings_and_directory(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path("runs/a")
    config = store_run(run, lr=0.5)
    (run / "checkpoints").rename("aside")
    assert "runs/a has no checkpoint" in refusal(capsys, "train", "--resume", "a")
    Path("aside").rename(run / "checkpoints")
    path = checkpoints.latest(run)
    assert path is not None
    assert cli.main(["train", "--resume", "a", "--max-frames", "1M"]) == 0  # its name alone
    assert launched.config == config.replace(
        resume="runs/a", run_dir="runs/a", max_frames=1_000_000
    )
    capsys.readouterr()
    line = refusal(capsys, "train", "--resume", "runs/a", "--env", "Acrobot-v1")
    assert "--env cannot change in a resumed run" in line
    path.write_bytes(path.read_bytes()[:-1])
    assert "is damaged" in refusal(capsys, "train", "--resume", "runs/a")
    checkpoints.save(run / "checkpoints", path.stem, {}, {"schema": {"num_actions": 3}})
    assert "was made for num_actions 3" in refusal(capsys, "train", "--resume", "runs/a")


def test_runs_of_the_same_moment_have_directories_of_their_own(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda *args: "now")
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    directories = set()
    for _ in range(2):
        assert cli.main(["train", *SMALL, "--quiet"]) == 0
        assert launched.config is not None
        directories.add(launched.config.run.run_dir)
        Path(launched.config.run.run_dir).mkdir(parents=True)
    assert len(directories) == 2


def test_a_failure_of_the_run_is_one_line_and_exit_code_1(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(config: Config, spec: EnvironmentSpec) -> int:
        raise PeerDied("the replay is gone:\nkilled by signal 9")

    monkeypatch.setattr("zapex.run.train.train", die)
    assert cli.main(["train", *SMALL]) == 1
    assert capsys.readouterr().err == "zapex: the replay is gone: killed by signal 9\n"


def test_eval_plays_the_saved_network_and_prints_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = store_run(Path("run")), Path("run")
    assert cli.main(["eval", "run", "--episodes", "3", "--json", "out.json"]) == 0
    printed = capsys.readouterr().out.splitlines()
    facts = json.loads((tmp_path / "out.json").read_text())
    assert printed[-1].startswith(f"mean {facts['mean']:g}")
    assert len(facts["returns"]) == 3
    assert "step-000000000007" in facts["checkpoint"]
    (run / "config.toml").write_text(config.replace(hidden=9).to_toml())
    assert "is of another network" in refusal(capsys, "eval", "run")
    assert "there is best, latest, step-" in refusal(capsys, "eval", "run", "--checkpoint", "x")


def test_a_runs_bare_name_is_found_in_runs_by_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store_run(Path("runs/one"))
    assert cli.main(["eval", "one", "--episodes", "1"]) == 0
    assert cli.main(["watch", "one"]) == 0
    with pytest.raises(CheckpointError, match="runs/one/checkpoints"):  # it has no spec
        zapex.load_policy("one")
    assert "did you mean one?" in refusal(capsys, "eval", "onee")


def test_stop_without_a_name_takes_the_run_that_is_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped: list[Path] = []
    monkeypatch.setattr(runs, "stop", lambda run_dir: stopped.append(run_dir) or 0)
    for name in ("one", "two"):
        store_run(Path("runs") / name)
    with open("runs/one/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(os.getpid(), file=lock, flush=True)
        assert cli.main(["stop"]) == 0
    assert stopped == [Path("runs/one")]


def test_a_long_eval_reports_its_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_run(Path("run"))
    assert cli.main(["eval", "run", "--episodes", "3"]) == 0
    assert capsys.readouterr().err == ""  # it took less than ten seconds
    monkeypatch.setattr("zapex.cli.play._PROGRESS_S", 0.0)
    assert cli.main(["eval", "run", "--episodes", "3"]) == 0
    said = capsys.readouterr().err.splitlines()
    played = [int(line.removesuffix(" of 3 episodes played")) for line in said]
    assert played == sorted(played)
    assert (played[0], played[-1]) == (0, 3)


@pytest.mark.skipif(find_spec("pygame") is None, reason="no pygame")
def test_a_video_drawn_by_pygame_needs_no_window_and_prints_nothing_else(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    store_run(Path("run"))
    assert cli.main(["eval", "run", "--episodes", "1", "--video", "game.mp4"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "pygame" not in out
    assert Path("game.mp4").stat().st_size > 1000


@pytest.fixture
def handle_interrupts() -> Iterator[None]:
    """Ctrl-C raises, even if a shell has started the tests in the background."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures("handle_interrupts")
@pytest.mark.parametrize("lost", ["ignored by C", "made another error"])
def test_ctrl_c_ends_the_command_even_if_the_exception_is_lost(
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

    monkeypatch.setitem(cli.COMMANDS, "config", (command, ""))
    began_s = time.monotonic()
    assert cli.main(["config"]) == 130
    assert time.monotonic() - began_s < 15
    assert capsys.readouterr().err == "zapex: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_keygen_says_where_each_key_goes_and_overwrites_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["keygen", "keys"]) == 0
    out = capsys.readouterr().out
    assert "zapex actor needs relay.key and public.json" in out
    assert {path.name for path in (tmp_path / "keys").iterdir()} == {
        "replay.key", "relay.key", "learner.key", "reader.key", "client.key", "public.json",
    }  # fmt: skip


H100 = gpu.Gpu("NVIDIA H100", 80 << 30, (9, 0), "535.104", "12.8", True, "convolutions")
BROKEN = gpu.Gpu(driver="470.57", problem="The NVIDIA driver on your system is too old")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> list[gpu.Gpu]:
    """Machines have one GPU; torch reports the last one of this list."""
    answers = [H100]
    look = Machine.look.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Machine, "look", classmethod(lambda *args, **kw: replace(look(*args, **kw), gpus=1))
    )
    monkeypatch.setattr(gpu, "look", lambda: answers[-1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return answers


def test_the_first_lines_say_where_each_role_computes(
    launched: Launched, one_gpu: list[gpu.Gpu], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *SMALL, "--eval-period-s", "0"]) == 0
    said = capsys.readouterr().out
    assert "\nactors: CPU, float32\n" in said
    assert f"\nlearner: {H100}, float32 (convolutions in TF32)\n" in said
    assert "evaluator:" not in said
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_an_unusable_gpu_is_a_warning_and_no_role_tries_it(
    launched: Launched, one_gpu: list[gpu.Gpu], capsys: pytest.CaptureFixture[str]
) -> None:
    one_gpu.append(BROKEN)
    assert cli.main(["train", *SMALL]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("WARNING")
    assert "driver 470.57" in said.err
    assert "update the NVIDIA driver" in said.err
    assert "\nlearner: CPU, float32\n" in said.out
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_an_unusable_gpu_is_an_error_with_device_cuda(
    launched: Launched, one_gpu: list[gpu.Gpu], capsys: pytest.CaptureFixture[str]
) -> None:
    one_gpu.append(BROKEN)
    said = refusal(capsys, "train", *SMALL, "--device", "cuda")
    assert "too old" in said
    assert "update the NVIDIA driver, or --device cpu" in said
    assert launched.config is None


def test_torch_is_not_asked_for_a_gpu_with_device_cpu(
    launched: Launched, one_gpu: list[gpu.Gpu], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu, "look", lambda: pytest.fail("torch was asked"))
    assert cli.main(["train", *SMALL, "--device", "cpu"]) == 0
    assert "\nlearner: CPU, float32\n" in capsys.readouterr().out
