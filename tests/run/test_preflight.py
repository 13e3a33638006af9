"""Preflight: what the machine lacks is found, with a hint that works."""

import errno
import os
import resource
import subprocess
import sys

import pytest

from zapex.errors import ConfigError, SharedMemoryError, ZapexError
from zapex.machine import jit
from zapex.machine.gpu import Gpu
from zapex.run import preflight
from zapex.run.preflight import Finding, check, demand, doctor

GIB = 1 << 30
H100 = Gpu("NVIDIA H100", 80 << 30, (9, 0), "535.104", "12.8", True, "convolutions")


@pytest.fixture
def machine(tmp_path):
    """A root directory with 8 GiB free, no huge pages reserved and nothing else."""
    write(tmp_path, "proc/meminfo", "MemAvailable: 8388608 kB\nHugepagesize: 2048 kB\n")
    (tmp_path / "dev").mkdir()
    return tmp_path


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def finding(what, findings):
    (one,) = [finding for finding in findings if finding.what == what]
    return one


def test_this_machine_can_run_something_small():
    before = os.listdir("/proc/self/fd")
    demand(check(1 << 20, 1))
    assert os.listdir("/proc/self/fd") == before


def test_memory_counts_the_processes_and_the_replay(machine):
    assert finding("memory", check(7 * GIB, 3, root=machine)).enough
    few = finding("memory", check(7 * GIB, 4, root=machine))
    assert (few.enough, few.found, few.needed) == (False, "8.0 GiB free", "8.2 GiB")
    assert "--capacity to 86 %" in few.hint
    light = finding("memory", check(7 * GIB, 4, without_torch=3, root=machine))
    assert (light.enough, light.needed) == (True, "7.7 GiB")


def test_too_many_processes_are_named_where_no_smaller_replay_helps(machine):
    few = finding("memory", check(GIB, 504, root=machine))
    assert not few.enough
    assert "504 processes" in few.hint
    assert "--actors" in few.hint
    assert "--capacity" not in few.hint


def test_a_containers_limit_is_the_free_memory(machine):
    write(machine, "proc/self/cgroup", "0::/\n")
    write(machine, "sys/fs/cgroup/memory.max", str(2 * GIB))
    write(machine, "sys/fs/cgroup/memory.current", str(GIB))
    few = finding("memory", check(2 * GIB, 0, root=machine))
    assert (few.enough, few.found) == (False, "1.0 GiB free")
    assert "docker run --memory 4g" in few.hint


@pytest.mark.parametrize(
    ("cgroup", "directory"), [("0::/job\n", ""), ("7:pids:/job\n5:freezer:/x\n", "pids/")]
)
def test_a_containers_limit_of_processes_counts_threads(machine, cgroup, directory):
    assert finding("processes", check(0, 4, root=machine)).found == "unlimited"
    write(machine, "proc/self/cgroup", cgroup)
    write(machine, f"sys/fs/cgroup/{directory}pids.max", "max")
    write(machine, f"sys/fs/cgroup/{directory}job/pids.max", "40")
    write(machine, f"sys/fs/cgroup/{directory}job/pids.current", "8")
    assert finding("processes", check(0, 4, root=machine)).enough
    few = finding("processes", check(0, 5, root=machine))
    assert not few.enough
    assert ("32" in few.found, "40" in few.needed) == (True, True)
    assert "docker run --pids-limit" in few.hint


def limits(monkeypatch, **values):
    """Pretend these (soft, hard) limits; all others are unlimited."""
    by_number = {getattr(resource, f"RLIMIT_{name}"): pair for name, pair in values.items()}
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda number: by_number.get(number, none))
    monkeypatch.setattr(resource, "setrlimit", by_number.__setitem__)


def test_the_limit_of_open_files_is_raised_as_far_as_allowed(monkeypatch):
    limits(monkeypatch, NOFILE=(100, 4096))
    files = finding("open files", check(0, 4))
    assert (files.enough, files.found, files.needed) == (True, "4096", "104")


def test_62_actors_need_fewer_open_files_than_the_usual_limit(monkeypatch):
    limits(monkeypatch, NOFILE=(1024, 1024))
    assert finding("open files", check(0, 1 + 62 + 3)).enough


def test_beyond_the_hard_limit_the_hint_is_for_the_administrator(monkeypatch):
    limits(monkeypatch, NOFILE=(100, 100))
    assert finding("open files", check(0, 4)).hint == "sudo prlimit --pid $$ --nofile=104:104"


def test_limits_of_address_space_and_file_size_apply_to_a_memfd(monkeypatch):
    limits(monkeypatch, AS=(GIB, 99 * GIB), FSIZE=(GIB, 99 * GIB))
    findings = check(2 * GIB, 4)
    assert finding("address space", findings).hint == f"ulimit -Sv {6 * 2**20}"
    assert finding("file size", findings).hint == f"ulimit -Sf {2 * 2**20}"


def test_the_hint_of_a_limit_works():
    code = (
        "from zapex.run.preflight import check; "
        f"print([f for f in check({GIB}, 4) if f.what == 'file size'][0].{{}})"
    )
    hint, enough = (f'{sys.executable} -c "{code.format(x)}"' for x in ("hint", "enough"))
    script = f'ulimit -Sf 1000; HINT=$({hint}); eval "$HINT"; echo "$HINT"; {enough}'
    printed = subprocess.check_output(["bash", "-c", script], text=True, timeout=60)
    assert printed.splitlines()[0].startswith("ulimit -S")
    assert printed.splitlines()[1] == "True"


