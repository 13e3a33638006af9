"""Joules of a processor and a GPU, from faked counters; what cannot be read says so."""

import os
import types

import pytest

from zapex.machine.power import Meter, Nvml, Rapl


def zone(root, name, energy, most=1000_000_000):
    path = root / "sys/class/powercap" / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "energy_uj").write_text(f"{energy}\n")
    (path / "max_energy_range_uj").write_text(f"{most}\n")


def test_joules_are_of_all_packages_and_not_of_their_parts_again(tmp_path):
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        zone(tmp_path, name, 5_000_000)
    rapl = Rapl(tmp_path)
    assert rapl.why == ""
    zone(tmp_path, "intel-rapl:0", 8_000_000)
    zone(tmp_path, "intel-rapl:1", 6_500_000)
    zone(tmp_path, "intel-rapl:0:0", 9_000_000)
    assert rapl.joules() == 4.5
    assert rapl.joules() == 0


def test_wrapped_counter_continues(tmp_path):
    zone(tmp_path, "intel-rapl:0", 999_000_000)
    rapl = Rapl(tmp_path)
    zone(tmp_path, "intel-rapl:0", 2_000_000)
    assert rapl.joules() == 3.0


def test_without_zones_nothing_is_readable(tmp_path):
    assert Rapl(tmp_path).joules() is None
    assert "powercap" in Rapl(tmp_path).why


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_only_root_may_read_says_so(tmp_path):
    zone(tmp_path, "intel-rapl:0", 1)
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").chmod(0)
    rapl = Rapl(tmp_path)
    assert rapl.joules() is None
    assert "only root" in rapl.why


class FakeNvml(types.SimpleNamespace):
    """NVIDIA's library, as far as it is used."""

    energy_mj = 1_000

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):  # noqa: N802
        return self.energy_mj

    def nvmlDeviceGetUtilizationRates(self, gpu):  # noqa: N802
        return types.SimpleNamespace(gpu=40)


def test_a_gpu_without_its_library_or_without_a_driver_says_what_to_do():
    def absent():
        raise ImportError

    def no_driver():
        raise RuntimeError("Driver Not Loaded")

    assert (Nvml(absent).joules(), Nvml(absent).why) == (None, "pip install nvidia-ml-py")
    assert (Nvml(no_driver).use(), Nvml(no_driver).why) == (None, "Driver Not Loaded")


def test_a_meter_has_watts_and_busy_shares(tmp_path):
    zone(tmp_path, "intel-rapl:0", 0)
    library = FakeNvml()
    meter = Meter(Rapl(tmp_path), Nvml(lambda: library)).begin([0])
    zone(tmp_path, "intel-rapl:0", 900_000_000)
    library.energy_mj += 5_000
    sum(range(2_000_000))
    found = meter.end()
    assert 0 <= found["cpu_share"] <= 1
    assert found["cpu_watts"] / found["gpu_watts"] == pytest.approx(180)
    assert found["gpu_share"] == 0.4
