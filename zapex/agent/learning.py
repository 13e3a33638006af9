"""A double DQN learner: one call turns a batch into a better network and new TD errors.

learner = DQN(networks.build((4, 84, 84), np.uint8, num_actions=4), lr=1e-4)
while True:
    batch = replay.sample(512, beta=0.4)
    td_errors, metrics = learner.learn(batch)
    replay.update_priorities(batch.keys, td_errors)
    publish(learner.flat_parameters())
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zapex.agent import losses
from zapex.agent.networks import Network
from zapex.agent.optimisers import Adam, CentredRMSProp, Optimiser
from zapex.errors import CheckpointError, Diverged
from zapex.machine.memory import M_MMAP_MAX, M_TRIM_THRESHOLD, set_malloc_option

_TEMPERATURE, _MUNCHAUSEN = 0.03, 0.9  # tau and alpha of Vieillard et al. 2020
_MMAPS = 1 << 16  # glibc's own default

Enter = Callable[[str], object]
"""Is told the phase of a step that begins: "forward", "backward" or "optimiser"."""
_RESULTS = ("td_loss", "q_values", "gradient_norm", "left_out")  # after a step's TD errors
_NUMBERS = {
    "action": torch.int64,
    "reward": torch.float32,
    "discount": torch.float32,
    "weights": torch.float32,
}
_COLUMNS = ("obs", "next_obs", *_NUMBERS)


class DQN:
    """Online and target network, loss and optimiser; the defaults are Ape-X's values.

    The target of a row is reward + discount * Q_target(next_obs, argmax_a Q_online(next_obs, a)).
    If the network has quantiles, so is the target of each of them, with the loss of Dabney et al.
    2018. TD errors are still of Q, the mean: they have the unit of an actor's first priorities, and
    a distribution that is right has none, however wide it is.

    Create it in the thread that will call `learn`. On a CPU, this also makes the process keep freed
    memory, and makes this thread treat numbers below 1e-38 as 0.

    Args:
        network: the online network; the target network is a copy of it.
        lr: learning rate.
        optimiser: rmsprop (centred), adam, or adam-rel: Adam that counts its steps from each
            new target on, and keeps its means (arXiv 2412.17113).
        rmsprop_decay: decay of RMSProp's averages.
        optimiser_eps: added to the optimiser's denominator.
        loss: huber (slope 1 beyond an error of 1), squared (half the square) or module:function;
            a network with quantiles has its own. Each row's loss is multiplied by its importance
            weight, and averaged over the batch.
        double: False: the target network chooses the action too.
        munchausen: use the targets of Vieillard et al. 2020, equation 1; of n steps, only the first
            has the added term.
        max_grad_norm: the gradient is clipped to this norm; 0: never.
        share_trunk: the target network has only heads of its own, and takes the features of the
            online network, which are then computed once for both (arXiv 2506.04398 with one
            target). A network without a trunk shares nothing.
        target_period: the target becomes the online network after so many batches.
        average_targets: `average` is a mean of the parameters over about the last so many targets,
            exponentially weighted, which often plays better than the newest ones; 0: none.
        largest: rows with a number that is larger or not finite are left out of a batch that cannot
            be learned from otherwise; their TD errors are 0. None: no row is left out.
    """

    def __init__(
        self,
        network: Network,
        *,
        lr: float = 0.00025 / 4,
        optimiser: str = "rmsprop",
        rmsprop_decay: float = 0.95,
        optimiser_eps: float = 1.5e-7,
        loss: str = "huber",
        double: bool = True,
        munchausen: bool = False,
        share_trunk: bool = False,
        max_grad_norm: float = 40.0,
        target_period: int = 2500,
        average_targets: int = 0,
        largest: float | None = None,
    ) -> None:
        if network.device.type == "cpu":
            _prepare_this_thread()
        self.online = network
        self.target = network.copy()
        network.learns()
        self.batches = 0
        # Whether a batch's images have their channels innermost, which a CPU's kernels want.
        self.channels_last = network.device.type == "cpu"
        self._loss = losses.quantile_huber if network.quantiles else losses.named(loss)
        self._largest = largest
        self._double, self._munchausen, self._shares = double, munchausen, share_trunk
        self._max_grad_norm = torch.tensor(max_grad_norm or math.inf, device=network.device)
        self._target_period = target_period
        self._average_targets = average_targets
        self._average = network.flat.clone()
        self._restarts = optimiser == "adam-rel"
        self.gradient = torch.zeros_like(network.flat)
        self._gradient_views = network.split(self.gradient)
        flat = network.flat, self.gradient
        self.optimiser: Optimiser = (
            Adam(*flat, lr, optimiser_eps)
            if optimiser.startswith("adam")
            else CentredRMSProp(*flat, lr, optimiser_eps, rmsprop_decay)
        )

    def learn(
        self, batch: Any, enter: Enter = lambda phase: None
    ) -> tuple[np.ndarray, dict[str, float]]:
        """Learn from one batch, and wait for the result.

        Args:
            batch: has, as attributes or keys, numpy arrays or tensors: obs and next_obs
                [B, *obs_shape] (images are best in channels_last memory), action [B], and float32
                reward, discount (0 where the episode ended) and weights [B].
            enter: called with "forward", "backward" and "optimiser" when each phase begins.

        Returns:
            TD errors, float32 [B], target minus prediction; and, by name, the mean td_loss,
            q_values and td_error (its size), the gradient_norm before clipping, and how many rows
            were left_out.

        Raises:
            Diverged: the loss or its gradient is not finite; the parameters are unchanged.
        """
        get = batch.__getitem__ if isinstance(batch, Mapping) else partial(getattr, batch)
        columns = {name: torch.as_tensor(get(name)) for name in _COLUMNS}
        if self.online.device.type != "cpu":
            columns = {
                name: column.to(self.online.device, non_blocking=True)
                for name, column in columns.items()
            }
        try:
            result = self._learn(columns, enter)
        except Diverged:
            # Not a check of every batch: it would cost a small network a tenth of its speed.
            columns = self.without_unusable_rows(columns)
            if "left_out" not in columns or not columns["left_out"].any():
                raise
            result = self._learn(columns, enter)
        if self.count():
            self.renew_target()
        return result

    def _learn(
        self, columns: Mapping[str, Tensor], enter: Enter
    ) -> tuple[np.ndarray, dict[str, float]]:
        out = torch.empty(self.results(len(columns["action"])), device=self.online.device)
        self.step(columns, out, enter)
        return self.read(out.cpu().numpy())

    def step(
        self, batch: Mapping[str, Tensor], out: Tensor, enter: Enter = lambda phase: None
    ) -> None:
        """Learn from tensors on the network's device, without waiting for the device.

        The same work is queued each time, so that it can be recorded and repeated; the caller then
        calls `count`. If the loss or its gradient is not finite, nothing changes but `out`.

        Args:
            batch: as for `learn`, and perhaps left_out, bool [B]: rows whose TD errors are 0.
            out: float32 [`results(B)`], for `read`.
            enter: as for `learn`.
        """
        enter("forward")
        columns = {name: batch[name].to(dtype) for name, dtype in _NUMBERS.items()}
        seen, following = (self.online.to_input(batch[name]) for name in ("obs", "next_obs"))
        if not self._shares:
            self.target.pack(len(columns["action"]))
        features = self.online.features(seen)
        with torch.no_grad():
            target = self._targets(seen, features, following, columns)
        q = _of_actions(self.online.head(features), columns["action"])
        # A custom loss may return another dtype.
        rows = self._loss(q, target).float()
        loss = columns["weights"].dot(rows) / len(q)
        enter("backward")
        # A custom network may have parameters that Q does not depend on.
        leaves = list(self.online.leaves.values())
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        self.online.gather_gradients(gradients, self._gradient_views)
        enter("optimiser")
        loss, q = loss.detach(), q.detach()
        if self.online.quantiles:
            q, target = q.mean(1), target.mean(1)
        norm = torch.linalg.vector_norm(self.gradient)
        is_finite = (loss + norm).abs() < math.inf
        self.optimiser.step((self._max_grad_norm / norm).clamp_max_(1.0), is_finite)
        self.online.refresh()
        td, left_out = target - q, torch.zeros_like(loss)
        if "left_out" in batch:
            td = td.masked_fill(batch["left_out"], 0.0)
            left_out = batch["left_out"].sum().float()
        torch.cat((td, torch.stack((loss, q.mean(), norm, left_out))), out=out)

    def without_unusable_rows(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch for `step` with zeros in the rows that cannot be learned from.

        Does not wait for the device. Its left_out says which rows these are.
        """
        columns = {name: batch[name] for name in _COLUMNS}
        if self._largest is None:
            return columns
        numbers = {name: each for name, each in columns.items() if each.is_floating_point()}
        sizes = [n.abs().flatten(1).amax(1) if n.ndim > 1 else n.abs() for n in numbers.values()]
        # A comparison with NaN is false.
        left_out = ~(torch.stack(sizes).amax(0) <= self._largest)
        for name, column in numbers.items():
            rows = left_out.view(-1, *[1] * (column.ndim - 1))
            columns[name] = column.masked_fill(rows, 0)
        return columns | {"left_out": left_out}

    def _targets(
        self, seen: Any, features: Any, following: Any, columns: Mapping[str, Tensor]
    ) -> Tensor:
        """What the predictions of a batch should be, (B,) or (B, quantiles); without gradient.

        features: of `seen`, in the online network.
        """
        reward, discount = columns["reward"], columns["discount"]
        after_features = (self.online if self._shares else self.target).features(following)
        values = self.target.head(after_features)
        q = self.online.q_of(values)
        if self._munchausen:
            log_policy = F.log_softmax(q / _TEMPERATURE, 1)
            before = features if self._shares else self.target.features(seen)
            taken = F.log_softmax(self.online.q_of(self.target.head(before)) / _TEMPERATURE, 1)
            bonus = (_TEMPERATURE * _of_actions(taken, columns["action"])).clamp(-1.0, 0.0)
            reward = reward + _MUNCHAUSEN * bonus
            log_policy = log_policy.view(*q.shape, *[1] * (values.ndim - 2))
            after = (log_policy.exp() * (values - _TEMPERATURE * log_policy)).sum(1)
        else:
            if self._double and self._shares:
                q = self.online.q_of(self.online.head(after_features))
            elif self._double:
                q = self.online(following)
            after = _of_actions(values, q.argmax(1))
        if self.online.quantiles:
            reward, discount = reward.unsqueeze(1), discount.unsqueeze(1)
        return reward + discount * after

    def count(self) -> bool:
        """Count a step that was made or queued. Returns whether the target is to be renewed now."""
        self.batches += 1
        return self.batches % self._target_period == 0

    def renew_target(self) -> None:
        """Make the target network the online network, and add it to the average."""
        self.target.load_flat(self.online.flat)
        targets = self.batches // self._target_period
        if (n := self._average_targets) and targets >= n:
            self._average.lerp_(self.online.flat, 1.0 if targets == n else 1 / n)
        if self._restarts:
            self.optimiser.steps = 0

    @staticmethod
    def results(batch_size: int) -> int:
        """How many numbers a step returns."""
        return batch_size + len(_RESULTS)

    def read(self, numbers: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
        """What `learn` returns, from the numbers of `step`. Raises Diverged, as `learn`."""
        td_errors, values = numbers[: -len(_RESULTS)], numbers[-len(_RESULTS) :].tolist()
        facts = dict(zip(_RESULTS, values, strict=True))
        facts["td_error"] = float(np.abs(td_errors).mean())
        if not math.isfinite(facts["td_loss"] + facts["gradient_norm"]):
            raise Diverged(
                f"the loss or its gradient is not finite after {self.batches} batches: lower lr, "
                "or look for infinite rewards or observations"
            )
        return td_errors, facts

    def flat_parameters(self) -> np.ndarray:
        """The online parameters, float32 [n]: on a CPU the live memory itself, else a copy."""
        flat: np.ndarray = self.online.flat.cpu().numpy()
        return flat

    @property
    def average(self) -> Tensor | None:
        """The mean of the parameters, float32 [n]; None before target `average_targets`."""
        enough = 0 < self._average_targets <= self.batches // self._target_period
        return self._average if enough else None

    def state_dict_tensors(self) -> dict[str, Tensor]:
        """All tensors of a state by name; with `counters` training resumes bit for bit.

        Those of the average are in it only if there is one.
        """
        return self._tensors(with_average=self.average is not None)

    def _tensors(self, with_average: bool) -> dict[str, Tensor]:
        tensors = {f"online.{name}": view for name, view in self.online.views.items()}
        tensors |= {f"target.{name}": view for name, view in self.target.views.items()}
        for key, flat in self.optimiser.state.items():
            views = self.online.split(flat)
            tensors |= {f"optimiser.{key}.{name}": view for name, view in views.items()}
        if with_average:
            views = self.online.split(self._average)
            tensors |= {f"average.{name}": view for name, view in views.items()}
        return tensors

    def counters(self) -> dict[str, int]:
        """The JSON part of the state."""
        return {"batches": self.batches, "optimiser_steps": self.optimiser.steps}

    def load_state(self, tensors: Mapping[str, Any], counters: Mapping[str, int]) -> None:
        """Continue from a state. Raises CheckpointError, changing nothing, if it does not fit."""
        has_average = any(name.startswith("average.") for name in tensors)
        own = self._tensors(has_average)
        found, needed = (
            {name: tuple(t.shape) for name, t in some.items()} for some in (tensors, own)
        )
        wrong = [
            f"{name} is {found.get(name, 'missing')}, here {needed.get(name, 'unknown')}"
            for name in sorted(found.keys() | needed.keys())
            if found.get(name) != needed.get(name)
        ]
        if wrong:
            raise CheckpointError(f"the checkpoint is of another network: {'; '.join(wrong)}")
        absent = self.counters().keys() - counters.keys()
        if absent:
            raise CheckpointError(f"the checkpoint lacks the counters {sorted(absent)}")
        with torch.no_grad():
            for name, view in own.items():
                view.copy_(torch.as_tensor(tensors[name]))
            if not has_average:
                self._average.copy_(self.online.flat)
        self.online.refresh()
        self.target.refresh()
        self.batches = int(counters["batches"])
        self.optimiser.steps = int(counters["optimiser_steps"])


def _of_actions(values: Tensor, actions: Tensor) -> Tensor:
    """(B,) or (B, N), of values (B, A) or (B, A, N) and actions (B,)."""
    places = actions.unsqueeze(1)
    if values.ndim == 3:
        places = places.unsqueeze(2).expand(-1, 1, values.shape[2])
    return values.gather(1, places).squeeze(1)


class _Heap:
    """The malloc options that this process has set; malloc does not report them."""

    keeps = False  # all freed memory


_heap = _Heap()


def _prepare_this_thread() -> None:
    """Avoid page faults in each batch, and the slow arithmetic of denormal numbers."""
    torch.set_flush_denormal(True)
    # Each batch allocates and frees activations of tens of MB. By default glibc returns them to
    # the system every time, and getting them again takes a sixth of the time.
    set_malloc_option(M_MMAP_MAX, 0)
    set_malloc_option(M_TRIM_THRESHOLD, 2**31 - 1)
    _heap.keeps = True


@contextlib.contextmanager
def memory_given_back() -> Iterator[None]:
    """Within this context large blocks come from the system, and return to it whole.

    Once a DQN exists on a CPU, the heap keeps everything. Without this context, a checkpoint's
    copies would sometimes find no free block that is large enough, and a run of days would grow. In
    a process without a DQN, glibc already behaves this way, and nothing is changed.
    """
    kept = _heap.keeps
    if kept:
        set_malloc_option(M_MMAP_MAX, _MMAPS)
    try:
        yield
    finally:
        if kept:
            set_malloc_option(M_MMAP_MAX, 0)
