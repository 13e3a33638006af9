"""A cache line of eight float64 at a time: vector code that Numba does not generate.

`nodes` is a one-dimensional C-contiguous float64 array; positions are not checked. The Python
bodies define each bit of the results. In kernels the functions become LLVM vectors of 8; each
target supports these or splits them.

The 8 running sums are added in three steps (Sklansky 1960): each odd entry adds the sum
of its left neighbour, each odd pair adds that of the pair before it, the right half adds that of
the left half. So they never decrease, even with rounding, and an entry of 0 has the running sum of
its left neighbour.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

FloatArray = npt.NDArray[np.float64]
Position = Any  # int64 or uint64: Numba infers which; mypy does not need it

LANES = 8
_NODES = types.Array(types.float64, 1, "C")
_LINE = ir.VectorType(ir.DoubleType(), LANES)
_ZEROS = ir.Constant(_LINE, [0.0] * LANES)
_BYTE = ir.IntType(8)
# For each step: the running sum that each lane adds. LANES means none.
_STEPS = [
    [lane // step * step - 1 if lane // step % 2 else LANES for lane in range(LANES)]
    for step in (1, 2, 4)
]


def line_sum(nodes: FloatArray, at: Position) -> float:
    """Sum of the line at `at`: its last running sum."""
    return float(_running_sums(nodes, at)[-1])


def rank_in_line(nodes: FloatArray, at: Position, value: float) -> tuple[int, float]:
    """How many running sums of the line at `at` are <= value, and the last of those.

    The second value is 0.0 if there are none, or if there are 8.
    """
    sums = _running_sums(nodes, at)
    count = int((sums <= value).sum())
    return count, float(sums[count - 1]) if 0 < count < LANES else 0.0


def _running_sums(nodes: FloatArray, at: Position) -> FloatArray:
    sums = np.append(nodes[int(at) : int(at) + LANES], 0.0)
    for lanes in _STEPS:
        sums[:LANES] += sums[lanes]
    return sums[:LANES]


# -- the same as vectors ---------------------------------------------------------------------------


def _shuffle(builder: Any, vector: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), lanes)
    return builder.shuffle_vector(vector, _ZEROS, mask)


def _running_sums_ir(context: Any, builder: Any, nodes: Any, at: Any) -> Any:
    array = context.make_array(_NODES)(context, builder, nodes)
    address = cgutils.get_item_pointer(context, builder, _NODES, array, [at])
    sums = builder.load(builder.bitcast(address, _LINE.as_pointer()))
    sums.align = 8  # the line may be a small array; declaring an alignment of 64 gains nothing
    for lanes in _STEPS:
        sums = builder.fadd(sums, _shuffle(builder, sums, lanes))
    return sums


def _define_line_sum(typing_context: Any, nodes: Any, at: Any) -> Any:
    def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        sums = _running_sums_ir(context, builder, *values)
        return builder.extract_element(sums, ir.Constant(_BYTE, LANES - 1))

    return types.float64(_NODES, types.uint64), lower


def _define_rank_in_line(typing_context: Any, nodes: Any, at: Any, value: Any) -> Any:
    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        sums = _running_sums_ir(context, builder, values[0], values[1])
        first = builder.insert_element(_ZEROS, values[2], ir.Constant(_BYTE, 0))
        broadcast = _shuffle(builder, first, [0] * LANES)
        reached = builder.bitcast(builder.fcmp_ordered("<=", sums, broadcast), _BYTE)
        count_ones = builder.module.declare_intrinsic("llvm.ctpop", [_BYTE])
        count = builder.call(count_ones, [reached])
        before = _shuffle(builder, sums, [LANES, *range(LANES - 1)])
        lane = builder.and_(count, ir.Constant(_BYTE, LANES - 1))
        last = builder.extract_element(before, lane)
        count = builder.zext(count, ir.IntType(64))
        return context.make_tuple(builder, signature.return_type, [count, last])

    result = types.Tuple((types.uint64, types.float64))
    return result(_NODES, types.uint64, types.float64), lower


_line_sum_vector = intrinsic(_define_line_sum)
_rank_in_line_vector = intrinsic(_define_rank_in_line)
# Overloads: inside kernels the names above mean these, elsewhere the Python functions.
overload(line_sum)(
    lambda nodes, at: lambda nodes, at: _line_sum_vector(nodes, at)  # noqa: PLW0108
)
overload(rank_in_line)(
    lambda nodes, at, value: (
        lambda nodes, at, value: _rank_in_line_vector(nodes, at, value)  # noqa: PLW0108
    )
)
