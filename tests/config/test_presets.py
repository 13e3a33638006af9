"""Presets: they suit the machine and never take more memory than it can spare."""

from dataclasses import replace

import numpy as np
import pytest

from zapex.chunks.schema import Column, Schema
from zapex.config.layers import explain
from zapex.config.presets import (
    TABLE,
    Task,
    check_memory,
    choose,
    outlook,
    replay_bytes,
)
from zapex.config.settings import Config
from zapex.errors import ConfigError
from zapex.machine.gpu import Gpu
from zapex.machine.resources import Machine

GIB = 2**30
ATARI = Task(
    Schema({"obs": Column((84, 84), np.uint8, stack=4), "action": Column((), np.int64)}), atari=True
)
VECTOR = Task(
    Schema({"obs": Column((4,), np.float32), "action": Column((), np.int64)}), atari=False
)
LAPTOP = Machine(cores=2, memory_bytes=16 * GIB, gpus=0)
SERVER = Machine(cores=64, memory_bytes=512 * GIB, gpus=4)


def config_of(preset: str, task: Task, machine: Machine) -> Config:
    chosen = choose(preset, task, machine)
    return Config().replace(**{name: choice.value for name, choice in chosen.items()})


@pytest.mark.parametrize("task", [ATARI, VECTOR])
@pytest.mark.parametrize("preset", ["auto", "paper", "workstation", "laptop", "smoke"])
@pytest.mark.parametrize("machine", [LAPTOP, SERVER, Machine(1, 2 * GIB, 0)])
def test_every_preset_makes_a_valid_config_on_every_machine(
    preset: str, task: Task, machine: Machine
) -> None:
    config = config_of(preset, task, machine)
    if preset != "paper":
        check_memory(config, task.schema, machine)
        assert replay_bytes(task.schema, config) <= 0.4 * machine.memory_bytes


def test_auto_chooses_by_the_machine_and_never_the_paper() -> None:
    assert choose("auto", ATARI, LAPTOP)["preset"].value == "laptop"
    assert choose("auto", ATARI, SERVER)["preset"].value == "workstation"
    assert choose("auto", ATARI, Machine(2, GIB, 1))["preset"].value == "workstation"


def test_the_paper_preset_is_the_defaults() -> None:
    assert config_of("paper", ATARI, LAPTOP) == Config()


def test_every_value_is_explained() -> None:
    for rules in TABLE.values():
        assert all(reason.strip() for _, reason in rules.values())
    lines = explain(choose("auto", VECTOR, LAPTOP)).splitlines()
    assert "2 cores, 16.0 GiB free, no GPU" in lines[0]
    assert any("--reward-clip" in line for line in lines)


def test_what_another_network_or_loss_does_not_have_is_left_out() -> None:
    assert {"quantiles", "share_trunk"} <= choose("laptop", ATARI, LAPTOP).keys()
    own_loss = choose("laptop", replace(ATARI, any_loss=False), LAPTOP)
    assert "quantiles" not in own_loss
    assert "share_trunk" in own_loss
    own_network = choose("laptop", replace(ATARI, nature=False), LAPTOP)
    assert not {"quantiles", "share_trunk", "layer_norm"} & own_network.keys()


def test_capacity_is_cut_to_the_memory_share() -> None:
    small = Machine(cores=2, memory_bytes=4 * GIB, gpus=0)
    choice = choose("laptop", ATARI, small)["capacity"]
    assert 180_000 <= choice.value <= 0.4 * 4 * GIB / 8_000
    assert "40%" in choice.reason
    smaller = replace(small, memory_bytes=2 * GIB)  # the run's other processes need most of it
    assert "12%" in choose("laptop", ATARI, smaller)["capacity"].reason


def test_a_capacity_that_does_not_fit_is_refused_with_one_that_does() -> None:
    config = Config().replace(capacity=10_000_000)
    with pytest.raises(ConfigError, match=r"--capacity (\d+) fits") as caught:
        check_memory(config, ATARI.schema, LAPTOP)
    fitting = int(str(caught.value).split("--capacity ")[-1].split()[0])
    assert 1_500_000 < fitting < 2_000_000
    check_memory(config.replace(capacity=fitting), ATARI.schema, LAPTOP)


def test_the_outlook_is_what_was_measured() -> None:
    for minutes in (0, 20, 30):
        assert "30 after 20" in outlook("laptop", "ALE/Breakout-v5", minutes, True)
    assert "this run ends early" in outlook("laptop", "ALE/Breakout-v5", 10, True)
    assert "2.0 to 6.0 M frames" in outlook("laptop", "BreakoutNoFrameskip-v4", 10, True)
    assert "12.0 to 36.0 M frames an hour" in outlook("laptop", "ALE/Krull-v5", 0, True)
    assert "not measured" in outlook("laptop", "Acrobot-v1", 10, False)
    assert "18 after 5" in outlook("workstation", "ALE/Pong-v5", 0, True)
    assert "not measured" in outlook("paper", "ALE/Breakout-v5", 10, True)


def test_the_frames_are_on_the_gpu_where_half_of_its_memory_holds_them() -> None:
    def place(gib: int, part: str = "all") -> object:
        seen = replace(SERVER, gpu=Gpu("a GPU", gib * GIB, (9, 0)))
        chosen = choose("workstation", ATARI, seen, part)
        return chosen["replay_device"].value if "replay_device" in chosen else "cpu"

    assert place(24) == "cpu"
    assert place(200) == "cuda"
    assert place(200, "learner") == place(200, "replay") == "cpu"
    assert "replay_device" not in choose("laptop", VECTOR, LAPTOP)
