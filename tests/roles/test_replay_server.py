"""The replay server: its counters, which side waits, and when it has something to do."""

import numpy as np
import pytest

from tests.support.fake_system import System, spec
from zapex.chunks.batch import Batch
from zapex.chunks.layout import BatchLayout
from zapex.config.settings import Config
from zapex.host.metrics import LIMITER_STATES


def system(**settings: object) -> System:
    values = {"actors": 1, "envs_per_actor": 2, "capacity": 64, "learning_starts": 16}
    config = Config().replace(**values | {"batch_size": 8, "hidden": 8} | settings)
    return System(config, spec(1))


def gauge(one: System, name: str) -> float:
    return one.host.metrics("replay").snapshot(alive=False)[name]


def limiter_state(one: System) -> str:
    return LIMITER_STATES[int(gauge(one, "limiter"))]


def test_counters_continue_after_a_restart() -> None:
    one = system()
    names = ("inserted", "evicted", "sampled", "batches", "updates_applied")
    before = dict.fromkeys(names, 0)
    for _ in range(4):
        one.goes_on(batches=5, chunks=2 * one.plan.replay.live_slots)
        now = {name: one.count("replay", name) for name in names}
        assert all(now[name] > before[name] for name in names), (before, now)
        before = now
        one.start_replay()
    assert gauge(one, "capacity") == 64


def test_gauges_match_the_ledger() -> None:
    one = system()
    one.goes_on(batches=5, chunks=20)
    assert gauge(one, "live") == len(one.replay)
    for state, count in one.replay.ledger.counts.items():
        assert gauge(one, f"slots_{state}") == count
    body_bytes = one.replay.store.layout.body_bytes
    assert gauge(one, "bytes_used") == body_bytes * one.replay.ledger.counts["live"]


def test_limiter_gauge_says_which_side_waits() -> None:
    one = system(samples_per_insert=4.0)
    one.calm_round()
    assert limiter_state(one) == "filling"
    one.goes_on(batches=1, chunks=1)
    for _ in range(200):  # nobody learns
        one.step("actor 0")
        one.step("replay")
    assert limiter_state(one) == "actors wait"
    assert gauge(one, "owed") == one.limiter.owed > 0
    for _ in range(200):  # nobody plays
        one.step("learner")
        one.step("replay")
    assert limiter_state(one) == "learner waits"


def test_request_waits_for_the_first_transitions() -> None:
    one = system(learning_starts=40)
    while not one.limiter.open:
        assert one.count("learner", "batches") == 0
        one.step("actor 0")
        one.step("replay")
        one.step("learner")
    assert one.count("replay", "batches") > 0


def test_ready_only_when_there_is_work() -> None:
    one = system()
    server = one.roles["replay"]
    while server.do_work():
        pass
    assert not server.ready()
    one.host.set_incarnation("actor 0", 99)
    assert server.ready()
    while server.do_work():
        pass
    assert not server.ready()
    one.start_actor(0)
    while one.step("actor 0"):
        pass
    while server.do_work():
        pass
    while one.step("actor 0") and not server.ready():
        pass
    assert server.ready(), "a chunk was handed over"


@pytest.mark.parametrize("waits", [True, False])
def test_released_slots_wake_it_only_for_waiting_actors(waits: bool) -> None:
    one = system()
    server = one.roles["replay"]
    while not (one.intake.waiting and one.replay.ledger.counts["quarantined"]):
        one.step("actor 0")
        one.step("replay")
        if one.count("learner", "batches") == 0:
            one.step("learner")
    # Everything is in quarantine or live until the learner gathers what it was answered.
    assert one.replay.ledger.free < 2
    assert not server.ready()
    assert limiter_state(one) == "no free slots"
    if not waits:
        one.host.set_incarnation("actor 0", 0)
        server.do_work()
    batch = Batch.empty(BatchLayout(one.plan.replay.schema, 8))
    assert one.sample_source.poll(batch) is not None
    assert server.ready() is waits


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_update_with_a_non_finite_priority_is_refused_whole(
    bad: float, capsys: pytest.CaptureFixture[str]
) -> None:
    one = system()
    one.goes_on(batches=5, chunks=20)
    server = one.roles["replay"]
    while server.do_work():
        pass
    leaves = one.replay.tree.leaves.copy()
    keys = one.replay.draw(8).keys
    priorities = np.ones(8, np.float32)
    priorities[3] = bad
    for _ in range(2):
        assert one.sample_source.update(keys, priorities)
        server.do_work()
    np.testing.assert_array_equal(one.replay.tree.leaves, leaves, "all of an update or nothing")
    assert one.replay.tree.check_valid()[0]
    assert one.count("replay", "updates_refused") == 2
    assert capsys.readouterr().err.count("update is refused") == 1
    one.goes_on(batches=5, chunks=5)
