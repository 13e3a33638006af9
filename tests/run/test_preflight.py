"""Preflight: what the machine lacks is found, with a remedy that works."""

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
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def finding(what, findings):
    (one,) = [finding for finding in findings if finding.what == what]
    return one


def test_this_machine_can_run_something_small():
    findings = check(1 << 20, 1)
    demand(findings)
    assert {finding.what for finding in findings} == {
        "memory", "/dev/shm", "open files", "address space", "file size", "processes", "cores",
        "huge pages",
        "memfd", "pidfd", "eventfd", "populate", "kernel cache", "GPU",
    }  # fmt: skip


def test_memory_counts_the_processes_beside_the_replay(machine):
    assert finding("memory", check(7 * GIB, 3, root=machine)).enough
    few = finding("memory", check(7 * GIB, 4, root=machine))
    assert (few.enough, few.found, few.needed) == (False, "8.0 GiB free", "8.2 GiB")
    assert few.mend.startswith("lower --capacity to 88 % of what it is")


def test_actors_without_torch_need_less_memory(machine):
    light = finding("memory", check(7 * GIB, 4, without_torch=3, root=machine))
    assert (light.enough, light.needed) == (True, "7.7 GiB")


def test_the_limit_of_a_container_is_the_memory_there_is(machine):
    write(machine, "proc/self/cgroup", "0::/\n")
    write(machine, "sys/fs/cgroup/memory.max", str(2 * GIB))
    write(machine, "sys/fs/cgroup/memory.current", str(GIB))
    few = finding("memory", check(2 * GIB, 0, root=machine))
    assert (few.enough, few.found) == (False, "1.0 GiB free")
    assert few.mend.endswith("docker run --memory 4g")


@pytest.mark.parametrize(
    ("cgroup", "directory"), [("0::/job\n", ""), ("7:pids:/job\n5:freezer:/x\n", "pids/")]
)
def test_a_containers_limit_of_processes_counts_their_threads(machine, cgroup, directory):
    assert finding("processes", check(0, 4, root=machine)).found == "unlimited"
    write(machine, "proc/self/cgroup", cgroup)
    write(machine, f"sys/fs/cgroup/{directory}pids.max", "max")
    write(machine, f"sys/fs/cgroup/{directory}job/pids.max", "40")
    write(machine, f"sys/fs/cgroup/{directory}job/pids.current", "8")
    assert finding("processes", check(0, 4, root=machine)).enough
    few = finding("processes", check(0, 5, root=machine))
    assert (few.enough, few.found, few.needed) == (
        False,
        "32 more may be started",
        "40, threads included",
    )
    assert few.mend == "in a container: docker run --pids-limit -1"


def limits(monkeypatch, **values):
    """Pretend these (soft, hard) limits; all others have none."""
    by_number = {getattr(resource, f"RLIMIT_{name}"): pair for name, pair in values.items()}
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda number: by_number.get(number, none))
    monkeypatch.setattr(resource, "setrlimit", by_number.__setitem__)


def test_the_limit_of_open_files_is_raised_to_what_may_be_had(monkeypatch):
    limits(monkeypatch, NOFILE=(100, 4096))
    files = finding("open files", check(0, 4))
    assert (files.enough, files.found, files.needed) == (True, "4096", "104")


def test_sixty_two_actors_need_fewer_than_the_usual_limit_of_open_files(monkeypatch):
    limits(monkeypatch, NOFILE=(1024, 1024))
    assert finding("open files", check(0, 1 + 62 + 3)).enough


def test_too_few_descriptors_are_mended_by_the_administrator_beyond_it(monkeypatch):
    limits(monkeypatch, NOFILE=(100, 100))
    assert finding("open files", check(0, 4)).mend == "sudo prlimit --pid $$ --nofile=104:104"


def test_limits_of_address_space_and_file_size_are_those_of_a_memfd_too(monkeypatch):
    limits(monkeypatch, AS=(GIB, 99 * GIB), FSIZE=(GIB, 99 * GIB))
    findings = check(2 * GIB, 4)
    assert finding("address space", findings).mend == f"ulimit -Sv {6 * 2**20}"
    assert finding("file size", findings).mend == f"ulimit -Sf {2 * 2**20}"


def test_the_command_that_mends_a_limit_does():
    code = (
        "from zapex.run.preflight import check; "
        f"print([f for f in check({GIB}, 4) if f.what == 'file size'][0].{{}})"
    )
    mend, enough = (f'{sys.executable} -c "{code.format(x)}"' for x in ("mend", "enough"))
    script = f'ulimit -Sf 1000; MEND=$({mend}); eval "$MEND"; echo "$MEND"; {enough}'
    printed = subprocess.check_output(["bash", "-c", script], text=True, timeout=60)
    assert printed.splitlines()[0].startswith("ulimit -S")
    assert printed.splitlines()[1] == "True"


def test_a_single_core_is_enough_but_could_be_better(monkeypatch, machine):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    cores = finding("cores", check(0, 4, root=machine))
    assert (cores.enough, cores.verdict) == (True, "could be better")
    assert cores.found == "1 may be used of 4 hardware threads"
    assert cores.mend.startswith("taskset -apc 0-3 $$")


def test_huge_pages_are_needed_only_where_they_are_asked_for(machine):
    assert finding("huge pages", check(GIB, 1, root=machine)).verdict == "ok"
    few = finding("huge pages", check(GIB, 1, huge_pages=True, root=machine))
    assert (few.enough, few.mend) == (False, "sudo sysctl vm.nr_hugepages=512")


