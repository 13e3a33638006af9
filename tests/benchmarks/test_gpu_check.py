"""`make gpu-check` without a GPU: each step runs and writes its file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.support.machine import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_dry_run_writes_every_step(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for step in gpu_check.LIMITS_S:
        assert json.loads((tmp_path / f"{step}.json").read_text())["results"], step
