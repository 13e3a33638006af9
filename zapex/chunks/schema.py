"""Schema: the columns of a transition, n_step and gamma."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from zapex.chunks.columns import Column
from zapex.chunks.spaces import observation_columns, plain_column
from zapex.errors import SchemaError

if TYPE_CHECKING:
    import gymnasium

RESERVED = ("reward", "discount", "priority", "next_obs", "weights", "keys", "indices")


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
                raise SchemaError(f'"{name}" is made by zapex itself; choose another column name')
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
        columns = observation_columns(observation_space, stack)
        columns["action"] = plain_column(action_space, "action")
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
