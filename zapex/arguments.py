"""What a user passes in, checked and converted before anything changes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.errors import InvalidPriority, SchemaError
from zapex.schema import Schema

BOOL, INT64 = np.dtype(np.bool_), np.dtype(np.int64)
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


def column(value: Any, dtype: Any, shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """`value` as a contiguous array; a conversion may lose precision, never the kind.

    Raises SchemaError for another shape, or a dtype of another kind (float for int, int for bool).
    """
    if (  # what fits is taken as it is; this is most of what a call on a tiny batch costs
        type(value) is np.ndarray
        and value.dtype is dtype
        and value.shape == shape
        and value.flags.carray
    ):
        return value
    array = np.asarray(value)
    if array.dtype != dtype:
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise SchemaError(f"{name} must be {dtype}, got {array.dtype}")
        array = array.astype(dtype)
    if array.shape != shape:
        raise SchemaError(f"{name} must have shape {shape}, got {array.shape}")
    # Kernels are compiled for contiguous, writeable arrays and for nothing else.
    return array if array.flags.carray else array.copy()


def observations(schema: Schema, obs: Any, rows: int, name: str) -> dict[str, NDArray[Any]]:
    """An observation or a dict of them, by the schema's column names. Raises SchemaError."""
    columns = schema.obs_columns
    if "obs" in columns:
        c = columns["obs"]
        return {"obs": column(obs, c.dtype, (rows, *c.value_shape), name)}
    if isinstance(obs, Mapping):
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
    if len(extras) + 1 != len(columns) or (extras and not extras.keys() <= columns.keys()):
        wanted = sorted(columns.keys() - {"action"})
        raise SchemaError(f"the extra columns are {wanted}, got {sorted(extras)}")
    rows = len(staged)
    for name, c in columns.items():
        value = action if name == "action" else extras[name]
        staged[name] = column(value, c.dtype, (rows, *c.shape), name)


def magnitudes(priorities: Any, rows: int) -> NDArray[np.float64]:
    """|priorities| (R,) float64. Raises InvalidPriority for NaN and infinities, SchemaError."""
    found: NDArray[np.float64] = np.abs(column(priorities, FLOAT64, (rows,), "priorities"))
    if not np.isfinite(found).all():
        row = int(np.flatnonzero(~np.isfinite(found))[0])
        raise InvalidPriority(
            f"a priority must be finite, got {found[row]} in row {row}: has the loss diverged? "
            "Nothing was changed"
        )
    return found
