"""Every column comes back as it went in, in whatever order a schema names them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zapex
from tests.library.test_snapshot import rewrite
from tests.support.schemas import check_rows, random_rows, random_schema, shuffled
from zapex import Column, PrioritizedReplay, Schema
from zapex.errors import CheckpointError


def new_replay(schema, capacity=400, **options):
    return PrioritizedReplay(capacity, schema, **{"seed": 0, "chunk": 16, "streams": 1, **options})


def all_of(replay):
    return replay.sample(len(replay), method="without_replacement")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31))
def test_every_column_of_a_random_schema_survives_a_save_and_a_connection(tmp_path_factory, seed):
    rng = np.random.default_rng(seed)
    schema = random_schema(rng)
    same = shuffled(rng, schema)
    assert same == schema == Schema.from_json(schema.to_json())
    rows = random_rows(rng, schema, 20)
    replay = new_replay(schema)
    replay.extend(**rows)
    path = tmp_path_factory.mktemp("snapshot")
    replay.save(path)
    loaded = PrioritizedReplay.load(path)
    assert loaded.schema == schema
    layouts = [r.core.layout.chunk_layout.sections for r in (replay, loaded, new_replay(same))]
    assert layouts[0] == layouts[1] == layouts[2]
    check_rows(all_of(loaded), rows)
    try:
        with zapex.connect(loaded.handle, timeout_s=60) as client:
            check_rows(all_of(client), rows)
            more = random_rows(rng, client.schema, 5, first=20)
            keys = client.extend(**more)
            assert loaded.update_priorities(keys, np.full(5, 1e12)) == (5, 0)
            check_rows(loaded.sample(5, method="without_replacement"), more)
    finally:
        loaded.close()


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
