"""The model of throughput: it finds the numbers of what follows it, and where growth stops."""

from dataclasses import astuple

import numpy as np
import pytest

from zapex.machine.resources import Machine
from zapex.studies.plan import trials
from zapex.studies.saturation import MOST_ENVS, Model, Point, error, fit, powers

MODELS = [
    Model(2e-3, 3e-4, 0.05, 1.0, 16),
    Model(5e-4, 5e-4, 0.0, 0.3, 4),
    Model(1e-2, 1e-5, 0.2, 0.1, 1),
    Model(0.0, 1e-3, 0.01, 1.0, 2),
]


def points(model, cores, noise=0.0, held_out=False):
    machine = Machine(model.physical, 2**34, 0)
    rng = np.random.default_rng(1)
    return [
        Point(t.actors, t.envs, t.cores,
              model.rate(t.actors, t.envs, t.cores) * (1 + noise * rng.uniform(-1, 1)))
        for t in trials(machine, cores, False, False, True)
        if t.do == "play" and t.held_out == held_out
    ]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cores", [1, 2, 8, 32])
def test_the_numbers_of_a_machine_that_follows_the_model_are_found(model, cores):
    found = fit(points(model, cores), model.physical)
    assert astuple(found)[:2] == pytest.approx(astuple(model)[:2], abs=1e-9)
    if cores > 1 and model.physical > 1:
        assert found.contention == pytest.approx(model.contention, abs=1e-9)
    for point in points(model, cores, held_out=True):
        if cores <= model.physical:
            assert error(found, point) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("model", "cores"), [(m, n) for m in MODELS for n in (1, 2, 8, 32) if n <= 2 * m.physical]
)
def test_with_three_percent_of_noise_all_predictions_are_within_ten(model, cores):
    found = fit(points(model, cores, 0.03), model.physical)
    checks = points(model, cores, 0.03, held_out=True)
    assert checks
    assert max(abs(error(found, point)) for point in checks) < 0.10


def test_second_threads_of_cores_add_what_was_measured():
    model = Model(1e-3, 1e-3, 0.0, 0.25, 4)
    found = fit(points(model, 8), 4)
    assert found.sibling == pytest.approx(0.25)
    assert found.rate(8, 16, 8) == pytest.approx(5 * found.rate(1, 16, 1))


def test_more_actors_than_cores_fill_the_time_that_waiting_actors_leave_idle():
    alone = [Point(1, envs, 1, envs / (1e-3 + envs * 1e-4)) for envs in (1, 4, 16)]
    pair = Point(2, 16, 2, 2 * alone[-1].steps_per_s, busy=0.8)
    found = fit([*alone, pair], 2)
    assert found.idle == pytest.approx(0.2)
    assert found.rate(2, 16, 2) == pytest.approx(pair.steps_per_s)
    assert found.rate(3, 16, 2) == pytest.approx(pair.steps_per_s / 0.8)
    assert found.rate(8, 16, 2) == found.rate(3, 16, 2)  # then the cores are full
    assert found.rate(1, 16, 2) == pytest.approx(alone[-1].steps_per_s)
    full = fit([*alone, Point(2, 16, 2, pair.steps_per_s)], 2)
    assert full.rate(8, 16, 2) == full.rate(2, 16, 2)


def test_growth_stops_where_twice_the_environments_gain_less_than_a_tenth():
    model = Model(2e-3, 1e-3, 0.0, 1.0, 4)
    envs = model.enough_envs()
    assert model.actor(2 * envs) / model.actor(envs) < 1.1
    assert model.actor(envs) / model.actor(envs // 2) >= 1.1
    assert Model(1.0, 1e-9, 0.0, 1.0, 4).enough_envs() == MOST_ENVS
    assert Model(0.0, 1e-3, 0.0, 1.0, 4).enough_envs() == 1


def test_growth_stops_where_a_core_more_gains_less_than_a_tenth_of_one():
    model = Model(1e-3, 1e-3, 0.5, 1.0, 64)
    n = model.enough_cores(8, 64)
    one = model.rate(1, 8, 1)
    assert model.rate(n + 1, 8, n + 1) - model.rate(n, 8, n) < 0.1 * one
    assert model.rate(n, 8, n) - model.rate(n - 1, 8, n - 1) >= 0.1 * one
    assert Model(1e-3, 1e-3, 0.0, 1.0, 64).enough_cores(8, 64) == 64
    assert Model(1e-3, 1e-3, 2.0, 1.0, 64).enough_cores(8, 64) == 1


def test_how_many_cores_make_a_rate_and_that_none_may_do():
    model = Model(1e-3, 1e-3, 0.1, 1.0, 4096)
    wanted = model.rate(7, 8, 7)
    assert model.cores_for(wanted, 8) == 7
    assert model.cores_for(wanted * 1.0001, 8) == 8
    assert model.cores_for(11 * model.rate(1, 8, 1), 8) is None  # its limit is 1 / 0.1 of one


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 128])
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("gpu", [True, False])
def test_a_plan_measures_once_and_checks_with_other_points_than_it_fits(threads, quick, gpu):
    machine = Machine(max(1, threads // 2), 2**34, int(gpu))
    every = trials(machine, threads, gpu, quick, paced=False)
    assert len(set(every)) == len(every)
    played = [(t.where, t.actors, t.envs, t.cores) for t in every if t.do == "play"]
    assert len(set(played)) == len(played)
    for where in ("cpu", "gpu") if gpu else ("cpu",):
        mine = [t for t in every if t.do == "play" and t.where == where]
        assert {t.held_out for t in mine} == {True, False}
        assert threads == 1 or any(t.actors > 1 and not t.held_out for t in mine)
    assert all(1 <= t.cores <= threads for t in every if t.do != "learn")
    assert any(t.do == "learn" for t in every)
    assert not any(t.do == "learn" for t in trials(machine, threads, gpu, quick, paced=True))


def test_powers_end_with_the_most():
    assert [powers(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
