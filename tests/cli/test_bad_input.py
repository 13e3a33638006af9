"""Faults of real run directories and of users' environments: one line, exit code 2.

The plain mistakes on a command line are in test_main.py. Here no process may start, and a run that
was there must stay as it was.
"""

import os
import re
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zapex.agent.architecture import layers, parameter_shapes, state_shapes
from zapex.checkpoints import file as checkpoint
from zapex.cli import main as cli
from zapex.config.settings import Config
from zapex.run import supervisor, train

TOY = "tests.support.toy_env"
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
    monkeypatch.setattr(train, "train", started)
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
    shapes = state_shapes(parameter_shapes(layers((4,), np.float32, 2, 8)))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    checkpoint.save(run / "checkpoints", checkpoint.step_name(5), tensors, state)
    return run


MISTAKES = """
# Commands.
trian                                        | did you mean train?
learn                                        | did you mean train?
evaluate run                                 | did you mean eval?
serve                                        | did you mean replay?
worker                                       | did you mean actor?
frobnicate                                   | `zapex --help` lists them
bench sumtre                                 | did you mean sumtree?
# Environments.
train --env Brekout-v5                       | did you mean ALE/Breakout-v5
train Brekout-v5                             | did you mean ALE/Breakout-v5
train CartPole                               | did you mean CartPole-v1
train --enw CartPole-v1                      | did you mean --env?
train --env-id Acrobat-v1                    | did you mean Acrobot-v1
train --env good.toml                        | --config good.toml
train CartPole-v1 Acrobot-v1                 | --env is given already
train --env ''                               | module:Id or module:callable
train Pendulum-v1                            | Discrete actions
train LunarLander-v2                         | LunarLander
train no_such_module:Env-v0                  | no module 'no_such_module'
train TOY:Lengthz                            | did you mean Lengths-v0
train TOY:dict_observations                  | with a --wrapper of your own
train TOY:many_actions                       | Discrete actions
train TOY:tiny_images                        | FlattenObservation
train TOY:not_an_environment                 | must be a gymnasium.Env class
train SMALL --env-kwargs oops                | pairs like key=value, got 'oops'
train SMALL --env-kwargs wings=2             | wings
train SMALL --env-kwargs                     | --env-kwargs KEY=VALUE
train --env-kwargs frameskip=0               | frameskip must be 1 to 60
train --env-kwargs sticky=0.25               | it takes repeat_action_probability
# Flags that other programs have.
train --lrr 1                                | did you mean --lr?
train --learning-rates 1                     | did you mean --lr?
train --buffer-size 1M                       | did you mean --capacity?
train --num-envs 8                           | did you mean --envs-per-actor?
train --workers 8                            | did you mean --actors?
train --gpu                                  | did you mean --device?
train --optimzer adam                        | did you mean --optimiser?
train --train-frequency 4                    | did you mean --samples-per-insert?
train --target-network-frequency 500         | did you mean --target-period?
train --exploration-fraction 0.1             | did you mean --eps-base?
train --wandb                                | did you mean --track?
train --total-frames 1M                      | did you mean --max-frames?
train --timesteps 1M                         | did you mean --total-timesteps?
train --max-steps 1M                         | did you mean --total-timesteps?
train --save-dir x                           | did you mean --run-dir?
train --load x                               | did you mean --resume?
train --eval-freq 10                         | did you mean --eval-period-s?
train --discount 0.9                         | did you mean --gamma?
train --multi-step 3                         | did you mean --n-step?
train --warmup 100                           | did you mean --learning-starts?
train --quiet                                | did you mean --plain?
train --exp-name a                           | did you mean --exp?
train --hidden-size 64                       | did you mean --hidden?
train --minibatch-size 64                    | did you mean --batch-size?
train --time-limit 3                         | did you mean --max-minutes?
train --target-return 475                    | did you mean --stop-at-return?
train --frobnicate 3                         | --help lists them
train -v                                     | '-v' is not a flag
train --no-lr                                | is not a flag
# Values.
train SMALL --lr fast                        | --lr must be a number, got 'fast'
train SMALL --lr 1,5                         | --lr must be a number, got '1,5'
train SMALL --lr nan                         | --lr must be a finite number, got nan
train SMALL --lr 0                           | --lr must be more than 0
train SMALL --lr                             | --lr needs a value: --lr NUMBER
train SMALL --lr --plain                     | --lr needs a value
train SMALL --batch-size 0                   | --batch-size must be at least 1, got 0
train SMALL --batch-size 1.5                 | a whole number like 5000, 200k
train SMALL --batch-size 4096                | lower the one or raise the other
train SMALL --actors some                    | --actors: a count must be a whole number
train SMALL --actors                         | --actors needs a value: --actors COUNT
train SMALL --actors 0                       | --actors must be at least 1
train SMALL --envs-per-actor 5000            | --envs-per-actor must be at most 4,096
train SMALL --optimiser sgd                  | 'rmsprop', 'adam'
train SMALL --loss l1                        | squared, huber or module:name
train SMALL --precision fp16                 | 'float32', 'bfloat16'
train SMALL --device gpu                     | 'cpu', 'cuda'
train SMALL --device cuda                    | --device cpu
train CartPole-v1 --preset desktop           | 'laptop', 'smoke'
train SMALL --max-frames -5                  | --max-frames must be at least 0, got -5
train SMALL --total-timesteps ten            | --total-timesteps: a count must be
train SMALL --total-timesteps -5             | --total-timesteps must be at least 0
train SMALL --total-timesteps 5 --max-frames 5 | give one of them
train SMALL --max-minutes inf                | --max-minutes must be a finite number
train SMALL --max-minutes -1                 | --max-minutes must be at least 0
train SMALL --max-minutes ten                | --max-minutes must be a number, got 'ten'
train SMALL --stop-at-return abc             | --stop-at-return must be a number, got 'abc'
train SMALL --stop-at-return 9 --eval-period-s 0 | --eval-period-s is 0: give
train SMALL --capacity 100                   | --learning-starts must be at most --capacity
train SMALL --capacity 10X                   | a whole number like 5000, 200k
train --capacity 4M --env-kwargs img_width=160 | fits
train SMALL --n-step 0                       | --n-step must be at least 1
train SMALL --n-step 65                      | --n-step must be at most 64
train SMALL --n-step 64 --capacity 32 --learning-starts 32 | --n-step
train SMALL --gamma 1.5                      | --gamma must be at most 1
train SMALL --alpha -1                       | --alpha must be at least 0
train SMALL --seed one                       | --seed: a count must be a whole number
train SMALL --seed -1                        | --seed must be at least 0
train SMALL --inline=maybe                   | --inline must be true or false
train SMALL --samples-per-insert -1          | --samples-per-insert must be at least 0
train SMALL --samples-per-insert 8 --samples-per-insert-tolerance 9 | 0 chooses it
train SMALL --eval-episodes 0                | --eval-episodes must be at least 1
train SMALL --exp 'a/b ../x'                 | --exp must be
train SMALL --track                          | pip install "zapex[wandb]"
train SMALL --seeds 1,x                      | --seeds must be numbers with commas, as 1,2,3
train SMALL --seeds 1,1                      | --seeds must name each seed once
train SMALL --seeds 1,,2                     | --seeds must be numbers with commas
train SMALL --seeds 1,2 --resume auto        | needs --run-dir
launch                                       | `zapex launch` needs a file: zapex launch FILE
plot                                         | `zapex plot` needs a directory: zapex plot RUN ...
plot nothing                                 | nothing is not a run
plot taken --by sed                          | --by must be one of config, seed, got 'sed'
plot taken --out x.gif                       | --out must end in .png, .svg, .pdf
plot taken --out no/x.png                    | directory that does not exist
compare taken                                | needs two runs or more
compare nothing.toml good.toml               | nothing.toml cannot be read as settings
runs nothing                                 | there is no directory nothing
watch nothing                                | nothing is not a run
watch --gme                                  | did you mean --game?
atach                                        | did you mean watch?
eval run --terminal                          | --video FILE.mp4
eval run --terminal --render                 | give one of them
eval run --render                            | there is no display here
train SMALL --visdom localhost:8097          | --visdom localhost:8097
train SMALL --visdom http://127.0.0.1:1      | --visdom http://127.0.0.1:1
# Files and directories.
train SMALL --run-dir taken                  | zapex train --resume taken
train SMALL --run-dir /proc/run              | --run-dir /proc/run cannot be created
train SMALL --run-dir file/run               | --run-dir file/run cannot be created
train SMALL --config none.toml               | none.toml cannot be read: No such file
train SMALL --config taken                   | taken cannot be read: Is a directory
train SMALL --config file                    | file is not TOML
train SMALL --config lr.toml                 | lr.toml: --lr must be a finite number, got 'fast'
train SMALL --config table.toml              | did you mean learner?
train SMALL --config key.toml                | setting is called 'learning_rate'; did you mean lr?
train SMALL --config place.toml              | belongs in the table [learner]
train --resume nowhere                       | nowhere is not a run
train --resume taken                         | taken is not a run
train --resume a --config b                  | leave --config out
config --lr fast                             | --lr must be a number
doctor --actors many                         | --actors: a count must be a whole number
simulate none.toml                           | none.toml cannot be read: No such file
simulate none.tml                            | none.tml cannot be read: No such file
simulate file                                | file is not TOML
simulate table.toml                          | did you mean learner?
# Evaluation.
eval                                         | zapex eval RUN
eval nowhere                                 | nowhere is not a run
eval run again                               | 'again' is not a flag
eval run --episodes -1                       | --episodes must be at least 1, got -1
eval run --episodes ten                      | --episodes: a count must be a whole number
eval run --epsilon 2                         | --epsilon must be 0 to 1
eval run --checkpoint newest                 | there is best, latest, step-
eval run --json no/such.json                 | --json no/such.json lies in a directory
eval run --video no/such.mp4                 | --video no/such.mp4 lies in a directory
eval run --video game.avi                    | must end in .mp4, got game.avi
eval run --device tpu                        | --device must be auto, cpu or cuda
eval run --num-episodes 3                    | did you mean --episodes?
# Several hosts.
replay --schema                              | --schema needs a value
replay --schema none.json                    | none.json cannot be read
replay --schema file                         | must be JSON
replay SMALL --listen 7711                   | --listen must be tcp://HOST:PORT
replay SMALL --listen tcp:/127.0.0.1:1       | did you mean tcp://127.0.0.1:1?
replay SMALL --listen tcp://127.0.0.1:0      | --listen tcp://127.0.0.1:0 needs a fixed port
replay SMALL --listen tcp://0.0.0.0:7711     | zapex keygen DIR
replay SMALL --listen tcp://192.0.2.1:7711 --insecure-network | does not have that address
replay SMALL --port 7711                     | did you mean --listen?
replay SMALL --keys nowhere                  | `zapex keygen` makes keys
replay SMALL --inline                        | --inline
replay SMALL --resume run                    | run is not a run: it has no config.toml
replay SMALL --network-memory 0              | --network-memory must be at least
actor SMALL --replay tcp:/127.0.0.1:1        | did you mean tcp://127.0.0.1:1?
actor SMALL --replay tcp://0.0.0.0:7711 --insecure-network | is only an address to listen at
actor SMALL --replay tcp://no.such.invalid:7711 --insecure-network | is not known here
actor SMALL --listen tcp://127.0.0.1:7711    | did you mean --replay?
actor SMALL --resume run                     | takes only --resume auto
actor SMALL --keys nowhere                   | `zapex keygen` makes keys
learner SMALL --replay tcp://192.0.2.1:7711  | --insecure-network
learner SMALL --inline                       | --inline
learner SMALL --host 10.0.0.1                | did you mean --replay?
doctor actor SMALL --replay 7711             | --replay must be tcp://HOST:PORT
doctor replay SMALL --listen 7711            | --listen must be tcp://HOST:PORT
keygen                                       | zapex keygen DIR
keygen taken                                 | never overwritten
keygen a b                                   | 'b' is not a flag
keygen /proc/new                             | cannot be made
"""

