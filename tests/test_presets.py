"""Presets: what suits the machine, never more memory than there is to spare."""

from pathlib import Path

import numpy as np
import pytest

from zapex.config import Config
from zapex.errors import ConfigError
from zapex.machine import Machine
from zapex.presets import TABLE, Task, check_memory, choose, explain, outlook, replay_bytes
from zapex.schema import Column, Schema

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


def test_every_value_has_a_reason_that_is_printed() -> None:
    for rules in TABLE.values():
        assert all(reason.strip() for _, reason in rules.values())
    lines = explain(choose("auto", VECTOR, LAPTOP)).splitlines()
    assert "2 cores, 16.0 GiB free, no GPU" in lines[0]
    assert any("--reward-clip" in line and "Atari's custom" in line for line in lines)


def test_capacity_is_cut_to_the_memory_share() -> None:
    small = Machine(cores=2, memory_bytes=GIB, gpus=0)
    choice = choose("laptop", ATARI, small)["capacity"]
    assert 45_000 <= choice.value <= 0.4 * GIB / 8_000
    assert "40% of 1.0 GiB" in choice.reason


def test_a_capacity_that_does_not_fit_is_refused_with_one_that_would() -> None:
    config = Config().replace(capacity=10_000_000)
    with pytest.raises(ConfigError, match=r"--capacity (\d+) fits") as caught:
        check_memory(config, ATARI.schema, LAPTOP)
    fitting = int(str(caught.value).split("--capacity ")[-1].split()[0])
    assert 1_500_000 < fitting < 2_000_000
    check_memory(config.replace(capacity=fitting), ATARI.schema, LAPTOP)


def machine_at(root: Path, files: dict[str, str]) -> Machine:
    for name, text in {"proc/meminfo": "MemAvailable:    8388608 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine.look(None, root)


def test_a_containers_limits_count_in_cgroup_version_2(tmp_path: Path) -> None:
    machine = machine_at(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/memory.max": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{2 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
            "sys/fs/cgroup/pod/app/memory.max": "max\n",
            "sys/fs/cgroup/pod/app/memory.current": "7\n",
            "sys/fs/cgroup/pod/app/cpu.max": "150000 100000\n",
        },
    )
    assert machine == Machine(cores=1, memory_bytes=3 * GIB // 2, gpus=0)


def test_a_containers_limits_count_in_cgroup_version_1(tmp_path: Path) -> None:
    machine = machine_at(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/the/hosts/path\n2:cpu,cpuacct:/the/hosts/path\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert machine == Machine(cores=1, memory_bytes=GIB, gpus=0)


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0", 1), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0,1,2", 2)]
)
def test_gpus_are_counted_as_cuda_would_show_them(
    tmp_path: Path, visible: str | None, count: int
) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert Machine.look(visible, tmp_path).gpus == count


def test_what_to_expect_is_what_was_seen_within_the_time():
    assert "of 36 after 8" in outlook("laptop", "ALE/Breakout-v5", 10, True)
    assert "of 23 after 6" in outlook("laptop", "ALE/Breakout-v5", 7.5, True)
    assert "of 36 after 8" in outlook("laptop", "ALE/Breakout-v5", 0, True)
    assert "5.8 M frames" in outlook("laptop", "ALE/Qbert-v5", 10, True)
    assert "not measured" in outlook("laptop", "Acrobot-v1", 10, False)
    assert "not measured" in outlook("paper", "ALE/Breakout-v5", 10, True)
