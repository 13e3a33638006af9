"""Devices that are none: one that does everything late, and one that only counts."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Enter = Callable[[str], object]
_POISON = 0xFF  # of floats: NaN


class Misuse(AssertionError):
    """Memory was used while a copy from or to it was under way."""


class Event:
    """Something that ends later."""

    done = False


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Reads(TorchDispatchMode):
    """Raises Misuse for an operation on a buffer whose content is not the one expected."""

    def __init__(self, queues: "LateQueues", expected: dict[int, int]) -> None:
        super().__init__()
        self._queues, self._expected = queues, expected

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and _place(tensor) in self._expected:
                place = _place(tensor)
                if self._queues.content[place] != self._expected[place]:
                    raise Misuse("a buffer is used before its copy, or after the next one's")
        return func(*args, **(kwargs or {}))


class LateQueues:
    """Two queues on the CPU whose work is done later, at random, in any order that is allowed.

    A copy poisons its destination first, and copies later still. It raises Misuse if its source has
    changed meanwhile; so does work that uses a buffer whose content is not the one that was put
    into the queue last before it.
    """

    device = torch.device("cpu")

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._copier: deque[Callable[[], object] | Event] = deque()
        self._computer: deque[Callable[[], object] | Event] = deque()
        self._sent: dict[int, int] = {}  # buffer -> how many copies to it were put into the queue
        self.content: dict[int, int] = {}  # buffer -> which of them it holds; -1: poison

    def host_memory(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def copy_in(self, to: Tensor, source: Tensor) -> Event:
        place, event = _place(to), Event()
        number = self._sent[place] = self._sent.get(place, 0) + 1
        self.content.setdefault(place, -1)
        before = hash(source.numpy().tobytes())

        def begin() -> None:
            to.fill_(_POISON)
            self.content[place] = -1

        def end() -> None:
            if hash(source.numpy().tobytes()) != before:
                raise Misuse("the host's memory was changed before it was copied")
            to.copy_(source)
            self.content[place] = number
            event.done = True

        self._copier += [begin, end]
        self._some()
        return event

    def copy_out(self, to: Tensor, source: Tensor) -> Event:
        event = Event()
        to.view(torch.uint8).fill_(_POISON)

        def copy() -> None:
            to.copy_(source)
            event.done = True

        self._computer.append(copy)
        self._some()
        return event

    def compute(self, work: Callable[[Enter], object], key: int | None = None) -> None:
        expected = dict(self._sent)

        def run() -> None:
            with _Reads(self, expected):
                work(lambda phase: None)

        self._computer.append(run)
        self._some()

    def computer_waits(self, event: Event) -> None:
        self._computer.append(event)
        self._some()

    def host_waits(self, event: Event) -> None:
        while not event.done:
            if not self._one():
                raise Misuse("the host waits for ever")

    def times(self, key: int) -> dict[str, float]:
        return {"forward": 1.0}

    def _some(self) -> None:
        for _ in range(self._random.choice((0, 0, 0, 1, 2, 5))):
            self._one()

    def _one(self) -> bool:
        """Do the first work of a queue; False if no queue can go on."""
        queues = [self._copier, self._computer]
        self._random.shuffle(queues)
        for queue in queues:
            while queue and isinstance(queue[0], Event) and queue[0].done:
                queue.popleft()
            if queue and not isinstance(queue[0], Event):
                work: Any = queue.popleft()
                work()
                return True
        return False


class Counting(TorchDispatchMode):
    """Counts, by device, what crosses between host and device; nothing is copied off `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.copied_in: list[int] = []  # bytes
        self.copied_out: list[int] = []
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs))
                   if isinstance(t, Tensor)]  # fmt: skip
        kinds = {t.device.type for t in tensors}
        name = func.overloadpacket.__name__
        if name == "copy_" and len(kinds) == 2:
            to, source = tensors[:2]
            if source.device.type == "meta":
                self.copied_out.append(source.nbytes)
                return to
            self.copied_in.append(source.nbytes)
        elif len(kinds) > 1:
            raise Misuse(f"{func} has tensors on {sorted(kinds)}")
        elif kinds == {"meta"} and name in ("_local_scalar_dense", "nonzero", "is_nonzero"):
            self.waits += 1
        elif name == "_to_copy" and "meta" in kinds | {str((kwargs or {}).get("device"))}:
            to_host = str((kwargs or {}).get("device") or "meta") != "meta"
            if to_host or "cpu" in kinds:
                raise Misuse(f"{func} copies between host and device")
        return func(*args, **(kwargs or {}))


class MetaQueues:
    """A device without memory and without time: its copies and waits are seen by `counting`."""

    device = torch.device("meta")

    def __init__(self, counting: Counting) -> None:
        self._counting = counting

    def host_memory(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def copy_in(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)

    copy_out = copy_in

    def compute(self, work: Callable[[Enter], object], key: int | None = None) -> None:
        work(lambda phase: None)

    def computer_waits(self, event: None) -> None:
        pass

    def host_waits(self, event: None) -> None:
        self._counting.waits += 1

    def times(self, key: int) -> dict[str, float]:
        return {}


def random_batch(batch: Any, number: int, actions: int) -> None:
    """Fill a batch: the same for the same number."""
    rng = np.random.default_rng(number)
    for name in ("obs", "next_obs"):
        column = batch[name]
        column[...] = (
            rng.integers(0, 256, column.shape)
            if column.dtype == np.uint8
            else rng.normal(size=column.shape)
        )
    rows = len(batch.keys)
    batch.action[:] = rng.integers(actions, size=rows)
    batch.reward[:] = rng.normal(size=rows)
    batch.discount[:] = 0.97
    batch.weights[:] = rng.random(rows)
    batch.keys[:] = np.arange(rows) + rows * number
