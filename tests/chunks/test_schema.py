"""Columns and bytes: aligned, apart from each other, told apart by a hash."""

import itertools

import numpy as np
import pytest
from gymnasium import spaces

from zapex.chunks.layout import BatchLayout, ChunkLayout
from zapex.chunks.schema import Column, Schema
from zapex.errors import SchemaError


def atari(**changes):
    columns = {
        "obs": Column((84, 84), np.uint8, stack=4),
        "action": Column((), np.int64),
        "mask": Column((18,), np.int8),
    }
    return Schema(columns, **{"n_step": 3, "gamma": 0.99, **changes})


def test_sections_are_aligned_and_do_not_overlap():
    schema = Schema(
        {"obs/image": Column((5, 7), np.uint8, stack=3), "obs/pose": Column((3,), np.float64),
         "action": Column((2,), np.float32), "tag": Column((), np.uint8)},
    )  # fmt: skip
    for layout, size in (
        (ChunkLayout(schema, 9), "body_bytes"),
        (BatchLayout(schema, 5), "nbytes"),
    ):
        spans = sorted((s.offset, s.offset + s.nbytes) for s in layout.sections.values())
        assert all(start % 64 == 0 for start, _ in spans)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= getattr(layout, size)
        assert getattr(layout, size) % 64 == 0


def test_a_chunk_has_room_for_its_frames_the_overlap_and_two_episode_ends():
    assert ChunkLayout(atari(), 64).frames == 64 + 3 + 4 - 1 + 2


def test_equal_schemas_hash_equally_and_every_difference_shows():
    base = atari()
    same = Schema.from_description(base.describe())
    assert (same, same.hash) == (base, base.hash)
    assert 0 <= base.hash < 2**63
    columns = dict(base.columns)
    different = [
        atari(n_step=4),
        atari(gamma=0.98),
        Schema({**columns, "obs": Column((84, 84), np.uint8, stack=3)}),
        Schema({**columns, "obs": Column((84, 84), np.uint8, stack=4, stack_axis=-1)}),
        Schema({**columns, "mask": Column((17,), np.int8)}),
        Schema({**columns, "mask": Column((18,), np.uint8)}),
        Schema({**columns, "more": Column((), np.int8)}),
    ]
    hashes = {schema.hash for schema in [base, *different]}
    assert len(hashes) == 1 + len(different)


def test_the_hash_is_the_same_on_every_machine():
    # A changed number here means: chunks and snapshots of older versions are refused.
    schema = Schema({"obs": Column((4,), np.float32), "action": Column((), np.int64)})
    assert schema.hash == Schema.from_description(
        {"columns": {"obs": [[4], "<f4", 1, 0], "action": [[], "<i8", 1, 0]},
         "n_step": 3, "gamma": 0.99}
    ).hash == 5403397171080694223  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"action": Column((), np.int64)}, 'needs a column "obs"'),
        ({"obs": Column((4,), np.float32)}, 'needs a column "action"'),
        ({"obs": Column((4,), np.float32), "obs/x": Column((4,), np.float32),
          "action": Column((), np.int64)}, "not both"),
        ({"obs": Column((4,), np.float32), "action": Column((), np.int64),
          "reward": Column((), np.float32)}, "name of zapex itself"),
        *(({"obs": Column((4,), np.float32), "action": Column((), np.int64),
            name: Column((), np.int8)}, message)
          for name, message in [("terminated", "terminated"), ("cut", "cut"), ("self", "self"),
                                ("next_obs_frames", "next_obs_frames"), ("a/b", "'a/b'"),
                                ("action/x", "'action/x'"), ("", "''"), (3, "3: Column")]),
        ({"obs/": Column((4,), np.float32), "action": Column((), np.int64)}, "'obs/'"),
        ({"obs": ((4,), np.float32), "action": Column((), np.int64)}, r"Column\(.*'obs': \(\(4,\)"),
        ({"obs": Column((4,), np.float32), "action": Column((), np.int64, stack=2)},
         "only observations are stacked"),
    ],
)  # fmt: skip
def test_columns_that_make_no_transition_are_refused(columns, message):
    with pytest.raises(SchemaError, match=message):
        Schema(columns)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4,), object), "plain fixed-size"),
        (((4,), np.dtype([("a", "i4")])), "plain fixed-size"),
        (((4,), "U0"), "plain fixed-size"),
        (((0,), np.float32), "positive"),
        (((4,), np.float32, 17), "1 to 16"),
        (((4,), np.float32, 4, 1), "0 or -1"),
    ],
)
def test_columns_that_have_no_fixed_bytes_are_refused(arguments, message):
    with pytest.raises(SchemaError, match=message):
        Column(*arguments)


@pytest.mark.parametrize("numbers", [{"n_step": 0}, {"n_step": 65}, {"gamma": 1.5}, {"gamma": -1}])
def test_returns_that_make_no_sense_are_refused(numbers):
    with pytest.raises(SchemaError, match=next(iter(numbers))):
        atari(**numbers)


