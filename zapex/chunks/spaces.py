"""Columns for Gymnasium's spaces: Box, Discrete, MultiDiscrete, MultiBinary and Dicts of them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from zapex.chunks.columns import Column
from zapex.errors import SchemaError

if TYPE_CHECKING:
    import gymnasium

# Most frames in a stack, least pixels of an image side, colours of RGB.
_FEW, _SIDE, _COLOURS = 16, 32, 3


def plain_column(space: "gymnasium.Space[Any]", name: str) -> Column:
    """The column for a space. Raises SchemaError if the space has no fixed shape."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Column((), np.int64)
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return Column(space.shape, space.dtype)
    raise SchemaError(
        f"{name}: {type(space).__name__} spaces have no columns; Box, Discrete, MultiDiscrete, "
        "MultiBinary and (for observations) a Dict of these do"
    )


def observation_column(space: "gymnasium.Space[Any]", name: str, stack: int | None) -> Column:
    """The column of an observation. `Schema.from_spaces` describes `stack`."""
    plain = plain_column(space, name)
    shape = plain.shape
    if stack == 1:
        return plain
    if stack is not None:
        axes = [axis for axis in (0, -1) if shape and shape[axis] == stack]
        if len(shape) == 1:
            axes = axes[:1]
        if not axes:
            raise SchemaError(f"{name}: stack={stack} is neither end of the shape {shape}")
    elif len(shape) == 3:
        axes = [
            axis
            for axis, image in ((0, shape[1:]), (-1, shape[:2]))
            if 1 < shape[axis] <= _FEW and min(image) >= _SIDE
        ]
        if (
            not axes
            and min(shape[0], shape[-1]) > 1
            and max(shape[0], shape[-1]) <= _FEW < shape[1]
        ):
            axes = [0, -1]
        if len(axes) == 1 and shape[axes[0]] == _COLOURS:
            raise SchemaError(
                f"{name}: the {_COLOURS} of the shape {shape} may be colours or successive frames: "
                f"say stack=1 or stack={_COLOURS}"
            )
    else:
        return plain
    if len(axes) == 2:
        raise SchemaError(
            f"{name}: either end of the shape {shape} may be the stack of frames: give "
            "Schema(columns=...) a Column with stack and stack_axis, or say stack=1"
        )
    if not axes:
        return plain
    frame = shape[1:] if axes[0] == 0 else shape[:-1]
    return Column(frame, plain.dtype, shape[axes[0]], axes[0])


def observation_columns(
    space: "gymnasium.Space[Any]", stack: int | Mapping[str, int] | None
) -> dict[str, Column]:
    """The "obs" column, or one "obs/<name>" column for each entry of a Dict."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Dict):
        if isinstance(stack, Mapping):
            raise SchemaError(f"stack by name is for Dict observations, not {type(space).__name__}")
        return {"obs": observation_column(space, "obs", stack)}
    stacks = stack if isinstance(stack, Mapping) else dict.fromkeys(space, stack)
    unknown = sorted(stacks.keys() - space.keys())
    if unknown:
        raise SchemaError(f"stack names {unknown}; the observation has {sorted(space)}")
    return {
        f"obs/{name}": observation_column(part, f"obs/{name}", stacks.get(name))
        for name, part in space.items()
    }
