"""Experience and parameters through a real Redis: bounds, repeats, false values, its failures."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.redis_server import RedisServer, needs_redis, redis_server, running
from tests.support.transport_rigs import (
    PARAMETER_BYTES,
    SCHEMA,
    form_of,
    layout_of,
    make_intake,
    store_of,
    until,
)
from zapex.chunks.layout import ACTOR, COMMITTED, COUNT, INCARNATION, SEQUENCE, STATE, STREAM
from zapex.net.redis_link import EXPERIENCE, PARAMETERS, VERSION, RedisLink
from zapex.redis_transport import (
    RedisChunkSender,
    RedisExperienceSource,
    RedisParameterSink,
    RedisParameterSource,
)
from zapex.replay.core import ReplayCore
from zapex.wire.control import encode
from zapex.wire.header import joined
from zapex.wire.pairs import Pairs, pair_rows

pytestmark = needs_redis
LAYOUT = layout_of(400)
FORM = form_of(LAYOUT)
MOST = 4
__all__ = ["redis_server"]  # a fixture


class Ends:
    """A relay's sender with whole chunks in its slots, and a learner's source with its memory."""

    def __init__(self, url: str, password: str = "") -> None:
        self.links = [RedisLink(url, password, FORM) for _ in range(2)]
        self.store = store_of(LAYOUT, 16)
        self.sender = RedisChunkSender(self.links[0], self.store, (5,), MOST)
        self.replay = ReplayCore(LAYOUT, seed=1)
        self.source = RedisExperienceSource(self.links[1], self.replay.store, 1)
        self.intake = make_intake(self.source, self.replay, 1)
        self.made = 0

    def make(self, count: int = 1, incarnation: int = 7, rows: int = 3) -> None:
        """Chunks of `rows` equal transitions, offered to the sender."""
        for _ in range(count):
            slot = self.made
            for name in ("obs_frames", "next_obs_frames"):
                self.store.column(slot, name)[:rows] = 0
            self.store.column(slot, "obs")[0] = 1 + self.made
            header = self.store.header_rows[slot]
            header[[ACTOR, INCARNATION, SEQUENCE, COUNT]] = 0, incarnation, self.made, rows
            header[STREAM], header[STATE] = 10, COMMITTED
            self.made += 1
            self.sender.offer([slot])

    def learn(self) -> None:
        self.intake.do_work(0, 0)

    def close(self) -> None:
        for link in self.links:
            link.close()


@pytest.fixture
def ends(redis_server: RedisServer) -> Iterator[Ends]:
    ends = Ends(redis_server.url)
    yield ends
    ends.close()


def pairs_of(body: np.ndarray | None = None, sequence: int = 0) -> bytes:
    if body is None:
        body = np.zeros(2 * pair_rows(SCHEMA).itemsize, np.uint8)
    message = Pairs(SCHEMA.hash, 5, 7, sequence, 10, 2, memoryview(body))
    return joined(encode(message))


def test_a_full_list_makes_the_sender_wait_until_the_learner_has_pulled(
    ends: Ends, redis_server: RedisServer
) -> None:
    ends.make(MOST + 3)
    until(lambda: ends.sender.counts["chunks"] == MOST, ends.sender.do_work)
    for _ in range(5):
        assert ends.sender.do_work() == 0
    assert ends.sender.full
    assert ends.sender.unacknowledged == 3
    assert redis_server.client().llen(EXPERIENCE) == MOST
    assert ends.sender.take_freed() == list(range(MOST))

    def turn() -> None:
        ends.sender.do_work()
        ends.learn()

    until(lambda: ends.intake.inserted == 3 * (MOST + 3), turn)
    assert len(ends.replay) == 3 * (MOST + 3)


def test_a_repeat_is_dropped_and_a_new_incarnation_begins_anew(
    ends: Ends, redis_server: RedisServer
) -> None:
    ends.make(2)
    until(lambda: ends.sender.counts["chunks"] == 2, ends.sender.do_work)
    client = redis_server.client()
    for value in client.lrange(EXPERIENCE, 0, -1):
        client.rpush(EXPERIENCE, value)
    until(lambda: ends.source.counts["messages"] == 4, ends.learn)
    until(lambda: ends.intake.inserted == 6, ends.learn)
    assert ends.source.counts["doubled"] == 2
    assert len(ends.replay) == 6
    # A source that attaches to the memory knows what it holds.
    again = RedisExperienceSource(ends.links[1], ends.replay.store, 2)
    assert again._known == {5: (7, 2)}


def test_values_that_are_no_pairs_or_that_no_run_makes_are_counted_and_dropped(
    ends: Ends, redis_server: RedisServer
) -> None:
    nan = np.zeros(2 * pair_rows(SCHEMA).itemsize, np.uint8)
    nan.view(np.float32)[-6:] = np.nan  # rewards, discounts, priorities
    whole = pairs_of()
    bad = [b"", b"x" * 70, whole[:-1], whole + b"more", whole[:80] + b"!" + whole[81:]]
    redis_server.client().rpush(EXPERIENCE, *bad, pairs_of(nan), pairs_of(sequence=1))
    until(lambda: ends.intake.inserted == 2, ends.learn)
    assert ends.source.counts["refused"] == len(bad) + 1


def test_pairs_without_a_common_frame_take_as_many_slots_as_they_need(
    ends: Ends, redis_server: RedisServer
) -> None:
    rows = LAYOUT.chunk
    rng = np.random.default_rng(2)
    body = np.zeros(rows * pair_rows(SCHEMA).itemsize, np.uint8)
    frames = rows * 2 * 4 * 6  # s and s' of four frames of 3 x 2
    body[:frames] = rng.integers(1, 255, frames)
    message = Pairs(SCHEMA.hash, 5, 7, 0, 10, rows, memoryview(body))
    redis_server.client().rpush(EXPERIENCE, joined(encode(message)))
    until(lambda: ends.intake.inserted == rows, ends.learn)
    assert ends.replay.ledger.counts["live"] > 1


def test_a_redis_that_stops_is_told_and_survived(redis_server: RedisServer, ends: Ends) -> None:
    ends.make(2)
    until(lambda: ends.sender.counts["chunks"] == 2, ends.sender.do_work)
    redis_server.stop()
    ends.make(1)
    until(lambda: bool(ends.links[0].problem), ends.sender.do_work)
    assert "it does not answer" in ends.links[0].waiting
    assert "\n" not in ends.links[0].waiting
    ends.learn()
    assert ends.sender.unacknowledged == 1
    redis_server.start()
    until(lambda: ends.sender.counts["chunks"] == 3, ends.sender.do_work)
    assert not ends.links[0].waiting
    until(lambda: ends.intake.inserted == 3, ends.learn)  # the others were lost with it


def test_a_redis_without_memory_is_told_and_survived(redis_server: RedisServer, ends: Ends) -> None:
    client = redis_server.client()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1")
    ends.make(1)
    until(lambda: bool(ends.links[0].problem), ends.sender.do_work)
    assert "no memory left" in ends.links[0].waiting
    assert "raise its maxmemory" in ends.links[0].waiting
    client.config_set("maxmemory", "0")
    until(lambda: ends.sender.counts["chunks"] == 1, ends.sender.do_work)


def test_a_redis_that_refuses_the_user_is_told(tmp_path: Path) -> None:
    with running(tmp_path, requirepass="secret") as server:
        ends = Ends(server.url)
        ends.make(1)
        ends.sender.do_work()
        assert "it refuses this user" in ends.links[0].waiting
        assert ends.links[0].refused
        ends.close()
        client = server.client(password="secret")
        client.execute_command("ACL", "SETUSER", "actor", "on", ">word", "~zapex:*", "+get")
        ends = Ends(server.url.replace("redis://", "redis://actor@"), "word")
        ends.make(1)
        ends.sender.do_work()
        assert "its ACL does not permit" in ends.links[0].waiting
        client.execute_command("ACL", "SETUSER", "actor", "+@all")
        until(lambda: ends.sender.counts["chunks"] == 1, ends.sender.do_work)
        ends.close()


def test_tls_is_used_as_redis_users_know_it(tmp_path: Path) -> None:
    import shutil
    import subprocess

    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out",
         str(certificate), "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    options = {
        "tls-cert-file": str(certificate), "tls-key-file": str(key),
        "tls-ca-cert-file": str(certificate), "tls-auth-clients": "no",
    }  # fmt: skip
    with running(tmp_path, **options) as server:
        plain, server_port = server.client(), server.port + 1
        plain.config_set("tls-port", str(server_port))
        where = f"rediss://127.0.0.1:{server_port}/0"
        stranger = Ends(where)
        stranger.make(1)
        stranger.sender.do_work()
        assert "certificate" in stranger.links[0].waiting.lower()
        known = Ends(f"{where}?ssl_ca_certs={certificate}")
        known.make(1)
        until(lambda: known.sender.counts["chunks"] == 1, known.sender.do_work)
        stranger.close()
        known.close()


def test_parameters_are_set_again_when_redis_has_lost_them(redis_server: RedisServer) -> None:
    links = [RedisLink(redis_server.url, "", FORM) for _ in range(2)]
    sink, source = RedisParameterSink(links[0]), RedisParameterSource(links[1])
    value = np.arange(PARAMETER_BYTES, dtype=np.uint32).astype(np.uint8)
    out = np.zeros(PARAMETER_BYTES, np.uint8)
    sink.publish(3, value)
    until(lambda: source.version == 3, lambda: None)
    redis_server.client().flushall()
    sink.again()
    sink.do_work()
    assert source.newer_than(0, out) == 3
    assert (out == value).all()
    client = redis_server.client()
    client.set(PARAMETERS, b"not parameters")
    client.set(VERSION, b"9")
    until(lambda: source.version == 9, lambda: None)
    assert source.newer_than(3, out) == 0
    client.set(VERSION, b"not a number")
    time.sleep(0.15)
    assert source.version == 9
    for link in links:
        link.close()


def test_no_call_waits_while_redis_does_not_answer(redis_server: RedisServer) -> None:
    now = [0.0]
    link = RedisLink(redis_server.url, "", FORM, clock_s=lambda: now[0])
    redis_server.stop()
    calls: list[Callable[[], object]] = [lambda: link.attempt(lambda r: r.ping(), False)] * 5
    assert [call() for call in calls] == [False] * 5
    assert link.counts["calls"] == 1
    now[0] += 1.0
    calls[0]()
    assert link.counts["calls"] == 2
    link.close()
