"""The model of a cluster against closed forms: full resources, M/D/1, round trips, the limiter."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("simpy", reason="pip install simpy")

from zapex.errors import ConfigError
from zapex.studies import bounds, purchase, simulation
from zapex.studies.cluster import Cluster, Link, Times
from zapex.studies.simulation import Simulation
from zapex.studies.stations import Station, through

TIMES = Times(
    insert_s=1e-4, sample_s=0.0, row_s=2e-6, update_s=1e-4, serve_s=1e-3, move_s=5e-5,
    byte_s=1e-10, push_s=1e-4, unpack_s=1e-3, hop_s=5e-5,
)  # fmt: skip
SMALL = Cluster(
    actors=32, per_host=4, rows=64, play_s=0.032, chunk_bytes=500_000, batch=512,
    batch_bytes=4_000_000, parameter_bytes=13_000_000, learn_s=0.02, times=TIMES, ahead=4,
    prefetch=4, host=Link(10), replay=Link(100), learner=Link(100),
)  # fmt: skip
FULL = {
    bounds.RELAYS: {"times": replace(TIMES, push_s=12e-3)},
    bounds.HOST_UP: {"host": Link(0.3)},
    bounds.SITE_UP: {"site": Link(2)},
    bounds.CORES: {"times": replace(TIMES, insert_s=2e-3)},
    bounds.THREADS: {"times": replace(TIMES, move_s=2e-3)},
    bounds.REPLAY_IN: {"replay": Link(2)},
}
"""What is made slow, and how: each alone keeps the actors of SMALL from their own speed."""
SHARED = bounds.CORES, bounds.REPLAY_IN, bounds.HOST_UP, bounds.LEARNER_IN


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_a_station_makes_poisson_arrivals_wait_as_pollaczek_and_khinchine_say(load):
    rng, station, now_s, waits = random.Random(1), Station(), 0.0, []
    for _ in range(100_000):
        now_s += rng.expovariate(load)
        waits.append(through(now_s, [(station, 1.0)]) - now_s - 1.0)
    assert sum(waits) / len(waits) == pytest.approx(bounds.queue_s(load, 1.0), rel=0.05)


def test_a_message_passes_stations_at_once_and_its_slowest_one_counts():
    fast, slow = Station(), Station()
    assert through(0.0, [(fast, 1.0), (slow, 3.0)], late_s=0.5) == 3.5
    assert through(0.0, [(fast, 1.0), (slow, 3.0)]) == 6.0
    assert through(0.0, [(Station(), 3.0), (Station(), 1.0)]) == 3.0
    assert slow.done_s(4.0) == 4.0


@pytest.mark.parametrize("kind", FULL)
def test_each_resource_is_full_at_the_rate_of_the_utilisation_law(kind):
    cluster = replace(SMALL, publish_s=1e6, prefetch=1, learn_s=0.5, **FULL[kind])
    found = Simulation(cluster).run()
    most, name = bounds.most_steps(cluster, found.batches_per_s)
    assert name == kind
    assert found.steps_per_s == pytest.approx(most, rel=0.03)
    assert found.loads[kind] > 0.97
    assert found.limit == kind


@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    hosts=st.integers(1, 40), per_host=st.integers(1, 16), shards=st.integers(1, 5),
    play_s=st.floats(0.01, 0.5), insert_s=st.floats(1e-5, 3e-3), gbit=st.floats(0.5, 40),
    learn_s=st.floats(0.005, 0.2), prefetch=st.integers(1, 8),
)  # fmt: skip
def test_no_rate_is_above_its_bound_and_what_is_far_below_full_is_not_slowed(
    hosts, per_host, shards, play_s, insert_s, gbit, learn_s, prefetch
):
    cluster = replace(
        SMALL, actors=hosts * per_host, per_host=per_host, shards=shards, play_s=play_s,
        learn_s=learn_s, prefetch=prefetch, times=replace(TIMES, insert_s=insert_s),
        replay=Link(gbit),
    )  # fmt: skip
    found = Simulation(cluster).run()
    assert found.steps_per_s <= 1.05 * cluster.own_steps_per_s
    assert found.batches_per_s <= 1.05 / learn_s
    if shards == 1:
        assert found.steps_per_s <= 1.05 * bounds.most_steps(cluster)[0]
    needed = bounds.demands(cluster, found.batches_per_s)
    if shards == 1 or max(found.loads[kind] for kind in SHARED) < 0.9:
        for kind in SHARED:
            wanted = min(1, needed[kind].load(found.steps_per_s, found.batches_per_s))
            assert found.loads[kind] <= wanted + 0.1, kind
            # Of several shards, the busiest may not be the one that has the parameters.
            assert shards > 1 or found.loads[kind] >= wanted - 0.1, kind
    shared = needed.keys() - {bounds.ACTORS, bounds.LEARNER}
    free = all(needed[k].load(cluster.own_steps_per_s, 1 / learn_s) < 0.5 for k in shared)
    if free:
        assert found.steps_per_s == pytest.approx(cluster.own_steps_per_s, rel=0.04)


def test_the_learner_is_as_fast_as_its_step_its_link_or_its_round_trips():
    alone = replace(SMALL, publish_s=1e6)
    found = Simulation(alone).run()
    assert found.batches_per_s == pytest.approx(1 / 0.02, rel=0.02)
    assert found.learner_limit == bounds.LEARNER
    narrow = Simulation(replace(alone, learner=Link(0.8))).run()  # 40 ms a batch
    assert narrow.batches_per_s == pytest.approx(25, rel=0.03)
    assert narrow.learner_limit == bounds.LEARNER_IN
    far = replace(alone, learner=Link(100, rtt_ms=200))
    assert Simulation(far).run().batches_per_s == pytest.approx(bounds.most_batches(far), rel=0.05)
    assert "--prefetch" in Simulation(far).run().learner_limit
    ahead = Simulation(replace(far, prefetch=32)).run()
    assert ahead.batches_per_s == pytest.approx(50, rel=0.02)
    assert ahead.staleness_batches == pytest.approx(31, abs=0.5)


def test_an_actor_that_waits_for_its_push_has_the_sum_of_both():
    one = replace(SMALL, actors=1, ahead=0, publish_s=1e6, learn_s=0.5, times=replace(
        TIMES, hop_s=0.0), site=Link(0, rtt_ms=20), host=Link(1))  # fmt: skip
    cycle_s = one.play_s + 0.004 + 0.020 + TIMES.insert_s  # 0.5 MB at 1 Gbit/s
    found = Simulation(one).run()
    assert found.steps_per_s == pytest.approx(64 / cycle_s, rel=0.01)
    assert found.push_s == pytest.approx(cycle_s - one.play_s, rel=0.02)


def test_chunks_of_many_actors_wait_less_than_poisson_arrivals_and_more_than_not_at_all():
    slow = replace(TIMES, insert_s=2.4e-4, hop_s=0.0, push_s=0.0, move_s=0.0)
    many = replace(SMALL, actors=100, per_host=1, times=slow, publish_s=1e6, learn_s=0.5,
                   host=Link(), replay=Link())  # fmt: skip
    load = 100 / 0.032 * 2.4e-4
    waited_s = Simulation(many).run().push_s - 2.4e-4
    assert 0 < waited_s < 2 * bounds.queue_s(load, 2.4e-4)


@pytest.mark.parametrize("reuse", [0.5, 4.0, 16.0])
def test_samples_per_insert_couple_both_rates_and_say_who_waits(reuse):
    found = Simulation(replace(SMALL, reuse=reuse, tolerance=20_000)).run()
    ratio = found.batches_per_s * 512 / found.steps_per_s
    assert ratio == pytest.approx(reuse, rel=0.08)
    if reuse == 16:  # 64,000 steps a second would need 2,000 batches
        assert found.limit == bounds.LEARNER


def test_actors_that_act_as_groups_are_as_fast_as_single_ones(monkeypatch):
    cluster = replace(SMALL, actors=256, replay=Link(400), publish_s=1e6,
                      times=replace(TIMES, insert_s=2e-5, move_s=1e-6))  # fmt: skip
    found = {}
    for groups in (16, 64, 256):
        monkeypatch.setattr(simulation, "_GROUPS", groups)
        found[groups] = Simulation(cluster).run()
    for groups in (16, 64):
        assert found[groups].steps_per_s == pytest.approx(found[256].steps_per_s, rel=0.03)
        assert found[groups].batches_per_s == pytest.approx(found[256].batches_per_s, rel=0.05)


def test_parameters_of_many_hosts_fill_the_first_shard():
    found = Simulation(
        replace(SMALL, actors=4_000, play_s=10.0, shards=4, parameter_bytes=10**6)
    ).run()
    assert found.loads[bounds.CORES] > 0.9  # 1,000 hosts, 1 ms each, once a second
    assert found.parameters_age_s > 1
    few = Simulation(replace(SMALL, play_s=10.0)).run()
    assert 0.5 < few.parameters_age_s < 0.7


def test_actors_also_those_of_one_host_are_spread_evenly_over_shards():
    assert replace(SMALL.of(400), shards=3).placed == [134, 133, 133]
    one_host = replace(SMALL, actors=6, per_host=8, shards=4)
    assert one_host.placed == [2, 2, 1, 1]
    pushed = Counter()
    for group in Simulation(one_host)._groups:
        pushed[id(group.shard)] += group.actors
    assert sorted(pushed.values()) == [1, 1, 2, 2]
    assert replace(SMALL, actors=2, shards=4).placed == [1, 1]


def test_a_learner_with_several_shards_checks_their_parts_itself():
    alone = replace(SMALL, publish_s=1e6, times=replace(TIMES, unpack_s=5e-3))
    assert Simulation(alone).run().batches_per_s == pytest.approx(1 / 0.020, rel=0.02)
    several = replace(alone, shards=2)
    assert Simulation(several).run().batches_per_s == pytest.approx(1 / 0.025, rel=0.02)


def test_the_same_seed_gives_the_same_outcome():
    assert Simulation(SMALL, 3).run() == Simulation(SMALL, 3).run()


def test_what_is_bought_reaches_both_rates_and_one_step_less_would_not():
    bought = purchase.advise(SMALL, 500_000, 45)
    assert bought.outcome.steps_per_s >= 0.98 * 500_000
    assert bought.outcome.batches_per_s >= 0.98 * 45
    c = bought.cluster
    assert c.hosts <= 1.1 * 500_000 / (4 * 2_000)
    gbit = purchase.GBIT[purchase.GBIT.index(c.replay.gbit) - 1]
    less = [replace(c, replay=Link(gbit))] + [replace(c, shards=c.shards - 1)] * (c.shards > 1)
    for one in less:
        loads = [d.load(500_000, 45) for kind, d in bounds.demands(one, 45).items()
                 if kind not in (bounds.ACTORS, bounds.LEARNER)]  # fmt: skip
        assert max(loads) > purchase.MOST_LOAD
    assert "actor hosts" in " ".join(bought.lines(SMALL))


def test_a_purchase_that_cannot_help_says_what_would():
    with pytest.raises(ConfigError, match="its step must take at most 10 ms"):
        purchase.advise(SMALL, 0, 100)
    far = replace(SMALL, learner=Link(100, rtt_ms=100), prefetch=2)
    assert "--prefetch" in " ".join(purchase.advise(far, 0, 40).lines(far))
