"""A batch is one block of memory with a name for every column."""

import copy
import pickle

import numpy as np
import pytest

from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.layout import BatchLayout
from zapex.chunks.schema import Column, Schema

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


@pytest.mark.parametrize("channels_last", [False, True])
def test_tensors_have_the_shapes_and_values_of_the_arrays(channels_last):
    torch = pytest.importorskip("torch")
    batch = Batch.empty(BatchLayout(NESTED, 4, channels_last))
    batch.memory[:] = np.random.default_rng(0).integers(0, 64, batch.memory.size)
    tensors = batch.torch(non_blocking=True)
    tensors.wait()  # nothing was copied
    assert set(tensors) == set(batch)
    for name in ("obs", "next_obs"):
        for key, array in batch[name].items():
            np.testing.assert_array_equal(tensors[name][key].numpy(), array)
    for name in ("action", "mask", "reward", "discount", "weights", "keys", "indices"):
        np.testing.assert_array_equal(tensors[name].numpy(), batch[name])
    assert tensors["obs"]["image"].data_ptr() == torch.from_numpy(batch.obs["image"]).data_ptr()


@pytest.mark.gpu
def test_after_waiting_for_its_tensors_a_batch_can_be_filled_again():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    batch = Batch.empty(BatchLayout(NESTED, 4096), pin_memory=True)
    for number in range(20):
        batch.memory[:] = number
        tensors = batch.torch("cuda", non_blocking=True)
        tensors.wait()
        batch.memory[:] = 99
        assert (tensors["obs"]["image"] == number).all()


def test_memory_starts_on_a_cache_line():
    for nbytes in (1, 64, 1000):
        memory = aligned_zeros(nbytes)
        assert memory.nbytes == nbytes
        assert memory.ctypes.data % 64 == 0


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))]
)
def test_a_copy_of_a_batch_is_one_block_again(copied, channels_last):
    batch = Batch.empty(BatchLayout(NESTED, 4, channels_last))
    batch.memory[:] = np.random.default_rng(0).integers(0, 64, batch.memory.size)
    other = copied(batch)
    for name in ("action", "reward", "keys"):
        np.testing.assert_array_equal(other[name], batch[name])
    other.memory[:] = 7
    for array in (other.obs["image"], other.next_obs["pose"].view(np.uint8), other["mask"]):
        assert (array == 7).all()
    assert other.keys is other["keys"]
    assert other.memory.ctypes.data % 64 == 0
    assert (batch.obs["image"] != 7).any()


def test_an_unknown_column_is_an_error_that_lists_the_known_ones():
    schema = Schema(
        {"obs": Column((4,), np.float32), "action": Column((), np.int64),
         "mask": Column((2,), np.int8)}
    )  # fmt: skip
    batch = Batch.empty(BatchLayout(schema, 2))
    with pytest.raises(AttributeError, match=r"'dones'.* obs, next_obs, action, mask, reward"):
        batch.dones  # noqa: B018
    with pytest.raises(AttributeError, match=r"batch\['mask'\]"):
        batch.mask  # noqa: B018
    for columns in (batch, batch.torch()):
        with pytest.raises(KeyError, match=r"'rewards'.* reward"):
            columns["rewards"]
        assert columns.get("rewards") is None
    assert not hasattr(batch, "rewards")
