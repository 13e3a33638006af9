"""`python -m zapex.agent.gpu_facts`: what torch says of the first GPU, as one line of JSON."""

import json
import warnings
from typing import Any

import torch


def facts() -> dict[str, Any]:
    """The fields of zapex.machine.gpu.Gpu, or a `problem`.

    A driver that is too old, and a GPU for which this build of torch has no kernels, show only when
    something is computed.
    """
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
            "tf32": _tf32(properties.major),
            "multiprocessors": properties.multi_processor_count,
        }
    except (RuntimeError, AssertionError) as error:
        return {"problem": (str(error).splitlines() or [repr(error)])[0]}


def _tf32(major: int) -> str:
    """What is computed in TF32 where float32 is asked for: from compute capability 8 on."""
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
    warnings.simplefilter("ignore")  # torch warns of what the problem says
    print(json.dumps(facts()), flush=True)
