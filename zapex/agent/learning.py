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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zapex.agent.flat import Network
from zapex.agent.losses import named_loss, rows_and_slopes
from zapex.agent.optimisers import Adam, CentredRMSProp, Optimiser
from zapex.errors import CheckpointError, Diverged
from zapex.machine.memory import M_MMAP_MAX, M_TRIM_THRESHOLD, set_malloc_option

_TEMPERATURE, _MUNCHAUSEN = 0.03, 0.9  # tau and alpha of Vieillard et al. 2020
_MMAPS = 1 << 16  # glibc's own default

Enter = Callable[[str], object]
"""Is told the phase of a step that begins: "forward", "backward" or "optimiser"."""
FACTS = ("td_loss", "q_values", "td_error", "gradient_norm", "left_out")
"""The facts about a step, by name. left_out: rows that were not learned from."""
_STEP_COLUMNS = {
    "action": torch.int64,
    "reward": torch.float32,
    "discount": torch.float32,
    "weights": torch.float32,
}


class DQN:
    """Online and target network, loss and optimiser; the defaults are Ape-X's values.

    `optimiser` is `rmsprop` (centred) or `adam`; `optimiser_eps` is added to its denominator.
    `loss` is `huber` (slope 1 beyond an error of 1), `squared` (half the square) or
    module:function, each times the importance weight, averaged over the batch. Without `double` the
    target network chooses the action too. `munchausen` gives the targets of Vieillard et al. 2020,
    equation 1; of n steps, only the first has the added term. `max_grad_norm` 0 does not clip. The
    target becomes the online network after every `target_period` batches.

    Create it in the thread that will call `learn`. On a CPU, this also makes the process keep freed
    memory, and makes this thread treat numbers below 1e-38 as 0.
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
        max_grad_norm: float = 40.0,
        target_period: int = 2500,
    ) -> None:
        if network.device.type == "cpu":
            _prepare_this_thread()
        self.online = network
        self.target = network.copy()
        network.learns()
        self.batches = 0
        # Whether a batch's images have their channels innermost, which a CPU's kernels want.
        self.channels_last = network.device.type == "cpu"
        self._slope_limit = 1.0 if loss == "huber" else math.inf
        self._loss = named_loss(loss) if ":" in loss else None
        self._double, self._munchausen = double, munchausen
        self._max_grad_norm = max_grad_norm
        self._target_period = target_period
        self.gradient = torch.zeros_like(network.flat)
        self._gradient_views = network.split(self.gradient)
        flat = network.flat, self.gradient
        self.optimiser: Optimiser = (
            Adam(*flat, lr, optimiser_eps)
            if optimiser == "adam"
            else CentredRMSProp(*flat, lr, optimiser_eps, rmsprop_decay)
        )

    def learn(
        self, batch: Any, enter: Enter = lambda phase: None
    ) -> tuple[np.ndarray, dict[str, float]]:
        """One step on a batch: (TD errors, float32 [B], target minus prediction; metrics).

        `enter` is called with "forward", "backward" and "optimiser" when each phase begins.

        `batch` has, as attributes or keys, numpy arrays or tensors: obs and next_obs
        [B, *obs_shape] (images are best in channels_last memory), action [B], and float32 reward,
        discount (0 where the episode ended) and weights [B]. The target is
        reward + discount * Q_target(next_obs, argmax_a Q_online(next_obs, a)).
        Raises Diverged, with the parameters unchanged, when the loss or its gradient is not
        finite.
        """
        device = self.online.device
        obs = _column(batch, "obs"), _column(batch, "next_obs")
        columns = {name: _tensor(batch, name, device, kind) for name, kind in _STEP_COLUMNS.items()}
        if device.type != "cpu":
            seen, following = (torch.as_tensor(o).to(device, non_blocking=True) for o in obs)
            out = torch.empty(self.results(len(columns["action"])), device=device)
            self.step({**columns, "obs": seen, "next_obs": following}, out, enter)
            if self.count():
                self.renew_target()
            return self.read(out.cpu().numpy())
        enter("forward")
        td, q, loss = self._differentiate(obs, columns, enter)
        enter("optimiser")
        td_loss, norm = torch.stack((loss, torch.linalg.vector_norm(self.gradient))).tolist()
        self._check(td_loss + norm)
        clip = self._max_grad_norm
        self.optimiser.step(clip / norm if 0.0 < clip < norm else 1.0)
        self.online.refresh()
        if self.count():
            self.renew_target()
        td_errors = td.numpy()
        values = td_loss, float(q.mean()), float(np.abs(td_errors).mean()), norm, 0.0
        return td_errors, dict(zip(FACTS, values, strict=True))

    def _differentiate(
        self, obs: Sequence[Any], columns: Mapping[str, Tensor], enter: Enter
    ) -> tuple[Tensor, Tensor, Tensor]:
        """TD errors (B,), predictions (B,) and the loss; the loss's derivative is in `gradient`."""
        online = self.online
        seen, following = (online.to_input(each) for each in obs)
        action, weights = columns["action"], columns["weights"]
        self.target.pack(len(action))
        with torch.no_grad():
            target = self._targets(seen, following, columns)
        q = online(seen).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            td = target - q
            slope = td if self._slope_limit == math.inf else td.clamp(-1.0, 1.0)
            rows = slope * (td - 0.5 * slope)
        if self._loss is not None:
            rows, slope = rows_and_slopes(self._loss, q, target)
            slope = -slope
        loss = (weights * rows).mean()
        enter("backward")
        pull = weights * slope / -len(td)  # the loss's derivative by q
        # A network of one's own may have parameters that Q does not depend on.
        leaves = list(online.leaves.values())
        gradients = torch.autograd.grad(q, leaves, pull, materialize_grads=True)
        online.gather_gradients(gradients, self._gradient_views)
        return td, q.detach(), loss

    def _targets(self, seen: Any, following: Any, columns: Mapping[str, Tensor]) -> Tensor:
        """What the predictions of a batch are to be, (B,); without gradient."""
        reward, discount = columns["reward"], columns["discount"]
        if self._munchausen:
            q = self.target(following)
            log_policy = F.log_softmax(q / _TEMPERATURE, 1)
            soft = (log_policy.exp() * (q - _TEMPERATURE * log_policy)).sum(1)
            taken = F.log_softmax(self.target(seen) / _TEMPERATURE, 1)
            taken = taken.gather(1, columns["action"].unsqueeze(1)).squeeze(1)
            bonus = _MUNCHAUSEN * (_TEMPERATURE * taken).clamp(-1.0, 0.0)
            return reward + bonus + discount * soft
        if not self._double:
            return reward + discount * self.target(following).amax(1)
        greedy = self.online(following).argmax(1, keepdim=True)
        return reward + discount * self.target(following).gather(1, greedy).squeeze(1)

    def step(
        self,
        batch: Mapping[str, Tensor],
        out: Tensor,
        enter: Enter = lambda phase: None,
        largest: float | None = None,
    ) -> None:
        """`learn`, of tensors on the network's device, without waiting for the device.

        It always queues the same work, so that the work can be recorded and repeated; the caller
        then calls `count`. If the loss or its gradient is not finite, nothing changes but `out`.

        Args:
            batch: as for `learn`.
            out: float32 [`results(B)`], for `read`.
            enter: as for `learn`.
            largest: rows with a number that is larger, or not finite, are left out: their TD errors
                are 0. None: no row is.
        """
        enter("forward")
        columns = {name: batch[name] for name in _STEP_COLUMNS}
        columns["action"] = columns["action"].long()
        obs = [batch["obs"], batch["next_obs"]]
        left_out = torch.zeros_like(columns["weights"], dtype=torch.bool)
        if largest is not None:
            numbers = [t for t in (*obs, *columns.values()) if t.is_floating_point()]
            # A comparison with NaN is false.
            sizes = [t.abs().flatten(1).amax(1) if t.ndim > 1 else t.abs() for t in numbers]
            left_out = ~(torch.stack(sizes).amax(0) <= largest)
            obs = [_without(left_out, each) for each in obs]
            columns = {name: _without(left_out, column) for name, column in columns.items()}
        td, q, loss = self._differentiate(obs, columns, enter)
        enter("optimiser")
        norm = torch.linalg.vector_norm(self.gradient)
        clip = self._max_grad_norm or math.inf
        is_finite = torch.isfinite(loss + norm)
        self.optimiser.step_queued((clip / norm).clamp_max(1.0), is_finite)
        self.online.refresh()
        td = td.masked_fill(left_out, 0.0)
        facts = torch.stack((loss, q.mean(), td.abs().mean(), norm, left_out.sum().float()))
        out.copy_(torch.cat((td, facts)))

    def count(self) -> bool:
        """Count a step that was made or queued. Returns whether the target is to be renewed now."""
        self.batches += 1
        return self.batches % self._target_period == 0

    def renew_target(self) -> None:
        """Make the target network the online network."""
        self.target.load_flat(self.online.flat)

    @staticmethod
    def results(batch_size: int) -> int:
        """How many numbers a step returns."""
        return batch_size + len(FACTS)

    def read(self, numbers: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
        """What `learn` returns, from the numbers of `step`. Raises Diverged, as `learn`."""
        td_errors, values = numbers[: -len(FACTS)], numbers[-len(FACTS) :].tolist()
        facts = dict(zip(FACTS, values, strict=True))
        self._check(facts["td_loss"] + facts["gradient_norm"])
        return td_errors, facts

    def _check(self, number: float) -> None:
        if not math.isfinite(number):
            raise Diverged(
                f"the loss or its gradient is not finite after {self.batches} batches: lower lr, "
                "or look for infinite rewards or observations"
            )

    def flat_parameters(self) -> np.ndarray:
        """The online parameters, float32 [n]: on a CPU the live memory itself, else a copy."""
        flat: np.ndarray = self.online.flat.cpu().numpy()
        return flat

    def state_dict_tensors(self) -> dict[str, Tensor]:
        """All tensors of a state by name; with `counters` training resumes bit for bit."""
        tensors = {f"online.{name}": view for name, view in self.online.views.items()}
        tensors |= {f"target.{name}": view for name, view in self.target.views.items()}
        for key, flat in self.optimiser.state.items():
            views = self.online.split(flat)
            tensors |= {f"optimiser.{key}.{name}": view for name, view in views.items()}
        return tensors

    def counters(self) -> dict[str, int]:
        """The JSON part of the state."""
        return {"batches": self.batches, "optimiser_steps": self.optimiser.steps}

    def load_state(self, tensors: Mapping[str, Any], counters: Mapping[str, int]) -> None:
        """Continue from a state. Raises CheckpointError, changing nothing, if it does not fit."""
        own = self.state_dict_tensors()
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
        self.online.refresh()
        self.target.refresh()
        self.batches = int(counters["batches"])
        self.optimiser.steps = int(counters["optimiser_steps"])


class _Heap:
    """What this process has told malloc, which cannot be asked."""

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

    Once a DQN exists on a CPU, the heap keeps everything. Without this, a checkpoint's copies would
    now and then find no free block that is large enough, and a run of days would grow. In a process
    without one, glibc does so already, and nothing is changed.
    """
    kept = _heap.keeps
    if kept:
        set_malloc_option(M_MMAP_MAX, _MMAPS)
    try:
        yield
    finally:
        if kept:
            set_malloc_option(M_MMAP_MAX, 0)


def _column(batch: Any, name: str) -> Any:
    return batch[name] if isinstance(batch, Mapping) else getattr(batch, name)


def _without(rows: Tensor, column: Tensor) -> Tensor:
    """The column with 0 in these rows (bool [B])."""
    return column.masked_fill(rows.view(-1, *[1] * (column.ndim - 1)), 0)


def _tensor(batch: Any, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    tensor = torch.as_tensor(_column(batch, name))
    return tensor.to(device, dtype, non_blocking=True)
