"""A record at a place in an int64 array, inside kernels.

To pass ten arrays, Numba needs about as long as a kernel needs for a whole step of one stream. A
NamedTuple of them takes longer, and each array that a kernel makes of another takes time, too. So
the state of a kernel between calls is one array (`pack`), and a record in it is only an address.
"""

from typing import Any, cast

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from zapex.machine.offsets import RecordType, count


def record_at(state: NDArray[np.int64], i: int, record: RecordType) -> Any:
    """The record whose words begin at state[i], to read and to write; not checked."""
    return state[i : i + count(record)].view(record)[0]


def _define_record_at(_typing_context: Any, state: Any, i: Any, record: Any) -> Any:
    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, values[0])
        word = cgutils.get_item_pointer(context, builder, signature.args[0], array, [values[1]])
        return builder.bitcast(word, context.get_value_type(signature.return_type))

    return record.dtype(state, types.int64, record), lower


if not numba.config.DISABLE_JIT:
    record_at = cast(Any, intrinsic(_define_record_at))
