"""Messages: they arrive unchanged, byte for byte as documented, and bad bytes are refused."""

import contextlib
import struct
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chunks.test_builder import play
from tests.support import messages
from tests.support.messages import same
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.layout import COUNT, NO_FRAME, STREAM, BatchLayout, ChunkLayout
from zapex.chunks.schema import Column, Schema
from zapex.errors import BadMessage, ConfigError
from zapex.replay.draw import Draw
from zapex.wire import messages as m
from zapex.wire.batches import BatchPacker, BatchUnpacker, check_batch_size, packed_bytes
from zapex.wire.protocol import (
    HEADER,
    MAX_BUFFERS,
    VERSION,
    Form,
    Kind,
    as_buffer,
    decode_header,
)

GOLDEN = Path(__file__).parents[1] / "golden"
SCHEMA = Schema(
    {"obs": Column((3, 2), np.uint8, stack=2), "action": Column((), np.int64)}, n_step=1, gamma=0.5
)
LAYOUT = ChunkLayout(SCHEMA, 4)
FORM = Form(LAYOUT, batch_size=2, parameter_bytes=8, metrics_bytes=16, episode_bytes=4)


def chunk() -> np.ndarray:
    """A chunk of two transitions and three frames, every number known."""
    memory = aligned_zeros(LAYOUT.body_bytes)
    LAYOUT.column("obs", memory, 0)[:3] = np.arange(18, dtype=np.uint8).reshape(3, 3, 2)
    LAYOUT.column("obs_frames", memory, 0)[:2] = [[NO_FRAME, 0], [0, 1]]
    LAYOUT.column("next_obs_frames", memory, 0)[:2] = [[0, 1], [1, 2]]
    for name, values in {"action": [5, 6], "reward": [1.5, -2], "discount": [0.5, 0],
                         "priority": [0.25, -1]}.items():  # fmt: skip
        LAYOUT.column(name, memory, 0)[:2] = values
    return memory


def batch_parts() -> tuple[memoryview, ...]:
    rows = struct.pack("<2d", 10.0, 0.5)  # total, smallest
    rows += struct.pack("<2q", 1 << 27, (1 << 27) + 1) + struct.pack("<2q", 0, 1)
    rows += struct.pack("<2d", 0.5, 2.0)
    rows += struct.pack("<4H", NO_FRAME, 0, 0, 1) + struct.pack("<4H", 0, 1, 1, 2)
    rows += struct.pack("<2q", 5, 6) + struct.pack("<2f", 1.5, -2) + struct.pack("<2f", 0.5, 0)
    return as_buffer(bytes(range(18))), as_buffer(rows)


def examples() -> dict[str, object]:
    """One message of each kind."""
    push = m.Push.of_chunks(
        LAYOUT, chunk(), [(0, 9, 2), (0, 8, 1)], actor=3, incarnation=77, sequence=12
    )
    batch = m.BatchMessage(SCHEMA.hash, 55, 5, 1000, 2, 3, 0, batch_parts())
    return messages.examples(push, batch, {"gamma": 0.5, "env": "x"}, SCHEMA)


def joined(parts) -> bytes:
    """Parts in a file: each behind its length."""
    return b"".join(struct.pack("<I", len(bytes(p))) + bytes(p) for p in parts)


