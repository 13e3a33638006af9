"""The GPU's facts: what a child that imports torch answers, and what is made of it."""

import json
from pathlib import Path

import pytest

from zapex.machine import gpu
from zapex.machine.gpu import Gpu

FACTS = {
    "name": "NVIDIA GeForce RTX 4090", "memory_bytes": 24 << 30, "capability": [8, 9],
    "cuda": "12.8", "bfloat16": True, "tf32": "convolutions",
}  # fmt: skip


def test_what_torch_answers_is_the_gpu_with_the_drivers_version(tmp_path: Path) -> None:
    path = tmp_path / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    found = gpu.look(lambda: json.dumps(FACTS), tmp_path)
    assert found == Gpu(
        "NVIDIA GeForce RTX 4090", 24 << 30, (8, 9), "535.104.05", "12.8", True, "convolutions"
    )
    assert str(found) == (
        "NVIDIA GeForce RTX 4090, 24 GiB, compute capability 8.9, driver 535.104.05, CUDA 12.8"
    )
    assert not found.hint


@pytest.mark.parametrize(
    ("problem", "hint"),
    [
        ("torch 2.13.0+cpu is not built for CUDA", "make venv TORCH=cuda"),
        ("The NVIDIA driver on your system is too old (found version 11040)", "update"),
        ("CUDA error: no kernel image is available for execution", "kernels for this GPU"),
        ("CUDA out of memory. Tried to allocate", "free its memory"),
        ("CUDA error: unknown error", "nvidia-smi"),
    ],
)
def test_each_problem_has_its_hint(problem: str, hint: str, tmp_path: Path) -> None:
    found = gpu.look(lambda: json.dumps({"problem": problem}), tmp_path)
    assert problem in str(found)
    assert hint in found.hint


@pytest.mark.parametrize("answer", ["", "Segmentation fault", "[]", "{}", '{"capability": 3}'])
def test_unusable_answer_is_a_problem(answer: str, tmp_path: Path) -> None:
    found = gpu.look(lambda: answer, tmp_path)
    assert "torch does not answer" in found.problem
    assert "nvidia-smi" in found.hint


def test_child_that_does_not_start_is_a_problem(tmp_path: Path) -> None:
    def ask() -> str:
        raise OSError("no more processes")

    assert "no more processes" in gpu.look(ask, tmp_path).problem


def test_the_child_answers_here_too() -> None:
    found = gpu.look()
    if found.problem:  # a machine without a GPU: torch says so in its own words
        assert "does not answer" not in found.problem
        assert found.hint
    else:
        assert found.memory_bytes > 1 << 30
