"""A replay served to any host: the same rows, keys, counts and errors as in one process."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import zapex
import zapex.net.keys
from tests.library.test_handle import raises
from tests.library.test_writer import new_replay
from tests.library.twin import Service
from tests.support import fstack
from tests.support.handle_processes import STREAMS, play, rows_from
from tests.support.parts import free_port
from zapex import Column, Schema
from zapex.chunks.keys import NO_KEY
from zapex.cli import hosts as cli_hosts
from zapex.errors import (
    ConfigError,
    InvalidPriority,
    NotEnoughData,
    PeerDied,
    PeerTimeout,
    Refused,
    SchemaError,
)
from zapex.wire.protocol import COMPRESSED, Kind

pytestmark = pytest.mark.timeout(110)
DEADLINE_S = 60.0  # a busy machine is no failure
ROOT = Path(__file__).parents[2]
SCHEMA = new_replay(n=3).schema


class Server:
    """`zapex replay --schema` in a process of its own; `url`, `schema`: for clients."""

    def __init__(self, folder, *flags, schema=SCHEMA, scheme="ipc"):
        listen = f"ipc://{folder}/replay"
        if scheme != "ipc":
            listen = f"{scheme}://127.0.0.1:{free_port()}"
        if scheme == "fstack":  # a real one may have its port in this process
            setup = fstack.standin()
            flags += ("--fstack-lib", setup.library, "--fstack-conf", setup.config)
            flags += (f"--fstack-eal={setup.arguments}",)
        self.url = listen if scheme == "ipc" else listen.replace(scheme, "tcp", 1)
        self.schema = folder / "schema.json"
        self.schema.write_text(schema.to_json())
        command = [
            sys.executable, "-m", "zapex", "replay", "--schema", str(self.schema),
            "--listen", listen, "--eps", "0", *flags,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        self.lines.extend(self.process.stdout)

    def connect(self, **options):
        return zapex.connect(self.url, schema=self.schema, timeout_s=DEADLINE_S, **options)

    def server_pid(self):
        """Of the process that serves."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text().split()[0])

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
        self._reader.join(DEADLINE_S)
        return self.process.returncode, "".join(self.lines)


@contextlib.contextmanager
def server(folder, *flags, **options):
    served = Server(folder, *flags, **options)
    try:
        yield served
    finally:
        served.close()


def check_all(client, expected):
    """All transitions that can be drawn are the twins', each there once."""
    count = len(client)
    batch = client.sample(count, method="without_replacement")
    twins = {row[1][0]: row for row in expected}
    assert len(set(batch.action.tolist())) == count == len(twins)
    for i, action in enumerate(batch.action):
        obs, (_, mask, _), reward, discount, next_obs, _ = twins[action]
        np.testing.assert_array_equal(batch.obs[i], obs)
        np.testing.assert_array_equal(batch.next_obs[i], next_obs)
        np.testing.assert_array_equal(batch["mask"][i], mask)
        np.testing.assert_allclose(batch.reward[i], reward, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(batch.discount[i], discount, rtol=1e-6)


@pytest.mark.parametrize(
    "scheme",
    ["ipc", *(pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("zmtp", "fstack"))],
)
def test_a_client_gives_what_the_replay_itself_gives(tmp_path, scheme):
    flags = "--capacity", "4000", "--alpha", "1", "--seed", "0", "--writers", "8"
    with server(tmp_path, *flags, scheme=scheme) as served, served.connect() as client:
        assert not client.can_sample(1)
        with pytest.raises(NotEnoughData, match="holds 0 transitions"):
            client.sample(4)
        expected, keys, priorities = [], [], []
        for seed in range(1, 4):
            rows, twins = rows_from(seed)
            keys.append(client.extend(**rows))
            priorities.append(rows["priorities"])
            with client.writer(STREAMS) as writer:
                expected += twins + play(10 + seed, writer)
            check_all(client, expected)
        keys, priorities = np.concatenate(keys), np.concatenate(priorities)
        assert len(set(keys.tolist())) == len(keys) == 600
        assert len(client) == len(expected) == client.stats()["inserted"]
        leaf = dict(zip(keys.tolist(), priorities, strict=True))
        for method in ("stratified", "independent", "without_replacement"):
            for normalise in ("batch", "memory"):
                batch = client.sample(128, 0.6, method=method, normalise=normalise)
                known = np.isin(batch.keys, keys)
                weights = np.array([leaf[key] for key in batch.keys[known].tolist()]) ** -0.6
                ratio = batch.weights[known] / weights
                np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)
                assert batch.weights.max() <= 1.0 + 1e-6
        # Keys of `extend` are those of what was extended: their priorities are drawn next.
        assert client.update_priorities(keys[:50], -1e12 - np.arange(50)) == (50, 0)
        assert set(client.sample(64).keys.tolist()) <= set(keys[:50].tolist())
        stale = np.array([NO_KEY, keys[0] ^ 1 << 40])
        assert client.update_priorities(stale, np.ones(2)) == (0, 1)
        out = client.empty_batch(32, layout="channels_last")
        assert client.sample(32, out=out) is out
        stats = client.stats()
        assert (stats["updates_applied"], stats["updates_stale"]) == (50, 1)


