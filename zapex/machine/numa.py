"""NUMA nodes: from which of them new pages come, and which is near the GPU."""

import contextlib
import ctypes
import os
import platform
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from zapex.errors import SharedMemoryError
from zapex.machine.resources import numa_nodes

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}.get(platform.machine())
_DEFAULT, _INTERLEAVE = 0, 3  # linux/mempolicy.h
_MASK_BITS = 1024  # the most nodes of a kernel

Set = Callable[[int, Collection[int]], None]
"""Sets this thread's policy: a mode, and the nodes that it is for. Raises OSError."""


def set_policy(mode: int, nodes: Collection[int]) -> None:
    """The system call, which needs no libnuma. Raises OSError."""
    if _SET_MEMPOLICY is None:
        raise OSError(f"no set_mempolicy is known for {platform.machine()}")
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    # The kernel reads one bit less than it is told.
    if call(_SET_MEMPOLICY, mode, ctypes.byref(mask) if nodes else None, _MASK_BITS + 1) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def interleaved(wanted: bool, root: Path = Path("/"), setter: Set = set_policy) -> Iterator[None]:
    """Within this context the pages that this thread reserves come from all nodes in turn.

    wanted: otherwise nothing changes, nor on a machine with one node. root: the directory of /sys.
    Raises SharedMemoryError if the kernel refuses.
    """
    nodes = sorted(numa_nodes(root)) if wanted else []
    if len(nodes) < 2:
        yield
        return
    try:
        setter(_INTERLEAVE, nodes)
    except OSError as error:
        raise SharedMemoryError(
            error.errno,
            f"the memory cannot be interleaved over {len(nodes)} NUMA nodes ({error}): leave "
            "--numa out; in a container: docker run --cap-add SYS_NICE",
        ) from error
    try:
        yield
    finally:
        setter(_DEFAULT, ())


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
