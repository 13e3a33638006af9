"""NUMA: pages from all nodes in turn, and the processors near the GPU, with faked machines."""

import ctypes
import os
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.machine.test_resources import topology
from zapex.errors import SharedMemoryError
from zapex.machine import resources, segment


def machine(root: Path, nodes: int, gpu_node: str = "1") -> Path:
    files = topology(cores=8, nodes=nodes)
    files["proc/driver/nvidia/gpus/0000:C1:00.0/information"] = "Model: a GPU\n"
    files["sys/bus/pci/devices/0000:c1:00.0/numa_node"] = gpu_node + "\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


class Kernel:
    """Keeps the policies that were set."""

    def __init__(self) -> None:
        self.set: list[tuple[int, list[int]]] = []

    def __call__(self, mode: int, nodes: Collection[int]) -> None:
        self.set.append((mode, list(nodes)))


@pytest.mark.parametrize(
    ("nodes", "wanted", "policies"),
    [(2, True, [(3, [0, 1]), (0, [])]), (4, True, [(3, [0, 1, 2, 3]), (0, [])]),
     (1, True, []), (2, False, [])],
)  # fmt: skip
def test_pages_are_interleaved_over_all_nodes(
    tmp_path: Path, nodes: int, wanted: bool, policies: list[tuple[int, list[int]]]
) -> None:
    kernel = Kernel()
    with segment.interleaved(wanted, machine(tmp_path, nodes), kernel):
        assert kernel.set == policies[:1]
    assert kernel.set == policies


def test_policy_is_restored_after_an_error(tmp_path: Path) -> None:
    kernel = Kernel()
    with pytest.raises(KeyError), segment.interleaved(True, machine(tmp_path, 2), kernel):
        raise KeyError
    assert kernel.set[-1] == (0, [])


def test_refused_policy_is_an_error_with_a_hint(tmp_path: Path) -> None:
    def refuse(mode: int, nodes: Collection[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    told = pytest.raises(SharedMemoryError, match=r"leave --numa out.*SYS_NICE")
    with told, segment.interleaved(True, machine(tmp_path, 2), refuse):
        pass


@pytest.mark.parametrize(
    ("nodes", "gpu_node", "cpus"),
    [(2, "1", {4, 5, 6, 7, 12, 13, 14, 15}), (2, "-1", set()), (1, "0", set())],
)
def test_the_processors_near_the_gpu_are_those_of_its_node(
    tmp_path: Path, nodes: int, gpu_node: str, cpus: set[int]
) -> None:
    assert resources.near_gpu(machine(tmp_path, nodes, gpu_node)) == cpus


def test_this_kernel_sets_and_restores_the_policy() -> None:
    """Its own node is allowed wherever the call is; a sandbox may forbid the call."""
    try:
        segment.set_policy(3, [0])
    except OSError as error:
        pytest.skip(f"set_mempolicy: {error}")
    try:
        assert _policy() == 3
    finally:
        segment.set_policy(0, ())
    assert _policy() == 0


def _policy() -> int:
    """This thread's policy, from get_mempolicy."""
    number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]
    mode = ctypes.c_int(-1)
    assert ctypes.CDLL(None).syscall(number, ctypes.byref(mode), None, 0, None, 0) == 0
    return mode.value