@pytest.mark.slow
def test_a_client_that_compresses_gives_the_same_beside_one_that_does_not(tmp_path, monkeypatch):
    pytest.importorskip("zstandard")
    rows, _ = rows_from(3, 96)
    with server(tmp_path, "--capacity", "2000", "--seed", "5") as served:
        with served.connect() as plain, served.connect(compress=True, prefetch=1) as small:
            kinds = []
            dealers = small._replays[0].link.link._dealers
            take = dealers.receive

            def receive(channel):
                buffers = take(channel)
                if buffers is not None:
                    kinds.append(int.from_bytes(bytes(buffers[0])[6:8], "little"))
                return buffers

            dealers.receive = receive
            keys = small.extend(**rows)
            assert len(plain) == len(keys) == 96
            for client in (plain, small):
                batch = client.sample(96, method="without_replacement")
                order = np.argsort(batch.keys)
                np.testing.assert_array_equal(batch.keys[order], np.sort(keys))
                np.testing.assert_array_equal(
                    batch.obs[order], np.asarray(rows["obs"])[np.argsort(keys)]
                )
                assert client.update_priorities(batch.keys, np.ones(96)) == (96, 0)
            assert Kind.BATCH | COMPRESSED in kinds
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"compress=True needs .*zapex\[compress\]"):
            served.connect(compress=True)


def test_prefetched_batches_are_whole_and_counted(tmp_path):
    with server(tmp_path, "--capacity", "4000") as served, served.connect(prefetch=3) as client:
        client.extend(**rows_from(1)[0])
        for rows in (16, 16, 32, 16):
            batch = client.sample(rows)
            assert len(batch.keys) == rows
            assert client.update_priorities(batch.keys, np.ones(rows)) == (rows, 0)
        assert len(client) == 200


def test_errors_are_those_of_the_replay_and_change_nothing(tmp_path):
    flags = "--capacity", "4000", "--writers", "2", "--alpha", "1"
    with server(tmp_path, *flags) as served:
        with served.connect() as client:
            rows = rows_from(1)[0]
            with pytest.raises(SchemaError, match="terminated or discount"):
                client.extend(**{**rows, "terminated": None})
            client.extend(**rows)
            before = client.stats()
            with pytest.raises(InvalidPriority, match="row 1"):
                client.update_priorities([0, 1], [1.0, np.nan])
            with pytest.raises(InvalidPriority, match="sum over the memory"):
                client.update_priorities(client.sample(1).keys, [1e308])
            with pytest.raises(ConfigError, match="draw several"):
                client.sample(1 << 20)
            with pytest.raises(ConfigError, match="method must be"):
                client.sample(4, method="uniform")
            with pytest.raises(NotEnoughData, match="200"):
                client.sample(4000, method="without_replacement")
            after = client.stats()
            assert {**after, "sampled": 0} == {**before, "sampled": 0}
            with client.writer(1):  # with the one that extends, these are all
                impatient = zapex.connect(served.url, schema=SCHEMA, timeout_s=1.0)
                with pytest.raises(PeerTimeout, match="actor numbers are in use"):
                    impatient.writer(1)
                impatient.close()
            client.writer(1).close()
        with pytest.raises(PeerDied, match="closed"):
            client.stats()
        other = Schema({"obs": Column((2,), np.float32), "action": Column((), np.int64)})
        with pytest.raises(Refused, match="schema"):
            zapex.connect(served.url, schema=other)


