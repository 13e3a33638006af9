"""With any settings, deaths and restarts there is progress, no slot is lost and no row is wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.audit import ChunkAudit
from tests.support.fake_system import System, spec
from zapex.chunks.layout import FREE, STATE
from zapex.config.settings import Config


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Small systems, the capacity often close to the least that is accepted."""
    n_step = draw(st.integers(1, 5))
    capacity = n_step + draw(st.sampled_from([0, 1, 2, 7, 60, 400]) | st.integers(0, 400))
    capacity = max(2, capacity)
    learning_starts = draw(st.integers(1, capacity))
    config = Config().replace(
        actors=draw(st.integers(1, 3)),
        envs_per_actor=draw(st.integers(1, 4)),
        n_step=n_step,
        capacity=capacity,
        learning_starts=learning_starts,
        batch_size=draw(st.integers(1, min(learning_starts, 16))),
        samples_per_insert=draw(st.sampled_from([0.0, 0.1, 1.0, 6.5])),
        prefetch=draw(st.integers(1, 4)),
        max_chunk_age_steps=draw(st.integers(1, 30)),
        param_period=draw(st.integers(1, 9)),
        publish_period_s=draw(st.sampled_from([0.0, 1.0])),
        sampling=draw(st.sampled_from(["stratified", "independent"])),
        hidden=8,
    )
    if config.replay.samples_per_insert and draw(st.booleans()):
        slack = draw(st.integers(0, 50))
        tolerance = config.smallest_tolerance + slack
        config = config.replace(samples_per_insert_tolerance=tolerance)
    return config


def storm(system: System, rng: np.random.Generator, ticks: int, servers_die: bool) -> None:
    """Duty cycles in any order, while actors die in the middle of theirs."""
    actors = range(system.plan.actors)
    for tick in range(ticks):
        actor = int(rng.integers(len(actors)))
        if f"actor {actor}" not in system.roles:
            if rng.random() < 0.3:
                system.start_actor(actor)
        elif rng.random() < 0.03:
            system.fuses[actor].left = int(rng.integers(1, 12))
        if servers_die and rng.random() < 0.01:
            system.start_replay()
        if servers_die and rng.random() < 0.01:
            system.start_learner()
        system.step(str(rng.choice(list(system.roles))))
        if tick % 5 == 0:
            system.check_slots()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    config=configs(),
    stack=st.sampled_from([1, 1, 3]),
    seed=st.integers(0, 2**32 - 1),
    servers_die=st.booleans(),
)
def test_systems_survive_random_deaths_with_correct_rows(
    config: Config, stack: int, seed: int, servers_die: bool
) -> None:
    system = System(config, spec(stack))
    storm(system, np.random.default_rng(seed), 250, servers_die)
    for actor in range(config.actor.actors):
        system.fuses[actor].left = -1
        if f"actor {actor}" not in system.roles:
            system.start_actor(actor)
    system.goes_on(batches=3, chunks=2 * system.plan.replay.live_slots + 3)
    system.check_slots()
    assert system.rows_checked


@pytest.mark.parametrize("fault", ["lost", "torn", "doubled", ""])
def test_the_audit_of_a_memory_finds_each_fault(fault: str) -> None:
    config = Config().replace(
        actors=2, envs_per_actor=2, capacity=256, learning_starts=16, batch_size=8, hidden=8
    )
    system = System(config, spec(1))
    system.goes_on(batches=5, chunks=20)
    audit, store, ledger = (
        ChunkAudit(system.host.store()),
        system.replay.store,
        system.replay.ledger,
    )
    assert audit.look()
    if fault == "lost":
        store.header_rows[ledger.live[-2], STATE] = FREE
    elif fault == "torn":
        store.mem[store.body(ledger.live[3]) + 70] ^= 1
    elif fault == "doubled":
        original, copy = ledger.live[-1], ledger.free_slots[0]
        store.header_rows[copy] = store.header_rows[original]
    else:
        system.goes_on(batches=20, chunks=100)  # evictions are none
    audit.look()
    counts = {"lost": audit.lost, "torn": audit.torn, "doubled": audit.doubled}
    assert {name for name, count in counts.items() if count} == {fault} - {""}
