"""Samples per insert: equal to a naive twin, and never a deadlock for an accepted config."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.naive import NaiveLimiter
from zapex.errors import ConfigError, ReplayError
from zapex.replay.limiter import LimiterConfig, RateLimiter

FIXED = settings(derandomize=True, max_examples=300, deadline=None)


def config(**changes):
    values = {
        "samples_per_insert": 8.0,
        "min_size_to_sample": 100,
        "tolerance": 8 * 64 + 32,
        "grant": 64,
        "batch": 32,
        "capacity": 1000,
    }
    return LimiterConfig(**(values | changes))


@st.composite
def accepted_configs(draw):
    grant = draw(st.integers(1, 40))
    batch = draw(st.integers(1, 40))
    ratio = draw(st.one_of(st.just(0.0), st.floats(0.1, 20), st.sampled_from([0.1, 1.0, 8.0])))
    capacity = draw(st.integers(1, 300))
    slack = draw(st.integers(0, 3))
    try:
        return LimiterConfig(
            samples_per_insert=ratio,
            min_size_to_sample=draw(st.integers(1, capacity)),
            tolerance=int(ratio * grant) + batch + slack,
            grant=grant,
            batch=batch,
            capacity=capacity,
        )
    except ConfigError:
        assume(False)


def test_nobody_waits_for_the_learner_until_min_size_is_committed():
    limiter = RateLimiter(config())
    for _ in range(50):
        limiter.insert(64)
    assert not limiter.can_sample(1)
    waits = "the learner waits: 0 of min_size_to_sample=100 transitions are committed"
    assert limiter.explain() == waits


def test_actors_wait_when_the_learner_is_behind_and_the_reason_says_so():
    limiter = RateLimiter(config(), committed=500)
    limiter.insert(64)
    assert not limiter.can_insert(64)
    assert limiter.explain().startswith("actors wait for the learner: it is 512 samples behind")
    limiter.sample(32)
    assert not limiter.can_insert(64)
    for _ in range(15):
        limiter.sample(32)
    assert limiter.can_insert(64)
    assert limiter.explain().startswith("the learner waits for actors: 0 samples are left")
    assert "a batch of 8 " in limiter.explain(8)


def test_nobody_waits_when_both_may_go_on():
    limiter = RateLimiter(config(tolerance=10_000), committed=500, granted=64)
    assert limiter.explain() == "no role waits"


def test_memory_that_is_attached_again_owes_nothing_for_what_it_holds():
    assert RateLimiter(config(), granted=64).owed == 0
    limiter = RateLimiter(config(), committed=900)
    assert limiter.owed == 0
    assert limiter.can_insert(64)
    assert not limiter.can_sample(1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tolerance": 8 * 64 + 31}, "will deadlock as soon as the samples owed.*544 or more"),
        ({"samples_per_insert": 8.3}, "raise tolerance to 564 or more"),  # 563.2 are needed
        (
            {"min_size_to_sample": 1001},
            "will deadlock as soon as the replay is full.*lower min_size_to_sample to 1000",
        ),
        ({"samples_per_insert": -1.0}, "samples_per_insert must be 0"),
        ({"samples_per_insert": float("nan")}, "samples_per_insert must be 0"),
        ({"samples_per_insert": float("inf")}, "samples_per_insert must be 0"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"min_size_to_sample": 0}, "min_size_to_sample must be at least 1"),
    ],
)
def test_a_config_that_cannot_work_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def test_the_smallest_and_the_fullest_config_is_accepted():
    config(grant=1, batch=1, min_size_to_sample=1, capacity=1)
    config(min_size_to_sample=1000)


def test_more_than_one_grant_or_one_batch_is_not_to_be_asked_for():
    limiter = RateLimiter(config())
    with pytest.raises(ReplayError, match="0 to 64"):
        limiter.can_insert(65)
    with pytest.raises(ReplayError, match="0 to 32"):
        limiter.can_sample(33)


def test_misuse_is_refused_and_changes_nothing():
    limiter = RateLimiter(config())
    limiter.insert(64)
    for call in (limiter.commit, limiter.refund):
        with pytest.raises(ReplayError):
            call(65)
    limiter.refund(64)
    with pytest.raises(ReplayError, match="0 to 0"):
        limiter.commit(1)


@FIXED
@given(accepted_configs(), st.integers(0, 2**32))
def test_it_answers_as_its_naive_twin_does(limits, seed):
    rng = random.Random(seed)
    limiter = RateLimiter(limits)
    naive = NaiveLimiter(limits.samples_per_insert, limits.min_size_to_sample, limits.tolerance)
    out = 0
    for _ in range(50):
        what = rng.choice(["insert", "insert", "commit", "commit", "refund", "sample", "sample"])
        most = {"insert": limits.grant, "sample": limits.batch}.get(what, out)
        n = rng.randint(0, most)
        if what in ("insert", "sample"):
            allowed = getattr(limiter, f"can_{what}")(n)
            assert allowed == getattr(naive, f"can_{what}")(n)
            if not allowed:
                continue
        getattr(limiter, what)(n)
        naive.note(what, n)
        out += {"insert": n, "sample": 0}.get(what, -n)


@FIXED
@given(accepted_configs(), st.integers(1, 4), st.integers(0, 2**32))
def test_no_accepted_config_deadlocks_whatever_closes_early_or_dies(limits, num_actors, seed):
    """Actors hold at most two grants each and commit, close early or die; the learner samples."""
    rng = random.Random(seed)
    limiter = RateLimiter(limits)
    held = [[] for _ in range(num_actors)]
    batches = grants = 0
    for _ in range(20_000):
        if batches >= 3 and grants >= 3:
            break
        moves = []
        if limiter.can_sample(limits.batch):
            moves.append("sample")
        for actor, holds in enumerate(held):
            if len(holds) < 2 and limiter.can_insert(limits.grant):
                moves.append(("grant", actor))
            if holds:
                moves.append(("end", actor))
        assert moves, limiter.explain()
        move = rng.choice(moves)
        if move == "sample":
            limiter.sample(limits.batch)
            batches += 1
        elif move[0] == "grant":
            limiter.insert(limits.grant)
            held[move[1]].append(limits.grant)
            grants += 1
        else:
            n = held[move[1]].pop(0)
            # At least one in four is written whole, or the learner never gets what it is owed.
            written = n if rng.random() < 0.25 else rng.randint(0, n)
            limiter.commit(written)
            limiter.refund(n - written)
    else:
        pytest.fail(f"{batches} batches and {grants} grants in 20,000 moves: {limiter.explain()}")
