"""The models hold for every order of steps and every crash; with a rule removed they do not."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEEDED = {
    path.stem: sorted(set(re.findall(r"ifn?def (NO_\w+)", path.read_text())))
    for path in sorted(HERE.glob("*.pml"))
}
"""Model -> its rules, each of which it can be checked without."""
NEEDED["mailbox"].append("CELLS=1")

needed = shutil.which("spin") and shutil.which("cc")
pytestmark = [
    pytest.mark.slow,  # what they depend on are the models alone
    pytest.mark.skipif(not needed, reason="needs spin and a C compiler"),
]


def errors_of(model: str, directory: Path, *definitions: str) -> int:
    """How many errors spin finds in the model, searching all of its states until the first."""
    shutil.copy(HERE / f"{model}.pml", directory)
    flags = [f"-D{definition}" for definition in definitions]
    subprocess.run(["spin", *flags, "-a", f"{model}.pml"], cwd=directory, check=True, timeout=60)
    # Compiling takes longer than the search, but where there are many states and no error.
    holds = not any(definition.startswith("NO_") for definition in definitions)
    optimise = "-O1" if model == "slots" and holds else "-O0"
    compiler = ["cc", optimise, "-w", "-DSAFETY", "-o", "pan", "pan.c"]
    subprocess.run(compiler, cwd=directory, check=True, timeout=60)
    search = ["./pan", "-m1000000"]
    result = subprocess.run(
        search, cwd=directory, capture_output=True, text=True, check=False, timeout=600
    )
    assert "max search depth too small" not in result.stdout
    assert "out of memory" not in result.stdout
    return int(result.stdout.split("errors: ")[1].split()[0])


@pytest.mark.parametrize("model", NEEDED)
def test_the_model_holds(model: str, tmp_path: Path) -> None:
    assert errors_of(model, tmp_path) == 0


@pytest.mark.parametrize(
    ("model", "removed"), [(model, rule) for model, rules in NEEDED.items() for rule in rules]
)
def test_the_check_fails_without(model: str, removed: str, tmp_path: Path) -> None:
    assert errors_of(model, tmp_path, removed) == 1


def test_the_model_of_slots_holds_for_more_chunks(tmp_path: Path) -> None:
    assert errors_of("slots", tmp_path, "CHUNKS=3") == 0
