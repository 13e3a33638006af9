"""The cores, memory and GPUs that this process may use, within a container's limits."""

import os
import platform
import re
import resource
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path

from zapex.errors import ConfigError
from zapex.machine.gpu import Gpu

CORES_VARIABLE = "ZAPEX_CORES"
_ROOT = Path("/")
_LONGEST_START_S = 600.0  # a command that seems older has a clock that is wrong


@dataclass(frozen=True)
class Machine:
    """The machine as a run sees it.

    cores: physical ones that this process may use. memory_bytes: free now. gpus: NVIDIA devices.
    smt: hardware threads of a core. nodes: NUMA nodes that these cores are in. cpu_bfloat16: the
    cores multiply bfloat16. gpu: what torch says of the first GPU; None if it was not asked.
    """

    cores: int
    memory_bytes: int
    gpus: int
    smt: int = 1
    nodes: int = 1
    cpu_bfloat16: bool = False
    gpu: Gpu | None = None

    @classmethod
    def look(
        cls,
        cuda_visible_devices: str | None = None,
        root: Path = _ROOT,
        cpus: Collection[int] | None = None,
    ) -> "Machine":
        """The machine as it is now; torch is not asked.

        cuda_visible_devices: the environment variable of that name, if it is set.
        root: the directory of /proc, /sys and /dev. cpus: the hardware threads that may be used;
        None: this process's.
        """
        usable = set(os.sched_getaffinity(0) if cpus is None else cpus)
        cores, memory_bytes = physical_cores(usable, root), memory_fact("MemAvailable", root)
        smt = max(1, len(usable) // cores)
        for group in _control_groups(root):
            quota = _cpu_quota(group)
            if quota is not None:
                cores = min(cores, max(1, int(quota)))
            room = _memory_room(group)
            if room is not None:
                memory_bytes = min(memory_bytes, room)
        return cls(
            cores,
            memory_bytes,
            _count_gpus(cuda_visible_devices, root),
            smt,
            sum(bool(mine & usable) for mine in numa_nodes(root).values()) or 1,
            cpu_multiplies_bfloat16(root),
        )

    def share(self, shares: int) -> "Machine":
        """What one of so many equal runs may use; the number of GPUs stays, for all use the same.

        Raises:
            ConfigError: there is less than a core for each.
        """
        if shares > self.cores:
            raise ConfigError(
                f"{shares} runs at once need {shares} cores, and this process may use {self.cores}"
            )
        gpu = self.gpu and replace(self.gpu, memory_bytes=self.gpu.memory_bytes // shares)
        cores, memory_bytes = self.cores // shares, self.memory_bytes // shares
        return replace(self, cores=cores, memory_bytes=memory_bytes, gpu=gpu)

    @property
    def learns_on_gpu(self) -> bool:
        """Whether there is a GPU of which nothing bad is known."""
        return self.gpus > 0 and (self.gpu is None or not self.gpu.problem)

    def __str__(self) -> str:
        gpus = {0: "no GPU", 1: "1 GPU"}.get(self.gpus, f"{self.gpus} GPUs")
        if self.gpu is not None:
            gpus += " that cannot be used" if self.gpu.problem else f" ({self.gpu.name})"
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        smt = f" of {self.smt} threads" if self.smt > 1 else ""
        nodes = f", {self.nodes} NUMA nodes" if self.nodes > 1 else ""
        return f"{cores}{smt}{nodes}, {self.memory_bytes / 2**30:.1f} GiB free, {gpus}"


def physical_cores(cpus: Collection[int], root: Path = _ROOT) -> int:
    """How many cores these hardware threads are of; each counts as one where nothing is known."""
    return max(1, len(_by_core(cpus, root)))


def _by_core(cpus: Collection[int], root: Path) -> dict[str, list[int]]:
    """Hardware threads by the core that they are of; each has one where nothing is known."""
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        core = _read(root / siblings.format(cpu)).strip() or str(cpu)
        cores.setdefault(core, []).append(cpu)
    return cores


def hardware_threads(cpus: Collection[int] | None = None, root: Path = _ROOT) -> list[int]:
    """Those that this process may use; first one of each core, then the second ones.

    cpus: None: what the affinity allows.
    """
    cores = _by_core(os.sched_getaffinity(0) if cpus is None else cpus, root)
    return [cpu for turn in zip_longest(*cores.values()) for cpu in turn if cpu is not None]


def shares_of_threads(
    shares: int, cpus: Collection[int] | None = None, root: Path = _ROOT
) -> list[set[int]]:
    """Hardware threads in equal shares of whole cores, neighbours together; some may be left.

    cpus: None: what the affinity allows, at least `shares` cores.
    """
    cores = [*_by_core(os.sched_getaffinity(0) if cpus is None else cpus, root).values()]
    each = len(cores) // shares
    return [set(chain(*cores[i * each : (i + 1) * each])) for i in range(shares)]


def numa_nodes(root: Path = _ROOT) -> dict[int, set[int]]:
    """The hardware threads of each NUMA node; empty where the kernel knows no nodes."""
    return {
        int(path.name[4:]): parse_cpus(_read(path / "cpulist"))
        for path in (root / "sys/devices/system/node").glob("node[0-9]*")
    }


def near_gpu(root: Path = Path("/")) -> set[int]:
    """The hardware threads of the first GPU's node; empty if it is not known or the only one."""
    nodes = numa_nodes(root)
    for gpu in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        device = root / "sys/bus/pci/devices" / gpu.name.lower()
        try:
            node = int((device / "numa_node").read_text())
        except (OSError, ValueError):
            continue
        return nodes.get(node, set()) if len(nodes) > 1 else set()
    return set()


def parse_cpus(text: str) -> set[int]:
    """A list of the kernel, as "0-3,8", as numbers."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def cpu_name(root: Path = _ROOT) -> str:
    """The processor's name; that of its architecture where the kernel does not tell it."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def cpu_multiplies_bfloat16(root: Path = _ROOT) -> bool:
    """Decided by the CPU's flags, not by timing, so a machine always computes the same bits."""
    match = re.search(r"^flags\b.*$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return match is not None and bool({"avx512_bf16", "amx_bf16"} & set(match[0].split()))


def open_files_limit() -> int:
    """Raise this process's limit of open files as far as it may go; returns it, -1 for none.

    Children inherit it. The soft limit is often 1,024, for programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def given_cores() -> int:
    """Cores that a learner may fill: this machine's, but no more than its scheduler gave it.

    A scheduler may count cores without keeping its processes to them, as Ray does.
    """
    given, cores = os.environ.get(CORES_VARIABLE, ""), Machine.look().cores
    return max(1, min(cores, int(given))) if given.isdecimal() else cores


def idle_seconds(root: Path = _ROOT) -> float:
    """Seconds that the hardware threads of this process have idled so far, of all together."""
    return processor_seconds(os.sched_getaffinity(0), root)[0]


def processor_seconds(cpus: Collection[int], root: Path = _ROOT) -> tuple[float, float]:
    """Seconds of these hardware threads so far: those in which they idled, and all."""
    wanted = {f"cpu{cpu}" for cpu in cpus}
    lines = [line.split() for line in _read(root / "proc/stat").splitlines()]
    # User, nice, system, idle, idle while a disk works, two kinds of interrupts, stolen.
    ticks = [[int(n) for n in words[1:9]] for words in lines if words and words[0] in wanted]
    second = os.sysconf("SC_CLK_TCK")
    return sum(sum(one[3:5]) for one in ticks) / second, sum(map(sum, ticks)) / second


def process_age_s(root: Path = _ROOT) -> float:
    """Seconds since this process was started, before Python began to run; 0 if it is not known.

    Both times are of /proc: in a sandbox or container its clock may have another origin than
    CLOCK_BOOTTIME.
    """
    fields = _read(root / "proc/self/stat").rpartition(")")[2].split()  # the name may hold anything
    uptime = _read(root / "proc/uptime").split()
    try:
        age_s = float(uptime[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (IndexError, ValueError):
        return 0.0
    return age_s if 0.0 <= age_s < _LONGEST_START_S else 0.0


def memory_fact(field: str, root: Path = _ROOT) -> int:
    """A field of /proc/meminfo, in bytes (or a count, if it has no unit); 0 if absent."""
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            number, *unit = value.split()
            return int(number) * (1024 if unit else 1)
    return 0


def tasks_room(root: Path = _ROOT) -> int | None:
    """Processes and threads that the control groups still allow; None if they set no limit."""
    rooms = []
    for group in _control_groups(root, "pids"):
        limit, used = _number(group / "pids.max"), _number(group / "pids.current")
        if limit is not None and used is not None:
            rooms.append(max(0, limit - used))
    return min(rooms, default=None)


def _control_groups(root: Path, *more: str) -> list[Path]:
    """This process's control groups and their parents. The smallest limit counts."""
    groups: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        known = ("", "memory", "cpu,cpuacct", "cpu", *more)
        if controllers in known:  # "" is version 2, the named ones are version 1
            mount = root / "sys/fs/cgroup" / controllers
            inner = mount / path.lstrip("/")
            # In a container the path may be the host's; the limits are then at the mount.
            groups += [g for g in (inner, *inner.parents) if g.is_relative_to(mount)]
    return groups


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _cpu_quota(group: Path) -> float | None:
    """How many cores of time the group may use, or None if there is no limit."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        return int(quota) / int(period)
    quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _memory_room(group: Path) -> int | None:
    """Bytes that the group may still use, or None if no limit is set; file cache counts as free."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _number(group / limit_name), _number(group / used_name)
        if limit is not None and used is not None:
            facts = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines())
            return max(0, limit - used + int(facts.get("inactive_file", 0)))
    return None


def _count_gpus(cuda_visible_devices: str | None, root: Path) -> int:
    """The number of NVIDIA devices, found without opening them."""
    present = sum(path.name[6:].isdigit() for path in (root / "dev").glob("nvidia*"))
    if cuda_visible_devices is None:
        return present
    # CUDA reads the list up to the first entry that is not a device: "-1" and "" hide all.
    visible = 0
    for entry in cuda_visible_devices.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        visible += 1
    return min(visible, present)
