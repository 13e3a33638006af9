"""Several served replays as one: the same distribution, weights, updates; one that is lost."""

import contextlib
import os
import signal
import time
import warnings

import numpy as np
import pytest

import zapex
from tests.library.test_url_client import DEADLINE_S, SCHEMA, check_all, server
from tests.library.test_writer import new_replay
from tests.library.twin import Service
from tests.support.handle_processes import STREAMS, play, rows_from
from zapex.chunks.keys import NO_KEY, by_shard
from zapex.errors import ConfigError, NotEnoughData, PeerTimeout

pytestmark = pytest.mark.timeout(110)


@contextlib.contextmanager
def services(folder, count):
    with contextlib.ExitStack() as held:
        served = []
        for i in range(count):
            (folder / str(i)).mkdir()
            service = Service(SCHEMA, 4000, 1.0, 0.0, folder / str(i))
            served.append(held.enter_context(service))
        yield [service.url for service in served]


def connect(urls, **options):
    return zapex.connect(urls, schema=SCHEMA, **{"timeout_s": DEADLINE_S, **options})


def test_batches_are_those_of_one_replay_with_everything(tmp_path):
    one, expected = new_replay(n=3), []
    with services(tmp_path, 3) as urls, connect(urls, shard_timeout_s=DEADLINE_S) as client:
        assert not client.can_sample(1)
        with pytest.raises(NotEnoughData, match="hold 0 transitions"):
            client.sample(4)
        leaf = {}
        for seed in range(1, 8):
            rows, twins = rows_from(seed, count=30 * seed)
            rows["priorities"] *= 2.0**seed
            keys = client.extend(**rows)
            one.extend(**rows)
            expected += twins
            leaf |= dict(zip(keys.tolist(), rows["priorities"], strict=True))
            assert len(by_shard(keys)) == 1
        assert len(client) == len(leaf) == len(one) == client.stats()["size"] == 840
        assert client.stats()["total_priority"] == pytest.approx(one.stats()["total_priority"])
        total = sum(leaf.values())
        for method in ("stratified", "independent"):
            for normalise in ("batch", "memory"):
                seen, draws = dict.fromkeys(leaf, 0), 40
                for _ in range(draws):
                    batch = client.sample(256, 0.6, method=method, normalise=normalise)
                    leaves = np.array([leaf[key] for key in batch.keys.tolist()])
                    least = min(leaf.values()) if normalise == "memory" else leaves.min()
                    np.testing.assert_allclose(batch.weights, (leaves / least) ** -0.6, rtol=1e-5)
                    for key in batch.keys.tolist():
                        seen[key] += 1
                wanted = np.array([draws * 256 * p / total for p in leaf.values()])
                chi_square = ((np.array(list(seen.values())) - wanted) ** 2 / wanted).sum()
                assert chi_square < len(leaf) + 5 * np.sqrt(2 * len(leaf))
        twins = {row[1][0]: row for row in expected}
        batch = client.sample(512)
        for i, action in enumerate(batch.action):
            obs, (_, mask, _), reward, discount, next_obs, _ = twins[action]
            np.testing.assert_array_equal(batch.obs[i], obs)
            np.testing.assert_array_equal(batch.next_obs[i], next_obs)
            np.testing.assert_array_equal(batch["mask"][i], mask)
            assert (batch.reward[i], batch.discount[i]) == (
                np.float32(reward), np.float32(discount),
            )  # fmt: skip


def test_new_priorities_reach_the_replay_of_each_key(tmp_path):
    with services(tmp_path, 3) as urls, connect(urls, prefetch=2) as client:
        keys = np.concatenate([client.extend(**rows_from(seed)[0]) for seed in range(1, 7)])
        assert set(by_shard(keys)) == {0, 1, 2}
        some = np.random.default_rng(1).permutation(keys)[:60]
        assert client.update_priorities(some, np.full(60, -1e12)) == (60, 0)
        assert set(client.sample(256).keys.tolist()) <= set(some.tolist())
        stale = np.array([NO_KEY, keys[0] ^ 1 << 40, keys[0] ^ 100 << 55])
        assert client.update_priorities(stale, np.ones(3)) == (0, 2)
        for _ in range(5):
            batch = client.sample(64)
            assert client.update_priorities(batch.keys, np.ones(64))[1] == 0


