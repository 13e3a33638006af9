"""Documentation and examples run as written."""

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_example_in_the_replays_docstring_runs():
    from zapex import PrioritizedReplay

    block = re.search(r"(?ms)^    import numpy.*?(?=\n\S)", inspect.getdoc(PrioritizedReplay))
    names: dict[str, object] = {}
    exec(compile(textwrap.dedent(block.group()), "PrioritizedReplay.__doc__", "exec"), names)
    assert (names["applied"], names["stale"]) == (32, 0)


@pytest.mark.parametrize(
    "library", ["CleanRL", pytest.param("Stable-Baselines3", marks=pytest.mark.slow)]
)
def test_a_diff_of_the_migration_guide_gives_a_program_that_runs(library, monkeypatch):
    text = (ROOT / "docs/migrate.md").read_text()
    lines = re.search(rf"(?s)## {library}.*?```diff\n(.*?)```", text).group(1).splitlines()
    before, after = (
        "\n".join(line[1:] for line in lines if line[:1] in kept) for kept in (" -", " +")
    )
    compile(before, f"docs/migrate.md, {library}, before", "exec")
    assert "zapex" not in before.lower()
    if library == "Stable-Baselines3":
        pytest.importorskip("stable_baselines3")
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
    few = {"50_000": "700", "1_000": "300", "learning_starts=1000": "learning_starts=300"}
    for number, smaller in few.items():
        after = after.replace(number, smaller)
    names: dict[str, object] = {}
    exec(compile(after, f"docs/migrate.md, {library}, after", "exec"), names)
    stats = names["replay"].stats()
    assert stats["inserted"] > 600
    assert stats["updates_applied"] > 0


def run(*arguments, timeout_s=110):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True,
    ).stdout  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("cartpole_dqn", "1500"), ("sac_pendulum", "600")])
def test_an_example_runs_from_end_to_end(name, steps):
    out = run(f"examples/{name}.py", "--total-steps", steps, "--learning-starts", "200")
    assert "episodes; mean return of the last" in out


# With forkserver test_handle.py's processes are quicker.
@pytest.mark.parametrize(
    "method",
    [
        pytest.param("spawn", marks=pytest.mark.slow),
        pytest.param("forkserver", marks=pytest.mark.slow),
    ],
)
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


@pytest.mark.slow
def test_the_stable_baselines_example_runs():
    pytest.importorskip("stable_baselines3")
    out = run("examples/sb3_dqn.py", "--total-steps", "2000")
    assert "effective_capacity" in out
