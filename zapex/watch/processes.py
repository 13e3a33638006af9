"""What the processes of a run use: processor time and private memory, as the kernel counts them."""

import os
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from zapex.host.metrics import ELSEWHERE

_PROCESS_PERIOD_S: Final = 2.0
_AT_ONCE: Final = 8  # reading what a process uses takes some 40 us
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class _Used(NamedTuple):
    """What a process had used at a time; `cores` since the look before."""

    started: int
    cpu_s: float
    at_ns: int
    cores: float
    private_bytes: float


class Processes:
    """Processor time and private memory of the roles' processes and of this one."""

    def __init__(self) -> None:
        self.host_cpu_share = 0.0
        self.host_memory_bytes = 0.0
        self._due_ns = 0
        self._used: dict[int, _Used] = {}  # by pid

    def look(self, pids: Iterable[int], now_ns: int) -> None:
        """Ask the kernel about new processes at once, about each other one every two seconds.

        With many processes that takes longer: a look asks about no more than _AT_ONCE known ones,
        those first that it has not asked about for the longest time.
        """
        period_ns = int(_PROCESS_PERIOD_S * 1e9)
        if now_ns >= self._due_ns:
            import psutil

            self._due_ns = now_ns + period_ns
            self.host_cpu_share = psutil.cpu_percent(None) / 100
            self.host_memory_bytes = float(psutil.virtual_memory().total)
        wanted = {*pids, os.getpid()} - {0}
        known = {pid: used for pid, used in self._used.items() if pid in wanted}
        old = [pid for pid, used in known.items() if now_ns - used.at_ns >= period_ns]
        old.sort(key=lambda pid: known[pid].at_ns)
        for pid in [*(wanted - known.keys()), *old[:_AT_ONCE]]:
            used = _ask_kernel(pid, known.pop(pid, None), now_ns)
            if used is not None:
                known[pid] = used
        self._used = known

    def alive(self, pid: int) -> bool:
        return pid == ELSEWHERE or pid in self._used

    def cpu_cores(self, pids: Collection[int] | None = None) -> float:
        return sum(used.cores for used in self._of(pids))

    def private_bytes(self, pids: Collection[int] | None = None) -> float:
        return sum(used.private_bytes for used in self._of(pids))

    def _of(self, pids: Collection[int] | None) -> Collection[_Used]:
        if pids is None:
            return self._used.values()
        return [self._used[pid] for pid in set(pids) if pid in self._used]


def _ask_kernel(pid: int, before: _Used | None, at_ns: int) -> _Used | None:
    """None if the process is gone. Reading two files takes a tenth of psutil's time."""
    try:
        stat, statm = (_read(f"/proc/{pid}/{name}") for name in ("stat", "statm"))
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()  # the name before it may hold anything
    started, cpu_s = int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    cores = 0.0
    if before is not None and before.started == started:
        cores = (cpu_s - before.cpu_s) / max(1e-9, (at_ns - before.at_ns) / 1e9)
    # Shared memory is mapped by all processes and counted once, separately.
    _, resident, shared, *_ = map(int, statm.split())
    return _Used(started, cpu_s, at_ns, cores, float((resident - shared) * _PAGE_BYTES))


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)
