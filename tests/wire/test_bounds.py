"""The last value that a message may have arrives; the next one is refused, with the reason."""

import json
import re
import struct
from dataclasses import replace

import numpy as np
import pytest

from tests.wire.test_messages import FORM, LAYOUT, SCHEMA, chunk, examples
from zapex.chunks.layout import ChunkLayout
from zapex.chunks.schema import Column, Schema
from zapex.errors import BadMessage
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


def hears(message: RawMessage, form: Form | None = FORM, **how: bool) -> object:
    return m.decode(message.encode(), form, **how)


def refuses(message: RawMessage, why: str, form: Form | None = FORM, **how: bool) -> None:
    with pytest.raises(BadMessage, match=why):
        hears(message, form, **how)


WORDS = [
    ("hello", "number", [0, len(m.ROLES) - 1], [-1, len(m.ROLES)]),
    ("hello", "value", [1, MAX_COUNT], [0]),
    ("hello", "frames", [0, 1], [2]),
    ("hello", "rows", [0, MAX_ACTORS], [MAX_ACTORS + 1]),
    ("welcome", "frames", [1, MAX_ACTORS], [0, MAX_ACTORS + 1]),
    ("welcome", "number", [1, 256], [0, 257]),
    ("push", "number", [0, MAX_ACTORS - 1], [-1, MAX_ACTORS]),
    ("push", "frames", [0, 1], [2]),
    ("push", "rows", [3], [2, 4]),
    ("sample", "rows", [1, 2], [0, 3]),
    ("sample", "number", [0, 1], [-1, 2]),
    ("params", "value", [1, MAX_COUNT - 1], [0, MAX_COUNT]),
    ("publish", "value", [1, MAX_COUNT - 1], [0, MAX_COUNT]),
    ("stats", "number", [m.REPLAY, MAX_ACTORS - 1], [m.REPLAY - 1, MAX_ACTORS]),
    ("error", "number", [1, len(m.Fault)], [0, len(m.Fault) + 1]),
    ("pull", "sequence", [0, MAX_COUNT - 1], [-1, MAX_COUNT]),
    ("pull", "value", [0, 2**63 - 1], [-1]),
    ("update", "incarnation", [0, 2**63 - 1], [-1]),
]


@pytest.mark.parametrize(("name", "place", "good", "bad"), WORDS)
def test_a_word_of_the_header_has_its_range(
    name: str, place: str, good: list[int], bad: list[int]
) -> None:
    for value in good:
        hears(raw(name, **{place: value}))
    for value in bad:
        why = rf"got {value}\b|not {value}$|says {value} rows|must not be negative"
        refuses(raw(name, **{place: value}), why)


def test_a_message_has_a_known_kind_and_as_many_bytes_and_parts_as_may_be() -> None:
    parts = [bytes(part) for part in m.encode(m.Bye())]
    for kind in (0, len(Kind) + 1):
        bad = parts[0][:6] + struct.pack("<H", kind) + parts[0][8:]
        with pytest.raises(BadMessage, match=f"kinds are 1 to {len(Kind)}, got {kind}"):
            decode_header([bad])
    most = raw("bye", body=(as_buffer(b"a"),) * (MAX_BUFFERS - 1))
    assert len(decode_header(most.encode()).body) == MAX_BUFFERS - 1
    over = replace(most, body=(*most.body, as_buffer(b"a")))
    for buffers in (over.encode(), []):
        with pytest.raises(BadMessage, match=f"1 to {MAX_BUFFERS} parts, got {len(buffers)}"):
            decode_header(buffers)
    with pytest.raises(BadMessage, match="says 0 bytes of body, got 1"):
        decode_header([*parts, b"x"])
    with pytest.raises(BadMessage, match="the checksum is wrong"):
        decode_header([parts[0][:-1] + bytes([parts[0][-1] ^ 1])])
    with pytest.raises(BadMessage, match="starts with b'ZAPX', got b'ZAPY'"):
        decode_header([b"ZAPY" + parts[0][4:]])


def test_the_claimed_kind_is_read_without_the_bit_of_compression() -> None:
    push = examples()["push"]
    for compressed in (False, True):
        assert kind_of(m.encode(push, compressed)) == Kind.PUSH


