"""What a user passes in, checked and converted before anything changes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zapex.errors import InvalidPriority, SchemaError
from zapex.schema import Schema


def column(value: Any, dtype: DTypeLike, shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """`value` as an array of that dtype; a conversion may lose precision, never the kind.

    Raises SchemaError for another shape, or a dtype of another kind (float for int, int for bool).
    """
    array = np.asarray(value)
    if array.dtype != dtype:
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise SchemaError(f"{name} must be {np.dtype(dtype)}, got {array.dtype}")
        array = array.astype(dtype)
    if array.shape != shape:
        raise SchemaError(f"{name} must have shape {shape}, got {array.shape}")
    return array


def observations(schema: Schema, obs: Any, rows: int, name: str) -> dict[str, NDArray[Any]]:
    """An observation or a dict of them, by the schema's column names. Raises SchemaError."""
    columns = schema.obs_columns
    if "obs" in columns:
        found = {"obs": obs}
    elif isinstance(obs, Mapping):
        found = {f"obs/{key}": value for key, value in obs.items()}
    else:
        raise SchemaError(f"{name} must be a dict of {sorted(columns)}, got {type(obs).__name__}")
    if found.keys() != columns.keys():
        raise SchemaError(f"{name} must have {sorted(columns)}, got {sorted(found)}")
    return {
        key: column(found[key], c.dtype, (rows, *c.value_shape), name + key.removeprefix("obs"))
        for key, c in columns.items()
    }


def stage(schema: Schema, action: Any, extras: Mapping[str, Any], staged: NDArray[Any]) -> None:
    """Action and extra columns into records (R,) of the schema's `step_dtype`.

    Raises SchemaError for a missing, unknown or unfitting one; `staged` is then of no meaning.
    """
    columns = schema.step_columns
    if len(extras) + 1 != len(columns) or not extras.keys() <= columns.keys():
        wanted = sorted(columns.keys() - {"action"})
        raise SchemaError(f"the extra columns are {wanted}, got {sorted(extras)}")
    rows = len(staged)
    for name, c in columns.items():
        value = action if name == "action" else extras[name]
        staged[name] = column(value, c.dtype, (rows, *c.shape), name)


def magnitudes(priorities: Any, rows: int) -> NDArray[np.float64]:
    """|priorities| (R,) float64. Raises InvalidPriority for NaN and infinities, SchemaError."""
    found = np.abs(column(priorities, np.float64, (rows,), "priorities"))
    if not np.isfinite(found).all():
        row = int(np.flatnonzero(~np.isfinite(found))[0])
        raise InvalidPriority(
            f"a priority must be finite, got {found[row]} in row {row}: has the loss diverged? "
            "Nothing was changed"
        )
    return found
