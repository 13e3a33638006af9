"""Stacked frames laid out pixel by pixel, the order that convolutions read fastest."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zapex.machine.jit import kernel

_STACK = 4


def channels_last(frames: Tensor) -> Tensor:
    """The same uint8 (B, stack, H, W) with the stack innermost in memory."""
    batch, stack, height, width = frames.shape
    if stack != _STACK or frames.device.type != "cpu" or not frames.is_contiguous():
        return frames.contiguous(memory_format=torch.channels_last)
    pixels = torch.empty((batch, height, width, stack), dtype=torch.uint8)
    _interleave_kernel(
        frames.numpy().reshape(batch, stack, -1),
        pixels.numpy().reshape(batch, -1).view(np.uint32),
    )
    return pixels.permute(0, 3, 1, 2)


@kernel
def _interleave_kernel(frames: npt.NDArray[np.uint8], pixels: npt.NDArray[np.uint32]) -> None:
    """frames (B, 4, pixels), pixels (B, pixels): whole words, so that LLVM vectorises it."""
    for row in range(frames.shape[0]):
        first, second, third, fourth = (
            frames[row, 0],
            frames[row, 1],
            frames[row, 2],
            frames[row, 3],
        )
        out = pixels[row]
        for i in range(out.size):
            low = np.uint32(first[i]) | np.uint32(second[i]) << np.uint32(8)
            high = np.uint32(third[i]) | np.uint32(fourth[i]) << np.uint32(8)
            out[i] = low | high << np.uint32(16)
