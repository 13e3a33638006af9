"""Mistakes on the command line and in files: one line, exit code 2, and nothing is started.

A run that was there must stay as it was.
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

from tests.support.stored_run import CARTPOLE, store_run
from zapex.cli import main as cli
from zapex.machine import supervisor
from zapex.run import checkpoints, train

TOY = "tests.support.toy_env"
SMALL = ["--env", "CartPole-v1", "--preset", "smoke"]


@pytest.fixture(autouse=True)
def empty_directory_where_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


MISTAKES = """
# Commands, flags and words.
trian                                        | did you mean train?
serve                                        | did you mean replay?
frobnicate                                   | 'frobnicate' & --help
bench sumtre                                 | did you mean sumtree?
train --lrr 1                                | did you mean --lr?
train --frobnicate 3                         | --frobnicate & --help
train -v                                     | '-v'
train --no-lr                                | --no-lr
train CartPole-v1 Acrobot-v1                 | 'Acrobot-v1' & 'CartPole-v1'
watch --gme                                  | did you mean --game?
keygen a b                                   | 'b'
eval                                         | zapex eval RUN
plot                                         | zapex plot RUN ...
launch                                       | zapex launch FILE
logs                                         | zapex logs ROLE [RUN]
keygen                                       | zapex keygen DIR
compare taken                                | two runs
# Flags of other libraries.
train --num-envs 8                           | did you mean --envs-per-actor?
train --learning-rates 1                     | did you mean --lr?
train --timesteps 1M                         | did you mean --total-timesteps?
replay SMALL --port 7711                     | did you mean --listen?
actor SMALL --listen tcp://127.0.0.1:7711    | did you mean --replay?
eval run --num-episodes 3                    | did you mean --episodes?
# Environments.
train Brekout-v5                             | did you mean ALE/Breakout-v5
train --env good.toml                        | --config good.toml
train --env ''                               | module:Id or module:callable
train Pendulum-v1                            | Discrete actions
train LunarLander-v2                         | LunarLander
train no_such_module:Env-v0                  | no module 'no_such_module'
train TOY:Lengthz                            | did you mean Lengths-v0
train TOY:dict_observations                  | --wrapper
train TOY:many_actions                       | Discrete actions
train TOY:tiny_images                        | FlattenObservation
train TOY:not_an_environment                 | gymnasium.Env
train SMALL --env-kwargs oops                | --env-kwargs & key=value & 'oops'
train SMALL --env-kwargs wings=2             | wings
train SMALL --env-kwargs                     | --env-kwargs KEY=VALUE
train --env-kwargs frameskip=0               | frameskip & 1 to 60
train --env-kwargs sticky=0.25               | repeat_action_probability
# Values.
train SMALL --lr fast                        | --lr & 'fast'
train SMALL --lr nan                         | --lr & finite & nan
train SMALL --lr 0                           | --lr & more than 0
train SMALL --lr                             | --lr NUMBER
train SMALL --lr --plain                     | --lr needs a value
train SMALL --batch-size 0                   | --batch-size & at least 1 & got 0
train SMALL --batch-size 1.5                 | --batch-size & '1.5' & 200k
train SMALL --actors                         | --actors COUNT
train SMALL --envs-per-actor 5000            | --envs-per-actor & at most 4,096 & 5000
train SMALL --optimiser sgd                  | --optimiser & 'adam' & 'sgd'
train SMALL --loss l1                        | --loss & huber & 'l1'
train SMALL --device cuda                    | --device cpu
train CartPole-v1 --preset desktop           | --preset & 'laptop' & 'desktop'
train SMALL --inline=maybe                   | --inline & 'maybe'
train SMALL --dueling no                     | --dueling & --no-dueling & 'no'
train SMALL --exp 'a/b ../x'                 | --exp & 'a/b ../x'
train SMALL --total-timesteps -5             | --total-timesteps & at least 0 & -5
train SMALL --track                          | pip install "zapex[wandb]"
train SMALL --visdom http://127.0.0.1:1      | python -m visdom.server
train SMALL --seeds 1,x                      | --seeds & 1,x
train SMALL --seeds 1,1                      | --seeds & once
train SMALL --seeds 1,2 --seed 3             | --seeds & --seed 3
train SMALL --parallel 0                     | --parallel & at least 1 & 0
train SMALL --more-minutes 5                 | --more-minutes & --resume
train SMALL --more-frames -1                 | --more-frames & -1
eval run --episodes -1                       | --episodes & at least 1 & -1
eval run --epsilon 2                         | --epsilon & at most 1 & 2
eval run --seed -1                           | --seed & at least 0 & -1
logs learner --lines 0                       | --lines & at least 1 & 0
eval run --device tpu                        | --device & 'tpu'
plot taken --by sed                          | --by & seed & 'sed'
# Values that do not fit together.
train SMALL --batch-size 4096                | --batch-size & --learning-starts
train SMALL --capacity 100                   | --learning-starts & --capacity
train --capacity 4M --env-kwargs img_width=160 | --capacity & fits
train SMALL --n-step 64 --capacity 32 --learning-starts 32 | --n-step
train SMALL --stop-at-return 9 --eval-period-s 0 | --eval-period-s is 0
train SMALL --total-timesteps 5 --max-frames 5 | --total-timesteps & --max-frames
train SMALL --samples-per-insert 8 --samples-per-insert-tolerance 9 | tolerance & 0 chooses it
train SMALL --seeds 1,2 --resume auto        | --run-dir
train SMALL --parallel 2                     | --parallel & --seeds
eval run --terminal --render                 | --terminal & --render
eval run --render                            | display
eval run --terminal                          | --video FILE.mp4
# Files and directories.
train SMALL --run-dir taken                  | zapex train --resume taken
train SMALL --run-dir /proc/run              | --run-dir /proc/run
train SMALL --run-dir file/run               | --run-dir file/run
train SMALL --config none.toml               | none.toml & No such file
train SMALL --config taken                   | taken & Is a directory
train SMALL --config file                    | file is not TOML
train SMALL --config bare.toml               | 'lr' & learner
train SMALL --config latin.toml              | latin.toml
train SMALL --config lr.toml                 | lr.toml & --lr & 'fast'
train SMALL --config table.toml              | did you mean learner?
train SMALL --config key.toml                | 'learning_rate'; did you mean lr?
train SMALL --config place.toml              | [learner]
train --resume nowhere                       | nowhere is not a run
train --resume a --config b                  | --config
runs nothing                                 | nothing
watch nothing                                | nothing
plot nothing                                 | nothing
plot taken --out x.gif                       | --out & .png & 'x.gif'
plot taken --out no/x.png                    | --out no/x.png
compare nothing.toml good.toml               | nothing.toml
eval nowhere                                 | nowhere is not a run
eval run --checkpoint newest                 | best, latest, step-
eval run --json no/such.json                 | --json no/such.json
eval run --video game.avi                    | .mp4 & game.avi
export run                                   | --onnx policy.onnx
export run --onnx p.pt                       | .onnx & 'p.pt'
export run --onnx no/p.onnx                  | --onnx no/p.onnx
keygen taken                                 | never overwritten
keygen /proc/new                             | /proc/new
# Several hosts.
replay --schema                              | --schema needs a value
replay --schema none.json                    | none.json
replay --schema file                         | JSON
replay --schema file --capacity 0            | --capacity & at least 1 & 0
replay --schema file --writers 5000          | --writers & at most 4,096 & 5000
replay --schema file --alpha nan             | --alpha & finite & nan
replay --schema file --seed -1               | --seed & at least 0 & -1
replay --schema file --samples-per-insert -2 | --samples-per-insert & at least 0 & -2
replay --schema file --tolerance -1          | --tolerance & at least 0 & -1
replay --schema file --timeout-s 1e30        | --timeout-s & at most & 1e+30
replay SMALL --listen 7711                   | --listen & tcp://HOST:PORT
replay SMALL --listen tcp:/127.0.0.1:1       | did you mean tcp://127.0.0.1:1?
replay SMALL --listen tcp://127.0.0.1:0      | --listen tcp://127.0.0.1:0
replay SMALL --listen tcp://0.0.0.0:7711     | zapex keygen DIR
replay SMALL --listen tcp://192.0.2.1:7711 --insecure-network | --listen & 192.0.2.1
replay SMALL --keys nowhere                  | zapex keygen & nowhere
replay SMALL --inline                        | --inline
replay SMALL --network-memory 0              | --network-memory
replay SMALL --shards 2 --shard 2            | --shard & 0 to 1 & 2
replay SMALL --shard 1                       | --shards
replay SMALL --shards 0                      | --shards & at least 1 & 0
replay SMALL --shards 2 --with-learner       | --with-learner & --shards
replay SMALL --resume run                    | run is not a run
actor SMALL --resume run                     | --resume auto
actor SMALL --replay tcp://0.0.0.0:7711 --insecure-network | --replay & 0.0.0.0
actor SMALL --replay tcp://no.such.invalid:7711 --insecure-network | no.such.invalid
actor SMALL --replay tcp://127.0.0.1:1,tcp://127.0.0.1:1 | 'tcp://127.0.0.1:1' & once
learner SMALL --replay tcp://127.0.0.1:1,htp://b | htp://b
learner SMALL --replay tcp://192.0.2.1:7711  | --insecure-network
doctor actor SMALL --replay 7711             | --replay & tcp://HOST:PORT
"""

FILES = {
    "file": "not TOML = = 3",
    "bare.toml": "lr = 3",
    "lr.toml": '[learner]\nlr = "fast"',
    "table.toml": "[learnr]\nlr = 3",
    "key.toml": "[learner]\nlearning_rate = 3",
    "place.toml": "[replay]\nlr = 3",
}


def mistakes() -> list[tuple[str, list[str]]]:
    """(command line, texts in its error) of every line that is not a comment."""
    lines = [line.split(" | ") for line in MISTAKES.strip().splitlines() if line[0] != "#"]
    return [(command.strip(), texts.strip().split(" & ")) for command, texts in lines]


@pytest.mark.parametrize(("command", "texts"), mistakes())
def test_a_mistake_is_one_line_with_setting_value_and_hint(
    command: str, texts: list[str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("latin.toml").write_bytes(b"\xff")
    Path("taken").mkdir()
    if command.startswith(("eval run", "export run")):
        store_run(Path("run"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    before = sorted(Path.cwd().rglob("*"))
    words = shlex.split(command.replace("TOY", TOY).replace("SMALL", " ".join(SMALL)))
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zapex: ")
    assert not [text for text in texts if text not in line], line
    assert sorted(Path.cwd().rglob("*")) == before, "nothing may have been written"


def test_without_the_dependencies_every_command_is_one_line() -> None:
    """As after `pip install --no-deps zapex numpy numba llvmlite`; in a process of its own."""
    store_run(Path("run"))
    code = (
        "import sys; sys.modules |= dict.fromkeys(sys.argv[1:])\n"
        "from zapex.cli.main import main\n"
        "for command in ('train', 'eval run', 'replay', 'keygen new', 'doctor', 'demo'):\n"
        "    assert main(command.split()) == 2, command\n"
    )
    packages = ("gymnasium", "ale_py", "torch", "zmq", "rich", "safetensors")
    done = subprocess.run(
        [sys.executable, "-c", code, *packages], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = r"zapex: this command needs \w+: pip install zapex\n"
    assert re.fullmatch(f"({line}){{6}}", done.stderr)


def test_the_doctor_of_a_host_checks_that_its_replay_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    assert cli.main(["doctor", "actor", *SMALL, "--replay", url]) == 1
    assert f"zapex replay --listen` at {url}" in capsys.readouterr().out


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
    assert "is not a replay" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"num_actions": 6}, ("num_actions 6", "num_actions 2")),
        ({"env_id": "Acrobot-v1", "observation_shape": [6]}, ("Acrobot-v1", "CartPole-v1")),
    ],
)
def test_a_checkpoint_of_another_environment_is_refused_with_both_named(
    settings: dict[str, Any], texts: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    store_run(Path("run"), CARTPOLE | settings)
    line = refusal(capsys, "--resume", "run")
    assert all(text in line for text in texts), line


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"online.value.bias": None}, "value.bias"),
        ({"optimiser.mean.dense1.weight": None}, "optimiser.mean.dense1.weight"),
        ({"target.streams.bias": np.zeros(3)}, "target.streams.bias"),
    ],
)
def test_a_checkpoint_without_a_tensor_is_refused_before_anything_starts(
    change: dict[str, Any], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store_run(Path("run"))
    path = checkpoints.latest(Path("run"))
    assert path is not None
    found = checkpoints.load(path)
    tensors = {name: t for name, t in (found.tensors | change).items() if t is not None}
    checkpoints.save(path.parent, path.stem, tensors, found.state)
    line = refusal(capsys, "--resume", "run")
    assert name in line
    assert path.name in line


@pytest.mark.parametrize("damage", ["cut short", "a bit flipped", "no checkpoint at all"])
def test_a_damaged_checkpoint_is_refused_and_left_as_it_is(
    damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store_run(Path("run"))
    path = checkpoints.latest(Path("run"))
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
