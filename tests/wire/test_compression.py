"""Compressed bodies: they arrive as they were, and a lie about their length allocates nothing."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import zmq
import zstandard

from tests.support.relays import Accounts, Relay, serving, wrong_rows
from tests.support.transport_rigs import (
    BATCH,
    BETA,
    CONFIG,
    SCHEMA,
    Memory,
    NetworkReplay,
    layout_of,
    nothing_left_open,
    until,
    url_of,
)
from tests.support.transport_rigs import make_link as link_to
from tests.wire.test_messages import FORM, examples
from zapex.chunks.batch import Batch
from zapex.chunks.layout import BatchLayout
from zapex.errors import BadMessage, ConfigError, OtherVersion, Refused
from zapex.net.sample_source import ZmqSampleSource
from zapex.wire import messages as m
from zapex.wire.compression import check_installed, compress, decompress
from zapex.wire.protocol import COMPRESSED, HEADER, MAX_BUFFERS, RawMessage

MOST = 1 << 16

__all__ = ["nothing_left_open"]  # a fixture of every test here


def test_buffers_arrive_as_they_were() -> None:
    rng = np.random.default_rng(1)
    body = [bytes(50_000), rng.bytes(1_000), b"", b"x"]
    back = decompress(compress([memoryview(part) for part in body]), [len(part) for part in body])
    assert [bytes(part) for part in back] == body
    assert not any(part.readonly for part in back)  # kernels are compiled for writable memory


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"no frame", "broken"),
        (b"", "broken|at most"),
        (zstandard.compress(bytes(MOST + 1)), str(MOST + 1)),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(9)), "at most"),
        (zstandard.compress(bytes(5_000))[:-3], "broken|has"),
    ],
)
def test_what_is_no_frame_or_holds_too_much_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(BadMessage, match=words):
        decompress([memoryview(data)], [MOST])


@pytest.mark.parametrize("name", ["push", "batch"])
def test_compressed_messages_say_what_plain_ones_say(name: str) -> None:
    message = examples()[name]
    plain, small = m.encode(message), m.encode(message, compressed=True)
    assert m.decode(small, FORM).raw().body == m.decode(plain, FORM).raw().body
    assert HEADER.unpack(small[0])[2] == message.kind | COMPRESSED


@pytest.mark.parametrize("name", sorted(set(examples()) - {"push", "batch"}))
def test_no_other_message_is_compressed_or_taken_so(name: str) -> None:
    message = examples()[name]
    assert m.encode(message, compressed=True) == m.encode(message)
    forced: RawMessage = message.raw()
    with pytest.raises(BadMessage, match="never compressed"):
        m.decode(forced.encode(compressed=True), FORM)


@pytest.mark.parametrize("kind", ["tcp", "zmtp"])
def test_chunks_and_batches_travel_compressed_and_arrive_whole(kind: str, tmp_path: object) -> None:
    layout = layout_of(400)
    accounts = Accounts()
    with serving(Memory(layout, 1), accounts, url_of(kind, tmp_path)) as server:  # type: ignore[arg-type]
        relay = Relay(layout, server.url, compressed=True)
        learner = link_to(server.url, "learner", 2, layout, compressed=True)
        source, batch = ZmqSampleSource(learner, BETA), Batch.empty(BatchLayout(SCHEMA, BATCH))
        for _ in range(20):
            relay.make()

        def turn() -> None:
            server.turn()
            relay.turn()
            learner.do_work()
            if server.sink.requests():
                server.sink.answer(server.replay.draw(BATCH))

        until(lambda: relay.sender.unacknowledged == 0 and learner.is_open, turn, "chunks")
        server.turn()
        accounts.settle([relay])
        source.request()
        until(source.ready, turn, "a batch")
        assert source.poll(batch) is not None
        assert wrong_rows(batch, layout.chunk_layout) == 0
        relay.kill()


@pytest.mark.parametrize("name", ["push", "batch"])
def test_all_lengths_are_checked_before_anything_is_decompressed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: RawMessage = examples()[name].raw()
    frames, rows = plain.body
    too_many = [plain.body * 2, (frames,) * (MAX_BUFFERS - 1), ()]
    large = memoryview(bytes(FORM.largest_request_bytes))
    bombs = [replace(plain, body=body).encode(compressed=True)
             for body in [*too_many, (large, rows), (frames, large)]]  # fmt: skip
    monkeypatch.setattr(zstandard, "ZstdDecompressor", None)
    for bomb in bombs:
        with pytest.raises(BadMessage):
            m.decode(bomb, FORM)


def test_only_a_client_of_the_right_role_gets_a_message_decompressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = NetworkReplay(Memory(layout_of(400), 1), "tcp://127.0.0.1:0")
    counts, push = server.server.counts, m.encode(examples()["push"], compressed=True)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(server.url)
        peer.send_multipart(push)
        until(lambda: counts["unknown"] == 1, server.turn, "a push without a hello")
        peer.send_multipart(m.encode(m.Hello("reader", 9, 1, m.BULK, SCHEMA.hash, 0, CONFIG)))
        peer.send_multipart(push)
        until(lambda: counts["forbidden"] == 1, server.turn, "a push of a reader")
    server.close()


def test_an_end_without_zstandard_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    small = m.encode(examples()["batch"], compressed=True)
    layout = layout_of(400)
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")
    learner = link_to(server.url, "learner", 2, layout, compressed=True)
    source = ZmqSampleSource(learner, BETA)
    until(lambda: learner.is_open, lambda: (server.turn(), learner.do_work()), "a welcome")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(OtherVersion, match=r"zapex\[compress\]"):
        m.decode(small, FORM)
    source.request()
    with pytest.raises(Refused, match=r"zapex\[compress\]"):
        until(lambda: False, lambda: (server.turn(), learner.do_work()))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--compress needs .*zapex\[compress\]"):
        check_installed("--compress")
