"""Schema: the columns of a transition, n_step and gamma; and the columns of Gymnasium's spaces."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from zapex.errors import SchemaError

if TYPE_CHECKING:
    import gymnasium

RESERVED = {
    # columns of chunks and batches
    *("reward", "discount", "priority", "next_obs", "weights", "keys", "indices"),
    *("frames", "obs_frames", "next_obs_frames"),
    # arguments of `add` and `extend`
    *("self", "terminated", "truncated", "cut", "exploratory", "priorities", "final_obs"),
}
# Most frames in a stack, least pixels of an image side, colours of RGB.
_FEW, _SIDE, _COLOURS = 16, 32, 3


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


@dataclass(frozen=True, eq=False)
class Schema:
    """The columns of a transition, and the n and gamma of its n-step return.

    Args:
        columns: "obs" (or several "obs/<name>"), "action", and any extra columns, in any order.
            reward, discount (float32) and next_obs are always present.
        n_step: steps between obs and next_obs, 1 to 64.
        gamma: discount of one step (Sutton & Barto, eq. 3.8).

    Raises:
        SchemaError: a column is missing or reserved, or a value is out of range.
    """

    columns: Mapping[str, Column]
    n_step: int = 3
    gamma: float = 0.99

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if not isinstance(name, str) or not isinstance(column, Column):
                raise SchemaError(
                    "columns must be Columns by name, as in Schema({'obs': Column((4,), "
                    f"np.float32), ...}}), got {name!r}: {column!r}"
                )
        # By name: a description has no order, and two schemas of the same columns are equal.
        object.__setattr__(self, "columns", dict(sorted(self.columns.items())))
        if not self.obs_columns:
            raise SchemaError('a schema needs a column "obs" (or several "obs/<name>")')
        if "obs" in self.columns and len(self.obs_columns) > 1:
            raise SchemaError('a schema has either "obs" or several "obs/<name>", not both')
        if "action" not in self.columns:
            raise SchemaError('a schema needs a column "action"')
        for name, column in self.columns.items():
            if name in RESERVED:
                raise SchemaError(f'"{name}" is a name of zapex itself; choose another column name')
            key = name.removeprefix("obs/") if name in self.obs_columns else name
            if not key or (key == name and "/" in name):
                raise SchemaError(
                    f'an extra column needs a name without "/", and part of an observation a name '
                    f'after "obs/", got {name!r}'
                )
            if column.stack > 1 and name not in self.obs_columns:
                raise SchemaError(f'only observations are stacked, but "{name}" has a stack')
        if not 1 <= self.n_step <= 64:
            raise SchemaError(f"n_step must be 1 to 64, got {self.n_step}")
        if not 0.0 <= self.gamma <= 1.0:
            raise SchemaError(f"gamma must be in 0..1, got {self.gamma}")

    @cached_property
    def obs_columns(self) -> dict[str, Column]:
        """The observation's columns, by name."""
        return {k: c for k, c in self.columns.items() if k == "obs" or k.startswith("obs/")}

    @cached_property
    def step_columns(self) -> dict[str, Column]:
        """The action and the extra columns: one value for each step."""
        return {k: c for k, c in self.columns.items() if k not in self.obs_columns}

    @cached_property
    def stack(self) -> int:
        """The longest stack of the observation's columns."""
        return max(column.stack for column in self.obs_columns.values())

    @cached_property
    def step_dtype(self) -> np.dtype[Any]:
        """A packed record of the step columns, in the form in which an actor stages them."""
        return np.dtype([(k, c.dtype, c.shape) for k, c in self.step_columns.items()])

    def describe(self) -> dict[str, Any]:
        """The schema as JSON values; equal schemas give equal values."""
        columns = {name: column.describe() for name, column in self.columns.items()}
        return {"columns": columns, "n_step": self.n_step, "gamma": self.gamma}

    @cached_property
    def hash(self) -> int:
        """A 63-bit hash of the schema, the same on every machine."""
        text = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.hash == other.hash

    def __hash__(self) -> int:
        return self.hash

    @classmethod
    def from_spaces(
        cls,
        observation_space: "gymnasium.Space[Any]",
        action_space: "gymnasium.Space[Any]",
        n_step: int = 3,
        gamma: float = 0.99,
        extra: Mapping[str, Column] | None = None,
        stack: int | Mapping[str, int] | None = None,
    ) -> "Schema":
        """Make the schema of one environment.

        Args:
            observation_space: Box, Discrete, MultiDiscrete, MultiBinary or a Dict of them. For a
                vector environment: its `single_observation_space`.
            action_space: the same kinds without Dict. For a vector environment: its
                `single_action_space`.
            n_step: steps between obs and next_obs.
            gamma: discount of one step.
            extra: more columns, by name.
            stack: how many successive frames make an observation, at its first or last axis. 1: no
                stack. A mapping by name is for Dict observations. None: found from the shape, for
                images of 32 pixels or more. A writer checks that the stack is right.

        Raises:
            SchemaError: a space is not supported, or the shape does not show whether an axis is
                the stack, or whether it is colours.
        """
        columns = _observation_columns(observation_space, stack)
        columns["action"] = _plain_column(action_space, "action")
        taken = sorted(columns.keys() & (extra or {}).keys())
        if taken:
            raise SchemaError(f"extra columns {taken} have the names of the spaces' own")
        return cls({**columns, **(extra or {})}, n_step, gamma)

    def to_json(self) -> str:
        """The text of a schema file, for `zapex replay --schema` and `zapex.connect`."""
        return json.dumps(self.describe(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        """Read the text of a schema file.

        Args:
            text: what `to_json` returned.

        Raises:
            SchemaError: the text is not a schema.
        """
        try:
            facts = json.loads(text)
        except ValueError as error:
            raise SchemaError(f"a schema's file must be JSON: {error}") from None
        if not isinstance(facts, dict):
            raise SchemaError("a schema's file must hold a JSON object")
        return cls.from_description(facts)

    @classmethod
    def from_description(cls, facts: Mapping[str, Any]) -> "Schema":
        """The inverse of `describe`."""
        try:
            columns = {}
            for name, (shape, dtype, stack, axis) in facts["columns"].items():
                if any(type(number) is not int for number in (*shape, stack, axis)):
                    raise TypeError(f"{name}: shape, stack and axis are whole numbers")
                columns[name] = Column(tuple(shape), _described_dtype(dtype), stack, axis)
            return cls(columns, int(facts["n_step"]), float(facts["gamma"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SchemaError(f"not a schema's description: {error}") from error


def _described_dtype(text: Any) -> "np.dtype[Any]":
    """The dtype whose `str` is `text`. Raises ValueError for other strings that NumPy accepts."""
    if not isinstance(text, str) or not re.fullmatch(r"[<>|=][A-Za-z]\d{1,9}(\[\w{1,9}\])?", text):
        raise ValueError(f"no dtype: {text!r}")
    return np.dtype(text)


def _plain_column(space: "gymnasium.Space[Any]", name: str) -> Column:
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


def _observation_column(space: "gymnasium.Space[Any]", name: str, stack: int | None) -> Column:
    """The column of an observation. `Schema.from_spaces` describes `stack`."""
    plain = _plain_column(space, name)
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


def _observation_columns(
    space: "gymnasium.Space[Any]", stack: int | Mapping[str, int] | None
) -> dict[str, Column]:
    """The "obs" column, or one "obs/<name>" column for each entry of a Dict."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Dict):
        if isinstance(stack, Mapping):
            raise SchemaError(f"stack by name is for Dict observations, not {type(space).__name__}")
        return {"obs": _observation_column(space, "obs", stack)}
    stacks = stack if isinstance(stack, Mapping) else dict.fromkeys(space, stack)
    unknown = sorted(stacks.keys() - space.keys())
    if unknown:
        raise SchemaError(f"stack names {unknown}; the observation has {sorted(space)}")
    return {
        f"obs/{name}": _observation_column(part, f"obs/{name}", stacks.get(name))
        for name, part in space.items()
    }