@pytest.mark.parametrize(
    "facts", [{}, {"columns": {"obs": 3}}, {"columns": {}, "n_step": "x", "gamma": 1}]
)
def test_a_description_from_elsewhere_that_is_none_is_refused(facts):
    with pytest.raises(SchemaError):
        Schema.from_description(facts)


def test_batches_have_the_shape_of_the_space_whatever_lies_in_memory():
    for axis, shape in ((0, (4, 84, 84)), (-1, (84, 84, 4))):
        schema = Schema(
            {"obs": Column((84, 84), np.uint8, stack=4, stack_axis=axis),
             "action": Column((), np.int64)}
        )  # fmt: skip
        for last in (False, True):
            layout = BatchLayout(schema, 3, channels_last=last)
            views = layout.views(np.zeros(layout.nbytes, np.uint8))
            assert views["obs"].shape == views["next_obs"].shape == (3, *shape)


def box(*shape, dtype=np.uint8):
    low, high = (0, 255) if dtype == np.uint8 else (-1.0, 1.0)
    return spaces.Box(low, high, shape, dtype)


def from_spaces(space, action=None, **options):
    return Schema.from_spaces(space, action or spaces.Discrete(4), **options)


@pytest.mark.parametrize(
    ("space", "column"),
    [
        (box(4, 84, 84), Column((84, 84), np.uint8, 4, 0)),
        (box(84, 84, 4), Column((84, 84), np.uint8, 4, -1)),
        (box(84, 84, 1), Column((84, 84, 1), np.uint8)),
        (box(10, 10, 4), Column((10, 10, 4), np.uint8)),
        (box(7, 7, 3), Column((7, 7, 3), np.uint8)),
        (box(17, dtype=np.float64), Column((17,), np.float64)),
        (box(4, dtype=np.float32), Column((4,), np.float32)),
        (box(4, 84, 84, 3), Column((4, 84, 84, 3), np.uint8)),
        (spaces.Discrete(16), Column((), np.int64)),
        (spaces.MultiDiscrete([3, 4]), Column((2,), np.int64)),
        (spaces.MultiBinary(5), Column((5,), np.int8)),
    ],
)
def test_a_spaces_column_has_its_shape_and_its_stack(space, column):
    assert from_spaces(space).columns["obs"] == column
    assert column.value_shape == space.shape


@pytest.mark.parametrize(
    ("space", "stack", "column"),
    [
        (box(3, 84, 84), 3, Column((84, 84), np.uint8, 3, 0)),
        (box(210, 160, 3), 1, Column((210, 160, 3), np.uint8)),
        (box(4, 84, 84, 3), 4, Column((84, 84, 3), np.uint8, 4, 0)),
        (box(10, 10, 4), 4, Column((10, 10), np.uint8, 4, -1)),
        (box(4, 17, dtype=np.float32), 4, Column((17,), np.float32, 4, 0)),
        (box(4, dtype=np.float32), 4, Column((), np.float32, 4, 0)),
        (box(4, 84, 84), 1, Column((4, 84, 84), np.uint8)),
    ],
)
def test_a_stack_that_is_named_is_found_at_its_end(space, stack, column):
    assert from_spaces(space, stack=stack).columns["obs"] == column


@pytest.mark.parametrize(
    ("space", "stack", "message"),
    [
        (box(4, 84, 4), None, "either end of the shape"),
        (box(4, 84, 4), 4, "either end of the shape"),
        (box(3, 84, 84), None, "may be colours or successive frames"),
        (box(210, 160, 3), None, "stack=1 or stack=3"),
        (box(4, 84, 84), 5, "neither end"),
        (spaces.Discrete(4), 2, "neither end"),
        (spaces.Text(5), None, "Text spaces have no columns"),
        (spaces.Tuple([box(4)]), None, "Tuple spaces have no columns"),
        (spaces.Dict(a=spaces.Dict(b=box(4))), None, "obs/a: Dict spaces have no columns"),
        (spaces.Dict(a=box(4)), {"b": 1}, r"stack names \['b'\]"),
        (box(4), {"b": 1}, "for Dict observations"),
    ],
)
def test_spaces_that_cannot_be_columns_or_could_be_two_are_refused(space, stack, message):
    with pytest.raises(SchemaError, match=message):
        from_spaces(space, stack=stack)


def test_dict_observations_box_actions_and_extra_columns():
    space = spaces.Dict(image=box(4, 84, 84), pose=box(3, dtype=np.float32))
    action = spaces.Box(-1.0, 1.0, (6,), np.float32)
    schema = from_spaces(space, action, n_step=5, gamma=0.9, extra={"mask": Column((18,), np.int8)})
    assert schema.columns == {
        "obs/image": Column((84, 84), np.uint8, 4),
        "obs/pose": Column((3,), np.float32),
        "action": Column((6,), np.float32),
        "mask": Column((18,), np.int8),
    }
    assert (schema.n_step, schema.gamma) == (5, 0.9)
    assert from_spaces(space, stack={"image": 1}).columns["obs/image"].stack == 1
    with pytest.raises(SchemaError, match="names of the spaces' own"):
        from_spaces(space, action, extra={"action": Column((), np.int8)})
