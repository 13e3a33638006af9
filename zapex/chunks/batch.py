"""Batch: all columns of the sampled transitions, in one block of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import BatchLayout, SequenceLayout
from zapex.errors import ConfigError

if TYPE_CHECKING:
    import torch

_USUAL = ("obs", "action", "reward", "discount", "next_obs", "weights", "keys", "indices")


@dataclass(frozen=True, eq=False, repr=False)
class Batch(Mapping[str, Any]):
    """B sampled transitions, as arrays over one block of memory.

    Read a column as an attribute or by name (`batch["mask"]` for an extra column). A Dict
    observation is a dict of arrays. If a row was overwritten while it was copied, its weight is 0
    and its key is -1. This happens only if the replay is in another process. A copy (copy,
    deepcopy, pickle) has its own block of memory, which is not page-locked.

    Attributes:
        obs: (B, *shape) observations s.
        action: (B, ...) actions, of the schema's dtype.
        reward: (B,) float32 n-step returns.
        discount: (B,) float32 factors of the bootstrap: gamma^m, or 0 after a terminal step.
        next_obs: (B, *shape) observations s'.
        weights: (B,) float32 importance weights.
        keys: (B,) int64, for `update_priorities`.
        indices: (B,) int64 places in the memory. A place is used again, a key is not.
        columns: all columns by name.
        layout: the place of each column.
        memory: the block itself, uint8.
        fresh: chunks that this batch is the first to need on a device (device_frames.py).
    """

    _usual: ClassVar[tuple[str, ...]] = _USUAL
    layout: BatchLayout
    memory: NDArray[np.uint8]
    _pinned: Any = None
    columns: dict[str, Any] = field(init=False)
    obs: NDArray[Any] = field(init=False)
    action: NDArray[Any] = field(init=False)
    reward: NDArray[np.float32] = field(init=False)
    discount: NDArray[np.float32] = field(init=False)
    next_obs: NDArray[Any] = field(init=False)
    weights: NDArray[np.float32] = field(init=False)
    keys: NDArray[np.int64] = field(init=False)  # type: ignore[assignment]
    indices: NDArray[np.int64] = field(init=False)
    fresh: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        columns = _by_root(self.layout.views(self.memory))
        usual = {name: columns[name] for name in self._usual if name in columns}
        self.__dict__.update(usual, columns=columns, fresh=[])

    @classmethod
    def empty(cls, layout: BatchLayout, pin_memory: bool = False, *, zeroed: bool = True) -> Self:
        """Allocate memory for a batch.

        Args:
            layout: sizes and places of the columns.
            pin_memory: page-lock the memory, for copies to a GPU.
            zeroed: False leaves what was in the memory, for a batch that is filled at once. The
                allocator may then give the same pages again, which saves their page faults.

        Raises:
            ConfigError: pin_memory is set and torch finds no GPU.
        """
        if not pin_memory:
            return cls(layout, _aligned(np.zeros if zeroed else np.empty, layout.nbytes))
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("pin_memory needs a GPU that torch can see; there is none")
        pinned = torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=True)
        return cls(layout, pinned.numpy(), pinned)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has one block, too: copied one by one, its columns would be apart from it.
        return _copied, (type(self), self.layout, self.memory, self.fresh)

    def __repr__(self) -> str:
        views = self.layout.views(self.memory).items()
        columns = ", ".join(f"{name} {array.dtype} {array.shape[1:]}" for name, array in views)
        return f"<{type(self).__name__} of {self.layout.batch_size} rows: {columns}>"

    def __getitem__(self, name: str) -> Any:
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(_unknown(name, self.columns)) from None

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            columns = self.__dict__.get("columns", ())
            how = f"; read it as batch[{name!r}]" if name in columns else ""
            raise AttributeError(_unknown(name, columns) + how)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def block(self) -> torch.Tensor:
        """The block of memory as a uint8 tensor; page-locked if the batch was made so."""
        import torch

        return torch.from_numpy(self.memory) if self._pinned is None else self._pinned

    def torch(self, device: torch.device | str = "cpu", non_blocking: bool = False) -> Tensors:
        """The columns as tensors.

        Args:
            device: on the CPU the tensors share the batch's memory. On another device they are one
                copy of it.
            non_blocking: do not wait for the copy. This needs pinned memory. The device orders its
                work after the copy by itself. Before the batch is filled again, call `wait()` of
                the result.

        Returns:
            A dict by column name. A Dict observation is a dict of tensors.
        """
        import torch

        block = self.block.to(device, non_blocking=non_blocking)
        tensors = Tensors(split(self.layout, block))
        if block.device.type == "cuda" and non_blocking:
            tensors.copied = torch.cuda.current_stream(block.device).record_event()
        return tensors


def _unknown(name: str, columns: Iterable[str]) -> str:
    return f"a batch has no {name!r}; its columns are {', '.join(columns)}"


@dataclass(frozen=True, eq=False, repr=False)
class SequenceBatch(Batch):
    """B sequences of T consecutive steps, as arrays over one block of memory.

    T is burn-in plus length. A sequence ends early at the end of its episode, and at the newest
    step of its stream. `valid` masks the steps that it has; everything after them is zero. If a
    sequence was overwritten while it was copied, it has no steps, the weight 0 and the key -1.
    Otherwise it is used like a Batch.

    Attributes:
        obs: (B, T + n_step + stack - 1, *frame) frames, each once. Observation t is the frames t to
            t + stack - 1; those after the T steps are for the bootstrap. With PyTorch,
            `obs.unfold(1, stack, 1)` is a view of all observations, with the stack at the end.
        action: (B, T, ...) actions; any extra column likewise, such as a recurrent state.
        reward: (B, T) float32 n-step returns.
        discount: (B, T) float32 factors of the bootstrap.
        bootstrap: (B, T) int64, the observation that a step's reward and discount lead to.
        valid: (B, T) bool, the mask of the steps that there are: the first ones.
        reset: (B,) bool, sequences that begin with the first step of an episode.
        weights: (B,) float32 importance weights.
        keys: (B,) int64, of the first steps.
        indices: (B,) int64, their places in the memory.
        spans: (B,) int64, how many steps a sequence stands for: those before the next one's start.
    """

    _usual: ClassVar[tuple[str, ...]] = (*_USUAL, "bootstrap", "valid", "reset", "spans")
    layout: SequenceLayout
    bootstrap: NDArray[np.int64] = field(init=False)
    valid: NDArray[np.bool_] = field(init=False)
    reset: NDArray[np.bool_] = field(init=False)
    spans: NDArray[np.int64] = field(init=False)


def _copied(
    kind: type[Batch], layout: BatchLayout, memory: NDArray[np.uint8], fresh: list[Any]
) -> Batch:
    batch = kind.empty(layout, zeroed=False)
    batch.memory[:] = memory
    batch.fresh.extend(fresh)
    return batch


class Tensors(dict[str, Any]):
    """The columns of a batch as tensors, by name."""

    copied: torch.cuda.Event | None = None

    def __missing__(self, name: str) -> Any:
        raise KeyError(_unknown(name, self))

    def wait(self) -> None:
        """Wait until the copy that made the tensors no longer reads the batch's memory."""
        if self.copied is not None:
            self.copied.synchronize()


def split(layout: BatchLayout, block: torch.Tensor) -> dict[str, Any]:
    """The columns of a batch, by name, as views of its block of memory (uint8) on any device."""
    import torch

    tensors = {}
    for name, section in layout.sections.items():
        kind = torch.from_numpy(np.empty(0, section.dtype)).dtype
        part = block[section.offset : section.offset + section.nbytes]
        tensor = part.view(kind).view(section.shape)
        tensors[name] = tensor.movedim(-1, 1) if layout.moves_stack(name) else tensor
    return _by_root(tensors)


def _by_root(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns by name, with those of a Dict observation in a dict of its own."""
    found: dict[str, Any] = {}
    for name, column in columns.items():
        root, _, key = name.partition("/")
        if key:
            found.setdefault(root, {})[key] = column
        else:
            found[root] = column
    return found


def aligned_zeros(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory that starts on a cache line (64 bytes)."""
    return _aligned(np.zeros, nbytes)


def _aligned(allocate: Callable[..., NDArray[np.uint8]], nbytes: int) -> NDArray[np.uint8]:
    memory = allocate(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]
