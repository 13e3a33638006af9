"""What this machine has for us: cores, memory and GPUs, with a container's limits."""

import os
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True)
class Machine:
    """cores: those we may run on; memory_bytes: what can be had now; gpus: NVIDIA devices."""

    cores: int
    memory_bytes: int
    gpus: int

    @classmethod
    def look(cls, cuda_visible_devices: str | None = None, root: Path = _ROOT) -> "Machine":
        """The machine as it is now.

        cuda_visible_devices: the environment variable of that name, where it is set.
        root: where /proc, /sys and /dev are looked for.
        """
        cores, memory_bytes = len(os.sched_getaffinity(0)), memory_fact("MemAvailable", root)
        for group in _control_groups(root):
            quota = _cpu_quota(group)
            if quota is not None:
                cores = min(cores, max(1, int(quota)))
            room = _memory_room(group)
            if room is not None:
                memory_bytes = min(memory_bytes, room)
        return cls(cores, memory_bytes, _count_gpus(cuda_visible_devices, root))

    def __str__(self) -> str:
        gpus = {0: "no GPU", 1: "1 GPU"}.get(self.gpus, f"{self.gpus} GPUs")
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        return f"{cores}, {self.memory_bytes / 2**30:.1f} GiB free, {gpus}"


def memory_fact(field: str, root: Path = _ROOT) -> int:
    """A field of /proc/meminfo, in bytes (or a count, where it has no unit); 0 where absent."""
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            number, *unit = value.split()
            return int(number) * (1024 if unit else 1)
    return 0


def tasks_room(root: Path = _ROOT) -> int | None:
    """Processes and threads that our control groups still allow; None where they set no limit."""
    rooms = []
    for group in _control_groups(root, "pids"):
        limit, used = _number(group / "pids.max"), _number(group / "pids.current")
        if limit is not None and used is not None:
            rooms.append(max(0, limit - used))
    return min(rooms, default=None)


def _control_groups(root: Path, *more: str) -> list[Path]:
    """Our control groups and all above them: the tightest limit holds."""
    groups: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        known = ("", "memory", "cpu,cpuacct", "cpu", *more)
        if controllers in known:  # "" is version 2, the named ones are version 1
            mount = root / "sys/fs/cgroup" / controllers
            inner = mount / path.lstrip("/")
            # Inside a container the path may be the host's, and our limits stand at the mount.
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
    """Cores' worth of time the group may use, or None where there is no limit."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        return int(quota) / int(period)
    quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _memory_room(group: Path) -> int | None:
    """Bytes the group may still take, or None where there is no limit; file cache gives way."""
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
    """NVIDIA devices, without importing anything that would open them."""
    present = sum(path.name[6:].isdigit() for path in (root / "dev").glob("nvidia*"))
    if cuda_visible_devices is None:
        return present
    # CUDA reads the list up to the first entry that is no device: "-1" and "" hide them all.
    visible = 0
    for entry in cuda_visible_devices.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        visible += 1
    return min(visible, present)
