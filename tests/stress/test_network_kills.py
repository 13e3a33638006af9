"""Processes on a network killed, links cut: every committed chunk arrives, and once."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.stress.network_kills import account
from tests.support.relays import fill, is_whole, wrong_rows
from tests.support.transport_rigs import SCHEMA, layout_of
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.layout import COUNT, BatchLayout
from zapex.chunks.store import ChunkStore


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kills", "cuts", "seed", "scheme"),
    [
        pytest.param(8, 3, 1, "tcp", marks=pytest.mark.slow),
        pytest.param(8, 3, 1, "zmtp", marks=pytest.mark.slow),
        pytest.param(8, 3, 1, "fstack", marks=pytest.mark.slow),
        pytest.param(60, 20, 2, "tcp", marks=pytest.mark.slow),
        pytest.param(60, 20, 2, "zmtp", marks=pytest.mark.slow),
        pytest.param(60, 20, 2, "fstack", marks=pytest.mark.slow),
    ],
)
def test_kills_and_cuts_lose_double_and_tear_nothing(
    kills: int, cuts: int, seed: int, scheme: str
) -> None:
    command = [sys.executable, "-m", "tests.stress.network_kills", "--transitions", "400000"]
    command += [f"--kills={kills}", f"--cuts={cuts}", f"--seed={seed}", "--long-cut=4"]
    command += [f"--scheme={scheme}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=190)
    facts = json.loads(done.stdout)
    assert done.returncode == 0
    assert (facts["lost"], facts["doubled"], facts["torn"], facts["wrong_rows"]) == (0, 0, 0, 0)
    assert facts["at_the_replay"] >= facts["acknowledged"] > kills
    assert facts["batches"] > 0
    assert facts["done"]["long cuts that clients told of"] == 1


def test_chunks_are_counted_life_by_life_so_that_no_surplus_hides_a_loss() -> None:
    everything = {(1, 0): 1, (1, 1): 1, (2, 0): 1}
    assert account(everything, {1: 2, 2: 1}) == {"lost": 0, "doubled": 0}
    # Killed between its commit and its count.
    assert account(everything, {1: 2}) == {"lost": 0, "doubled": 0}
    assert account(everything, {1: 3}) == {"lost": 1, "doubled": 0}
    assert account(everything, {1: 2, 2: 1, 3: 1}) == {"lost": 1, "doubled": 0}
    assert account({**everything, (2, 2): 1}, {1: 2, 2: 1}) == {"lost": 1, "doubled": 0}
    assert account({**everything, (1, 1): 2}, {1: 3, 2: 1}) == {"lost": 1, "doubled": 1}


def test_a_changed_byte_of_any_column_of_a_batch_or_of_a_chunk_is_seen() -> None:
    layout = layout_of(400).chunk_layout
    store = ChunkStore(aligned_zeros(ChunkStore.required_bytes(layout, 2)), layout, 2)
    fill(store, 1, (0, 5, 7), 0, np.random.default_rng(1))
    rows = int(store.header_rows[1, COUNT])
    batch = Batch.empty(BatchLayout(SCHEMA, rows))
    keys = store.keys_of(store.indices(1), 0)
    store.gather(keys, batch.layout, batch.memory, batch.keys)
    assert is_whole(store, 1)
    assert wrong_rows(batch, layout) == 0
    for name in ("obs", "next_obs", "discount", "mask", "action"):
        before = batch[name].copy()
        batch[name][0] += 1
        assert wrong_rows(batch, layout) == 1, name
        batch[name][:] = before
    for name in ("next_obs_frames", "reward", "discount", "mask", "action", "priority"):
        column = store.column(1, name)
        before = column.copy()
        column[0] += 1
        assert not is_whole(store, 1), name
        column[:] = before
    store.column(1, "obs")[store.column(1, "next_obs_frames")[0, 0]] += 1
    assert not is_whole(store, 1)
