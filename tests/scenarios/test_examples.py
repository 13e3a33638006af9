"""Documentation and examples run as written."""

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")

ROOT = Path(__file__).parents[2]


def test_the_example_in_the_replays_docstring_runs():
    from zapex import PrioritizedReplay

    block = re.search(r"(?ms)^    import numpy.*?(?=\n\S)", inspect.getdoc(PrioritizedReplay))
    names: dict[str, object] = {}
    exec(compile(textwrap.dedent(block.group()), "PrioritizedReplay.__doc__", "exec"), names)
    assert (names["applied"], names["stale"]) == (32, 0)


@pytest.mark.parametrize(
    ("page", "section"),
    [("migrate", "CleanRL"), pytest.param("sb3", "DQN", marks=pytest.mark.slow)],
)
def test_a_diff_of_the_docs_gives_a_program_that_runs(page, section):
    text = (ROOT / f"docs/{page}.md").read_text()
    lines = re.search(rf"(?s)## {section}.*?```diff\n(.*?)```", text).group(1).splitlines()
    before, after = (
        "\n".join(line[1:] for line in lines if line[:1] in kept) for kept in (" -", " +")
    )
    compile(before, f"docs/{page}.md, {section}, before", "exec")
    assert "zapex" not in before.lower()
    if page == "sb3":
        pytest.importorskip("stable_baselines3")
    few = {"50_000": "700", "1_000": "300", "learning_starts=1000": "learning_starts=300"}
    for number, smaller in few.items():
        after = after.replace(number, smaller)
    names: dict[str, object] = {}
    exec(compile(after, f"docs/{page}.md, {section}, after", "exec"), names)
    replay = names["replay"] if "replay" in names else names["model"].replay_buffer.replay
    stats = replay.stats()
    assert stats["inserted"] > 600
    assert stats["updates_applied"] > 0


def run(*arguments, timeout_s=110):
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True,
    ).stdout  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cartpole_dqn", "cartpole_two_processes"])
def test_the_cartpole_example_learns(name):
    out = run(str(ROOT / "examples" / f"{name}.py"), "--total-steps", "30000", timeout_s=600)
    assert float(re.search(r"mean return of the last 20: ([\d.]+)\n.*\{", out).group(1)) > 150


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("cartpole_dqn", "--total-steps 1500 --learning-starts 200", "mean return of the last"),
        ("sac_pendulum", "--total-steps 600 --learning-starts 200", "mean return of the last"),
        ("r2d2", "--max-seconds 5", "best mean return"),
        ("cartpole_two_processes", "--total-steps 900 --learning-starts 200", "updates"),
        ("own_env", "--max-frames 1500", "first move"),
        ("own_env", "--max-frames 1500 --whole", "first move"),
        ("own_network", "--max-frames 1500", "Q values of an upright pole"),
        ("optuna_sweep", "--trials 2 --max-frames 1500", "trial 1: complete after 1,5"),
        ("sb3_dqn", "--total-steps 2000", "effective_capacity"),
    ],
)
def test_an_example_says_what_it_found(name, words, says):
    library = {"optuna_sweep": "optuna", "sb3_dqn": "stable_baselines3"}.get(name, "zapex")
    pytest.importorskip(library)
    assert says in run(str(ROOT / "examples" / f"{name}.py"), *words.split())


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom():
    cells = json.loads((ROOT / "examples/notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = "\n".join([*code, "print('the end', result.steps, mine.steps)"])
    assert "the end" in run("-c", program)  # a main module that is no file, as in a kernel
