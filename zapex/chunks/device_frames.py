"""Frames on the learner's device: each chunk's are copied there once; a batch only names them.

`gather` runs on the host, if asked during the step. It writes a batch without observations: its
column "frames" holds the row of each frame in the device's memory. Chunks that the device does not
have yet are copied first, into `batch.fresh`. `complete` runs on the device, in the order of the
batches: it puts the fresh chunks in their places and gathers the observations.

A slot's place on the device may still be read by an earlier step when the slot has new content. So
fresh chunks are put in place by the device's own queue, after that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.chunks.keys import GENERATION_MASK, GENERATION_SHIFT, slots_and_rows
from zapex.chunks.store import ChunkStore
from zapex.errors import ConfigError

if TYPE_CHECKING:
    import torch


class DeviceFrames:
    """The frames of a store's slots, on a device.

    Chunks must be whole when they can be drawn, as those of a run are.

    Args:
        store: the chunk slots.
        device: where the frames are kept. The CPU is possible, too.

    Raises:
        ConfigError: the observations are not images (uint8), or the device has not enough memory.
    """

    def __init__(self, store: ChunkStore, device: torch.device) -> None:
        import torch

        columns = list(store.layout.schema.obs_columns.items())
        if len(columns) != 1 or np.dtype(columns[0][1].dtype) != np.uint8:
            raise ConfigError(
                "--replay-device needs observations that are images: leave it out, or set it to cpu"
            )
        self._name, self._column = columns[0]
        self._store = store
        self._zeros = store.slots * store.layout.frames  # the row of the frame of zeros
        shape = (self._zeros + 1, *self._column.shape)
        try:
            self._frames = torch.zeros(shape, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"--replay-device needs {np.prod(shape) / 2**30:.1f} GiB on {device}, which has "
                "less free: lower --capacity, or set --replay-device to cpu"
            ) from None
        self._pin = device.type == "cuda"
        self._there = np.zeros(store.slots, np.int64)  # the generation that the device has
        self.copied = 0  # chunks

    def gather(self, keys: NDArray[np.int64], batch: Batch, out_keys: NDArray[np.int64]) -> int:
        """As `ChunkStore.gather`, into a batch whose layout has its frames apart."""
        self._copy_new(keys, batch.fresh)
        torn, numbers = self._store.gather_numbers(keys, batch.layout, batch.memory, out_keys)
        slots, _ = slots_and_rows(keys)
        frames = self._store.layout.frames
        rows = slots[:, None, None] * frames + numbers
        # No frame; a torn row may have any number.
        batch["frames"][...] = np.where(numbers >= frames, self._zeros, rows)
        return torn

    def _copy_new(self, keys: NDArray[np.int64], fresh: list[Any]) -> None:
        """Copy the chunks that the device does not have."""
        import torch

        slots, _ = slots_and_rows(keys)
        generations = keys >> GENERATION_SHIFT & GENERATION_MASK
        missing = self._there[slots] != generations
        for slot, generation in dict(
            zip(slots[missing], generations[missing], strict=True)
        ).items():
            frames = self._store.column(slot, self._name)
            copy = torch.empty(frames.shape, dtype=torch.uint8, pin_memory=self._pin)
            copy.numpy()[...] = frames
            fresh.append((int(slot), copy))
            self.copied += 1
            # If the slot was evicted meanwhile, its rows are torn. Nothing but a new key, whose
            # generation differs, can name the slot again.
            self._there[slot] = generation

    def put_in_place(self, batch: Batch) -> None:
        """Put the chunks that are new in this batch in their places on the device."""
        frames = self._store.layout.frames
        for slot, copy in batch.fresh:
            self._frames[slot * frames : (slot + 1) * frames].copy_(copy, non_blocking=True)
        batch.fresh.clear()

    def complete(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns (tensors on the device) with "obs" and "next_obs" instead of "frames"."""
        rows, depth = columns["frames"], self._column.stack
        completed = {name: column for name, column in columns.items() if name != "frames"}
        for side, name in enumerate(("obs", "next_obs")):
            found = self._frames.index_select(0, rows[:, side].reshape(-1))
            value = found.view(len(rows), depth, *self._column.shape)
            if depth == 1:
                value = value.squeeze(1)
            elif self._column.stack_axis == -1:
                value = value.movedim(1, -1)
            completed[name] = value
        return completed
