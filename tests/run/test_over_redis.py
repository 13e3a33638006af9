"""How hosts join a run through a real Redis, and what they do when it changes under them."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer, needs_redis, redis_server
from zapex.config.settings import Config
from zapex.envs import environments
from zapex.errors import ConfigError, Fenced
from zapex.net.redis_link import HOST_KEY, LEARNER, NUMBERS, RUN, SETTINGS
from zapex.run.over_redis import _HostBeat, _RunKeeper, joined_run, link_of, tell_all
from zapex.run.preflight import check_redis
from zapex.run.run import Membership, Run

pytestmark = needs_redis
__all__ = ["redis_server"]  # a fixture


def run_of(server: RedisServer, part: str, directory: Path, **changes: object) -> Run:
    config = Config().replace(
        env="CartPole-v1", actors=2, envs_per_actor=2, capacity=2_000, learning_starts=100,
        batch_size=32, hidden=16,
    )  # fmt: skip
    membership = Membership(f"{part} over redis", server.url)  # type: ignore[arg-type]
    spec = environments.check("CartPole-v1")
    return Run(config.replace(**changes), spec, directory, membership=membership)


def numbers_of(run: Run) -> tuple[int, ...]:
    assert run.membership is not None
    return run.membership.numbers


def test_hosts_take_different_numbers_and_those_of_a_host_that_is_gone(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    learner = joined_run(run_of(redis_server, "learner", tmp_path, actors=4))
    hosts = [joined_run(run_of(redis_server, "actor", tmp_path)) for _ in range(2)]
    assert [numbers_of(host) for host in hosts] == [(0, 1), (2, 3)]
    for host in hosts:
        assert host.membership is not None
        assert learner.membership is not None
        assert host.membership.epoch == learner.membership.epoch
        assert host.plan.replay.chunk == learner.plan.replay.chunk
        assert host.streams == 8
    assert hosts[0].membership is not None
    redis_server.client().delete(f"{HOST_KEY}{hosts[0].membership.host}")  # it has expired
    assert numbers_of(joined_run(run_of(redis_server, "actor", tmp_path))) == (0, 1)
    with pytest.raises(Fenced, match="another host now has the actor numbers"):
        _HostBeat(link_of(hosts[0]), hosts[0].membership)()


def test_other_settings_and_a_second_learner_are_refused(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    first = joined_run(run_of(redis_server, "learner", tmp_path))
    with pytest.raises(ConfigError, match=r"gamma is 0\.99 at the learner and 0\.5 here"):
        joined_run(run_of(redis_server, "actor", tmp_path, gamma=0.5))
    with pytest.raises(ConfigError, match="the run has 2: lower --actors"):
        joined_run(run_of(redis_server, "actor", tmp_path, actors=3))
    second = run_of(redis_server, "learner", tmp_path)
    with pytest.raises(ConfigError, match="another learner trains"):
        joined_run(second)
    assert second.membership is not None
    taken = replace(second, membership=replace(second.membership, take_over=True))
    assert joined_run(taken).membership != first.membership


def test_a_refused_user_is_a_mistake_and_no_wait(redis_server: RedisServer, tmp_path: Path) -> None:
    redis_server.client().config_set("requirepass", "secret")
    with pytest.raises(ConfigError, match="it refuses this user"):
        joined_run(run_of(redis_server, "learner", tmp_path))


def test_the_doctor_says_what_a_redis_lacks(redis_server: RedisServer) -> None:
    (found,) = check_redis(redis_server.url)
    assert found.enough
    redis_server.client().config_set("requirepass", "secret")
    (found,) = check_redis(redis_server.url)
    assert not found.enough
    assert "REDISCLI_AUTH" in found.hint
    redis_server.stop()
    (found,) = check_redis(redis_server.url)
    assert "start one there" in found.hint


def test_a_redis_that_was_emptied_gets_the_run_again(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    learner = joined_run(run_of(redis_server, "learner", tmp_path))
    host = joined_run(run_of(redis_server, "actor", tmp_path))
    assert host.membership is not None
    client = redis_server.client()
    client.flushall()
    told: list[str] = []
    lost: list[bool] = []

    class Sink:
        def again(self) -> None:
            lost.append(True)

        def do_work(self) -> None:
            pass

    class Begun:
        run = learner

        class notices:  # noqa: N801
            tell = told.append

    link = link_of(host)
    beat = _HostBeat(link, host.membership)
    beat()
    assert "it has no run" in link.waiting
    keeper = _RunKeeper(link_of(learner), Begun(), Sink())  # type: ignore[arg-type]
    keeper()
    assert lost == [True]
    assert "was emptied" in told[0]
    assert client.exists(LEARNER, RUN, SETTINGS, NUMBERS) == 4
    beat()
    assert link.waiting == ""
    keeper()
    assert len(told) == 1


def test_the_end_of_the_run_reaches_the_hosts(redis_server: RedisServer, tmp_path: Path) -> None:
    learner = joined_run(run_of(redis_server, "learner", tmp_path))
    host = joined_run(run_of(redis_server, "actor", tmp_path))
    assert host.membership is not None
    tell_all(learner, "a minute is over")
    link = link_of(host)
    _HostBeat(link, host.membership)()
    assert link.over == "a minute is over"
    other = joined_run(run_of(redis_server, "learner", tmp_path))  # nothing is in its way
    with pytest.raises(Fenced, match="another learner has begun"):
        _HostBeat(link_of(host), host.membership)()
    assert other.membership is not None
