"""Every switch for ablations changes what it says, and nothing else turns off with it."""

import contextlib
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def watched(directory: Path) -> Iterator[Seen]:
    """In that directory, what the runs of this process show."""
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
        found.batches.append(
            {**tensors, **nets, "errors": errors.copy(), "facts": facts, "dqn": dqn}
        )
        return errors, facts

    def counted(actor: Actor, step: Any) -> None:
        found.epsilons.append(actor._epsilons.copy())
        count(actor, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(DQN, "learn", learned)
        patch.setattr(Actor, "_count", counted)
        yield found


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Of a run with no switch."""
    with watched(tmp_path_factory.mktemp("usual")) as found:
        run(max_frames=600)
    return found


@pytest.fixture
def seen(tmp_path: Path, usual: Seen) -> Iterator[Seen]:
    """Of the runs of a test."""
    with watched(tmp_path) as found:
        yield found


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


def test_double_chooses_with_the_online_network_and_no_double_with_the_target(
    seen: Seen, usual: Seen
) -> None:
    assert fits(usual.batches, double)
    assert not fits(usual.batches, single)
    run(double=False, max_frames=600)
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


def test_no_dueling_has_one_stream(seen: Seen, usual: Seen) -> None:
    run(dueling=False)
    assert "value.weight" not in seen.batches[0]["dqn"].online.shapes
    assert "value.weight" in usual.batches[0]["dqn"].online.shapes
    assert zapex.load_policy("run").q_values(np.zeros(4, np.float32)).shape == (2,)


def test_layer_norm_makes_q_values_independent_of_the_scale_of_a_layer(
    seen: Seen, usual: Seen
) -> None:
    obs = torch.randn(8, 4)
    run(layer_norm=True)
    for found, switch in ((seen, True), (usual, False)):
        online = found.batches[-1]["dqn"].online
        before = online(online.to_input(obs)).detach().clone()
        for part in ("weight", "bias"):
            online.views[f"dense1.{part}"].mul_(10.0)
        online.refresh()
        after = online(online.to_input(obs)).detach()
        assert torch.allclose(before, after, rtol=1e-2, atol=1e-2) is switch


def test_n_step_sums_so_many_rewards(seen: Seen, usual: Seen) -> None:
    run(n_step=1)
    for found, n in ((seen, 1), (usual, 3)):
        discounts = torch.cat([b["discount"] for b in found.batches])
        assert discounts.max() == pytest.approx(0.99**n)
        rewards = torch.cat([b["reward"] for b in found.batches])  # each step's is 1
        assert rewards.max() == pytest.approx(sum(0.99**i for i in range(n)))


@pytest.mark.parametrize("switch", ["alpha", "beta", ""])
def test_alpha_0_and_beta_0_weigh_all_alike(switch: str, seen: Seen, usual: Seen) -> None:
    if switch:
        run(**{switch: 0.0})
    batches = seen.batches if switch else usual.batches
    weights = torch.cat([b["weights"] for b in batches])
    assert bool((weights == 1.0).all()) is bool(switch)


def test_initial_priority_max_draws_new_transitions_alike(seen: Seen, usual: Seen) -> None:
    run(initial_priority="max")
    for found, alike in ((seen, True), (usual, False)):
        weights = found.batches[0]["weights"]  # nothing has been learned yet
        assert bool((weights == 1.0).all()) is alike


def test_exploration_is_a_ladder_or_a_line(seen: Seen, usual: Seen) -> None:
    np.testing.assert_allclose(usual.epsilons, [[0.4, 0.4**8]] * len(usual.epsilons))
    run(exploration="linear", eps_end=0.2, exploration_frames=100)
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


def test_the_optimiser_is_the_one_asked_for(seen: Seen, usual: Seen) -> None:
    run(optimizer="rmsprop")
    assert type(seen.batches[0]["dqn"].optimiser) is optimisers.CentredRMSProp
    assert type(usual.batches[0]["dqn"].optimiser) is optimisers.Adam


@pytest.mark.slow
def test_quantiles_are_learned_saved_and_played_with(seen: Seen, usual: Seen) -> None:
    run(quantiles=6)
    dqn = seen.batches[0]["dqn"]
    assert dqn.online.shapes["advantage.weight"][0] == 2 * 6
    assert usual.batches[0]["dqn"].online.shapes["advantage.weight"][0] == 2
    obs = np.zeros((1, 4), np.float32)
    quantiles = dqn.online.values(dqn.online.to_input(obs)).detach().numpy()
    q = zapex.load_policy("run").q_values(obs[0])
    np.testing.assert_allclose(q, quantiles[0].mean(1), atol=1e-5)


def test_an_average_of_targets_is_saved_and_played_with(seen: Seen) -> None:
    run(average_targets=3, target_period=2)
    dqn, obs = seen.batches[-1]["dqn"], np.ones(4, np.float32)
    played = zapex.load_policy("run").q_values(obs)
    assert not np.allclose(played, dqn.online.q_values(obs[None])[0], rtol=1e-4)
    dqn.online.load_flat(dqn.average)
    np.testing.assert_allclose(played, dqn.online.q_values(obs[None])[0], rtol=1e-6)


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
