"""The README of the benchmarks, the scripts, their results and their smoke tests name the same."""

import re

from benchmarks.train.bench_train import MEASUREMENTS
from tests.benchmarks.quick import ROOT

BENCHMARKS = ROOT / "benchmarks"
README = (BENCHMARKS / "README.md").read_text()
ROWS = "\n".join(line for line in README.splitlines() if line.startswith("| "))
SMOKE = "\n".join(path.read_text() for path in (ROOT / "tests/benchmarks").glob("test_*.py"))


def test_every_script_is_in_the_readmes_table_and_has_a_smoke_test() -> None:
    scripts = {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("*/bench_*.py")}
    assert scripts == set(re.findall(r"\| `bench_(\w+)", ROWS))
    assert scripts == set(re.findall(r'quick\(tmp_path, "(\w+)"', SMOKE))


def test_every_measurement_of_a_whole_run_is_there_too() -> None:
    assert set(MEASUREMENTS) == set(re.findall(r"`bench_train (\w+)`", ROWS))
    assert set(MEASUREMENTS) == set(re.findall(r'quick\(tmp_path, "train", "(\w+)"', SMOKE))


def test_every_result_has_a_row_and_every_row_its_results() -> None:
    files = {path.name for path in (BENCHMARKS / "results").iterdir()}
    assert files == set(re.findall(r"`(\w+\.(?:json|png))`", ROWS))