def test_what_connect_cannot_use_is_one_clear_error(tmp_path):
    for options, words in (
        ({}, "needs schema="),
        ({"schema": tmp_path / "none.json"}, "cannot be read"),
        ({"schema": SCHEMA, "prefetch": 99}, "prefetch must be"),
        ({"schema": SCHEMA, "timeout_s": 0}, "timeout_s must be"),
    ):
        with pytest.raises(ConfigError, match=words):
            zapex.connect(f"ipc://{tmp_path}/x", **options)
    for url in ("", "http://127.0.0.1", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "ipc://"):
        with pytest.raises(ConfigError, match="the target of connect must be tcp://HOST:PORT"):
            zapex.connect(url, schema=SCHEMA)
    for schema in ("/dev/zero", 5, b"x"):
        with pytest.raises(ConfigError, match="schema"):
            zapex.connect(f"ipc://{tmp_path}/x", schema=schema)
    with pytest.raises(ConfigError, match="reached from other machines"):
        zapex.connect("tcp://192.0.2.1:7711", schema=SCHEMA)
    with pytest.raises(ConfigError, match="handle or URL"):
        zapex.connect(7711)
    with pytest.raises(PeerTimeout):
        zapex.connect(f"ipc://{tmp_path}/x", schema=SCHEMA, timeout_s=0.3)
    for text in ("[", "[]", "{}"):
        with pytest.raises(SchemaError):
            Schema.from_json(text)
    assert Schema.from_json(SCHEMA.to_json()) == SCHEMA


def test_keys_are_of_a_clients_own_rows_where_another_had_its_number_before(tmp_path):
    with Service(SCHEMA, 4000, 1.0, 0.0, tmp_path) as service:
        for seed, count in ((1, 20), (2, 3), (3, 7)):
            with zapex.connect(service.url, schema=SCHEMA, timeout_s=DEADLINE_S) as client:
                rows = {name: column[:count] for name, column in rows_from(seed)[0].items()}
                keys = client.extend(**rows)
                assert len(set(keys.tolist())) == count
                assert client.update_priorities(keys, np.full(count, 10.0 ** (4 * seed))) == (
                    count,
                    0,
                )
                drawn = client.sample(count, method="without_replacement").action
                assert sorted(drawn.tolist()) == rows["action"].tolist()


def test_keys_of_a_former_memory_are_stale(tmp_path):
    rows, options = rows_from(1)[0], {"schema": SCHEMA, "timeout_s": DEADLINE_S}
    with Service(SCHEMA, 4000, 1.0, 0.0, tmp_path) as service:
        client = zapex.connect(service.url, **options)
        keys = client.extend(**rows)
    with Service(SCHEMA, 4000, 1.0, 0.0, tmp_path) as service:
        with zapex.connect(service.url, **options) as other:
            other.extend(**rows)
        batch = client.sample(16)
        assert client.update_priorities(keys, np.ones(len(keys))) == (0, len(keys))
        assert client.stats()["updates_applied"] == 0
        assert client.update_priorities(batch.keys, np.ones(16)) == (16, 0)
        client.close()


def test_writers_go_on_at_a_replay_that_has_lost_its_memory(tmp_path):
    options = {"schema": SCHEMA, "timeout_s": DEADLINE_S}
    with Service(SCHEMA, 4000, 1.0, 0.0, tmp_path) as service:
        client = zapex.connect(service.url, **options)
        writer = client.writer(STREAMS)
        play(11, writer)
        writer.flush()
        client.extend(**rows_from(1)[0])
    with Service(SCHEMA, 4000, 1.0, 0.0, tmp_path) as service:
        with zapex.connect(service.url, **options) as other, other.writer(STREAMS) as first:
            expected = play(12, first)  # it may have the number that the other writer had
            rows, twins = rows_from(2)
            keys = client.extend(**rows)
            expected += twins + play(13, writer)
            writer.flush()
            first.flush()
            check_all(client, expected)
            drawn = client.sample(len(expected), method="without_replacement")
            assert dict(zip(drawn.keys, drawn.action, strict=True)).items() >= set(
                zip(keys, rows["action"], strict=True)
            )
        writer.close()
        client.close()


