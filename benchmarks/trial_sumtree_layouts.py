"""The sum tree's layouts that were tried, side by side: the numbers of docs/decisions/0002.

    python -m benchmarks.trial_sumtree_layouts [--quick] [--json FILE]

Bare kernels, without the checks and the minima of the real one, all with the same priorities: draw
a stratified batch, then give the drawn leaves new priorities. States as in bench_sumtree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from benchmarks._harness import (
    CacheSweeper,
    arguments,
    clock_ns,
    interleaved,
    percentiles,
    write_json,
)

LEAVES, BATCHES = 2**21, (512, 4096)
U = np.uint64
DOUBLE, I64 = ir.DoubleType(), ir.IntType(64)
NEAR_ENTRIES = 8192


@dataclass(frozen=True)
class Layout:
    leaf_width: int = 8  # leaves in a node
    inner_width: int = 8  # sums in a node
    leaf_dtype: type = np.float64
    vector: bool = True  # walk a node in vector registers, or by halves in scalar ones
    ahead: str = "load"  # before a far level is walked: load its nodes, prefetch them, or "no"
    stored: bool = False  # inner nodes' running sums in memory too, so that a walk only compares


LAYOUTS = {
    "chosen: 8/8, vector walk, loads ahead": Layout(),
    "scalar walk": Layout(vector=False),
    "scalar walk, nothing ahead": Layout(vector=False, ahead="no"),
    "nothing ahead": Layout(ahead="no"),
    "prefetch ahead": Layout(ahead="prefetch"),
    "stored running sums": Layout(stored=True),
    "leaves 16, sums 8": Layout(leaf_width=16),
    "leaves 8, sums 16": Layout(inner_width=16),
    "leaves 16, sums 16": Layout(16, 16),
    "float32 leaves 16, sums 8": Layout(leaf_width=16, leaf_dtype=np.float32),
    "float32 leaves 16, sums 16": Layout(16, 16, np.float32),
}


def _vector_tools(width: int, single: bool) -> tuple[Any, Any]:
    """running sums of a node as a vector, and a shuffle; LLVM IR builders."""
    vector = ir.VectorType(DOUBLE, width)
    loaded = ir.VectorType(ir.FloatType() if single else DOUBLE, width)

    def shuffle(builder: Any, x: Any, lanes: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), width), lanes)
        return builder.shuffle_vector(x, ir.Constant(vector, [0.0] * width), mask)

    def load(builder: Any, address: Any) -> Any:
        x = builder.load(builder.bitcast(address, loaded.as_pointer()))
        x.align = 8
        return builder.fpext(x, vector) if single else x

    return load, shuffle


def _address(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [at])


def make_walk(width: int, dtype: type, stored: bool) -> Any:
    """walk(nodes, at, rest) -> (position, rest) in a node of entries, or of stored running sums."""
    load, shuffle = _vector_tools(width, dtype is np.float32)
    bits = ir.IntType(width)

    @intrinsic
    def walk(typing_context, nodes, at, rest):  # type: ignore[no-untyped-def]
        def lower(context, builder, signature, values):  # type: ignore[no-untyped-def]
            address = _address(context, builder, signature.args[0], *values[:2])
            sums = load(builder, address)
            step = 1
            while step < width and not stored:
                lanes = [j // step * step - 1 if j // step % 2 else width for j in range(width)]
                sums = builder.fadd(sums, shuffle(builder, sums, lanes))
                step *= 2
            zeros = ir.Constant(sums.type, [0.0] * width)
            first = builder.insert_element(zeros, values[2], ir.Constant(I64, 0))
            rests = shuffle(builder, first, [0] * width)
            reached = builder.bitcast(builder.fcmp_ordered("<=", sums, rests), bits)
            ones = builder.module.declare_intrinsic("llvm.ctpop", [bits])
            lane = builder.zext(builder.call(ones, [reached]), I64)
            if stored:  # what is stored is exclusive: its first is 0 and always reached
                lane = builder.sub(lane, ir.Constant(I64, 1))
                below = builder.load(builder.gep(address, [lane]))
            else:
                before = shuffle(builder, sums, [width, *range(width - 1)])
                below = builder.extract_element(before, lane)
            position = builder.add(values[1], lane)
            rest = builder.fsub(values[2], below)
            return context.make_tuple(builder, signature.return_type, [position, rest])

        result = types.Tuple((types.uint64, types.float64))
        return result(nodes, types.uint64, types.float64), lower

    return walk


@intrinsic
def prefetch(typing_context, nodes, at):  # type: ignore[no-untyped-def]
    def lower(context, builder, signature, values):  # type: ignore[no-untyped-def]
        address = _address(context, builder, signature.args[0], *values)
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        name = "llvm.prefetch.p0"
        callee = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        constants = [ir.Constant(flag, value) for value in (0, 3, 1)]
        builder.call(callee, [builder.bitcast(address, byte), *constants])
        return context.get_dummy_value()

    return types.none(nodes, types.uint64), lower


def make_scalar_walk(width: int) -> Any:
    """The same by halves; a node's left half, then a quarter, ..."""

    @numba.njit
    def part(nodes, at, n):  # type: ignore[no-untyped-def]
        if n == 1:
            return np.float64(nodes[at])
        if n == 2:
            return np.float64(nodes[at]) + np.float64(nodes[at + U(1)])
        a = np.float64(nodes[at]) + np.float64(nodes[at + U(1)])
        return a + (np.float64(nodes[at + U(2)]) + np.float64(nodes[at + U(3)]))

    @numba.njit
    def walk(nodes, at, rest):  # type: ignore[no-untyped-def]
        left = part(nodes, at, 4)
        right = rest >= left
        rest = rest - left if right else rest
        at += U(right) << U(2)
        left = part(nodes, at, 2)
        right = rest >= left
        rest = rest - left if right else rest
        at += U(right) << U(1)
        left = part(nodes, at, 1)
        right = rest >= left
        return at + U(right), rest - left if right else rest

    assert width == 8
    return walk


