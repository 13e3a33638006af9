"""A child belongs to its parent before it imports anything large."""

import json
import os
import subprocess
import sys

import pytest

from zapex.errors import ConfigError
from zapex.run import child

ORDER = child.Order("learner", {}, -1, -1, [], {}, 0)


def test_child_imports_nothing_large_before_its_setup() -> None:
    code = (
        "import sys, zapex.run.child\n"
        "print(sorted({'numpy', 'numba', 'torch'} & sys.modules.keys()))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "[]\n"


def test_orphaned_child_ends_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    order = json.dumps({"name": "actor 7", "and": "nothing that a role could start from"})
    done = subprocess.run(
        [sys.executable, "-m", "zapex.run.child", order],
        env={"ZAPEX_PARENT_PID": str(gone.pid), "ZAPEX_INCARNATION": "1"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == f"actor 7: the parent (pid {gone.pid}) is gone\n"


def test_config_error_in_a_role_is_one_line_and_a_status(monkeypatch, capsys):
    def refuse(order, incarnation):
        raise ConfigError("no GPU here")

    monkeypatch.setattr(child, "child_setup", lambda title: 1)
    monkeypatch.setattr(child, "play", refuse)
    with pytest.raises(SystemExit) as ended:
        child.main(json.dumps(vars(ORDER)))
    assert ended.value.code == os.EX_CONFIG
    assert capsys.readouterr().out == "no GPU here\n"


def test_orphaned_command_ends_before_it_imports_the_command() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "zapex", "--child", "actor 7", "version"],
        env={"ZAPEX_PARENT_PID": str(gone.pid), "ZAPEX_INCARNATION": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"actor 7: the parent (pid {gone.pid}) is gone\n" in done.stderr
    assert "zapex.cli" not in done.stderr