def test_settings_have_as_many_bytes_items_and_tables_as_may_be() -> None:
    def config(text: str | bytes) -> RawMessage:
        return raw("hello", body=(as_buffer(text.encode() if isinstance(text, str) else text),))

    padded = '{"a": "' + "x" * (m.MAX_CONFIG_BYTES - 9) + '"}'
    assert len(padded) == m.MAX_CONFIG_BYTES
    hears(config(padded))
    refuses(config(padded + " "), f"at most {m.MAX_CONFIG_BYTES} bytes")
    items = {str(i): 0 for i in range(m.MAX_CONFIG_ITEMS // 2)}  # a colon each, commas between
    hears(config(json.dumps(items)))
    refuses(config(json.dumps({**items, "more": 0})), f"many items .{m.MAX_CONFIG_ITEMS + 1}")
    tables = json.dumps({"a": [[]] * (m.MAX_CONFIG_TABLES - 2)})
    hears(config(tables))
    refuses(config(tables.replace("[[]", "[[],[]", 1)), f"tables .{m.MAX_CONFIG_TABLES + 1}")
    refuses(config("{"), "not JSON")
    refuses(config("[1]"), "not a table")


@pytest.mark.parametrize("name", ["welcome", "ack"])
def test_actors_states_are_whole_records_of_numbers_in_range(name: str) -> None:
    def states(data: bytes) -> RawMessage:
        return raw(name, body=(as_buffer(data),))

    one = np.ones(1, m.ACTOR_STATE)
    full = states(one.tobytes() * MAX_ACTORS)
    assert len(hears(full).actors) == MAX_ACTORS
    assert len(hears(states(b"")).actors) == 0
    refuses(states(one.tobytes() * (MAX_ACTORS + 1)), "at most")
    refuses(states(one.tobytes()[:-1]), f"records of {m.ACTOR_STATE.itemsize} bytes, got 31")
    for field, value in (("actor", MAX_ACTORS), ("actor", -1), ("credit_bytes", -1)):
        bad = one.copy()
        bad[field] = value
        refuses(states(bad.tobytes()), "out of range")
    one["actor"] = MAX_ACTORS - 1
    hears(states(one.tobytes()))


def test_statistics_are_one_block_of_metrics_and_whole_episodes() -> None:
    def statistics(*sizes: int) -> RawMessage:
        return raw("stats", body=tuple(as_buffer(bytes(size)) for size in sizes))

    hears(statistics(16, 0))
    hears(statistics(16, 4 * m.MAX_EPISODES))
    refuses(statistics(16, 4 * m.MAX_EPISODES + 4), "whole number of episodes")
    refuses(statistics(16, 5), "whole number of episodes")
    refuses(statistics(15, 4), "metrics have 16 bytes, got 15")
    refuses(statistics(16), "two parts, got 1")
    refuses(statistics(16, 4, 4), "two parts, got 3")


@pytest.mark.parametrize("name", ["bye", "error"])
def test_texts_are_cut_at_their_most_and_longer_ones_refused(name: str) -> None:
    field = {"bye": "over", "error": "text"}[name]

    def text(data: bytes) -> RawMessage:
        return raw(name, body=(as_buffer(data),))

    full = "x" * MAX_TEXT_BYTES
    assert getattr(hears(text(full.encode())), field) == full
    refuses(text(full.encode() + b"x"), f"at most {MAX_TEXT_BYTES} bytes")
    refuses(replace(text(b""), body=(as_buffer(b"a"),) * 2), "one part of body, got 2")
    long = replace(examples()[name], **{field: "y" * (MAX_TEXT_BYTES + 5)})
    assert getattr(m.decode(m.encode(long), FORM), field) == "y" * MAX_TEXT_BYTES
    assert getattr(hears(text(b"a\n\xffb")), field) == "a?\ufffdb"


def test_only_a_bye_may_say_nothing() -> None:
    empty = m.encode(m.Bye())
    assert len(empty) == 1
    assert m.decode(empty, FORM).over == ""
    refuses(raw("error", body=()), "one part of body, got 0")
    assert len(m.encode(m.Error(m.Fault.BAD, ""))) == 2


@pytest.mark.parametrize("name", ["pull", "update_ack", "publish_ack", "sample"])
def test_what_has_no_body_is_refused_with_one(name: str) -> None:
    refuses(raw(name, body=(as_buffer(b"x"),)), "has no body, got 1 parts")


@pytest.mark.parametrize("name", ["params", "publish"])
def test_parameters_have_the_bytes_of_the_run(name: str) -> None:
    for size in (FORM.parameter_bytes - 1, FORM.parameter_bytes + 1):
        wrong = raw(name, body=(as_buffer(bytes(size)),))
        refuses(wrong, f"{FORM.parameter_bytes} bytes of body, got {size}")


def test_priorities_are_finite_one_for_each_key_and_at_most_a_batchs() -> None:
    def update(rows: int, priorities: list[float]) -> RawMessage:
        keys = np.arange(5, 5 + rows)
        body = keys.astype("<i8").tobytes() + np.array(priorities, "<f4").tobytes()
        return raw("update", rows=rows, body=(as_buffer(body),))

    heard = hears(update(2, [-1.5, 2.5]))
    assert heard.keys.tolist() == [5, 6]
    assert heard.priorities.tolist() == [-1.5, 2.5]
    assert len(hears(update(0, [])).keys) == 0
    refuses(update(3, [1, 1, 1]), "at most a batch's rows, 2, got 3")
    refuses(update(2, [1]), "24 bytes of body, got 20")
    for bad in (np.nan, np.inf):
        refuses(update(1, [bad]), "priorities must be finite")


def push(*records: tuple[int, int, int], rows: int | None = None, count: int | None = None,
         rest: int = 0) -> RawMessage:  # fmt: skip
    """A push that claims chunks of (stream, rows, frames), all of zero frames."""
    every = sum(record[1] for record in records)
    frames = sum(record[2] for record in records)
    row_bytes = 2 * 2 * 2 + 8 + 3 * 4
    last = b"".join(struct.pack("<qII", *record) for record in records)
    last += bytes(every * row_bytes + rest)
    body = (as_buffer(bytes(6 * frames)), as_buffer(last))
    return raw(
        "push", body=body, rows=every if rows is None else rows,
        value=len(records) if count is None else count,
    )  # fmt: skip


def test_a_push_has_chunks_that_fit_and_bytes_for_all_of_them() -> None:
    rows, frames = LAYOUT.chunk, LAYOUT.frames
    assert [c[:4] for c in hears(push((0, rows, frames), (7, 1, 1))).chunks] == [
        (0, rows, frames, 0), (7, 1, 1, frames)
    ]  # fmt: skip
    for record in ((0, 0, 1), (0, rows + 1, 1), (0, 1, 0), (0, 1, frames + 1), (-1, 1, 1)):
        text = f"got {record[1]}, {record[2]} and {record[0]}"
        refuses(push(record), f"1 to {rows} rows and 1 to {frames} frames .* {text}")
    one = (0, 1, 1)
    hears(push(*[one] * FORM.most_pushed))
    for count in (0, FORM.most_pushed + 1):
        many = push(*[one] * count)
        refuses(many, f"a push has 1 to {FORM.most_pushed} chunks, got {count}")
    refuses(push(one, count=9), "9 chunks has as many records of 16 bytes")
    refuses(raw("push", body=()), "as many records")
    refuses(push(one, rest=1), re.escape("parts of [6, 44] bytes, got [6, 45]"))
    refuses(push(one, rows=2), "the header says 2 rows, the chunks have 1")


def test_a_batch_has_no_more_frames_than_its_rows_can_need() -> None:
    batch = raw("batch")
    most = 2 * batch.rows * SCHEMA.stack
    for frames, why in ((most, "parts of"), (most + 1, f"more than {batch.rows} rows can need")):
        refuses(replace(batch, frames=frames), why)
    for rows in (0, FORM.batch_size + 1):
        refuses(replace(batch, rows=rows), f"a batch has 1 to {FORM.batch_size} rows, got {rows}")


def test_a_piece_lies_in_its_batch_and_a_batch_has_at_most_64() -> None:
    form = replace(FORM, batch_size=200)
    for first in (0, 198):
        assert hears(replace(raw("batch"), number=first), form).first == first
    for first in (-1, 199):
        refuses(replace(raw("batch"), number=first), f"do not fit .* behind {first}", form)
    hears(replace(raw("sample"), rows=128, frames=2), form)
    refuses(replace(raw("sample"), rows=129, frames=2), "129 rows in pieces of 2 .* 64", form)


def test_only_experience_is_compressed_and_a_replay_takes_only_pushes_so() -> None:
    for name in ("push", "batch"):
        compressed = m.encode(examples()[name], True)
        m.decode(compressed, FORM)
        if name == "push":
            m.decode(compressed, FORM, of_client=True)
        else:
            with pytest.raises(BadMessage, match="BATCH is never compressed"):
                m.decode(compressed, FORM, of_client=True)
    for name in ("hello", "update"):
        assert m.encode(examples()[name], True)[0][7] & 0x80 == 0
        with pytest.raises(BadMessage, match="is never compressed"):
            m.decode(raw(name).encode(compressed=True), FORM)
    with pytest.raises(BadMessage, match="PUSH came before the welcome"):
        hears(raw("push"), None)


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
