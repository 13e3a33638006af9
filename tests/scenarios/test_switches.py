"""Every switch for ablations changes what it says, and nothing else turns off with it."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zapex
from zapex.agent import optimisers
from zapex.agent.learning import DQN
from zapex.roles.actor import Actor
from zapex.run import checkpoints

STEPS = 200
FEW: dict[str, Any] = {
    "env": "CartPole-v1", "preset": "smoke", "inline": True, "run_dir": "run", "seed": 3,
    "max_frames": STEPS, "learning_starts": 64, "batch_size": 32, "publish_period_s": 0.0,
}  # fmt: skip


class Seen:
    """What a run of 200 steps has shown of itself."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.epsilons: list[Any] = []
        self.priorities: list[float] = []


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = Seen()
    learn, count = DQN.learn, Actor._count

    def learned(dqn: DQN, batch: Any, enter: Any) -> Any:
        tensors = {name: torch.from_numpy(column.copy()) for name, column in batch.items()
                   if name != "indices"}  # fmt: skip
        nets = {}
        for name, net in (("online", dqn.online), ("target", dqn.target)):
            for obs in ("obs", "next_obs"):
                nets[f"{name} {obs}"] = net(net.to_input(tensors[obs])).detach()
        errors, facts = learn(dqn, batch, enter)
        found.batches.append({**tensors, **nets, "errors": errors.copy(), "facts": facts,
                              "dqn": dqn, "sizes": len(dqn.online.shapes)})  # fmt: skip
        return errors, facts

    def counted(actor: Actor, step: Any) -> None:
        found.epsilons.append(actor._epsilons.copy())
        count(actor, step)

    monkeypatch.setattr(DQN, "learn", learned)
    monkeypatch.setattr(Actor, "_count", counted)
    return found


def run(**switches: Any) -> zapex.Result:
    result = zapex.train(zapex.TrainConfig(**{**FEW, **switches}))
    assert result.steps >= STEPS
    return result


def targets(batch: dict[str, Any]) -> Any:
    """The targets that the TD errors of a batch were made from."""
    taken = batch["online obs"].gather(1, batch["action"].long()[:, None]).squeeze(1)
    return torch.from_numpy(batch["errors"]) + taken


def double(batch: dict[str, Any]) -> Any:
    greedy = batch["online next_obs"].argmax(1, keepdim=True)
    best = batch["target next_obs"].gather(1, greedy).squeeze(1)
    return batch["reward"] + batch["discount"] * best


def single(batch: dict[str, Any]) -> Any:
    return batch["reward"] + batch["discount"] * batch["target next_obs"].amax(1)


def fits(batches: list[dict[str, Any]], rule: Any) -> bool:
    return all(torch.allclose(targets(b), rule(b), rtol=1e-3, atol=1e-3) for b in batches)


def test_double_chooses_with_the_online_network_and_no_double_with_the_target(seen: Seen) -> None:
    run(max_frames=600)
    assert fits(seen.batches, double)
    assert not fits(seen.batches, single)
    seen.batches.clear()
    run(double=False, run_dir="other", max_frames=600)
    assert fits(seen.batches, single)
    assert not fits(seen.batches, double)


def test_munchausen_adds_the_scaled_log_policy(seen: Seen) -> None:
    run(munchausen=True)
    log = [torch.log_softmax(b["target next_obs"] / 0.03, 1) for b in seen.batches]
    soft = [(p.exp() * (b["target next_obs"] - 0.03 * p)).sum(1)
            for p, b in zip(log, seen.batches, strict=True)]  # fmt: skip
    added = [targets(b) - b["reward"] - b["discount"] * s
             for b, s in zip(seen.batches, soft, strict=True)]  # fmt: skip
    assert torch.cat(added).max() < 1e-3  # 0.9 times a logarithm, clipped at -1
    assert torch.cat(added).min() > -0.901
    assert torch.cat(added).min() < -1e-3


def test_no_dueling_has_one_stream(seen: Seen) -> None:
    run(dueling=False)
    assert "value.weight" not in seen.batches[0]["dqn"].online.shapes
    run(run_dir="other")
    assert "value.weight" in seen.batches[-1]["dqn"].online.shapes
    assert zapex.load_policy("run").q_values(np.zeros(4, np.float32)).shape == (2,)