def test_a_single_core_is_enough_but_could_be_better(monkeypatch, machine):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    cores = finding("cores", check(0, 4, root=machine))
    assert (cores.enough, cores.verdict) == (True, "could be better")
    assert cores.hint.startswith("taskset -apc 0-3 $$")


def test_huge_pages_are_needed_only_if_the_run_uses_them(machine):
    assert finding("huge pages", check(GIB, 1, root=machine)).verdict == "ok"
    few = finding("huge pages", check(GIB, 1, huge_pages=True, root=machine))
    assert (few.enough, few.hint) == (False, "sudo sysctl vm.nr_hugepages=512")
    write(machine, "proc/meminfo", "MemAvailable: 8388608 kB\n")
    assert not finding("huge pages", check(GIB, 1, huge_pages=True, root=machine)).enough


def test_reserved_huge_pages_are_not_free_memory(machine):
    facts = "MemAvailable: 1048576 kB\nHugepagesize: 2048 kB\nHugePages_Free: 4096\n"
    write(machine, "proc/meminfo", facts)
    assert not finding("memory", check(7 * GIB, 2, root=machine)).enough
    reserved = check(7 * GIB, 2, huge_pages=True, root=machine)
    assert finding("memory", reserved).enough
    assert finding("huge pages", reserved).enough


@pytest.mark.parametrize("function", ["memfd_create", "pidfd_open", "eventfd"])
def test_a_forbidden_feature_is_found_by_trying(monkeypatch, function):
    def refuse(*args):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, function, refuse)
    kernel = finding("kernel", check(0, 1))
    assert not kernel.enough
    assert function.partition("_")[0] in kernel.found
    assert os.strerror(errno.EPERM) in kernel.found
    assert "seccomp" in kernel.hint


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.EMFILE, "ulimit -n"), (errno.EAGAIN, "ulimit -u"), (errno.ENOSPC, "disk")],
)
def test_an_error_from_a_system_limit_says_how_to_raise_it(number, hint):
    match = f"{os.strerror(number)}: .*{hint}.*zapex doctor"
    with pytest.raises(ZapexError, match=match), preflight.limits_explained():
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(2, "No such file"), SharedMemoryError(errno.ENOSPC, "24 GiB, 3 free")],
)
def test_other_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, preflight.limits_explained():
        raise error
    assert caught.value is error


def test_a_read_only_kernel_cache_could_be_better(monkeypatch):
    monkeypatch.setattr(jit, "CACHE_DIRECTORY", None)
    assert finding("kernel cache", check(0, 1)).verdict == "could be better"


@pytest.mark.parametrize(("required", "verdict"), [(False, "could be better"), (True, "lacking")])
def test_a_gpu_that_torch_cannot_use_has_a_hint(machine, required, verdict):
    (machine / "dev/nvidia0").touch()
    broken = Gpu(driver="470.57", problem="The NVIDIA driver on your system is too old")
    gpu = finding("GPU", check(0, 1, root=machine, gpu=broken, cuda=required))
    assert gpu.verdict == verdict
    assert gpu.found == str(broken)
    assert gpu.hint.startswith("update the NVIDIA driver")
    assert ("--device cpu" in gpu.hint) == required


def test_a_gpu_that_torch_can_use_is_described(machine):
    (machine / "dev/nvidia0").touch()
    gpu = finding("GPU", check(0, 1, root=machine, gpu=H100, cuda=True))
    assert (gpu.verdict, gpu.found) == ("ok", str(H100))
    assert finding("GPU", check(0, 1, root=machine)).verdict == "ok"


def test_a_hidden_gpu_is_reported(machine):
    (machine / "dev/nvidia0").touch()
    gpu = finding("GPU", check(0, 1, cuda_visible_devices="-1", root=machine))
    assert "CUDA_VISIBLE_DEVICES=-1" in gpu.found
    assert gpu.hint == "unset CUDA_VISIBLE_DEVICES"


FINE = Finding("cores", "2 of 2", True, "2")
BETTER = Finding("cores", "1 of 4", True, "2", "taskset")
FEW = Finding("open files", "20", False, "128", "ulimit -Sn 128")


def test_everything_that_is_lacking_is_one_error():
    demand([FINE, BETTER])
    with pytest.raises(ConfigError) as refused:
        demand([FINE, FEW, FEW])
    assert str(refused.value).count(str(FEW)) == 2
    assert str(FEW) == "open files: 20; needed: 128; to fix it: ulimit -Sn 128"


def test_the_doctors_exit_code_says_whether_something_is_lacking(capsys):
    assert doctor([FINE, BETTER]) == 0
    assert "cores: taskset\n" in capsys.readouterr().out
    assert doctor([FINE, FEW]) == 1
    assert capsys.readouterr().out.endswith("Lacking: open files\n")


def test_preflight_imports_neither_torch_nor_numba():
    code = (
        "import sys; from zapex.run.preflight import check; check(0, 1); "
        "print({'numba', 'torch', 'rich'} & {*sys.modules})"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert printed == "set()\n"
