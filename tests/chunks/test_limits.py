"""What a chunk of a run can hold: everything else is named before it is committed."""

import math
from typing import Any

import numpy as np
import pytest

from zapex.chunks.batch import aligned_zeros
from zapex.chunks.layout import ChunkLayout
from zapex.chunks.limits import LARGEST, Limits
from zapex.chunks.schema import Column, Schema
from zapex.chunks.store import ChunkStore

COLUMNS = {"obs": Column((2,), np.float32), "action": Column((), np.int64)}
SCHEMA = Schema(COLUMNS, n_step=3, gamma=0.5)
ROWS, FRAMES = 3, 4


def limits(clipped: bool = True) -> Limits:
    return Limits.of_run(SCHEMA, actions=4, clipped=clipped)


def chunk(**values: Any) -> ChunkStore:
    """A chunk whose values are all as large as can be; `values` stand in its second row."""
    layout = ChunkLayout(SCHEMA, 4)
    store = ChunkStore(aligned_zeros(ChunkStore.required_bytes(layout, 1)), layout, 1)
    for name, value in {"reward": -1.75, "discount": 0.5, "priority": 5.75, "action": 3}.items():
        store.column(0, name)[:ROWS] = value
        store.column(0, name)[ROWS:] = 99  # behind the chunk's last row
    for name, value in values.items():
        store.column(0, name)[1] = value
    return store


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("reward", (math.nan, math.inf, -math.inf, 1.76, -1.76, 1e30), "a return"),
        ("discount", (math.nan, math.inf, 0.51, -0.01, 1.0), "a discount"),
        ("priority", (math.nan, math.inf, -math.inf), "a priority"),
        ("action", (-1, 4, 1 << 40, -(1 << 63)), "an action"),
        ("obs", (math.nan, math.inf, -math.inf, 1e10, 3e38), "an observation"),
    ],
)
def test_what_no_run_can_produce_is_named(name: str, values: tuple[float, ...], words: str) -> None:
    assert limits().breach(chunk(), 0, ROWS, FRAMES) == ""
    for value in values:
        assert limits().breach(chunk(**{name: value}), 0, ROWS, FRAMES).startswith(words), value


def test_a_priority_above_the_largest_td_error_counts_as_that() -> None:
    store = chunk(priority=3e38)
    assert limits().breach(store, 0, ROWS, FRAMES) == ""
    # A return of 1.75 and two values of 1 / (1 - 0.5).
    assert store.column(0, "priority")[:ROWS] == pytest.approx([5.75, 5.75, 5.75], rel=1e-4)


def test_rewards_that_are_not_clipped_may_be_as_large_as_can_be_learned_from() -> None:
    assert limits(clipped=False).breach(chunk(reward=1e9), 0, ROWS, FRAMES) == ""
    assert limits(clipped=False).breach(chunk(reward=2 * LARGEST), 0, ROWS, FRAMES)
    assert pytest.approx(float(np.finfo(np.float32).max)) == LARGEST**4


def test_a_library_takes_all_finite_numbers() -> None:
    store = chunk(reward=-1e30, discount=1.5, action=-7, obs=math.nan)
    assert Limits().breach(store, 0, ROWS, FRAMES) == ""
    assert Limits().breach(chunk(reward=math.nan), 0, ROWS, FRAMES)
