"""`zapex card`: the folder that publishes a run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import zapex
from tests.support.stored_run import store_run
from zapex.cli import main as cli

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


def front_matter(text: str) -> list[str]:
    """The lines of a model card that the hub reads."""
    return re.match(r"---\n(.*?)\n---\n", text, re.S)[1].splitlines()


def test_a_card_has_the_network_and_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    zapex.train(
        zapex.TrainConfig(
            env="CartPole-v1", preset="smoke", inline=True, run_dir="run", max_frames=1500,
            target_period=10, average_targets=2,
        )
    )  # fmt: skip
    evaluation = {"params_version": 3, "steps": 400, "frames": 400, "wall_s": 5.0}
    with open("run/metrics.jsonl", "a") as lines:
        for returns in ([10.0, 14.0], [9.0, 11.0]):
            facts = {"kind": "evaluation", "time": 5.0, "returns": returns, **evaluation}
            lines.write(json.dumps(facts) + "\n")
    assert cli.main(["card", "run", "--out", "out"]) == 0
    assert "hf upload USER/NAME out" in capsys.readouterr().out
    card = Path("out/README.md").read_text()
    lines = front_matter(card)
    assert lines[0] == "library_name: zapex"
    assert '- "CartPole-v1"' in lines
    assert "      value: 12.00 +/- 2.00" in lines
    for name in re.findall(r"^\* `(.+?)`", card, re.M):
        assert Path("out", name).stat().st_size > 0
    obs = np.random.default_rng(3).normal(size=(7, 4)).astype(np.float32)
    mine, theirs = zapex.load_policy("run"), zapex.load_policy("out/best.safetensors")
    assert np.array_equal(mine.q_values(obs), theirs.q_values(obs))


def test_a_run_without_an_evaluation_has_a_card_without_a_result() -> None:
    store_run(Path("run"))
    assert cli.main(["card", "run"]) == 0
    text = Path("run/card/README.md").read_text()
    assert "model-index:" not in front_matter(text)
    assert "curve" not in text


def test_a_stranger_s_module_needs_consent() -> None:
    store_run(Path("run"), env="mine:Env")
    assert cli.main(["card", "run"]) == 2
    assert not Path("run/card").exists()