def split(data: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        parts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return parts


@pytest.mark.parametrize("name", examples())
def test_messages_survive_a_round_trip(name: str) -> None:
    said = examples()[name]
    assert same(m.decode(m.encode(said), FORM), said)


def test_every_kind_has_an_example() -> None:
    assert {e.kind for e in examples().values()} == set(Kind)


@pytest.mark.parametrize("name", examples())
def test_golden_bytes_of_version_4(name: str) -> None:
    """A change of any byte is a new version: golden files are never written anew."""
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    assert joined(m.encode(examples()[name])) == golden
    assert same(m.decode(split(golden), FORM), examples()[name])


def test_the_document_names_every_kind_and_every_fault() -> None:
    text = (Path(__file__).parents[2] / "docs" / "wire_protocol.md").read_text()
    for word in (*Kind, *m.Fault):
        assert f"{word.name} " in text, word.name


def test_a_chunk_arrives_as_it_was_and_sends_only_what_it_holds() -> None:
    memory = chunk()
    parts = m.encode(examples()["push"])
    row_bytes = 2 * 2 * 2 + 8 + 3 * 4
    assert [len(p) for p in parts] == [64, (3 + 2) * 6, 2 * 16 + (2 + 1) * row_bytes]
    target = aligned_zeros(LAYOUT.body_bytes + 64)
    m.decode(parts, FORM).write(0, LAYOUT, target, 64)
    assert (target[64:] == memory).all()


@pytest.mark.parametrize(("stack", "level"), [(1, 0), (4, 0), (4, 2)])
def test_real_chunks_arrive_as_they_were(stack: int, level: int) -> None:
    rng = np.random.default_rng(1)
    store, slots, *_ = play(rng, streams=2, stack=stack, n=3, chunk=8, steps=60, level=level)
    layout = store.layout
    form = Form(layout, 2, 8)
    headers = store.header_rows
    alone, together = [[slot] for slot in slots], [slots[:4], slots[4:6]]
    for group in alone + together:
        chunks = [(store.body(s), int(headers[s, STREAM]), int(headers[s, COUNT])) for s in group]
        said = m.Push.of_chunks(layout, store.mem, chunks, actor=7, incarnation=9, sequence=0)
        push = m.decode(m.encode(said), form)
        assert [(c.stream, c.rows) for c in push.chunks] == [chunk[1:] for chunk in chunks]
        for number, slot in enumerate(group):
            target = aligned_zeros(layout.body_bytes)
            push.write(number, layout, target, 0)
            for name in layout.sections:
                chunk = push.chunks[number]
                count = chunk.frames if name in layout.schema.obs_columns else chunk.rows
                sent, came = store.column(slot, name), layout.column(name, target, 0)
                assert (sent[:count] == came[:count]).all()


@pytest.mark.parametrize(("stack", "channels_last"), [(1, False), (4, False), (4, True)])
@pytest.mark.parametrize("rows", [1, 64])
def test_a_packed_batch_unpacks_to_what_a_gather_gives_with_each_frame_sent_once(
    stack: int, channels_last: bool, rows: int
) -> None:
    rng = np.random.default_rng(2)
    store, closed, *_ = play(rng, streams=2, stack=stack, n=3, chunk=8, steps=60)
    layout = BatchLayout(store.layout.schema, rows, channels_last)
    slots = rng.choice(closed, rows)
    offsets = rng.integers(0, store.header_rows[slots, COUNT])
    indices = slots * store.layout.chunk + offsets
    keys, leaves = store.keys_of(indices), rng.random(rows) + 0.1
    wanted, got = Batch.empty(layout), Batch.empty(layout)
    store.gather(keys, layout, wanted.memory, wanted.keys)
    wanted.indices[:] = indices

    memory = np.empty(packed_bytes(layout.schema, rows), np.uint8)
    draw = Draw(keys, indices, leaves, 9.0, 500, 0.1)
    packed = BatchPacker(store).pack(draw, epoch=1, sequence=2, memory=memory)
    tables = [store.column(s, name)[o] for name in ("obs_frames", "next_obs_frames")
              for s, o in zip(slots, offsets, strict=True)]  # fmt: skip
    needed = {(s, f) for s, row in zip([*slots, *slots], tables, strict=True) for f in row}
    assert packed.frames == len([f for _, f in needed if f != NO_FRAME])
    assert packed.body[0].nbytes == 6 * packed.frames
    message = m.decode(m.encode(packed), Form(store.layout, rows, 8))
    out = BatchUnpacker(layout, store.layout).unpack(message, got)
    assert (out.leaves == leaves).all()
    assert (out.total, out.smallest, out.count) == (9.0, 0.1, 500)
    assert (got.memory == wanted.memory).all()


def test_a_batch_whose_frames_cannot_be_numbered_is_refused() -> None:
    check_batch_size(8191, 4)
    with pytest.raises(ConfigError, match=r"at most 8,191 .* got 8,192"):
        check_batch_size(8192, 4)


@pytest.mark.parametrize("at", [0, 8, 48])  # the total, the smallest leaf, one that was drawn
@pytest.mark.parametrize("number", [-1.0, 0.0, np.nan, np.inf])
def test_a_batch_with_a_number_that_no_tree_has_is_refused(at: int, number: float) -> None:
    frames, rows = batch_parts()
    bad = bytearray(rows)
    struct.pack_into("<d", bad, at, number)
    batch = m.BatchMessage(SCHEMA.hash, 55, 5, 1000, 2, 3, 0, (frames, as_buffer(bytes(bad))))
    with pytest.raises(BadMessage, match="positive and finite"):
        m.decode(m.encode(batch), FORM)


def test_a_bye_may_give_a_reason() -> None:
    for over in ("the learner is done", ""):
        said = replace(examples()["bye"], over=over)
        assert m.decode(m.encode(said), FORM).over == over


def test_another_schema_is_refused_with_both_hashes() -> None:
    other = Schema(SCHEMA.columns, n_step=2, gamma=0.5)
    form = Form(ChunkLayout(other, 4), 2, 8)
    with pytest.raises(BadMessage, match=f"{SCHEMA.hash:#018x}.*{other.hash:#018x}"):
        m.decode(m.encode(examples()["push"]), form)


def test_another_version_is_refused_with_both_versions() -> None:
    parts = [bytes(p) for p in m.encode(m.Bye())]
    parts[0] = parts[0][:4] + b"\x02\x00" + parts[0][6:]
    with pytest.raises(BadMessage, match="version 4, the peer version 2"):
        m.decode(parts, FORM)


@pytest.mark.parametrize("name", examples())
def test_a_header_that_is_cut_short_is_refused(name: str) -> None:
    parts = m.encode(examples()[name])
    for cut in (0, 1, 63):
        with pytest.raises(BadMessage):
            m.decode([bytes(parts[0])[:cut], *parts[1:]], FORM)


def test_references_to_missing_frames_are_refused() -> None:
    for name in ("push", "batch"):
        message = decode_header(m.encode(examples()[name]))
        body = [bytearray(part) for part in message.body]
        first = body[-1].find(struct.pack("<H", NO_FRAME))
        for at in range(first, first + 2 * 2 * 2 * 2, 2):  # both tables: two rows, stacks of two
            changed = bytearray(body[-1])
            struct.pack_into("<H", changed, at, 3)
            bad = replace(message, body=(*map(as_buffer, body[:-1]), as_buffer(changed)))
            with pytest.raises(BadMessage, match="refers to a frame"):
                m.decode(bad.encode(), FORM)


def test_only_some_kinds_are_read_before_the_welcome() -> None:
    free = {"hello", "welcome", "ack", "update_ack", "pull", "publish_ack", "bye", "error"}
    for name, message in examples().items():
        if name in free:
            m.decode(m.encode(message), None)
        else:
            with pytest.raises(BadMessage):
                m.decode(m.encode(message), None)


def decode_or_refuse(parts) -> None:
    """The property of every decoder: a message, or BadMessage, and little memory either way."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    with contextlib.suppress(BadMessage):
        m.decode(parts, FORM)
    assert tracemalloc.get_traced_memory()[1] - before < 2 << 20


@pytest.fixture(scope="module", autouse=True)
def _traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@given(st.lists(st.binary(max_size=100), max_size=MAX_BUFFERS + 1))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_any_bytes_are_a_message_or_refused(parts: list[bytes]) -> None:
    decode_or_refuse(parts)


_I64, _U32 = st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1)


@st.composite
def mutants(draw: st.DrawFn) -> list[bytes]:
    """A real message with fields and bytes changed, resealed so that the checks behind the
    checksum are reached."""
    message = decode_header(m.encode(examples()[draw(st.sampled_from(sorted(examples())))]))
    near = st.integers(0, 12)
    body = [bytearray(p) for p in message.body]
    for _ in range(draw(st.integers(0, 3))):
        where = draw(st.integers(0, 5))
        part = draw(st.sampled_from(body)) if body else bytearray()
        if where == 0 and part:
            part[draw(st.integers(0, len(part) - 1))] = draw(st.integers(0, 255))
        elif where == 1:
            del part[draw(st.integers(0, len(part))) :]
        elif where == 2:
            part += draw(st.binary(max_size=20))
        elif where == 3:
            body.append(bytearray(draw(st.binary(max_size=8))))
        elif where == 4 and body:
            body.pop()
        elif where == 5 and len(part) >= 8:
            at = draw(st.integers(0, len(part) // 8 - 1)) * 8
            struct.pack_into("<q", part, at, draw(_I64))
    f = {
        "kind": draw(st.one_of(st.just(message.kind), st.integers(0, 20))),
        "schema": draw(st.one_of(st.just(message.schema), st.integers(0, 2**64 - 1))),
        "incarnation": draw(st.one_of(st.just(message.incarnation), _I64)),
        "sequence": draw(st.one_of(st.just(message.sequence), _I64)),
        "value": draw(st.one_of(st.just(message.value), _I64)),
        "number": draw(st.one_of(st.just(message.number), near, st.integers(-(2**31), 2**31 - 1))),
        "rows": draw(st.one_of(st.just(message.rows), near, _U32)),
        "frames": draw(st.one_of(st.just(message.frames), near, _U32)),
    }
    size = draw(st.one_of(st.just(sum(map(len, body))), st.integers(0, 2**64 - 1)))
    head = HEADER.pack(
        b"ZAPX", VERSION, f["kind"], f["schema"], f["incarnation"], f["sequence"], f["value"], size,
        f["number"], f["rows"], f["frames"], 0,
    )[:-4]  # fmt: skip
    crc = zlib.crc32(b"".join([head, *map(bytes, body)]))
    return [head + struct.pack("<I", crc), *map(bytes, body)]


@given(mutants())
@settings(max_examples=20, derandomize=True, deadline=None)
def test_mutants_of_real_messages_are_messages_or_refused(parts: list[bytes]) -> None:
    decode_or_refuse(parts)


def write_golden() -> None:
    """For a new version of the protocol only."""
    for name, message in examples().items():
        (GOLDEN / f"{name}.bin").write_bytes(joined(m.encode(message)))
