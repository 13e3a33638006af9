"""The actor: its steps, its initial priorities, and how it waits for slots."""

import numpy as np
import pytest

from tests.support.fake_system import ACTIONS, System, frame, game, moment_of, spec
from zapex.chunks.layout import COUNT
from zapex.config.settings import Config


class Judge:
    """A policy whose Q values are known for every moment."""

    def __init__(self, stack: int) -> None:
        self._stack = stack

    def load_flat(self, buffer: object) -> None: ...

    def q(self, obs: np.ndarray) -> np.ndarray:
        stream, _, episode, step = moment_of(self._stack, obs)
        values = np.sin(np.arange(1, ACTIONS + 1) * (1 + step + 7 * episode + 31 * stream))
        return (3 * values).astype(np.float32)

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        return np.stack([self.q(one) for one in obs])


def system(stack: int = 1, policy: Judge | None = None, **settings: object) -> System:
    values = {"actors": 1, "envs_per_actor": 3, "capacity": 4000, "learning_starts": 4000}
    config = Config().replace(**values | {"batch_size": 8, "hidden": 8} | settings)
    return System(config, spec(stack), policy=policy)


@pytest.mark.parametrize("stack", [1, 3])
def test_initial_priorities_are_td_errors_of_the_actors_values(stack: int) -> None:
    judge = Judge(stack)
    one = system(stack, judge)
    one.goes_on(batches=0, chunks=12)
    schema, store = one.plan.replay.schema, one.replay.store
    rated = 0
    for slot in one.replay.ledger.live:
        obs_at = store.column(slot, "obs_frames")
        frames = store.column(slot, "obs")
        for row in range(int(store.header_rows[slot, COUNT])):
            stream, life, episode, t = moment = moment_of(
                stack, frames[obs_at[row, -1]][None] if stack > 1 else frames[obs_at[row, -1]]
            )
            played = game(stream, life, episode)
            total, discount, then = played.transition(t, schema.n_step, schema.gamma)
            next_q = judge.q(_newest(stack, (stream, life, episode, then)))
            q = judge.q(_newest(stack, moment))[one.played[moment]]
            wanted = abs(total + discount * next_q.max() - q)
            assert store.column(slot, "priority")[row] == pytest.approx(wanted, abs=1e-4)
            rated += 1
    assert rated > 100


@pytest.mark.parametrize("stack", [1, 3])
def test_returns_end_before_an_exploratory_action_if_they_are_cut_there(stack: int) -> None:
    judge = Judge(stack)
    one = system(stack, judge, cut_exploratory=True, n_step=4)
    one.goes_on(batches=0, chunks=12)
    schema, store, cut = one.plan.replay.schema, one.replay.store, 0
    for slot in one.replay.ledger.live:
        obs_at, frames = store.column(slot, "obs_frames"), store.column(slot, "obs")
        for row in range(int(store.header_rows[slot, COUNT])):
            picture = frames[obs_at[row, -1]]
            stream, life, episode, t = moment_of(stack, picture[None] if stack > 1 else picture)
            played = game(stream, life, episode)
            _, usual, then = played.transition(t, schema.n_step, schema.gamma)
            steps = 1
            while t + steps < then and _is_greedy(judge, one, (stream, life, episode, t + steps)):
                steps += 1
            discount = usual if t + steps == then else schema.gamma**steps
            total = sum(schema.gamma**k * played.rewards[t + k] for k in range(steps))
            now, after = (_newest(stack, (stream, life, episode, at)) for at in (t, t + steps))
            taken = one.played[stream, life, episode, t]
            wanted = abs(total + discount * judge.q(after).max() - judge.q(now)[taken])
            assert store.column(slot, "discount")[row] == pytest.approx(discount)
            assert store.column(slot, "reward")[row] == pytest.approx(total, abs=1e-4)
            assert store.column(slot, "priority")[row] == pytest.approx(wanted, abs=1e-4)
            cut += t + steps < then
    assert cut > 100


def _is_greedy(judge: Judge, one: System, moment: tuple[int, int, int, int]) -> bool:
    q = judge.q(_newest(judge._stack, moment))
    return bool(q[one.played[moment]] == q.max())


def test_without_actor_priorities_new_transitions_get_the_same() -> None:
    one = system(initial_priority="max")
    one.goes_on(batches=0, chunks=12)
    leaves = one.replay.tree.leaves[one.replay.tree.leaves > 0]
    assert len(leaves) == len(one.replay)
    assert (leaves == leaves[0]).all()


def _newest(stack: int, moment: tuple[int, int, int, int]) -> np.ndarray:
    picture = frame(stack, moment)
    return picture if stack == 1 else picture[None]


def test_actor_waits_for_parameters_then_for_slots() -> None:
    one = system()
    actor = one.roles["actor 0"]
    assert actor.ready(), "the learner has published"
    assert actor.do_work() == 0, "there are parameters, but no slots"
    assert not actor.ready()
    assert one.count("actor 0", "credit_waits") == 1
    one.step("replay")
    assert actor.ready()
    while actor.do_work():
        pass
    assert one.count("actor 0", "credit_waits") == 2
    assert one.count("actor 0", "steps") == len(one.played)
    one.goes_on(batches=0, chunks=30)
    assert one.count("actor 0", "steps") == len(one.played)


def test_finished_games_are_reported_with_score_and_epsilon() -> None:
    one = system()
    one.goes_on(batches=0, chunks=12)
    consumer = one.host.ring("episodes 0").consumer()
    records = consumer.take(consumer.ring.capacity)
    assert len(records) == one.count("actor 0", "episodes") > 3
    seen = dict.fromkeys(range(3), 0)
    for record in records:
        stream = int(record["stream"])
        played = game(stream, 1, seen[stream])
        seen[stream] += 1
        assert record["game_return"] == sum(played.rewards)
        assert record["steps"] == record["frames"] == played.length
        assert record["epsilon"] == 0.5
        assert record["params_version"] == 1


def test_parameters_are_pulled_periodically() -> None:
    judge, pulls = Judge(1), []
    one = system(1, judge, param_period=5, learning_starts=16)
    sink, size = one.host.mailbox(), one.plan.parameter_bytes
    one.goes_on(batches=0, chunks=1)
    judge.load_flat = lambda buffer: pulls.append(version)
    for version in range(10, 40):
        sink.publish(version, np.zeros(size, np.uint8))
        one.step("actor 0")
        one.step("replay")
    assert len(pulls) == 6
    assert (np.diff(pulls) == 5).all()


def test_actor_that_may_not_step_waits_for_its_end() -> None:
    one = system(max_frames=30)
    for _ in range(100):
        one.step("actor 0")
        one.step("replay")
    actor = one.roles["actor 0"]
    assert 30 <= one.count("actor 0", "frames") < 33
    assert actor.do_work() == 0
    assert not actor.ready()
    held = len(one.replay)
    actor.close()
    one.step("replay")
    assert len(one.replay) > held


def test_close_commits_unfinished_chunks() -> None:
    one = system()
    while len(one.played) < 10:
        one.calm_round()
    held = len(one.replay)
    one.roles["actor 0"].close()
    one.step("replay")
    assert len(one.replay) > held
    one.check_slots()
