"""The share of time by class of kernel, of some steps of any work: torch's profiler, by name."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_CPU: Any = torch._C._autograd.DeviceType.CPU
CLASSES = {
    "copies": ("memcpy", "memset", "copy_", "to_copy", "contiguous", "clone"),
    "convolutions": ("conv", "fprop", "dgrad", "wgrad", "implicit_gemm"),
    "matrix products": ("gemm", "linear", "matmul", "addmm", "aten::mm", "cutlass", "gemv"),
    "reductions": ("reduce", "norm", "sum", "mean", "argmax", "aten::max"),
    "indexing": ("index", "gather", "scatter", "select"),
    "elementwise": (
        "elementwise", "threshold", "relu", "add", "mul", "div", "sqrt", "clamp", "fill", "foreach",
        "lerp", "where",
    ),
}  # fmt: skip
"""A class -> parts of names of its kernels; the first class that fits counts."""


def class_of(name: str) -> str:
    """The class of a kernel or of an operator; "other" if no part of its name is known."""
    low = name.lower()
    return next((kind for kind, parts in CLASSES.items() if any(p in low for p in parts)), "other")


def shares(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Class -> share of the whole, largest first. times: name and time of each kernel."""
    found: dict[str, float] = {}
    for name, time in times:
        found[class_of(name)] = found.get(class_of(name), 0.0) + time
    whole = sum(found.values())
    rows = sorted(found.items(), key=lambda row: -row[1])
    return {name: time / whole for name, time in rows if whole and time > 0}


def measure(step: Callable[[], object], steps: int, device: torch.device) -> dict[str, float]:
    """Shares of the device's time in so many steps; on a CPU, of the operators' own time."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        if cuda:
            torch.cuda.synchronize(device)
    rows = profiler.key_averages()
    if cuda:
        kernels = [row for row in rows if row.device_type != _CPU]
        return shares((row.key, row.self_device_time_total) for row in kernels)
    return shares((row.key, row.self_cpu_time_total) for row in rows)