def test_layer_norm_makes_q_values_independent_of_the_scale_of_a_layer(seen: Seen) -> None:
    obs = torch.randn(8, 4)
    for name, switch in (("run", True), ("other", False)):
        run(layer_norm=switch, run_dir=name)
        online = seen.batches[-1]["dqn"].online
        before = online(online.to_input(obs)).detach().clone()
        for part in ("weight", "bias"):
            online.views[f"dense1.{part}"].mul_(10.0)
        online.refresh()
        after = online(online.to_input(obs)).detach()
        assert torch.allclose(before, after, rtol=1e-2, atol=1e-2) is switch


def test_n_step_sums_so_many_rewards(seen: Seen) -> None:
    for n in (1, 3):
        seen.batches.clear()
        run(n_step=n, run_dir=f"run{n}")
        discounts = torch.cat([b["discount"] for b in seen.batches])
        assert discounts.max() == pytest.approx(0.99**n)
        rewards = torch.cat([b["reward"] for b in seen.batches])  # each step's is 1
        assert rewards.max() == pytest.approx(sum(0.99**i for i in range(n)))


def test_alpha_0_draws_all_alike(seen: Seen) -> None:
    for alpha in (0.0, 0.6):
        seen.batches.clear()
        run(alpha=alpha, run_dir=f"run{alpha}")
        weights = torch.cat([b["weights"] for b in seen.batches])
        assert bool((weights == 1.0).all()) is (alpha == 0.0)


def test_initial_priority_max_draws_new_transitions_alike(seen: Seen) -> None:
    for first in ("actor", "max"):
        seen.batches.clear()
        run(initial_priority=first, run_dir=first)
        weights = seen.batches[0]["weights"]  # nothing has been learned yet
        assert bool((weights == 1.0).all()) is (first == "max")


def test_exploration_is_a_ladder_or_a_line(seen: Seen) -> None:
    run(eps_base=0.4)
    np.testing.assert_allclose(seen.epsilons, [[0.4, 0.4**8]] * len(seen.epsilons))
    seen.epsilons.clear()
    run(exploration="linear", eps_end=0.2, exploration_frames=100, run_dir="other")
    np.testing.assert_allclose(seen.epsilons[0], [1.0, 1.0])
    np.testing.assert_allclose(seen.epsilons[-1], [0.2, 0.2])
    np.testing.assert_allclose(seen.epsilons[25], [1.0 - 0.8 * 50 / 100] * 2, atol=0.03)


def test_the_line_goes_on_where_a_run_goes_on(seen: Seen) -> None:
    line = {"exploration": "linear", "eps_end": 0.0, "exploration_frames": 1000}
    run(**line)
    seen.epsilons.clear()
    zapex.train(zapex.TrainConfig(resume="run", max_frames=2 * STEPS))
    assert seen.epsilons[0][0] == pytest.approx(1.0 - STEPS / 1000, abs=0.02)


@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_the_loss_is_half_the_square_or_hubers(loss: str, seen: Seen) -> None:
    run(loss=loss)
    for batch in seen.batches:
        size = np.abs(batch["errors"].astype(np.float64))
        rows = 0.5 * size**2 if loss == "mse" else np.where(size < 1, 0.5 * size**2, size - 0.5)
        mean = (batch["weights"].numpy() * rows).mean()
        assert batch["facts"]["td_loss"] == pytest.approx(mean, rel=1e-3)
    assert max(np.abs(b["errors"]).max() for b in seen.batches) > 1.0  # where the two differ


@pytest.mark.parametrize(
    ("name", "kind"), [("rmsprop", optimisers.CentredRMSProp), ("adam", optimisers.Adam)]
)
def test_the_optimiser_is_the_one_asked_for(name: str, kind: type, seen: Seen) -> None:
    run(optimizer=name)
    assert type(seen.batches[0]["dqn"].optimiser) is kind


@pytest.mark.slow
def test_max_pool_leaves_a_small_square(seen: Seen) -> None:
    few = {"env": "ALE/Breakout-v5", "max_frames": 800}
    run(**few)
    run(**few, max_pool=3, run_dir="other")
    widths = {name: checkpoints.load(path).tensors["online.streams.weight"].shape[1]
              for name in ("run", "other") if (path := checkpoints.latest(Path(name)))}  # fmt: skip
    assert widths["run"] // 49 == widths["other"] // 9


@pytest.mark.slow
def test_impala_is_another_network_with_another_name(seen: Seen) -> None:
    run(env="ALE/Breakout-v5", max_frames=4 * STEPS, network="impala", channels=4, hidden=8)
    path = checkpoints.latest(Path("run"))
    assert path is not None
    assert "online.stages.0.first.weight" in checkpoints.load(path).tensors
    q = zapex.load_policy("run").q_values(np.zeros((2, 4, 84, 84), np.uint8))
    assert q.shape == (2, 4)
