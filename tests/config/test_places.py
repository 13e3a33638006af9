"""The device and precision of each role, as a run prints them."""

from dataclasses import replace

import pytest

from zapex.config.places import describe, learner_device
from zapex.config.settings import Config
from zapex.machine.gpu import Gpu
from zapex.machine.resources import Machine

ROLES = ("actor", "replay", "learner", "evaluator")
PC = Machine(cores=8, memory_bytes=32 << 30, gpus=0, cpu_bfloat16=True)
H100 = Gpu("NVIDIA H100", 80 << 30, (9, 0), "535.104", "12.8", True, "convolutions")
STATION = replace(PC, gpus=1, gpu=H100)


def lines(machine: Machine, image: bool = True, **settings: object) -> list[str]:
    return describe(Config().replace(eval_period_s=60, **settings), machine, ROLES, image)


def test_every_role_with_a_network_has_a_line() -> None:
    assert lines(PC) == [
        "actors: CPU, bfloat16",
        "learner: CPU, bfloat16",
        "evaluator: CPU, bfloat16",
    ]
    assert lines(replace(PC, cpu_bfloat16=False))[0] == "actors: CPU, float32"
    assert lines(PC, image=False)[1] == "learner: CPU, float32"
    assert describe(Config(), PC, ("actor", "relay"), True) == ["actors: CPU, bfloat16"]


def test_central_inference_uses_a_gpu_that_works() -> None:
    assert lines(PC, inference="central")[0] == "actors: CPU, bfloat16, one process for all of them"
    there = lines(STATION, inference="central")[0]
    assert there == f"actors: {H100}, bfloat16, one process for all of them"
    told = lines(STATION, inference="central", inference_device="cpu")[0]
    assert told == "actors: CPU, bfloat16, one process for all of them"


def test_float32_on_a_gpu_names_what_uses_tf32() -> None:
    assert lines(STATION)[1] == f"learner: {H100}, bfloat16"
    precise = lines(STATION, precision="float32")
    assert precise[1] == f"learner: {H100}, float32 (convolutions in TF32)"
    old = replace(STATION, gpu=replace(H100, bfloat16=False, tf32=""))
    assert lines(old)[1].endswith(", float32")


def test_actors_have_their_own_precision() -> None:
    old_cpu = replace(STATION, cpu_bfloat16=False)
    found = lines(old_cpu, precision="bfloat16")
    assert found[0] == "actors: CPU, float32"
    assert found[1].endswith("bfloat16")
    asked = lines(old_cpu, actor_precision="bfloat16")
    assert "no instructions for it" in asked[0]


@pytest.mark.parametrize(
    ("asked", "machine", "device"),
    [
        ("auto", PC, "cpu"),
        ("auto", STATION, "cuda"),
        ("auto", replace(STATION, gpu=Gpu(problem="the driver is too old")), "cpu"),
        ("cpu", STATION, "cpu"),
        ("cuda", STATION, "cuda"),
    ],
)
def test_the_learner_uses_a_gpu_that_works(asked: str, machine: Machine, device: str) -> None:
    assert learner_device(Config().replace(device=asked), machine) == device
