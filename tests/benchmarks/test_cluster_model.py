"""The model of many hosts against closed forms, and against points that were measured."""

import json
from dataclasses import replace

import pytest

from benchmarks.transport import cluster_model
from benchmarks.transport.cluster_model import Cluster, Link, Times, predict

TIMES = Times(
    insert_s=1e-4,
    sample_s=0.0,
    row_s=2e-6,
    update_s=1e-4,
    serve_s=1e-3,
    move_s=5e-5,
    byte_s=1e-10,
    push_s=1e-4,
    unpack_s=1e-3,
    hop_s=5e-5,
)
SMALL = Cluster(
    actors=32,
    per_host=4,
    rows=64,
    play_s=0.032,
    chunk_bytes=500_000,
    batch=512,
    batch_bytes=4_000_000,
    learn_s=0.02,
    times=TIMES,
    ahead=4,
    prefetch=4,
    publish_s=1e6,
    host=Link(10),
    replay=Link(100),
    learner=Link(100),
)


def test_it_predicts_the_measured_points() -> None:
    results = json.loads(cluster_model.RESULTS.read_text())["results"]
    assert cluster_model.check(results) < 0.13


@pytest.mark.parametrize(
    ("slow", "name", "most"),
    [
        ({"times": replace(TIMES, insert_s=2e-3)}, "replay's core", 64 / 2e-3),
        ({"replay": Link(2)}, "replay's link, in", 64 * 2e9 / 8 / 500_000),
        ({"site": Link(1)}, "site's link", 64 * 1e9 / 8 / 500_000),
    ],
)
def test_a_full_resource_limits_the_actors(slow: dict, name: str, most: float) -> None:
    found = predict(replace(SMALL, prefetch=1, learn_s=0.5, **slow))
    assert found.steps_per_s == pytest.approx(most, rel=0.05)
    assert found.loads[name] > 0.95


def test_the_learner_is_as_fast_as_its_step_its_link_or_its_round_trips() -> None:
    assert predict(SMALL).batches_per_s == pytest.approx(50, rel=0.02)
    narrow = replace(SMALL, learner=Link(0.8))  # 40 ms a batch
    assert predict(narrow).batches_per_s == pytest.approx(25, rel=0.03)
    far = replace(SMALL, learner=Link(100, rtt_ms=200))
    assert predict(far).batches_per_s < 20
    ahead = predict(replace(far, prefetch=32))
    assert ahead.batches_per_s == pytest.approx(50, rel=0.02)