def test_writers_go_to_all_replays_and_everything_is_there_once(tmp_path):
    expected = []
    with services(tmp_path, 2) as urls, connect(urls) as client:
        for seed in range(1, 5):
            with client.writer(STREAMS) as writer:
                expected += play(seed, writer)
        assert len(client) == len(expected)
        for url in urls:
            with zapex.connect(url, schema=SCHEMA, timeout_s=DEADLINE_S) as alone:
                assert len(alone) > 0
        with pytest.raises(ConfigError, match="without replacement"):
            check_all(client, expected)


def test_a_replay_that_does_not_answer_loses_its_share_and_gets_it_back(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    flags = "--capacity", "4000", "--alpha", "1"
    with (
        server(tmp_path / "a", *flags) as one,
        server(tmp_path / "b", *flags) as other,
        connect([one.url, other.url], shard_timeout_s=2.0) as client,
    ):
        keys = np.concatenate([client.extend(**rows_from(seed)[0]) for seed in (1, 2)])
        client.timeout_s = 5.0  # from here on: they have started
        mine = {s: set(keys[rows].tolist()) for s, rows in by_shard(keys).items()}
        assert len(client) == 400
        client.sample(64)
        pid = other.server_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            with pytest.warns(UserWarning, match="drawn from the others"):
                batch = client.sample(256)
            assert time.monotonic() - began_s < 30
            assert set(batch.keys.tolist()) <= mine[0]
            assert batch.weights.max() == 1.0
            assert (client.stats()["shards_away"], client.stats()["shards_lost"]) == (1, 1)
            gone = np.array(sorted(mine[1]))
            assert client.update_priorities(gone, np.ones(200)) == (0, 200)
            more = client.extend(**rows_from(3)[0])
            assert set(by_shard(more)) == {0}
            with client.writer(STREAMS) as writer:
                play(9, writer, steps=20)
        finally:
            os.kill(pid, signal.SIGCONT)
        deadline_s = time.monotonic() + DEADLINE_S
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while client.stats()["shards_away"]:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        assert client.stats()["shards_back"] == 1
        assert mine[1] & set(client.sample(256).keys.tolist())


@pytest.mark.slow
def test_what_a_writer_has_for_a_replay_that_is_gone_goes_to_another(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    flags = "--capacity", "4000", "--alpha", "1"
    with (
        server(tmp_path / "a", *flags) as one,
        server(tmp_path / "b", *flags) as other,
        connect([one.url, other.url], shard_timeout_s=1.5) as client,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        client.timeout_s = 2.0  # from here on: they have started
        client._turn = iter(range(1, 100))  # the writer's replay is the other one
        with client.writer(STREAMS) as writer:
            other.process.kill()
            other.process.wait()
            expected = play(1, writer)
        assert len(client) == len(expected)
        one.close()
        with pytest.raises(PeerTimeout):
            client.extend(**rows_from(3)[0])
        with pytest.raises(PeerTimeout):
            client.sample(4)


@pytest.mark.slow
def test_a_replay_that_waits_for_samples_keeps_its_share(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    flags = "--capacity", "20000", "--alpha", "1", "--writers", "2"
    with (
        server(tmp_path / "a", *flags, "--samples-per-insert", "4") as limited,
        server(tmp_path / "b", *flags, "--samples-per-insert", "0") as other,
    ):
        urls = [limited.url, other.url]
        with connect(urls) as first:  # both load their kernels
            used = [*first.extend(**rows_from(0)[0]), *first.extend(**rows_from(1)[0])]
            assert set(by_shard(np.array(used))) == {0, 1}
        with connect(urls, timeout_s=3.0) as client:
            shards = []
            while shards[-3:] != [1, 1, 1]:
                rows, _ = rows_from(2 + len(shards), count=60)  # of one chunk
                shards += by_shard(client.extend(**rows))
            assert len(client) == 400 + 60 * len(shards) < 20000
            assert client.stats()["shards_lost"] == 0
            assert set(by_shard(client.sample(256).keys)) == {0, 1}


@pytest.mark.parametrize(
    ("urls", "options", "says"),
    [
        ([], {}, "1 to 128 URLs, got 0"),
        (["ipc:///a", "ipc:///a"], {}, "ipc:///a twice"),
        (["ipc:///a"], {"shard_timeout_s": 0}, "shard_timeout_s must be"),
        (["ipc:///a", 3], {}, "or a list of URLs"),
        (["ipc:///a", "htp://b"], {}, "htp"),
    ],
)
def test_a_wrong_list_is_refused_before_anything_is_opened(urls, options, says):
    with pytest.raises(ConfigError, match=says):
        connect(urls, **options)
