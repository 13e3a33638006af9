"""Priorities that hosts give: those of an honest host stay, those of a liar win nothing."""

import numpy as np
import pytest

from zapex.net.priorities import InitialPriorities


def chunk(rng: np.random.Generator, scale: float) -> np.ndarray:
    return (scale * np.abs(rng.normal(size=64))).astype(np.float32)


@pytest.mark.parametrize("learned", [0.0, 0.5])
def test_a_host_that_gives_large_priorities_gets_those_of_the_others_on_average(
    learned: float,
) -> None:
    rng, limiter = np.random.default_rng(1), InitialPriorities(given=True)
    if learned:
        limiter.learned(np.full(8, learned, np.float32))
    given: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for _ in range(300):
        for host, scale in ((1, 1.0), (2, 1.5), (3, 200.0)):
            priorities = chunk(rng, scale)
            before = priorities.copy()
            limiter.limit(host, priorities)
            given[host].append(float(priorities.mean()))
            assert np.allclose(priorities / priorities.max(), before / before.max())
    means = {host: np.mean(values) for host, values in given.items()}
    assert means[1] == pytest.approx(0.8, rel=0.1)
    assert means[2] == pytest.approx(1.2, rel=0.1)
    assert means[3] <= 1.2 * 1.1


def test_a_host_alone_and_one_beside_a_host_that_gives_none_keep_the_learners_scale() -> None:
    rng, limiter = np.random.default_rng(1), InitialPriorities(given=True)
    alone = chunk(rng, 200.0)
    before = alone.copy()
    limiter.limit(1, alone)
    assert (alone == before).all()
    limiter.learned(np.full(8, 1000.0, np.float32))
    for _ in range(50):
        limiter.limit(2, np.zeros(64, np.float32))
        mine = chunk(rng, 200.0)
        before = mine.copy()
        limiter.limit(1, mine)
        assert (mine == before).all()


def test_priorities_that_are_not_given_do_not_win_either() -> None:
    rng, limiter = np.random.default_rng(1), InitialPriorities(given=True)
    for _ in range(50):
        limiter.limit(1, chunk(rng, 0.01))
        none = np.full(64, -1, np.float32)
        limiter.limit(2, none)
    assert 0 <= none.mean() < 0.02


def test_where_hosts_give_none_a_host_that_gives_one_all_the_same_gains_nothing() -> None:
    priorities = np.array([3.0, 1e9], np.float32)
    InitialPriorities(given=False).limit(1, priorities)
    assert (priorities < 0).all()
