"""The GPU as torch sees it, asked in a child process.

To load torch takes seconds, and to open a GPU hundreds of MiB: a run's parent needs neither.
"""

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ANSWER_S = 120.0  # a first import of torch from a slow disk
_LOOK_UP = "nvidia-smi shows whether the driver works and who uses the GPU"
_HINTS = (
    ("not built", "make venv TORCH=cuda"),
    ("driver", "update the NVIDIA driver"),
    ("no kernel image", "install a build of torch with kernels for this GPU"),
    ("out of memory", "free its memory: nvidia-smi shows who uses it"),
)
"""A word of the problem -> what fixes it."""

Ask = Callable[[], str]
"""Returns one line of JSON: what `facts` returns. Raises OSError."""


@dataclass(frozen=True)
class Gpu:
    """The first GPU that torch finds; with a `problem` torch cannot use it.

    capability: its compute capability. driver: the version of the driver, "" if it is not known.
    cuda: the CUDA version that torch was built for. bfloat16: it multiplies bfloat16. tf32: what
    torch computes in TF32 where float32 is asked for; "" for nothing. multiprocessors: how many
    it has (SMs); 0: not known.
    """

    name: str = "an NVIDIA GPU"
    memory_bytes: int = 0
    capability: tuple[int, int] = (0, 0)
    driver: str = ""
    cuda: str = ""
    bfloat16: bool = False
    tf32: str = ""
    problem: str = ""
    multiprocessors: int = 0

    @property
    def hint(self) -> str:
        """What to do about the problem."""
        known = [hint for word, hint in _HINTS if word in self.problem.lower()]
        return next(iter(known), _LOOK_UP) if self.problem else ""

    def __str__(self) -> str:
        if self.problem:
            driver = f" (driver {self.driver})" if self.driver else ""
            return f"{self.name}{driver} cannot be used: {self.problem}"
        major, minor = self.capability
        return (
            f"{self.name}, {self.memory_bytes / 2**30:.0f} GiB, compute capability "
            f"{major}.{minor}, driver {self.driver or 'unknown'}, CUDA {self.cuda}"
        )


def look(ask: Ask | None = None, root: Path = Path("/")) -> Gpu:
    """Ask torch about the GPU. ask: asks; None starts a child. root: the directory of /proc."""
    driver = _driver(root)
    try:
        facts = json.loads((ask or _ask_torch)())
        if facts.get("problem"):
            return Gpu(driver=driver, problem=str(facts["problem"]))
        major, minor = facts["capability"]
        return Gpu(
            str(facts["name"]),
            int(facts["memory_bytes"]),
            (int(major), int(minor)),
            driver,
            str(facts["cuda"]),
            bool(facts["bfloat16"]),
            str(facts["tf32"]),
            multiprocessors=int(facts.get("multiprocessors", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Gpu(driver=driver, problem=f"torch does not answer ({error})")


def _ask_torch() -> str:
    """The last line of a child that imports torch and computes something on the GPU."""
    command = [sys.executable, "-P", "-m", "zapex.machine.gpu"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"within {_ANSWER_S:g} s") from None
    lines = done.stdout.splitlines() or done.stderr.splitlines() or [""]
    if done.returncode:
        said = (done.stderr.splitlines() or lines)[-1]
        raise OSError(f"its process ended with status {done.returncode}: {said}")
    return lines[-1]


def _driver(root: Path) -> str:
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", text)
    return match[1] if match else ""


def facts() -> dict[str, Any]:
    """The fields of Gpu as torch reports them, or a `problem`.

    A driver that is too old, and a GPU for which this build of torch has no kernels, show only when
    something is computed.
    """
    import torch

    if torch.version.cuda is None:
        return {"problem": f"torch {torch.__version__} is not built for CUDA"}
    try:
        torch.ones(1, device="cuda")  # its error says why there is none
        properties = torch.cuda.get_device_properties(0)
        twice = torch.ones(8, device="cuda").mul(2)
        if twice.sum().item() != 16:
            return {"problem": "it computes wrong numbers"}
        return {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": [properties.major, properties.minor],
            "cuda": torch.version.cuda,
            "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
            "tf32": _tf32(torch, properties.major),
            "multiprocessors": properties.multi_processor_count,
        }
    except (RuntimeError, AssertionError) as error:
        return {"problem": (str(error).splitlines() or [repr(error)])[0]}


def _tf32(torch: Any, major: int) -> str:
    """What is computed in TF32 instead of float32; needs compute capability 8."""
    used = [
        what
        for what, allowed in (
            ("convolutions", torch.backends.cudnn.allow_tf32),
            ("matrix products", torch.backends.cuda.matmul.allow_tf32),
        )
        if allowed and major >= 8
    ]
    return " and ".join(used)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # the problem says what torch warns of
    print(json.dumps(facts()), flush=True)
