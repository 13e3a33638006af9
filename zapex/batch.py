"""A batch: every column of the sampled transitions in one caller-owned block of memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError
from zapex.schema import BatchLayout

if TYPE_CHECKING:
    import torch

Observation = NDArray[Any] | dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Batch(Mapping[str, Any]):
    """B transitions as arrays over one block of memory.

    obs, next_obs: (B, *space shape), a dict of them for Dict observations. action, extra columns:
    (B, ...). reward, discount, weights: (B,) float32. keys, indices: (B,) int64; a row that was
    overwritten while it was copied has weight 0 and key -1. Extra columns are read by name:
    `batch["mask"]`.
    """

    layout: BatchLayout
    memory: NDArray[np.uint8] = field(repr=False)
    _pinned: Any = field(default=None, repr=False)
    columns: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        flat = self.layout.views(self.memory)
        columns: dict[str, Any] = {}
        for name, array in flat.items():
            root, _, key = name.partition("/")
            if key:
                columns.setdefault(root, {})[key] = array
            else:
                columns[root] = array
        object.__setattr__(self, "columns", columns)

    @classmethod
    def empty(cls, layout: BatchLayout, pin_memory: bool = False) -> "Batch":
        """Memory for a batch; pinned (page-locked) where a GPU will read it."""
        if not pin_memory:
            return cls(layout, aligned_zeros(layout.nbytes))
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("pin_memory needs a GPU that torch can see; there is none")
        pinned = torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=True)
        return cls(layout, pinned.numpy(), pinned)

    @property
    def obs(self) -> Observation:
        """Observations s, (B, *shape)."""
        return self.columns["obs"]  # type: ignore[no-any-return]

    @property
    def next_obs(self) -> Observation:
        """Observations s' that bootstrapping starts from, (B, *shape)."""
        return self.columns["next_obs"]  # type: ignore[no-any-return]

    @property
    def action(self) -> NDArray[Any]:
        """Actions, (B, ...)."""
        return self.columns["action"]  # type: ignore[no-any-return]

    @property
    def reward(self) -> NDArray[np.float32]:
        """n-step returns without the bootstrap, (B,)."""
        return self.columns["reward"]  # type: ignore[no-any-return]

    @property
    def discount(self) -> NDArray[np.float32]:
        """What the bootstrap is multiplied by, (B,): gamma^m, or 0."""
        return self.columns["discount"]  # type: ignore[no-any-return]

    @property
    def weights(self) -> NDArray[np.float32]:
        """Importance weights, (B,)."""
        return self.columns["weights"]  # type: ignore[no-any-return]

    @property
    def keys(self) -> NDArray[np.int64]:  # type: ignore[override]
        """Keys for `update_priorities`, (B,)."""
        return self.columns["keys"]  # type: ignore[no-any-return]

    @property
    def indices(self) -> NDArray[np.int64]:
        """Places in the memory, (B,); a key is what stays right when a place is reused."""
        return self.columns["indices"]  # type: ignore[no-any-return]

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def torch(self, device: "torch.device | str" = "cpu", non_blocking: bool = False) -> Any:
        """The columns as a dict of tensors: views on the CPU, copies on another device."""
        import torch

        def tensor(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: tensor(array) for key, array in value.items()}
            return torch.from_numpy(value).to(device, non_blocking=non_blocking)

        return {name: tensor(value) for name, value in self.columns.items()}


def aligned_zeros(nbytes: int) -> NDArray[np.uint8]:
    """Zeros that start on a cache line."""
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]