def test_a_server_that_is_killed_comes_back_over_the_same_memory(tmp_path):
    with server(tmp_path, "--capacity", "8000") as served, served.connect() as client:
        expected = rows_from(1)[1]
        keys = client.extend(**rows_from(1)[0])
        writer = client.writer(STREAMS)
        for seed in (11, 12):
            os.kill(served.server_pid(), signal.SIGKILL)
            expected += play(seed, writer)
            writer.flush()
            check_all(client, expected)
        writer.close()
        assert client.update_priorities(keys, np.ones(200)) == (200, 0)  # the keys are good
    _, said = served.close()
    assert "killed by SIGKILL" in said
    assert said.count("replay started") == 2


@pytest.mark.slow
def test_a_dead_server_is_an_error_at_the_deadline(tmp_path):
    with server(tmp_path, "--capacity", "4000") as served:
        served.connect().close()
        client = zapex.connect(served.url, schema=SCHEMA, timeout_s=1.0)
        pid = served.server_pid()
        served.process.kill()
        while Path(f"/proc/{pid}").exists():  # it ends with its parent
            time.sleep(0.01)
        start = time.monotonic()
        with pytest.raises(PeerTimeout):
            client.stats()
        with pytest.raises(PeerTimeout):
            client.sample(4)
        assert time.monotonic() - start < 30
        client.close()


@pytest.mark.slow
def test_samples_per_insert_lets_both_sides_wait(tmp_path):
    flags = "--capacity", "4000", "--samples-per-insert", "4", "--timeout-s", "0.2"
    with server(tmp_path, *flags, "--writers", "2") as served, served.connect() as client:
        client.extend(**rows_from(1)[0])
        while not raises(NotEnoughData, lambda: client.sample(64)):
            pass
        drawn = client.stats()["sampled"]
        assert drawn > 0
        with pytest.raises(NotEnoughData, match="the learner waits for actors"):
            client.sample(64)
        assert not client.can_sample(64)
        client.extend(**rows_from(2)[0])
        client.sample(64)
        assert client.stats()["sampled"] == drawn + 64


@pytest.mark.slow
def test_several_clients_and_threads_at_once(tmp_path):
    failures = []

    def guarded(work):
        def run():
            try:
                work()
            except BaseException as error:
                failures.append(error)

        return threading.Thread(target=run)

    with server(tmp_path, "--capacity", "20000") as served, served.connect() as client:
        client.extend(**rows_from(1)[0])

        def write(seed):
            with client.writer(STREAMS) as writer:
                play(seed, writer, steps=60)

        def extend(seed):
            with served.connect() as other:
                other.extend(**rows_from(seed)[0])

        def read():
            for _ in range(20):
                batch = client.sample(32)
                assert client.update_priorities(batch.keys, np.ones(32)) == (32, 0)

        threads = [guarded(lambda: write(11)), guarded(lambda: write(12)), guarded(read)]
        threads += [guarded(read), guarded(lambda: extend(2)), guarded(lambda: extend(3))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not failures
        expected = [row for seed in (1, 2, 3) for row in rows_from(seed)[1]]
        expected += play(11, None, steps=60) + play(12, None, steps=60)
        check_all(client, expected)


@pytest.mark.slow
def test_with_keys_only_a_client_gets_in(tmp_path):
    keys = tmp_path / "keys"
    zapex.net.keys.make(keys)
    with server(tmp_path, "--capacity", "4000", "--keys", str(keys)) as served:
        with served.connect(keys=keys) as client:
            client.extend(**rows_from(1)[0])
            assert len(client.sample(16).keys) == 16
        with pytest.raises(PeerTimeout):
            zapex.connect(served.url, schema=SCHEMA, timeout_s=1.0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--capacity", "40"), "writers"),
        (("--listen", "tcp://0.0.0.0:7711"), "reached from other machines"),
        (("--capacty", "40"), "did you mean --capacity"),
        (("--schema", "/none.json"), "cannot be read"),
    ],
)
def test_flags_that_cannot_work_are_one_line_before_anything_starts(tmp_path, flags, words):
    schema = tmp_path / "schema.json"
    schema.write_text(SCHEMA.to_json())
    with pytest.raises(ConfigError, match=words):
        cli_hosts.command("replay", ["--schema", str(schema), *flags])
