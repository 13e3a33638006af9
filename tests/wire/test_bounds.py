"""The last value that a message may have arrives; the next one is refused, with the reason."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest

from tests.wire.test_messages import FORM, LAYOUT, SCHEMA, chunk, examples
from zapex.chunks.layout import ChunkLayout
from zapex.chunks.schema import Column, Schema
from zapex.errors import TELLABLE, BadMessage
from zapex.wire import messages as m
from zapex.wire.experience import claimed_push
from zapex.wire.messages import MAX_TEXT_BYTES
from zapex.wire.protocol import (
    MAX_ACTORS,
    MAX_BUFFERS,
    MAX_COUNT,
    Form,
    Kind,
    RawMessage,
    as_buffer,
    decode_header,
    kind_of,
)


def raw(name: str, **words: object) -> RawMessage:
    return replace(decode_header(m.encode(examples()[name])), **words)


def hears(message: RawMessage, form: Form | None = FORM) -> object:
    return m.decode(message.encode(), form)


def refuses(message: RawMessage, got: object = "", form: Form | None = FORM) -> None:
    """It is refused, with the value that is wrong."""
    with pytest.raises(BadMessage) as refusal:
        hears(message, form)
    assert str(got) in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "word", "good", "bad"),
    [
        ("hello", "number", [0, len(m.ROLES) - 1], [-1, len(m.ROLES)]),
        ("hello", "value", [1, MAX_COUNT], [0]),
        ("hello", "frames", [0, 1], [2]),
        ("hello", "rows", [0, MAX_ACTORS], [MAX_ACTORS + 1]),
        ("welcome", "frames", [1, MAX_ACTORS], [0, MAX_ACTORS + 1]),
        ("welcome", "number", [1, 256], [0, 257]),
        ("push", "number", [0, MAX_ACTORS - 1], [-1, MAX_ACTORS]),
        ("push", "frames", [0, 1], [2]),
        ("push", "rows", [3], [1, 2, 4, 9]),
        ("push", "value", [2], [0, 1, 3, FORM.most_pushed + 1]),
        ("batch", "rows", [2], [0, 3]),
        ("batch", "frames", [3], [2, 4, 9]),
        ("batch", "number", [0], [-1, 1]),
        ("sample", "rows", [1, 2], [0, 3]),
        ("sample", "number", [0, 3], [-1, 4]),
        ("sample", "value", [0, 2], [-1, 3]),
        ("no_batch", "number", [1, len(TELLABLE)], [0, len(TELLABLE) + 1]),
        ("params", "value", [1, MAX_COUNT - 1], [0, MAX_COUNT]),
        ("publish", "value", [1, MAX_COUNT - 1], [0, MAX_COUNT]),
        ("stats", "number", [m.REPLAY, MAX_ACTORS - 1], [m.REPLAY - 1, MAX_ACTORS]),
        ("error", "number", [1, len(m.Fault)], [0, len(m.Fault) + 1]),
        ("call", "number", [1], [0, m.Request.SEQUENCES + 1]),
        ("call", "rows", [2], [0, 3]),
        ("reply", "number", [0, len(TELLABLE)], [-1, len(TELLABLE) + 1]),
        ("pull", "sequence", [0, MAX_COUNT - 1], [-1, MAX_COUNT]),
        ("pull", "value", [0, 2**63 - 1], [-1]),
        ("update", "incarnation", [0, 2**63 - 1], [-1]),
    ],
)
def test_a_word_of_the_header_has_its_range(
    name: str, word: str, good: list[int], bad: list[int]
) -> None:
    for value in good:
        hears(raw(name, **{word: value}))
    for value in bad:
        refuses(raw(name, **{word: value}))


@pytest.mark.parametrize(
    ("name", "body"),
    [
        *((name, [b"x"]) for name in ("pull", "update_ack", "publish_ack", "sample")),
        *(("hello", [text]) for text in (b"{", b"[1]", b"\xff")),
        *(("hello", parts) for parts in ([], [b"{}", b"{}"])),
        *(("stats", [bytes(n) for n in sizes]) for sizes in ((16, 5), (15, 4), (16,), (16, 4, 4))),
        ("stats", [bytes(16), bytes(4 * m.MAX_EPISODES + 4)]),
        *((name, [b"a", b"a"]) for name in ("bye", "error")),
        ("error", []),
        *((name, [b"x" * (MAX_TEXT_BYTES + 1)]) for name in ("bye", "error")),
        *((name, [bytes(n)]) for name in ("params", "publish") for n in (7, 9)),
        *((name, [bytes(31)]) for name in ("welcome", "ack")),
        ("push", []),
        ("reply", [bytes((1 << 18) + 1)]),
    ],
)
def test_a_body_has_its_parts_and_bytes(name: str, body: list[bytes]) -> None:
    refuses(raw(name, body=tuple(map(as_buffer, body))))


def test_a_message_has_a_known_kind_and_as_many_bytes_and_parts_as_may_be() -> None:
    parts = [bytes(part) for part in m.encode(m.Bye())]
    most = raw("bye", body=(as_buffer(b"a"),) * (MAX_BUFFERS - 1))
    assert len(decode_header(most.encode()).body) == MAX_BUFFERS - 1
    over = replace(most, body=(*most.body, as_buffer(b"a")))
    kinds = [[parts[0][:6] + struct.pack("<H", n) + parts[0][8:]] for n in (0, len(Kind) + 1)]
    checksum, magic = parts[0][:-1] + bytes([parts[0][-1] ^ 1]), b"ZAPY" + parts[0][4:]
    for buffers in (over.encode(), [], *kinds, [*parts, b"x"], [checksum], [magic]):
        with pytest.raises(BadMessage):
            decode_header(buffers)


def test_the_claimed_kind_is_read_without_the_bit_of_compression() -> None:
    push = examples()["push"]
    for compressed in (False, True):
        assert kind_of(m.encode(push, compressed)) == Kind.PUSH


def test_settings_have_as_many_bytes_items_and_tables_as_may_be() -> None:
    def config(text: str) -> RawMessage:
        return raw("hello", body=(as_buffer(text.encode()),))

    padded = '{"a": "' + "x" * (m.MAX_CONFIG_BYTES - 9) + '"}'
    assert len(padded) == m.MAX_CONFIG_BYTES
    hears(config(padded))
    refuses(config(padded + " "), m.MAX_CONFIG_BYTES + 1)
    items = {str(i): 0 for i in range(m.MAX_CONFIG_ITEMS // 2)}  # a colon each, commas between
    hears(config(json.dumps(items)))
    refuses(config(json.dumps({**items, "more": 0})), m.MAX_CONFIG_ITEMS + 1)
    tables = json.dumps({"a": [[]] * (m.MAX_CONFIG_TABLES - 2)})
    hears(config(tables))
    refuses(config(tables.replace("[[]", "[[],[]", 1)), m.MAX_CONFIG_TABLES + 1)


@pytest.mark.parametrize("name", ["welcome", "ack"])
def test_actors_states_are_numbers_in_range(name: str) -> None:
    def states(records: np.ndarray) -> RawMessage:
        return raw(name, body=(as_buffer(records.tobytes()),))

    one = np.ones(1, m.ACTOR_STATE)
    assert len(hears(states(np.repeat(one, MAX_ACTORS))).actors) == MAX_ACTORS
    assert len(hears(states(one[:0])).actors) == 0
    refuses(states(np.repeat(one, MAX_ACTORS + 1)))
    for field, value in (("actor", MAX_ACTORS), ("actor", -1), ("credit_bytes", -1)):
        bad = one.copy()
        bad[field] = value
        refuses(states(bad))
    one["actor"] = MAX_ACTORS - 1
    hears(states(one))


@pytest.mark.parametrize(("name", "field"), [("bye", "over"), ("error", "text")])
def test_texts_are_cut_at_their_most_and_printable(name: str, field: str) -> None:
    long = replace(examples()[name], **{field: "y" * (MAX_TEXT_BYTES + 5)})
    assert getattr(m.decode(m.encode(long), FORM), field) == "y" * MAX_TEXT_BYTES
    odd = raw(name, body=(as_buffer(b"a\n\xffb"),))
    assert getattr(hears(odd), field) == "a?\ufffdb"


def test_priorities_are_finite_one_for_each_key_and_at_most_a_batchs() -> None:
    def update(rows: int, priorities: list[float]) -> RawMessage:
        keys = np.arange(5, 5 + rows)
        body = keys.astype("<i8").tobytes() + np.array(priorities, "<f4").tobytes()
        return raw("update", rows=rows, body=(as_buffer(body),))

    heard = hears(update(2, [-1.5, 2.5]))
    assert heard.keys.tolist() == [5, 6]
    assert heard.priorities.tolist() == [-1.5, 2.5]
    assert len(hears(update(0, [])).keys) == 0
    for bad in (update(3, [1, 1, 1]), update(2, [1]), update(1, [np.nan]), update(1, [np.inf])):
        refuses(bad)


def push(*records: tuple[int, int, int], rest: int = 0) -> RawMessage:
    """A push that claims chunks of (stream, rows, frames), all of zero frames."""
    rows = sum(record[1] for record in records)
    frames = sum(record[2] for record in records)
    last = b"".join(struct.pack("<qII", *record) for record in records)
    last += bytes(rows * (2 * 2 * 2 + 8 + 3 * 4) + rest)
    body = (as_buffer(bytes(6 * frames)), as_buffer(last))
    return raw("push", body=body, rows=rows, value=len(records))


def test_a_push_has_chunks_that_fit_and_bytes_for_all_of_them() -> None:
    rows, frames = LAYOUT.chunk, LAYOUT.frames
    heard = hears(push((0, rows, frames), (7, 1, 1)))
    assert [c[:4] for c in heard.chunks] == [(0, rows, frames, 0), (7, 1, 1, frames)]
    for record in ((0, rows + 1, 1), (0, 1, frames + 1), (0, 1, 0), (-1, 1, 1), (0, 0, 1)):
        refuses(push((0, 1, 1), record, (0, 2, 1)), f"{record[1]}, {record[2]} and {record[0]}")
    hears(push(*[(0, 1, 1)] * FORM.most_pushed))
    refuses(push((0, 1, 1), rest=1))


def test_a_piece_lies_in_its_batch_and_a_batch_has_at_most_64() -> None:
    form = replace(FORM, batch_size=200)
    for first in (0, 198):
        assert hears(replace(raw("batch"), number=first), form).first == first
    for first in (-1, 199):
        refuses(replace(raw("batch"), number=first), first, form)
    hears(replace(raw("sample"), rows=128, frames=2), form)
    refuses(replace(raw("sample"), rows=129, frames=2), 129, form)


def test_what_a_header_claims_of_a_push_is_read_before_its_body() -> None:
    def of_one(**fields: object) -> m.Push:
        made = m.Push.of_chunks(LAYOUT, chunk(), [(0, 9, 2)], actor=3, incarnation=77, sequence=12)
        return replace(made, **fields)

    head = m.encode(of_one())[0]
    assert claimed_push(head, FORM) == (3, 77, 12)
    assert claimed_push(m.encode(of_one(actor=0))[0], FORM) == (0, 77, 12)
    other = Form(ChunkLayout(Schema(SCHEMA.columns, n_step=2), 4), 2, 8)
    assert claimed_push(head, other) is None
    of_two = m.encode(examples()["push"])[0]
    short, long = head[:-1], as_buffer(bytes(head) + b"x")
    update = m.encode(examples()["update"])[0]
    compressed = m.encode(of_one(), True)[0]
    nobody = replace(decode_header(m.encode(of_one())), number=-1).encode()[0]
    for other_head in (of_two, short, long, update, compressed, nobody):
        assert claimed_push(other_head, FORM) is None


def test_the_largest_messages_follow_from_what_both_ends_know() -> None:
    columns = {"obs": Column((84, 84), np.uint8, stack=4), "action": Column((), np.int64)}
    large = ChunkLayout(Schema(columns), 64)
    least = 1 << 18
    assert Form(LAYOUT, 2, 8).largest_request_bytes == least
    assert Form(LAYOUT, 2, 8).largest_answer_bytes == least
    assert Form(LAYOUT, 2, 8).most_pushed == -(-(1 << 17) // LAYOUT.body_bytes) > 1
    assert Form(large, 2, 8).most_pushed == 1
    assert Form(large, 2, 8).largest_request_bytes == large.body_bytes + 16
    assert Form(LAYOUT, 20_000, 8).largest_request_bytes == 16 * 20_000
    parameters = Form(LAYOUT, 2, least + 1)
    assert (parameters.largest_request_bytes, parameters.largest_answer_bytes) == (least + 1,) * 2
    assert Form(large, 512, 8).largest_answer_bytes == 2 * 512 * 4 * 84 * 84
    small = ChunkLayout(Schema({"obs": Column((), np.uint8), "action": Column((), np.int8)}), 64)
    assert Form(small, 10_000, 8).largest_answer_bytes == 10_000 * (1 + 1 + 4 + 64)
