"""`zapex export`: a network as ONNX, with the same Q values."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

import zapex
from zapex.agent import networks
from zapex.agent.export import export
from zapex.cli import main as cli
from zapex.errors import ConfigError, ZapexError

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


def few(env: str = "CartPole-v1", **more: object) -> None:
    settings = {"env": env, "preset": "smoke", "inline": True, "run_dir": "run", "max_frames": 400}
    zapex.train(zapex.TrainConfig(**(settings | more)))


@pytest.mark.parametrize("env", ["CartPole-v1", "ALE/Breakout-v5"])
def test_an_exported_network_chooses_as_the_policy_does(
    env: str, capsys: pytest.CaptureFixture[str]
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    few(env)
    assert cli.main(["export", "run", "--onnx", "policy.onnx"]) == 0
    assert "written and checked with onnxruntime: policy.onnx" in capsys.readouterr().out
    rng = np.random.default_rng(3)
    obs = rng.normal(size=(7, 4)).astype(np.float32)
    if env != "CartPole-v1":
        obs = rng.integers(0, 256, (7, 4, 84, 84), dtype=np.uint8)
    (found,) = onnxruntime.InferenceSession("policy.onnx").run(None, {"obs": obs})
    wanted = zapex.load_policy("run").q_values(obs)
    np.testing.assert_allclose(found, wanted, atol=0.02)  # of bfloat16, where the CPU has it


def test_an_export_with_other_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    network = networks.build((4,), np.float32, 2, 8, device="cpu", precision="float32")
    monkeypatch.setattr(networks.Nature, "to_plain_input", lambda self, obs: obs.flatten(1) * 1.5)
    with pytest.raises(ConfigError, match="gives other Q values than the network"):
        export(network, tmp_path / "p.onnx", "float32")


def test_full_disk_keeps_the_old_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    network = networks.build((4,), np.float32, 2, 8, device="cpu", precision="float32")
    file = tmp_path / "p.onnx"
    file.write_text("before")

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ZapexError, match="No space left"):
        export(network, file, "float32")
    assert [(path, path.read_text()) for path in tmp_path.iterdir()] == [(file, "before")]


def test_without_onnx_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few()
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert cli.main(["export", "run", "--onnx", "p.onnx"]) == 2
    assert 'pip install "zapex[onnx]"' in capsys.readouterr().err
