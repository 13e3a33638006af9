"""The quick form of a benchmark, run as a user runs it, and checks that hold for every figure."""

import json
import math
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PERCENTILES = ("p10", "p50", "p90", "p99")
_PATIENCE_S = 400  # on a machine that does much else; alone each takes half a minute at most


def quick(tmp_path: Path, *words: str) -> Any:
    """The results of `zapex bench WORDS --quick`."""
    out = tmp_path / "quick.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "zapex", "bench", *words, "--quick", "--json", str(out)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends what it has started
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said[-6000:]
    return json.loads(out.read_text())["results"]


def check_figures(results: Any, may_be_zero: Collection[str] = ()) -> None:
    """Nothing is empty, every number is finite, and none is zero but where that is said.

    may_be_zero: keys of numbers, or of whole dicts, that need not be positive.
    """
    for path, value in _walk(results):
        where = ".".join(map(str, path))
        if isinstance(value, dict | list):
            assert value, f"{where} is empty"
        if isinstance(value, dict) and set(PERCENTILES) <= set(value):
            points = [value[name] for name in PERCENTILES]
            assert points == sorted(points), f"{where}: percentiles out of order: {points}"
            assert value["n"] >= 1, where
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert math.isfinite(value), f"{where} is {value}"
            assert value > 0 or set(may_be_zero) & set(path), f"{where} is {value}"


def _walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, value
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(inner, (*path, key))
