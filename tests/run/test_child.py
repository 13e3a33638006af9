"""A child belongs to its parent before it imports anything large."""

import json
import os
import subprocess
import sys

import pytest

from zapex.errors import ConfigError
from zapex.run import child

ORDER = child.Order("learner", {}, {}, "run", -1, -1, [], {}, 0)


def test_nothing_large_is_imported_before_a_child_is_set_up() -> None:
    code = (
        "import sys, zapex.run.child\n"
        "print(sorted({'numpy', 'numba', 'torch'} & sys.modules.keys()))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "[]\n"


def test_a_child_whose_parent_is_gone_ends_before_it_reads_its_order() -> None:
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


def test_settings_that_only_a_role_finds_impossible_are_told_to_its_parent_in_one_line(
    monkeypatch, capsys
):
    def refuse(order, incarnation):
        raise ConfigError("no GPU here")

    monkeypatch.setattr(child, "child_setup", lambda title: 1)
    monkeypatch.setattr(child, "play", refuse)
    with pytest.raises(SystemExit) as ended:
        child.main(json.dumps(vars(ORDER)))
    assert ended.value.code == os.EX_CONFIG
    assert capsys.readouterr().out == "no GPU here\n"