FILES = {
    "file": "not TOML = = 3",
    "lr.toml": '[learner]\nlr = "fast"',
    "table.toml": "[learnr]\nlr = 3",
    "key.toml": "[learner]\nlearning_rate = 3",
    "place.toml": "[replay]\nlr = 3",
}


def mistakes() -> list[tuple[str, str]]:
    """(command line, what its message says to do) of every line that is not a comment."""
    lines = [line.split(" | ") for line in MISTAKES.strip().splitlines() if line[0] != "#"]
    return [(command.strip(), mend.strip()) for command, mend in lines]


def test_the_table_of_mistakes_is_long_and_holds_none_twice() -> None:
    commands = [command for command, _ in mistakes()]
    assert len(set(commands)) == len(commands) >= 120


@pytest.mark.parametrize(("command", "mend"), mistakes())
def test_a_mistake_is_one_line_that_says_what_to_do(
    command: str, mend: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("taken").mkdir()
    if "eval run" in command:
        a_run()
    monkeypatch.setitem(sys.modules, "wandb", None)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    before = sorted(Path.cwd().rglob("*"))
    words = shlex.split(command.replace("TOY", TOY).replace("SMALL", " ".join(SMALL)))
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zapex: ")
    assert mend in line
    assert sorted(Path.cwd().rglob("*")) == before, "nothing may have been written"


def test_without_the_dependencies_every_command_is_one_line() -> None:
    """As after `pip install --no-deps zapex numpy numba llvmlite`; in a process of its own."""
    a_run()
    code = (
        "import sys; sys.modules |= dict.fromkeys(sys.argv[1:])\n"
        "from zapex.cli.main import main\n"
        "for command in ('train', 'eval run', 'replay', 'keygen new', 'doctor', 'demo'):\n"
        "    assert main(command.split()) == 2, command\n"
    )
    packages = ("gymnasium", "ale_py", "torch", "zmq", "psutil", "rich", "safetensors")
    done = subprocess.run(
        [sys.executable, "-c", code, *packages], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = r"zapex: this command needs \w+: pip install zapex\n"
    assert re.fullmatch(f"({line}){{6}}", done.stderr)


def test_the_doctor_of_a_host_looks_for_its_replay_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    assert cli.main(["doctor", "actor", *SMALL, "--replay", url]) == 1
    assert f"replay: start `zapex replay --listen` at {url}" in capsys.readouterr().out


def test_a_port_where_something_else_listens_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer_as_a_web_server() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(64)  # closed with unread bytes, the answer could be lost
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        pool.submit(answer_as_a_web_server)
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert cli.main(["actor", *SMALL, "--replay", url]) == 2
    assert "is not a replay: give the host and port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_actions": 6}, "num_actions 6; this run has num_actions 2"),
        ({"env_id": "Acrobot-v1", "observation_shape": [6]}, "env_id Acrobot-v1"),
    ],
)
def test_a_checkpoint_of_another_environment_is_refused_with_both_named(
    settings: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(**settings)
    assert said in refusal(capsys, "--resume", "run")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"online.value.bias": None},
            "value.bias is missing there, and this run needs (1,)",
        ),
        ({"optimiser.mean.dense1.weight": None}, "optimiser.mean.dense1.weight is missing"),
        ({"target.streams.bias": np.zeros(3)}, "target.streams.bias is (3,) there"),
    ],
)
def test_a_checkpoint_without_a_tensor_is_refused_before_anything_starts(
    change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint.latest(a_run())
    assert path is not None
    found = checkpoint.load(path)
    tensors = {name: t for name, t in (found.tensors | change).items() if t is not None}
    checkpoint.save(path.parent, path.stem, tensors, found.state)
    line = refusal(capsys, "--resume", "run")
    assert said in line
    assert path.name in line


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
