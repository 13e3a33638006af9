"""Check and convert the arguments of a user, before the replay changes."""

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.schema import Schema
from zapex.errors import ConfigError, InvalidPriority, SchemaError

MOST_TIMEOUT_S = 1e6  # poll takes milliseconds in 32 bits
BOOL, INT64 = np.dtype(np.bool_), np.dtype(np.int64)
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


def whole(value: Any, name: str) -> int:
    """`value` as an int; 1e5 is one. Raises ConfigError for what is no whole number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number, got {value!r}") from None


def within(value: Any, name: str, least: float, most: float) -> float:
    """`value` as a float. Raises ConfigError if it is no number from `least` to `most`."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most:
        raise ConfigError(f"{name} must be a number from {least:g} to {most:g}, got {value!r}")
    return number


def as_array(value: Any, name: str) -> NDArray[Any]:
    """`value` as an array. Raises SchemaError for what cannot be one, such as a GPU's tensor."""
    try:
        return np.asarray(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise SchemaError(f"{name} cannot be made an array: {error}") from None


def column(value: Any, dtype: Any, shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """`value` as a contiguous array of `dtype`. Only floats may lose precision.

    Raises SchemaError if the shape is wrong, if the dtype is of another kind (float for int, int
    for bool), or if a value does not fit into it.
    """
    if (  # A fitting array skips the checks below. They are most of the cost of a tiny batch.
        type(value) is np.ndarray
        and value.dtype is dtype
        and value.shape == shape
        and value.flags.carray
    ):
        return value
    array = as_array(value, name)
    if array.dtype != dtype:
        array = _converted(array, np.dtype(dtype), name)
    if array.shape != shape:
        raise SchemaError(f"{name} must have shape {shape}, got {array.shape}")
    # Kernels are compiled only for contiguous, writeable arrays.
    return array if array.flags.carray else array.copy()


def _converted(array: NDArray[Any], dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    """`array` as `dtype`. NumPy would wrap integers, cut texts and make large floats infinite."""
    if array.size and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise SchemaError(f"{name} must be {dtype}, got {array.dtype}")
    if not array.size or np.can_cast(array.dtype, dtype, "safe"):
        return array.astype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        for value in array.min(), array.max():
            if not limits.min <= int(value) <= limits.max:
                raise SchemaError(
                    f"{name} must be {dtype}, {limits.min} to {limits.max}, got {value}"
                )
    try:
        with np.errstate(over="raise"):
            converted = array.astype(dtype)
    except FloatingPointError:
        with np.errstate(over="ignore"):
            lost = np.isinf(array.astype(dtype)) & ~np.isinf(array)
        raise SchemaError(f"{name} must be {dtype}, got {array[lost][0]}: too large") from None
    if dtype.kind in "SU" and not np.array_equal(converted.astype(array.dtype), array):
        raise SchemaError(f"{name} must be {dtype}, got a longer text")
    return converted


def observations(schema: Schema, obs: Any, rows: int, name: str) -> dict[str, NDArray[Any]]:
    """The observation's arrays by column name of the schema. Raises SchemaError."""
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
    """Write the action and the extra columns into `staged`: (R,) of the schema's `step_dtype`.

    Raises SchemaError if a column is missing, unknown or does not fit. The content of `staged` is
    then undefined.
    """
    columns = schema.step_columns
    if len(extras) + 1 != len(columns) or (extras and not extras.keys() <= columns.keys()):
        wanted = sorted(columns.keys() - {"action"})
        raise SchemaError(f"the extra columns are {wanted}, got {sorted(extras)}")
    rows = len(staged)
    for name, c in columns.items():
        value = action if name == "action" else extras[name]
        staged[name] = column(value, c.dtype, (rows, *c.shape), name)


def demand_finite(**columns: NDArray[np.float32] | None) -> None:
    """Raise ConfigError if a number in these columns (by name, None: not given) is not finite."""
    for name, numbers in columns.items():
        if numbers is not None and not np.isfinite(numbers).all():
            row = int(np.flatnonzero(~np.isfinite(numbers))[0])
            raise ConfigError(f"{name} must be finite float32, got {numbers[row]} in row {row}")


def magnitudes(priorities: Any, rows: int) -> NDArray[np.float64]:
    """|priorities|, (R,) float64.

    Raises InvalidPriority for NaN and infinity, SchemaError for a wrong shape or dtype.
    """
    found: NDArray[np.float64] = np.abs(column(priorities, FLOAT64, (rows,), "priorities"))
    if not np.isfinite(found).all():
        row = int(np.flatnonzero(~np.isfinite(found))[0])
        raise InvalidPriority(
            f"a priority must be finite, got {found[row]} in row {row}: has the loss diverged? "
            "Nothing was changed"
        )
    return found
