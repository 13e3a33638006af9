"""Several seeds by one command, and the page on comparing runs as its reader runs it."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from zapex.cli import main as cli
from zapex.run import checkpoints

ROOT = Path(__file__).parents[2]
SHORT = ["--preset", "smoke", "--inline", "--plain", "--max-frames", "3000", "--max-minutes", "0"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("in_an_empty_directory"),
]


def parameters(run: str) -> np.ndarray:
    path = checkpoints.latest(Path(run))
    assert path is not None
    tensors = checkpoints.load(path).tensors
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


def test_each_seed_is_the_run_that_it_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "CartPole-v1", *SHORT]
    assert cli.main([*words, "--run-dir", "all", "--seeds", "1,2"]) == 0
    assert cli.main([*words, "--run-dir", "alone", "--seed", "2"]) == 0
    assert np.array_equal(parameters("all/seed-2"), parameters("alone"))
    assert not np.array_equal(parameters("all/seed-1"), parameters("all/seed-2"))
    out = capsys.readouterr().out
    assert "seed 2, run 2 of 2" in out
    assert "zapex plot all/seed-1 all/seed-2" in out
    walls = [json.loads(Path(f"all/seed-{n}/result.json").read_text())["wall_s"] for n in (1, 2)]
    assert walls[1] < sum(walls), "the second run's clock begins with it"


def test_the_page_on_comparing_does_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/comparing.md").read_text()
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S)).splitlines()
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == ["zapex"]:
            assert cli.main([*words[1:], *(SHORT if words[1] == "train" else [])]) == 0, line
    out = capsys.readouterr().out
    assert re.search(r"CartPole-v1 +3 .* lr 0\.001$", out, re.M)
    assert re.search(r"^lr +\S+ +0\.001$", out, re.M)
    assert Path("curves.png").stat().st_size > 10_000
    assert "<svg" in Path("seeds.svg").read_text()