def make_sum(width: int) -> Any:
    @numba.njit
    def sum4(nodes, at):  # type: ignore[no-untyped-def]
        a = np.float64(nodes[at]) + np.float64(nodes[at + U(1)])
        return a + (np.float64(nodes[at + U(2)]) + np.float64(nodes[at + U(3)]))

    @numba.njit
    def sum8(nodes, at):  # type: ignore[no-untyped-def]
        return sum4(nodes, at) + sum4(nodes, at + U(4))

    @numba.njit
    def sum16(nodes, at):  # type: ignore[no-untyped-def]
        return sum8(nodes, at) + sum8(nodes, at + U(8))

    return {8: sum8, 16: sum16}[width]


def aligned(n: int, dtype: type) -> np.ndarray:
    raw = np.zeros(n * np.dtype(dtype).itemsize + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][: n * np.dtype(dtype).itemsize].view(dtype)


def build(layout: Layout, leaves_n: int) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """(sample(values, indices), update(indices, priorities), total()) of one layout."""
    lw, iw, stored, ahead = layout.leaf_width, layout.inner_width, layout.stored, layout.ahead
    offsets, entries = [0], -(-leaves_n // lw)
    while entries > 1:
        entries = -(-entries // iw)
        offsets.append(offsets[-1] + entries * iw)
    off = np.array(offsets)
    leaves, inner = (
        aligned(-(-leaves_n // lw) * lw, layout.leaf_dtype),
        aligned(off[-1] + iw, float),
    )
    running = aligned(off[-1] + iw if stored else iw, float)  # exclusive running sums
    if layout.vector:
        walk_leaf = make_walk(lw, layout.leaf_dtype, False)
        walk_inner = make_walk(iw, np.float64, stored)
    else:
        walk_leaf = walk_inner = make_scalar_walk(lw)
    sum_leaf, sum_inner = make_sum(lw), make_sum(iw)
    leaf_shift, inner_shift = lw.bit_length() - 1, iw.bit_length() - 1
    load_ahead, prefetch_ahead = ahead == "load", ahead == "prefetch"

    @numba.njit
    def reach(nodes, base, width, indices, touched):  # type: ignore[no-untyped-def]
        far_half = U(64 // nodes.itemsize)  # a node may be two cache lines long
        for i in range(len(indices)):
            at = base + U(width) * U(indices[i])
            if load_ahead:
                touched[i] = nodes[at]
                if U(width) > far_half:
                    touched[i] += nodes[at + far_half]
            if prefetch_ahead:
                prefetch(nodes, at)

    @numba.njit(nogil=True)
    def sample(leaves, inner, running, off, rests, indices):  # type: ignore[no-untyped-def]
        n = len(rests)
        touched = np.empty(n)
        indices[:] = 0
        nodes = running if stored else inner
        for h in range(len(off) - 2, -1, -1):
            base = U(off[h])
            if off[h + 1] - off[h] > NEAR_ENTRIES:
                reach(nodes, base, iw, indices, touched)
            for i in range(n):
                at, rests[i] = walk_inner(nodes, base + U(iw) * U(indices[i]), rests[i])
                indices[i] = np.int64(at - base)
        reach(leaves, U(0), lw, indices, touched)
        for i in range(n):
            at, rests[i] = walk_leaf(leaves, U(lw) * U(indices[i]), rests[i])
            indices[i] = np.int64(at)

    @numba.njit(nogil=True)
    def update(leaves, inner, running, off, indices, priorities):  # type: ignore[no-untyped-def]
        n = len(indices)
        for i in range(n):
            leaves[U(indices[i])] = priorities[i]
        for i in range(n):
            line = U(indices[i]) >> U(leaf_shift)
            inner[line] = sum_leaf(leaves, U(lw) * line)
        for h in range(len(off) - 1):
            base, above = U(off[h]), U(off[h + 1])
            lines = (off[h + 1] - off[h]) // iw
            whole = lines <= n
            for i in range(lines if whole else n):
                shift = U(leaf_shift + inner_shift * (h + 1))
                line = U(i) if whole else U(indices[i]) >> shift
                at = base + U(iw) * line
                inner[above + line] = sum_inner(inner, at)
                if stored:
                    total = 0.0
                    for j in range(iw):
                        running[at + U(j)] = total
                        total += inner[at + U(j)]

    def run_sample(values: np.ndarray, indices: np.ndarray) -> None:
        sample(leaves, inner, running, off, values, indices)

    def run_update(indices: np.ndarray, priorities: np.ndarray) -> None:
        update(leaves, inner, running, off, indices, priorities)

    return run_sample, run_update, lambda: inner[off[-1]]


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("The sum tree's layouts that were tried.").parse_args(argv)
    rng = np.random.default_rng(0)
    start = rng.random(LEAVES) + 1e-6
    sweeper = CacheSweeper()
    trees = {name: build(layout, LEAVES) for name, layout in LAYOUTS.items()}
    for _, update, _ in trees.values():
        update(np.arange(LEAVES), start)
    results: dict[str, Any] = {name: {} for name in trees}
    for batch in BATCHES:
        for state in ("fresh", "cold"):
            rounds = (5 if options.quick else 30) if state == "cold" else 300
            parts: dict[str, list[tuple[int, int]]] = {name: [] for name in trees}

            def case(name: str) -> float:
                sample, update, total = trees[name]
                values = (np.arange(batch) + rng.random(batch)) * (total() / batch)  # noqa: B023
                indices, new = np.empty(batch, np.int64), rng.random(batch) + 1e-6  # noqa: B023
                if state == "cold":  # noqa: B023
                    sweeper.sweep()
                    sample(values[:1].copy(), indices[:1])
                before = clock_ns()
                sample(values, indices)
                sampling = clock_ns() - before
                if state == "cold":  # noqa: B023
                    sweeper.sweep()
                    update(indices[:1], new[:1])
                before = clock_ns()
                update(indices, new)
                parts[name].append((sampling, clock_ns() - before))  # noqa: B023
                return sum(parts[name][-1])  # noqa: B023

            interleaved({n: (lambda n=n: case(n)) for n in trees}, rounds)  # type: ignore[misc]
            print(f"\n{LEAVES} leaves, batch {batch}, {state}: ns an item, sample + update = pair")
            for name, times in parts.items():
                columns = list(zip(*times[2:], strict=True))
                pair = [a + b for a, b in times[2:]]
                named = zip(("sample", "update", "pair"), (*columns, pair), strict=True)
                found = {key: percentiles(values, batch) for key, values in named}
                results[name][f"{state} {batch}"] = found
                s, u, p = (found[key]["p50"] for key in ("sample", "update", "pair"))
                print(f"{name:40} {s:7.1f} + {u:6.1f} = {p:7.1f}")
    if options.json:
        write_json(options.json, "sumtree layouts", results, unit="ns an item")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
