"""Values that do not fit their column are refused, and orders of columns do not matter."""

import numpy as np
import pytest

import zapex
from tests.library.test_snapshot import rewrite
from zapex import Column, PrioritizedReplay, Schema
from zapex.errors import CheckpointError, SchemaError


def new_replay(schema, capacity=400, **options):
    return PrioritizedReplay(capacity, schema, **{"seed": 0, "chunk": 16, "streams": 1, **options})


OBS = {"obs": Column((2,), np.float32)}
ACTION = {"action": Column((), np.int64)}


@pytest.mark.parametrize(
    ("columns", "loads"),
    [
        ({**ACTION, **OBS}, True),
        ({**OBS, **ACTION, "a_mask": Column((), np.int64)}, False),
        ({"obs/right": OBS["obs"], "obs/left": OBS["obs"], **ACTION}, False),
    ],
)
def test_a_snapshot_that_did_not_note_the_order_is_used_only_where_there_is_one(
    tmp_path, columns, loads
):
    schema = Schema(columns, n_step=1)
    replay = new_replay(schema)
    rng = np.random.default_rng(0)
    obs = {n: rng.normal(size=(4, 2)).astype(np.float32) for n in schema.obs_columns}
    obs = obs.get("obs", {n.removeprefix("obs/"): o for n, o in obs.items()})
    extras = {n: np.arange(4) for n in columns if n == "a_mask"}
    replay.extend(
        obs=obs, next_obs=obs, action=np.arange(4), reward=np.ones(4),
        terminated=np.zeros(4, bool), **extras,
    )  # fmt: skip
    replay.save(tmp_path)
    assert len(PrioritizedReplay.load(tmp_path)) == 4
    rewrite(tmp_path, lambda facts: facts.update(format=1))
    if loads:
        assert len(PrioritizedReplay.load(tmp_path)) == 4
    else:
        with pytest.raises(CheckpointError, match="did not note the order"):
            PrioritizedReplay.load(tmp_path)


WHOLE = Schema(
    {"obs": Column((2,), np.uint8), "action": Column((), np.int8),
     "half": Column((), np.float16), "name": Column((), "S2")},
    n_step=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": np.array([[300, 0]], np.uint16)}, "^obs must be uint8, 0 to 255, got 300"),
        ({"next_obs": np.array([[0, 256]], np.uint32)}, "^next_obs must be uint8.* 256"),
        ({"action": np.array([200], np.uint8)}, "^action must be int8, -128 to 127, got 200"),
        ({"action": np.array([-129])}, "^action must be int8.* got -129"),
        ({"half": np.array([1e6])}, "^half must be float16, got 1000000.0"),
        ({"name": np.array([b"abc"])}, "^name must be "),
    ],
)
@pytest.mark.parametrize("place", ["owner", "handle"])
def test_a_value_that_does_not_fit_into_its_column_is_refused(change, message, place):
    replay = new_replay(WHOLE)
    row = {
        "obs": np.zeros((1, 2), np.uint8), "next_obs": np.zeros((1, 2), np.uint16),
        "action": [-128], "half": [np.inf], "name": [b"ab"], "reward": [0.0],
    }  # fmt: skip
    try:
        user = replay if place == "owner" else zapex.connect(replay.handle, timeout_s=60)
        with pytest.raises(SchemaError, match=message):
            user.extend(**{**row, **change}, terminated=[False])
        assert len(replay) == 0
        user.extend(**row, terminated=[False])
        batch = replay.sample(1)
        assert (batch.action[0], batch["half"][0], batch["name"][0]) == (-128, np.inf, b"ab")
        if change.keys() <= {"obs"}:
            return
        writer = user.writer(1, "same_step")
        writer.reset(row.pop("obs"))
        step = {
            **row,
            "terminated": [True],
            "truncated": [False],
            "final_obs": np.ones((1, 2), np.uint8),
        }
        with pytest.raises(SchemaError, match=message):
            writer.add(**{**step, **change})
    finally:
        replay.close()


def test_integers_do_not_wrap_in_any_other_call():
    replay = new_replay(WHOLE)
    writer = replay.writer(1, "same_step")
    large = np.array([[1000, 0]], np.uint16)
    with pytest.raises(SchemaError, match=r"^obs must be uint8.* 1000"):
        writer.reset(large)
    writer.reset(large * 0)
    step = {
        "action": [0], "half": [0.0], "name": [b""], "reward": [0.0], "next_obs": large * 0,
        "terminated": [True], "truncated": [False], "final_obs": large,
    }  # fmt: skip
    with pytest.raises(SchemaError, match=r"^final_obs must be uint8.* 1000"):
        writer.add(**step)
    with pytest.raises(SchemaError, match=r"^keys must be int64.* 9223372036854775808"):
        replay.update_priorities(np.array([1 << 63], np.uint64), [1.0])
