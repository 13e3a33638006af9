"""Energy of the processor (RAPL, by powercap), and energy and use of a GPU (NVML)."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from zapex.machine.resources import processor_seconds


class Rapl:
    """Joules that the processor packages have used; the kernel's counters wrap.

    root: the directory of /sys. `why` says why it cannot be read; "": it can.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        zones = sorted((root / "sys/class/powercap").glob("intel-rapl:[0-9]*"))
        self._zones = [zone for zone in zones if zone.name.count(":") == 1]
        self.why = "" if self._zones else "the kernel has no powercap zones"
        try:
            self._before = self._read()
        except (OSError, ValueError) as error:
            self.why = f"only root may read it ({error})"

    def joules(self) -> float | None:
        """Since the last call, or the beginning; None: not readable."""
        if self.why:
            return None
        try:
            now, before = self._read(), self._before
        except (OSError, ValueError) as error:
            self.why = str(error)
            return None
        self._before = now
        used = 0
        for (zone, after), earlier in zip(now.items(), before.values(), strict=True):
            used += after - earlier
            if after < earlier:
                used += int((zone / "max_energy_range_uj").read_text())
        return used / 1e6

    def _read(self) -> dict[Path, int]:
        return {zone: int((zone / "energy_uj").read_text()) for zone in self._zones}


class Nvml:
    """The first GPU's joules and utilisation, by NVIDIA's library. `why`: as of Rapl."""

    def __init__(self, load: Callable[[], Any] | None = None) -> None:
        self.why, self._before = "", 0.0
        try:
            self._nvml = (load or _pynvml)()
            self._nvml.nvmlInit()
            self._gpu = self._nvml.nvmlDeviceGetHandleByIndex(0)
            self._before = self._energy()
        except ImportError:
            self.why = "pip install nvidia-ml-py"
        except Exception as error:  # the library's own class, of a package that may be absent
            self.why = str(error) or repr(error)

    def joules(self) -> float | None:
        """Since the last call, or the beginning; None: not readable."""
        if self.why:
            return None
        before, self._before = self._before, self._energy()
        return self._before - before

    def use(self) -> float | None:
        """The share of the last second in which a kernel ran; None: not readable."""
        if self.why:
            return None
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu) / 100

    def _energy(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)) / 1e3


def _pynvml() -> Any:
    import pynvml

    return pynvml


class Meter:
    """What the machine used between `begin` and `end`.

    found: cpu_share (busy share of the hardware threads `cpus`), cpu_watts, gpu_share, gpu_watts;
    None for what cannot be read.
    """

    def __init__(self, rapl: Rapl | None = None, nvml: Nvml | None = None) -> None:
        self.rapl, self.nvml = rapl or Rapl(), nvml or Nvml()

    def begin(self, cpus: list[int]) -> Self:
        """Start to measure."""
        self._cpus, self._began_s = cpus, time.monotonic()
        self._before = processor_seconds(cpus)
        with suppress(Exception):
            self.rapl.joules()
            self.nvml.joules()
        return self

    def end(self) -> dict[str, float | None]:
        """What was found since `begin`."""
        seconds = time.monotonic() - self._began_s
        cpu, gpu = self.rapl.joules(), self.nvml.joules()
        now = processor_seconds(self._cpus)
        idle, whole = (a - b for a, b in zip(now, self._before, strict=True))
        return {
            "cpu_share": 1 - idle / whole if whole else 0.0,
            "cpu_watts": None if cpu is None else cpu / seconds,
            "gpu_share": self.nvml.use(),
            "gpu_watts": None if gpu is None else gpu / seconds,
        }
