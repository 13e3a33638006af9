"""A batch is one block of memory with a name for every column."""

import numpy as np
import pytest

from zapex.batch import Batch, aligned_zeros
from zapex.schema import BatchLayout, Column, Schema

NESTED = Schema(
    {"obs/image": Column((3, 2), np.uint8, stack=2), "obs/pose": Column((3,), np.float32),
     "action": Column((2,), np.float32), "mask": Column((5,), np.int8)}
)  # fmt: skip


def test_columns_are_views_of_one_block_by_name_and_by_attribute():
    batch = Batch.empty(BatchLayout(NESTED, 6))
    assert set(batch) == {
        "obs", "next_obs", "action", "mask", "reward", "discount", "weights", "keys", "indices"
    }  # fmt: skip
    assert batch.obs["image"].shape == (6, 2, 3, 2)
    assert batch.next_obs["pose"].shape == (6, 3)
    for name in ("action", "reward", "discount", "weights", "keys", "indices"):
        assert getattr(batch, name) is batch[name]
        assert np.shares_memory(batch[name], batch.memory)
    assert batch.reward.dtype == batch.discount.dtype == batch.weights.dtype == np.float32
    assert batch.keys.dtype == batch.indices.dtype == np.int64
    assert dict(batch.items()).keys() == set(batch)


def test_tensors_on_the_cpu_share_the_batchs_memory():
    torch = pytest.importorskip("torch")
    batch = Batch.empty(BatchLayout(NESTED, 2))
    tensors = batch.torch()
    batch.reward[:] = [1.0, 2.0]
    batch.obs["image"][0, 1] = 7
    assert torch.equal(tensors["reward"], torch.tensor([1.0, 2.0]))
    assert tensors["obs"]["image"][0, 1].min() == 7


def test_memory_starts_on_a_cache_line():
    for nbytes in (1, 64, 1000):
        memory = aligned_zeros(nbytes)
        assert memory.nbytes == nbytes
        assert memory.ctypes.data % 64 == 0
