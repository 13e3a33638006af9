"""A child belongs to its parent before it imports anything large."""

import json
import subprocess
import sys


def test_nothing_large_is_imported_before_a_child_is_set_up() -> None:
    code = (
        "import sys, zapex.birth; print(sorted({'numpy', 'numba', 'torch'} & sys.modules.keys()))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "[]\n"


def test_a_child_whose_parent_is_gone_ends_before_it_reads_its_order() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    order = json.dumps({"name": "actor 7", "and": "nothing that a role could start from"})
    done = subprocess.run(
        [sys.executable, "-m", "zapex.birth", order],
        env={"ZAPEX_PARENT_PID": str(gone.pid), "ZAPEX_INCARNATION": "1"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == f"actor 7: the parent (pid {gone.pid}) is gone\n"
