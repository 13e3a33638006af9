"""Machine: what a run may use, within a container's limits, from the kernel's files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zapex.errors import ConfigError
from zapex.machine.resources import (
    CORES_VARIABLE,
    Machine,
    given_cores,
    hardware_threads,
    idle_seconds,
    numa_nodes,
    parse_cpus,
    process_age_s,
    processor_seconds,
    shares_of_threads,
)

GIB = 2**30


def machine_at(root: Path, files: dict[str, str], cpus: set[int] | None = None) -> Machine:
    for name, text in {"proc/meminfo": "MemAvailable:    8388608 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine.look(None, root, cpus or {0, 1, 2, 3})


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


def test_a_scheduler_may_give_fewer_cores_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CORES_VARIABLE, raising=False)
    cores = Machine.look().cores
    assert given_cores() == cores
    for given, usable in (("1", 1), ("1000", cores), ("0", 1), ("many", cores)):
        monkeypatch.setenv(CORES_VARIABLE, given)
        assert given_cores() == usable


def test_idle_time_is_of_usable_cores(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(
        "cpu  9 9 9 9999 9 9 9 9\n"
        + "".join(f"cpu{cpu} 7 0 5 150 50 0 1 0 0 0\n" for cpu in mine)
        + f"cpu{max(mine) + 1} 7 0 5 900 90 0 1 0 0 0\nintr 5 6\n\n"
    )
    second = os.sysconf("SC_CLK_TCK")
    assert idle_seconds(tmp_path) == len(mine) * 200 / second
    assert processor_seconds([max(mine) + 1], tmp_path) == (990 / second, 1003 / second)


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


def topology(cores: int, nodes: int = 1, smt: int = 2) -> dict[str, str]:
    """Files of a machine whose thread i and i + cores share a core, as on most PCs."""
    files = {"proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx512_bf16 sse\n"}
    for cpu in range(smt * cores):
        siblings = ",".join(str(cpu % cores + cores * i) for i in range(smt))
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings + "\n"
    each = cores // nodes
    for node in range(nodes):
        first = node * each
        ranges = [f"{first + cores * i}-{first + each - 1 + cores * i}" for i in range(smt)]
        files[f"sys/devices/system/node/node{node}/cpulist"] = ",".join(ranges) + "\n"
    return files


def test_cores_are_physical_and_nodes_usable(tmp_path: Path) -> None:
    files = topology(cores=32, nodes=2)
    whole = machine_at(tmp_path, files, cpus=set(range(64)))
    assert whole == Machine(32, 8 * GIB, 0, smt=2, nodes=2, cpu_bfloat16=True)
    assert str(whole).startswith("32 cores of 2 threads, 2 NUMA nodes, 8.0 GiB free")
    half = Machine.look(None, tmp_path, cpus=set(range(16)))
    assert half == Machine(16, 8 * GIB, 0, smt=1, nodes=1, cpu_bfloat16=True)
    both_threads = Machine.look(None, tmp_path, cpus={0, 32, 1, 33})
    assert both_threads == Machine(2, 8 * GIB, 0, smt=2, nodes=1, cpu_bfloat16=True)


def test_a_quota_is_in_cores_and_is_never_more_than_there_are(tmp_path: Path) -> None:
    quota = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "600000 100000\n"}
    files = topology(cores=4) | quota
    assert machine_at(tmp_path, files, cpus=set(range(8))).cores == 4
    assert machine_at(tmp_path, topology(cores=16) | quota, cpus=set(range(32))).cores == 6


def test_runs_at_once_have_equal_shares_of_whole_cores(tmp_path: Path) -> None:
    machine = machine_at(tmp_path, topology(cores=8), cpus=set(range(16)))
    shares = shares_of_threads(3, range(16), tmp_path)
    assert shares == [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}]
    assert (machine.share(3).cores, machine.share(3).memory_bytes) == (2, 8 * GIB // 3)
    assert machine.share(1) == machine
    with pytest.raises(ConfigError, match="9 cores"):
        machine.share(9)


def test_threads_are_listed_by_core_first(tmp_path: Path) -> None:
    machine_at(tmp_path, topology(cores=2))
    assert hardware_threads({0, 1, 2, 3}, tmp_path) == [0, 1, 2, 3]
    assert hardware_threads({0, 2, 3}, tmp_path) == [0, 3, 2]


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("5\n", {5}), ("0-2,8,10-11\n", {0, 1, 2, 8, 10, 11})]
)
def test_the_kernels_lists_of_cpus_are_read(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


def test_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == {}
    assert machine_at(tmp_path, {}).nodes == 1


@pytest.mark.parametrize(
    ("uptime", "age_s"),
    [("1000.50 9.9", 0.5), ("900.00 9.9", 0.0), ("9999999.0 9.9", 0.0), ("", 0.0)],
)
def test_age_of_the_process_is_by_the_clock_of_proc(
    tmp_path: Path, uptime: str, age_s: float
) -> None:
    """In a container, the boot time that another clock counts from may be days away."""
    (tmp_path / "proc/self").mkdir(parents=True)
    ticks = 1000 * os.sysconf("SC_CLK_TCK")
    (tmp_path / "proc/self/stat").write_text(f"7 (a) b) S {' 0' * 18} {ticks} 0 0")
    (tmp_path / "proc/uptime").write_text(uptime)
    assert process_age_s(tmp_path) == pytest.approx(age_s)


def test_the_limit_of_open_files_is_raised_for_children_too() -> None:
    code = "from zapex.machine.resources import open_files_limit as f; import os; print(f())"
    script = f"ulimit -Sn 64; {sys.executable} -c '{code}; os.system(\"ulimit -n\")'; ulimit -Hn"
    said = subprocess.check_output(["bash", "-c", script], text=True, timeout=60).split()
    assert len(set(said) - {"unlimited"}) <= 1 or said[0] == "-1"
    assert said[1] == said[2] != "64"
