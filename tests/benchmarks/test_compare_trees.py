"""Two checkouts compared: a slower figure is found, noise is not."""

import pytest

from benchmarks.support.compare_trees import compare, figures

NOISE = [1.00, 1.08, 0.95, 1.02, 0.99]


def test_every_figure_has_a_path_that_names_its_row() -> None:
    result = {"cells": [{"kind": "push", "bytes": 64, "us": {"p10": 1, "p50": 2.0, "n": 9}}]}
    assert dict(figures(result)) == {"cells[push 64].bytes": 64.0, "cells[push 64].us.p50": 2.0,
                                     }  # fmt: skip


@pytest.mark.parametrize("more_is_better", [False, True])
def test_a_figure_beyond_both_spreads_is_worse_in_its_bad_direction_only(
    more_is_better: bool,
) -> None:
    slower = [1.3 * value for value in NOISE]
    assert compare(NOISE, slower, more_is_better)["worse"] is not more_is_better
    assert compare(slower, NOISE, more_is_better)["worse"] is more_is_better


def test_noise_is_not_worse() -> None:
    assert not compare(NOISE, NOISE[::-1], False)["worse"]
    assert not compare(NOISE, [1.01 * value for value in NOISE], False)["worse"]