def test_reserved_huge_pages_are_not_asked_of_the_free_memory(machine):
    write(machine, "proc/meminfo", "MemAvailable: 1048576 kB\nHugepagesize: 2048 kB\n"
          "HugePages_Free: 4096\n")  # fmt: skip
    assert not finding("memory", check(7 * GIB, 2, root=machine)).enough
    reserved = check(7 * GIB, 2, huge_pages=True, root=machine)
    assert finding("memory", reserved).enough
    assert finding("huge pages", reserved).enough


def test_a_kernel_without_huge_pages_has_too_few_of_them(machine):
    write(machine, "proc/meminfo", "MemAvailable: 8388608 kB\n")
    few = finding("huge pages", check(GIB, 1, huge_pages=True, root=machine))
    assert (few.enough, few.found) == (False, "none in this kernel")


@pytest.mark.parametrize(
    ("function", "what"),
    [("memfd_create", "memfd"), ("pidfd_open", "pidfd"), ("eventfd", "eventfd")],
)
def test_a_feature_that_is_forbidden_is_found_by_trying(monkeypatch, function, what):
    def refuse(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, function, refuse)
    missing = finding(what, check(0, 1))
    assert not missing.enough
    assert missing.found.endswith("refuses: Operation not permitted")
    assert "seccomp" in missing.mend


@pytest.mark.parametrize(
    ("number", "mend"),
    [(errno.EMFILE, "ulimit -n"), (errno.EAGAIN, "ulimit -u"), (errno.ENOSPC, "disk")],
)
def test_a_limit_met_on_the_way_is_told_with_its_mend(number, mend):
    told = pytest.raises(ZapexError, match=f"{os.strerror(number)}: .*{mend}.*zapex doctor")
    with told, preflight.limits_told():
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(2, "No such file"), SharedMemoryError(errno.ENOSPC, "24 GiB, 3 free")],
)
def test_other_errors_and_those_that_say_it_better_are_left_alone(error):
    with pytest.raises(type(error)) as caught, preflight.limits_told():
        raise error
    assert caught.value is error


def test_looking_keeps_no_descriptor():
    before = os.listdir("/proc/self/fd")
    check(0, 1)
    assert os.listdir("/proc/self/fd") == before


def test_a_kernel_cache_that_cannot_be_written_costs_time_and_is_said(monkeypatch):
    monkeypatch.setattr(jit, "CACHE_DIRECTORY", None)
    cache = finding("kernel cache", check(0, 1))
    assert cache.verdict == "could be better"
    assert "compiled at every start" in cache.found


@pytest.mark.parametrize(("required", "verdict"), [(False, "could be better"), (True, "lacking")])
def test_a_gpu_that_torch_cannot_use_is_told_with_its_mend(machine, required, verdict):
    (machine / "dev/nvidia0").touch()
    broken = Gpu(driver="470.57", problem="The NVIDIA driver on your system is too old")
    gpu = finding("GPU", check(0, 1, root=machine, gpu=broken, cuda=required))
    assert gpu.verdict == verdict
    assert "470.57" in gpu.found
    assert "too old" in gpu.found
    instead = ", or --device cpu and --inference cpu" if required else ""
    assert gpu.mend == "update the NVIDIA driver" + instead


def test_a_gpu_that_torch_can_use_is_told_with_all_that_is_known_of_it(machine):
    (machine / "dev/nvidia0").touch()
    gpu = finding("GPU", check(0, 1, root=machine, gpu=H100, cuda=True))
    assert (gpu.verdict, gpu.found) == ("ok", str(H100))
    assert finding("GPU", check(0, 1, root=machine)).verdict == "ok"


def test_a_hidden_gpu_is_said_to_be_hidden(machine):
    (machine / "dev/nvidia0").touch()
    gpu = finding("GPU", check(0, 1, cuda_visible_devices="-1", root=machine))
    assert gpu.found == "1, hidden by CUDA_VISIBLE_DEVICES=-1"
    assert gpu.mend == "unset CUDA_VISIBLE_DEVICES"


FINE = Finding("cores", "2 of 2", True, "2")
BETTER = Finding("cores", "1 of 4", True, "2", "taskset")
FEW = Finding("open files", "20", False, "128", "ulimit -Sn 128")


def test_what_is_too_small_is_refused_in_one_message():
    demand([FINE, BETTER])
    with pytest.raises(ConfigError) as refused:
        demand([FINE, FEW, FEW])
    assert str(refused.value) == (
        "this machine has too little for the run. "
        "open files: 20; needed: 128; to mend it: ulimit -Sn 128. "
        "open files: 20; needed: 128; to mend it: ulimit -Sn 128"
    )


def test_findings_are_lines():
    assert [f"{finding.verdict:<15}  {finding}" for finding in (FINE, BETTER)] == [
        "ok               cores: 2 of 2",
        "could be better  cores: 1 of 4; needed: 2; to mend it: taskset",
    ]


def test_the_doctor_says_by_its_exit_code_whether_something_is_too_small(capsys):
    assert doctor([FINE, BETTER]) == 0
    assert capsys.readouterr().out.endswith("taskset\nEverything that is needed is there.\n")
    assert doctor([FINE, FEW]) == 1
    assert capsys.readouterr().out.endswith("ulimit -Sn 128\nLacking: open files\n")


def test_a_preflight_imports_neither_torch_nor_numba():
    code = (
        "import sys; from zapex.run.preflight import check; check(0, 1); "
        "print({'numba', 'torch', 'rich'} & {*sys.modules})"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert printed == "set()\n"
