"""The vector code computes the same bits as its Python bodies."""

import numpy as np

from zapex.machine.jit import kernel
from zapex.machine.simd import LANES, line_sum, rank_in_line


@kernel
def sum_compiled(nodes, at):
    return line_sum(nodes, np.uint64(at))


@kernel
def rank_compiled(nodes, at, value):
    return rank_in_line(nodes, np.uint64(at), value)


def lines():
    """(24,) arrays over eighteen orders of magnitude, a third of them zeros."""
    rng = np.random.default_rng(0)
    for _ in range(1000):
        yield rng.random(24) * 10.0 ** rng.integers(-9, 9, 24) * (rng.random(24) > 1 / 3)


def test_compiled_and_python_agree_to_the_bit_at_any_alignment() -> None:
    for turn, nodes in enumerate(lines()):
        at = turn % (24 - LANES)
        total = line_sum(nodes, at)
        assert sum_compiled(nodes, at) == total
        for value in (*np.random.default_rng(turn).random(3) * total, 0.0, total, np.inf):
            assert rank_compiled(nodes, at, value) == rank_in_line(nodes, at, value)


def test_the_rank_never_points_at_a_zero() -> None:
    for nodes in lines():
        for value in np.linspace(0.0, line_sum(nodes, 0), 9)[:-1]:
            lane, below = rank_in_line(nodes, 0, value)
            assert nodes[lane] > 0.0
            assert below <= value


def test_at_or_past_the_sum_every_lane_is_counted() -> None:
    nodes = np.arange(8.0)
    assert rank_compiled(nodes, 0, 28.0) == (LANES, 0.0)
    assert rank_compiled(nodes, 0, 27.9) == (7, 21.0)
    assert rank_compiled(nodes, 0, 0.0) == (1, 0.0)
