"""Faster than torch's plain operators: a layer with its ReLU, and stacked frames.

A layer and its ReLU are one call of oneDNN, or of cuDNN and cuBLAS, forward and backward.
The plain operators write a layer's output, then read and write it again for the ReLU. In float32
they also multiply matrices with MKL, which runs at half of oneDNN's speed on some CPUs.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from zapex.agent.architecture import Layer
from zapex.machine.jit import kernel

_OPS = torch.ops.mkldnn
_HAS_ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
AVAILABLE = bool(_HAS_ONEDNN) and hasattr(_OPS, "_convolution_pointwise")
# Not on x86 without AVX-512: there the plain operators compute it, slowly.
_BFLOAT16 = AVAILABLE and _OPS._is_mkldnn_bf16_supported()
_CUDNN = torch.version.cuda is not None and bool(torch._C._has_cudnn)

_STACK = 4
_SMALL = 1 << 16  # a dense layer with fewer weights loses more by the call than it gains


def layer(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """relu(convolution) with `stride`, or relu(x weight^T + bias) where it is 0."""
    if not _pays(weight):
        y = F.conv2d(x, weight, bias, stride) if stride else F.linear(x, weight, bias)
        return F.relu_(y)
    if torch.is_grad_enabled():
        fused: Tensor = _Layer.apply(x, weight, bias, stride)  # type: ignore[no-untyped-call]
        return fused
    return _forward(x, weight, bias, stride)


def packed(weight: Tensor, rows: int) -> Tensor:
    """A dense layer's `weight`, laid out to multiply `rows` rows at a time; without gradient."""
    if _pays(weight) and weight.device.type == "cpu":
        weight = _OPS._reorder_linear_weight(weight.detach(), rows)
    return weight


class _Use:
    """Whether these calls may be used at all."""

    allowed = True


use = _Use()


@contextlib.contextmanager
def plain_operators() -> Iterator[None]:
    """Within this context layers are plain operators, which other programs know too."""
    use.allowed = False
    try:
        yield
    finally:
        use.allowed = True


def _pays(weight: Tensor) -> bool:
    if weight.device.type == "cuda" or not use.allowed:
        return use.allowed and _CUDNN
    is_small = weight.ndim == 2 and weight.numel() < _SMALL
    there = AVAILABLE and (_BFLOAT16 or weight.dtype != torch.bfloat16)
    return there and weight.device.type == "cpu" and not is_small


def _forward(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    y, sides = None, [stride, stride]
    if x.device.type == "cuda":
        if stride:
            y = torch.cudnn_convolution_relu(x, weight, bias, sides, [0, 0], [1, 1], 1)
        else:
            y = torch._addmm_activation(bias, x, weight.t())
    elif stride:
        y = _OPS._convolution_pointwise(x, weight, bias, [0, 0], sides, [1, 1], 1, "relu", [], "")
    else:
        y = _OPS._linear_pointwise(x, weight, bias, "relu", [], "")
    return y


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T."""
    if x.device.type == "cuda":
        return x @ weight.t()
    y: Tensor = _OPS._linear_pointwise(x, weight, None, "none", [], "")
    return y


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
        y = _forward(x, weight, bias, stride)
        ctx.stride = stride
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, weight, y = ctx.saved_tensors
        needs_dx = ctx.needs_input_grad[0]
        dy = torch.ops.aten.threshold_backward(dy, y, 0)
        if ctx.stride:
            stride, out = [ctx.stride, ctx.stride], [weight.shape[0]]
            dx, dweight, dbias = torch.ops.aten.convolution_backward(
                dy, x, weight, out, stride, [0, 0], [1, 1], False, [0, 0], 1, [needs_dx, True, True]
            )
        else:
            dx = product(dy, weight.t()) if needs_dx else None
            dweight, dbias = product(dy.t(), x.t()), dy.sum(0)
        return dx, dweight, dbias, None


def channels_last(frames: Tensor) -> Tensor:
    """The same uint8 (B, stack, H, W) with the stack innermost, as convolutions read fastest."""
    batch, stack, height, width = frames.shape
    if stack != _STACK or frames.device.type != "cpu" or not frames.is_contiguous():
        return frames.contiguous(memory_format=torch.channels_last)
    pixels = torch.empty((batch, height, width, stack), dtype=torch.uint8)
    _interleave_kernel(
        frames.numpy().reshape(batch, stack, -1),
        pixels.numpy().reshape(batch, -1).view(np.uint32),
    )
    return pixels.permute(0, 3, 1, 2)


def fits_blocks(first: Layer, shape: tuple[int, ...]) -> bool:
    """Whether a network's first layer can see images of `shape` in blocks."""
    sides = (*first.weight[2:], *shape[1:])
    return first.stride == 4 and not any(side % 4 for side in sides)


def in_blocks(images: Tensor) -> Tensor:
    """(B, C, H, W) as (B, 16 C, H/4, W/4): each 4x4 block of pixels becomes the channels of one.

    A convolution with stride 4 over the images is one with stride 1 over these, whose channels fill
    a GPU's tensor cores. The result is in channels_last memory.
    """
    batch, channels, height, width = images.shape
    is_bytes = images.dtype == torch.uint8
    # A row of a block is four bytes, which move as one word.
    words = images.contiguous().view(torch.int32) if is_bytes else images
    blocks = words.reshape(batch, channels, height // 4, 4, width // 4, -1)
    pixels = blocks.permute(0, 2, 4, 1, 3, 5).reshape(batch, height // 4, width // 4, -1)
    return (pixels.view(torch.uint8) if is_bytes else pixels).permute(0, 3, 1, 2)


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
