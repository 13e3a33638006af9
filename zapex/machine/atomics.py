"""Atomics on int64 words, records in them, and bytes: LLVM IR that Numba does not emit.

Kernels can call these functions. `words` is an aligned one-dimensional C-contiguous int64 array,
usually over shared memory; an index is not checked. A relaxed access is atomic but orders nothing.

A function's Python body defines its result for one thread. It runs only under
NUMBA_DISABLE_JIT=1: then a debugger can step through kernels, but they do not synchronise.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from zapex.machine.jit import kernel
from zapex.machine.memory import WORD_BYTES, RecordType, count

F = TypeVar("F", bound=Callable[..., Any])
Words = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_LINE_BYTES = 64


def _argument_type(function: str, parameter: inspect.Parameter, given: types.Type) -> types.Type:
    """The Numba type of `given`; refuses types that cannot be lowered safely."""
    if parameter.annotation is int:
        if isinstance(given, types.Integer):
            return types.int64
        raise TypingError(f"{function}: {parameter.name} must be an integer, got {given}")
    item = types.int64 if parameter.annotation is Words else types.uint8
    fits = isinstance(given, types.Array) and (given.dtype, given.ndim, given.layout, given.aligned)
    if fits != (item, 1, "C", True):
        raise TypingError(
            f"{function}: {parameter.name} must be an aligned, one-dimensional, C-contiguous "
            f"array of {item}, got {given}"
        )
    return given


def _lowered(emit: Callable[..., Any]) -> Callable[[F], F]:
    """Compile calls of the decorated function to what `emit(builder, *operands)` emits.

    An array and the index after it become one operand, the item's address. It comes from
    `cgutils.get_item_pointer`, because LLVM 22 miscompiles addresses made with inttoptr.
    """

    def decorate(function: F) -> F:
        if numba.config.DISABLE_JIT:
            return function
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())

        def lower(context: Any, builder: Any, call: Any, values: Any) -> Any:
            operands: list[Any] = []
            for kind, value in zip(call.args, values, strict=True):
                if operands and isinstance(operands[-1], tuple):
                    array_type, array = operands.pop()
                    view = context.make_array(array_type)(context, builder, array)
                    address = cgutils.get_item_pointer(context, builder, array_type, view, [value])
                    operands.append(address)
                else:
                    operands.append((kind, value) if isinstance(kind, types.Array) else value)
            result = emit(builder, *operands)
            return context.get_dummy_value() if signature.return_annotation is None else result

        def define(_typing_context: Any, *given: types.Type) -> Any:
            name = function.__name__
            arguments = [
                _argument_type(name, *pair) for pair in zip(parameters, given, strict=True)
            ]
            result = types.none if signature.return_annotation is None else types.int64
            return result(*arguments), lower

        context = inspect.Parameter("typing_context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # Numba takes names and arity from the definition.
        define.__signature__ = signature.replace(parameters=[context, *parameters])  # type: ignore[attr-defined]
        define.__name__, define.__doc__ = function.__name__, function.__doc__
        return cast(F, intrinsic(define))

    return decorate


@_lowered(lambda builder, word: builder.load_atomic(word, "acquire", WORD_BYTES))
def load_acquire(words: Words, i: int) -> int:
    """words[i]; later accesses happen after it. Pairs with `store_release` of that word."""
    return int(words[i])


@_lowered(lambda builder, word, value: builder.store_atomic(value, word, "release", WORD_BYTES))
def store_release(words: Words, i: int, value: int) -> None:
    """words[i] = value; a process that acquires this value sees all earlier stores."""
    words[i] = value


@_lowered(lambda builder, word: builder.load_atomic(word, "monotonic", WORD_BYTES))
def load_relaxed(words: Words, i: int) -> int:
    """words[i], atomic, not ordered with other accesses."""
    return int(words[i])


@_lowered(lambda builder, word, value: builder.store_atomic(value, word, "monotonic", WORD_BYTES))
def store_relaxed(words: Words, i: int, value: int) -> None:
    """words[i] = value, atomic, not ordered with other accesses."""
    words[i] = value


@_lowered(lambda builder: builder.fence("acquire"))
def fence_acquire() -> None:
    """Earlier loads happen before all later loads and stores."""


@_lowered(lambda builder: builder.fence("release"))
def fence_release() -> None:
    """Earlier loads and stores happen before all later stores."""


@_lowered(lambda builder: builder.fence("seq_cst"))
def fence_full() -> None:
    """All earlier accesses happen before all later ones, also a store before a load."""


def _emit_memcpy(builder: Any, target: Any, source: Any, n: Any) -> None:
    cgutils.raw_memcpy(builder, target, source, n, ir.Constant(n.type, 1))


@_lowered(_emit_memcpy)
def copy_bytes(
    target: Bytes, target_offset: int, source: Bytes, source_offset: int, n: int
) -> None:
    """Copy n bytes as memcpy does; the two places must not overlap; n must not be negative."""
    target[target_offset : target_offset + n] = source[source_offset : source_offset + n]


def _emit_streaming_copy(builder: Any, target: Any, source: Any, n: Any) -> None:
    word = n.type
    line = ir.VectorType(ir.IntType(8), _LINE_BYTES)

    def number(value: int) -> Any:
        return ir.Constant(word, value)

    def place(base: Any, at: Any) -> Any:
        return builder.gep(base, [at])

    long = builder.icmp_signed(">=", n, number(2 * _LINE_BYTES))
    with builder.if_else(long) as (then, otherwise):
        with then:
            # The loop writes whole lines of the target, each once. If another store had just put a
            # line into the caches, the streaming store would have to evict it.
            first = builder.and_(builder.neg(builder.ptrtoint(target, word)), number(63))
            lines = builder.and_(builder.sub(n, first), number(-_LINE_BYTES))
            end = builder.add(first, lines)
            _emit_memcpy(builder, target, source, first)
            with cgutils.for_range_slice(builder, first, end, number(_LINE_BYTES)) as (at, _):
                loaded = builder.load(builder.bitcast(place(source, at), line.as_pointer()))
                loaded.align = 1
                store = builder.store(loaded, builder.bitcast(place(target, at), line.as_pointer()))
                store.align = _LINE_BYTES
                store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
            _emit_memcpy(builder, place(target, end), place(source, end), builder.sub(n, end))
        with otherwise:
            _emit_memcpy(builder, target, source, n)


@_lowered(_emit_streaming_copy)
def stream_bytes(
    target: Bytes, target_offset: int, source: Bytes, source_offset: int, n: int
) -> None:
    """`copy_bytes` with streaming stores: the target does not replace the caches' content.

    Other threads may see the bytes late: call `fence_full` before you publish them.
    """
    target[target_offset : target_offset + n] = source[source_offset : source_offset + n]


def _emit_memcmp(builder: Any, a: Any, b: Any, n: Any) -> Any:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.IntType(32), [byte, byte, n.type])
    function = cgutils.get_or_insert_function(builder.module, kind, "memcmp")
    operands = [builder.bitcast(a, byte), builder.bitcast(b, byte), n]
    return builder.sext(builder.call(function, operands), ir.IntType(64))


@_lowered(_emit_memcmp)
def compare_bytes(a: Bytes, a_offset: int, b: Bytes, b_offset: int, n: int) -> int:
    """0 if the n bytes are equal, like memcmp; n must not be negative."""
    return int(a[a_offset : a_offset + n].tobytes() != b[b_offset : b_offset + n].tobytes())


def _emit_prefetch(builder: Any, address: Any) -> None:
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for_reading, keep, data = 0, 3, 1
    flags = [ir.Constant(flag, value) for value in (for_reading, keep, data)]
    builder.call(function, [builder.bitcast(address, byte), *flags])


@_lowered(_emit_prefetch)
def prefetch(data: Bytes, i: int) -> None:
    """Prefetch data[i]. Only a hint: any i is allowed."""


# Records in an int64 array.
#
# Numba needs as long to pass ten arrays as a kernel needs for one step of a stream. A NamedTuple of
# them takes longer, and so does each array that a kernel makes of another one. So the state of a
# kernel between calls is one array (`pack` in memory.py), and a record in it is only an address.


def record_at(state: Words, i: int, record: RecordType) -> Any:
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


# Words, for callers that are not kernels.


@kernel
def load_kernel(words: Any, i: int) -> int:
    """One word, with acquire semantics; for callers that are no kernels."""
    return load_acquire(words, i)


@kernel
def store_kernel(words: Any, i: int, value: int) -> None:
    """Set one word, with release semantics."""
    store_release(words, i, value)


@kernel
def find_changed_kernel(words: Any, places: Any, known: Any, found: Any) -> int:
    """Which of the words at `places` differ from `known`: their indices into `found`, how many."""
    count = 0
    for i in range(places.size):
        if load_acquire(words, places[i]) != known[i]:
            found[count] = i
            count += 1
    return count
