"""One batch from several replays: the draw and the weights of one replay that holds everything."""

import numpy as np
import pytest

from tests.library.test_writer import new_replay
from tests.support.handle_processes import rows_from
from zapex.chunks.keys import NO_KEY, by_shard, with_shard, without_shard
from zapex.errors import ConfigError
from zapex.replay.shards import Part, Shares, check_method, share_out

BETA = 0.6


@pytest.mark.parametrize("seed", range(20))
def test_counts_add_up_and_are_shares_rounded_up_or_down(seed: int) -> None:
    rng = np.random.default_rng(seed)
    totals = rng.exponential(size=rng.integers(1, 9)) * (rng.random() + 1e-6)
    totals[rng.random(len(totals)) < 0.3] = 0.0
    totals[rng.integers(len(totals))] = 0.5
    rows = int(rng.integers(1, 600))
    wanted = rows * totals / totals.sum()
    for _ in range(50):
        counts = share_out(totals, rows, rng, "stratified")
        assert counts.sum() == rows
        assert (np.abs(counts - wanted) < 1 + 1e-9).all()
        assert not counts[totals == 0].any()
        counts = share_out(totals, rows, rng, "independent")
        assert counts.sum() == rows
        assert not counts[totals == 0].any()


@pytest.mark.parametrize("method", ["stratified", "independent"])
def test_counts_are_the_shares_on_average(method) -> None:
    rng, totals, rows, draws = np.random.default_rng(3), np.array([0.2, 5.0, 0.0, 1.3]), 7, 20_000
    mean = sum(share_out(totals, rows, rng, method) for _ in range(draws)) / draws
    shares = totals / totals.sum()
    sigma = np.sqrt(rows * shares * (1 - shares) / draws)
    assert (np.abs(mean - rows * shares) <= 5 * sigma).all()


def test_a_rounded_point_at_the_very_end_is_of_the_last_shard_with_a_share() -> None:
    class Most:
        def random(self) -> float:
            return 1.0

    counts = share_out(np.array([1e-300, 3.0, 0.0]), 3, Most(), "stratified")  # type: ignore[arg-type]
    assert counts.tolist() == [0, 3, 0]


def filled(count: int):
    """Replays with different rows, and one replay with all of them: the naive twin."""
    shards, one = [new_replay(n=3) for _ in range(count)], new_replay(n=3)
    for i, shard in enumerate(shards):
        rows, _ = rows_from(i + 1, count=40 + 30 * i)
        rows["priorities"] *= 3.0**i
        shard.extend(**rows)
        one.extend(**rows)
    return shards, one


def drawn(shards, shares, rows, rng, method):
    counts = share_out(shares.totals, rows, rng, method)
    parts = []
    for s, n in enumerate(counts.tolist()):
        if n:
            draw = shards[s].core.draw(n, method)
            parts.append(Part(s, shares.totals[s], draw))
    return shares.together(parts)


def known(shards) -> Shares:
    shares = Shares(len(shards))
    for s, shard in enumerate(shards):
        core = shard.core
        shares.learn(s, core.tree.total, len(core), core.tree.min_positive)
    return shares


@pytest.mark.parametrize("method", ["stratified", "independent"])
def test_every_transition_is_drawn_as_often_as_from_one_replay(method) -> None:
    shards, one = filled(3)
    shares, rng = known(shards), np.random.default_rng(5)
    seen: dict[int, int] = {}
    for _ in range(400):
        keys = drawn(shards, shares, 128, rng, method).keys
        for key in keys.tolist():
            seen[key] = seen.get(key, 0) + 1
    observed, expected = [], []
    for s, shard in enumerate(shards):
        core = shard.core
        for index in np.flatnonzero(core.tree.leaves):
            key = with_shard(core.store.keys_of(np.array([index]), 0), s)[0]
            observed.append(seen.pop(int(key), 0))
            expected.append(400 * 128 * core.tree[np.array([index])][0] / one.core.tree.total)
    assert not seen
    observed, expected = np.array(observed), np.array(expected)
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(observed) - 1
    # Strata only make it smaller.
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)
    if method == "independent":
        assert chi_square > freedom - 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("by_memory", [False, True])
def test_weights_are_those_of_one_replay(by_memory: bool) -> None:
    shards, one = filled(3)
    draw = drawn(shards, known(shards), 200, np.random.default_rng(1), "stratified")
    weights = np.empty(200, np.float32)
    draw.weigh(weights, BETA, by_memory=by_memory)
    core = one.core
    assert draw.count == len(core)
    assert draw.total == pytest.approx(core.tree.total)
    assert draw.smallest == core.tree.min_positive
    q = draw.leaves / core.tree.total
    wanted = (len(core) * q) ** -BETA
    largest = (len(core) * core.tree.min_positive / core.tree.total) ** -BETA
    wanted /= largest if by_memory else wanted.max()
    np.testing.assert_allclose(weights, wanted, rtol=1e-6)


def test_weights_follow_the_probability_really_used_where_a_total_was_old() -> None:
    shards, _ = filled(2)
    shares = known(shards)
    old = shares.totals.copy()
    keys = shards[0].core.store.keys_of(np.arange(8), 0)
    shards[0].update_priorities(keys, np.full(8, 50.0))
    draw = drawn(shards, shares, 300, np.random.default_rng(1), "stratified")
    weights = np.empty(300, np.float32)
    draw.weigh(weights, BETA)
    share = old / old.sum()
    q = np.empty(300)
    for s, rows in by_shard(draw.keys).items():
        core = shards[s].core
        q[rows] = share[s] * core.tree[draw.indices[rows]] / core.tree.total
    wanted = q**-BETA
    np.testing.assert_allclose(weights, wanted / wanted.max(), rtol=1e-5)


def test_keys_carry_their_shard_and_give_back_the_replays_own() -> None:
    keys = np.array([1 << 27, NO_KEY, (1 << 55) - 1], np.int64)
    marked = with_shard(keys, 127)
    assert (marked[[0, 2]] > 0).all()
    assert marked[1] == NO_KEY
    assert {s: rows.tolist() for s, rows in by_shard(marked).items()} == {127: [0, 2]}
    assert without_shard(marked[[0, 2]]).tolist() == keys[[0, 2]].tolist()


def test_a_lost_shard_has_no_share_until_it_says_something() -> None:
    shares = Shares(2)
    shares.learn(0, 2.0, 10, 0.1)
    shares.learn(1, 6.0, 20, 0.2)
    assert shares.lose(1)
    assert not shares.lose(1)
    assert (shares.totals.tolist(), shares.counts.tolist(), shares.away) == (
        [2.0, 0.0],
        [10, 0],
        [1],
    )
    assert shares.learn(1, 5.0, 20)
    assert (shares.totals.tolist(), shares.away, shares.lost, shares.back) == ([2.0, 5.0], [], 1, 1)


def test_without_replacement_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="depends on every leaf"):
        check_method("without_replacement")
