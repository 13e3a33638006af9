"""Column: one named field of a transition."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from zapex.errors import SchemaError


@dataclass(frozen=True)
class Column:
    """One named field of a transition.

    Args:
        shape: the shape of one value, or of one frame (without the stack axis).
        dtype: any fixed-size NumPy dtype.
        stack: how many successive frames make one observation, 1 to 16. Other columns have 1.
        stack_axis: the axis of the stack in the observation's shape, 0 or -1.

    Raises:
        SchemaError: a value is out of range.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    stack: int = 1
    stack_axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        dtype = np.dtype(self.dtype)
        if dtype.hasobject or dtype.itemsize == 0 or dtype.fields:
            raise SchemaError(f"a column's dtype must be a plain fixed-size one, got {dtype}")
        object.__setattr__(self, "dtype", dtype)
        if any(n < 1 for n in self.shape):
            raise SchemaError(f"a column's shape must be positive, got {self.shape}")
        if not 1 <= self.stack <= 16:
            raise SchemaError(f"stack must be 1 to 16, got {self.stack}")
        if self.stack_axis not in (0, -1):
            raise SchemaError(f"stack_axis must be 0 or -1, got {self.stack_axis}")

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of one frame, or of one value."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    @cached_property
    def stack_innermost(self) -> bool:
        """Whether the user's observations have the stack at the last axis."""
        return self.stack > 1 and self.stack_axis == -1

    @cached_property
    def value_shape(self) -> tuple[int, ...]:
        """The shape of the user's arrays: the frame's shape, and the stack axis if stack > 1."""
        if self.stack == 1:
            return self.shape
        if self.stack_axis == 0:
            return (self.stack, *self.shape)
        return (*self.shape, self.stack)

    def describe(self) -> list[Any]:
        """The column as JSON values. Equal columns give equal values."""
        return [list(self.shape), np.dtype(self.dtype).str, self.stack, self.stack_axis]
