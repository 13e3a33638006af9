"""A stranger's run directory: every command that reads one ends at once, with one line."""

import fcntl
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support import fake_run
from zapex.cli import main as cli
from zapex.config.settings import Config
from zapex.run import checkpoints, train
from zapex.watch.recorders import JsonLines, write_result
from zapex.watch.runs import Attached
from zapex.watch.terminal import PlainLines

ESCAPE = "\x1b]0;owned\x07\x1b[2J"
DEEP = "[" * 100_000
DIGITS = "9" * 5000
CHECKPOINT = "checkpoints/step-000000000005.safetensors"
# Command -> the files that it reads; in brackets those without which it works.
READERS = {
    "runs .": "[snapshot.json] [result.json] [.lock]",
    "watch run": f"snapshot.json result.json [config.toml] [.lock] [{CHECKPOINT}]",
    "watch run --game": f"config.toml {CHECKPOINT}",
    "plot run": "config.toml metrics.jsonl",
    "compare run good": "config.toml",
    "stop run": "[snapshot.json] [.lock]",
    "eval run --episodes 1": f"config.toml {CHECKPOINT}",
    "export run --onnx x.onnx": f"config.toml {CHECKPOINT}",
    "card run": f"config.toml {CHECKPOINT} metrics.jsonl",
    "train --resume run": f"config.toml {CHECKPOINT} metrics.jsonl",
    "config --config run/config.toml": "config.toml",
    "status job": "launch.json run.toml",
    "logs learner job": "launch.json run.toml",
    "stop job": "launch.json run.toml",
}
CASES = [(command, file) for command, files in READERS.items() for file in files.split()]
UNREADABLE = ("fifo", "link to a device", "huge numbers", "nesting")
KINDS = (*UNREADABLE, "escapes", "other types")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A directory with two runs and a launched job."""
    path = tmp_path_factory.mktemp("template")
    for name in ("run", "good"):
        run = path / name
        run.mkdir()
        config = Config().replace(env="CartPole-v1", preset="smoke", hidden=8)
        (run / "config.toml").write_text(config.to_toml())
        write_result(run, fake_run.record([JsonLines(run)], 60, Path(name)), "over")
        checkpoints.save(run / "checkpoints", checkpoints.step_name(5), {}, {})
        (run / ".lock").write_text("1")
    (path / "job").mkdir()
    facts = {"on": "ray", "name": "x", "ids": {"a": "b"}}
    (path / "job" / "launch.json").write_text(json.dumps(facts))
    (path / "job" / "run.toml").write_text("[ray]\n")
    return path


@pytest.fixture(autouse=True)
def in_a_copy_where_nothing_starts(template, tmp_path, monkeypatch):
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def started(*args):
        raise AssertionError("a run was started")

    monkeypatch.setattr(train, "train", started)


def spoil(file: Path, kind: str) -> None:
    """Make a file of a run hostile."""
    lines = file.suffix == ".jsonl"
    original = file.read_text() if lines else ""
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "link to a device":
        file.symlink_to("/dev/zero")
    elif file.suffix == ".toml":
        text = {
            "escapes": f'["{ESCAPE.encode("unicode_escape").decode()}"]\n',
            "huge numbers": f"[run]\nseed = {DIGITS}\n",
            "nesting": f"[run]\n{'seed.' * 100_000}x = 1\n",
            "other types": "[run]\nseed = []\nexp = 3\n[learner]\nlr = 'x'\n",
        }[kind]
        file.write_text(text.replace(r"\x", r"\u00"))
    elif file.suffix == ".safetensors":
        state = {"nesting": DEEP, "huge numbers": DIGITS}.get(kind, json.dumps(ESCAPE))
        header = {"__metadata__": {"format": checkpoints.FORMAT, "state": state}}
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text)
    else:
        values = {
            "escapes": json.dumps(ESCAPE),
            "huge numbers": DIGITS,
            "nesting": DEEP,
            "other types": '{"facts": 3, "reason": [], "kind": "evaluation", "ids": 3, "on": []}',
        }
        text = original + values[kind] + "\n"
        if lines and kind in UNREADABLE:  # a damaged line is left out, an endless one refused
            text = original + "[" * (1 << 20)
        file.write_text(text)


def peak_bytes() -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return 1024 * int(line.split()[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("command", "file"), CASES)
def test_a_hostile_file_is_one_line(command, file, kind, capsys):
    name = file.strip("[]")
    spoil(Path("job" if command.endswith(" job") else "run") / name, kind)
    signal.alarm(20)  # a hang ends the test with a signal
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory counts from now
    before_bytes, began_s = peak_bytes(), time.process_time()
    code = cli.main(command.split())
    took_s, took_bytes = time.process_time() - began_s, peak_bytes() - before_bytes
    signal.alarm(0)
    said = capsys.readouterr()
    assert took_s < 2
    assert took_bytes < 150 << 20
    assert "\x1b" not in said.out + said.err
    if code or (kind in UNREADABLE and file == name):
        assert code == 2, said.out
        (line,) = said.err.splitlines()
        assert line.startswith("zapex: ")


def test_watching_writes_nothing():
    before = sorted(Path("run").iterdir())
    with Path("run/.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Attached(Path("run"), PlainLines()).look()
    assert sorted(Path("run").iterdir()) == before


def test_a_runs_name_cannot_move_the_cursor(capsys):
    Path("run").rename(f"run{ESCAPE}")
    assert cli.main(["runs", "."]) == 0
    assert cli.main(["watch", f"run{ESCAPE}"]) == 0
    assert cli.main(["eval", f"run{ESCAPE}x"]) == 2
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err


@pytest.mark.parametrize(
    "state",
    [
        {"policy": 3},
        {"policy": {"environment": {}, "network": {}}},
        {"policy": {"environment": 3, "network": {}}},
        {"policy": {"environment": {"env_id": 1}, "network": {}}},
        {"schema": 3},
        {"schema": {"num_actions": "2"}, "totals": [], "mean_return": "x", "counters": 3},
    ],
)
@pytest.mark.parametrize("command", ["export run --onnx x.onnx", "train --resume run"])
def test_a_checkpoint_with_facts_of_other_types_is_one_line(state, command, capsys):
    checkpoints.save(Path("run/checkpoints"), checkpoints.step_name(5), {}, state)
    assert cli.main(command.split()) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
