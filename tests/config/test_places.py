"""The device and precision of each role, as a run prints them."""

from dataclasses import replace
from typing import Any

import pytest

from zapex.config.places import describe, learner_device
from zapex.config.settings import Config
from zapex.machine.gpu import Gpu
from zapex.machine.resources import Machine

PC = Machine(cores=8, memory_bytes=32 << 30, gpus=0, cpu_bfloat16=True)
OLD_PC = replace(PC, cpu_bfloat16=False)
H100 = Gpu("NVIDIA H100", 80 << 30, (9, 0), "535.104", "12.8", True, "convolutions")
STATION = replace(PC, gpus=1, gpu=H100)
OLD_STATION = replace(STATION, gpu=replace(H100, bfloat16=False, tf32=""), cpu_bfloat16=False)
CENTRAL = ", one process for all of them"
SLOW = "bfloat16 (slow: this CPU has no instructions for it)"


@pytest.mark.parametrize(
    ("machine", "settings", "actors", "learner"),
    [
        (PC, {}, "CPU, bfloat16", "CPU, bfloat16"),
        (OLD_PC, {}, "CPU, float32", "CPU, float32"),
        (PC, {"inference": "central"}, f"CPU, bfloat16{CENTRAL}", "CPU, bfloat16"),
        (STATION, {}, "CPU, bfloat16", f"{H100}, bfloat16"),
        (STATION, {"inference": "central"}, f"{H100}, bfloat16{CENTRAL}", f"{H100}, bfloat16"),
        (STATION, {"inference": "central", "inference_device": "cpu", "device": "cpu"},
         f"CPU, bfloat16{CENTRAL}", "CPU, bfloat16"),
        (STATION, {"precision": "float32"}, "CPU, bfloat16",
         f"{H100}, float32 (convolutions in TF32)"),
        (OLD_STATION, {"precision": "float32"}, "CPU, float32", f"{OLD_STATION.gpu}, float32"),
        (OLD_STATION, {"actor_precision": "bfloat16"}, f"CPU, {SLOW}",
         f"{OLD_STATION.gpu}, float32"),
    ],
)  # fmt: skip
def test_each_role_has_a_line_with_its_device_and_precision(
    machine: Machine, settings: dict[str, Any], actors: str, learner: str
) -> None:
    roles = ("actor", "replay", "learner", "evaluator")
    lines = describe(Config().replace(eval_period_s=60, **settings), machine, roles, image=True)
    assert lines[:2] == [f"actors: {actors}", f"learner: {learner}"]
    assert lines[2].startswith("evaluator: CPU")
    assert describe(Config(), PC, ("actor", "relay"), image=False) == ["actors: CPU, float32"]


def test_a_gpu_that_does_not_work_is_not_used() -> None:
    broken = replace(STATION, gpu=Gpu(problem="the driver is too old"))
    assert learner_device(Config(), broken) == "cpu"
    assert learner_device(Config().replace(device="cuda"), broken) == "cuda"
