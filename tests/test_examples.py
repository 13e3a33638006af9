"""Documentation and examples run as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_every_block_of_the_library_documentation_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.S)
    assert len(blocks) >= 8
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        # Our own documentation: not bytes from elsewhere.
        exec(compile(block, f"docs/library.md, block {number}", "exec"), names)
    assert "effective_capacity" in capsys.readouterr().out


def run(*arguments, timeout_s=110):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True,
    ).stdout  # fmt: skip


@pytest.mark.parametrize(("name", "steps"), [("cartpole_dqn", "1500"), ("sac_pendulum", "600")])
def test_an_example_runs_from_end_to_end(name, steps):
    out = run(f"examples/{name}.py", "--total-steps", steps, "--learning-starts", "200")
    assert "episodes; mean return of the last" in out


# With forkserver test_handle.py's processes are quicker.
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_the_example_of_two_processes_runs_from_end_to_end(method):
    few = ["--total-steps", "1500", "--learning-starts", "200", "--start-method", method]
    out = run("examples/cartpole_two_processes.py", *few)
    assert "episodes; mean return of the last" in out
    assert int(re.search(r"(\d+) updates", out).group(1)) > 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cartpole_dqn", "cartpole_two_processes"])
def test_the_cartpole_example_learns(name):
    out = run(f"examples/{name}.py", "--total-steps", "30000", timeout_s=600)
    assert float(re.search(r"mean return of the last 20: ([\d.]+)\n.*\{", out).group(1)) > 150


def test_the_stable_baselines_example_runs():
    pytest.importorskip("stable_baselines3")
    out = run("examples/sb3_dqn.py", "--total-steps", "2000")
    assert "effective_capacity" in out


def test_every_zapex_name_of_the_migration_guide_is_there():
    from zapex import PrioritizedReplay, Writer

    text = (ROOT / "docs/migrate.md").read_text()
    called = set(re.findall(r"\b(replay|writer)\.(\w+)\(", text))
    assert len(called) >= 7
    for owner, name in called:
        assert hasattr({"replay": PrioritizedReplay, "writer": Writer}[owner], name), name
