"""The epsilon ladder and epsilon-greedy actions."""

import numpy as np
import pytest

from zapex.agent.policy import epsilon_greedy, epsilon_ladder


def test_the_ladder_is_the_papers_closed_form():
    ladder = epsilon_ladder(8)
    np.testing.assert_allclose(ladder, [0.4 ** (1 + 7 * i / 7) for i in range(8)])
    assert ladder[0] == 0.4
    assert ladder[-1] == pytest.approx(0.4**8)


def test_one_stream_explores_with_the_base():
    np.testing.assert_array_equal(epsilon_ladder(1, base=0.3), [0.3])


@pytest.mark.parametrize(("base", "alpha"), [(0.0, 7.0), (1.0, 7.0), (0.4, 0.0)])
def test_the_ladders_edges_are_flat(base, alpha):
    np.testing.assert_array_equal(epsilon_ladder(4, base, alpha), [base] * 4)


def test_epsilon_0_is_greedy_and_epsilon_1_is_uniform():
    rng = np.random.default_rng(0)
    q = np.tile(np.float32([0, 3, 1, 2]), (4000, 1))
    epsilons = np.repeat([0.0, 1.0], 2000)
    actions = epsilon_greedy(q, epsilons, rng)
    assert actions.dtype == np.int64
    assert set(actions[:2000]) == {1}
    assert np.all(np.abs(np.bincount(actions[2000:]) - 500) < 100)


def test_the_q_values_do_not_change_what_is_drawn():
    rngs = np.random.default_rng(5), np.random.default_rng(5)
    for rng, q in zip(rngs, (np.zeros((6, 3)), np.eye(6, 3)), strict=True):
        epsilon_greedy(q, np.full(6, 0.5), rng)
    assert rngs[0].random() == rngs[1].random()
