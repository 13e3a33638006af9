"""Custom networks and losses, IMPALA's network, and the options of the built-in one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zapex.agent import losses, networks
from zapex.agent.export import export
from zapex.agent.learning import DQN
from zapex.errors import ConfigError

HERE = __name__
CPU = torch.device("cpu")


class Twin(nn.Module):
    """The built-in network for vectors, written with torch's own layers."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.dense1 = nn.Linear(observation_space.shape[0], 16)
        self.streams = nn.Linear(16, 32)
        self.value = nn.Linear(16, 1)
        self.advantage = nn.Linear(16, int(action_space.n))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.streams(F.relu(self.dense1(obs))))
        value, advantage = self.value(x[:, :16]), self.advantage(x[:, 16:])
        return value + advantage - advantage.mean(1, keepdim=True)


class Lazy(nn.Sequential):
    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(nn.Flatten(), nn.LazyLinear(int(action_space.n)))


class Unused(Twin):
    """One of its layers has no part in Q."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(observation_space, action_space)
        self.spare = nn.Linear(3, 3)


class OneValue(Lazy):
    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return super().forward(obs)[:, :1]


class Buffers(nn.Sequential):
    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(nn.BatchNorm1d(4), nn.Linear(4, int(action_space.n)))


class Broken(Lazy):
    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2\ncannot be multiplied")


class NoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()


def no_module(observation_space: Any, action_space: Any) -> str:
    return "a network"


def huber(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.huber_loss(prediction, target, reduction="none")


def mean(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (prediction - target).abs().mean()


def constant(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return target


def root(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return prediction.sqrt()


def own(name: str, seed: int = 0) -> networks.Network:
    return networks.build((4,), np.float32, 3, network=f"{HERE}:{name}", device="cpu", seed=seed)


def batch(rows: int, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(5)
    seen = [rng.normal(size=(rows, *shape)).astype(dtype) for _ in range(2)]
    if dtype == "uint8":
        seen = [rng.integers(0, 256, (rows, *shape), dtype=np.uint8) for _ in range(2)]
    return {
        "obs": seen[0],
        "next_obs": seen[1],
        "action": rng.integers(3, size=rows),
        "reward": rng.normal(size=rows).astype(np.float32),
        "discount": np.full(rows, 0.9, np.float32),
        "weights": rng.random(rows).astype(np.float32),
    }


@pytest.mark.parametrize("optimiser", ["adam", "rmsprop"])
@pytest.mark.parametrize("loss", ["huber", f"{HERE}:huber"])
def test_a_custom_network_learns_like_the_built_in_one_with_the_same_layers(
    optimiser: str, loss: str
) -> None:
    built_in = networks.build((4,), np.float32, 3, 16, device="cpu")
    mine = own("Twin")
    mine.load_flat(built_in.flat)
    learners = [
        DQN(network, optimiser=optimiser, loss=each, lr=1e-2, target_period=2)
        for network, each in ((built_in, "huber"), (mine, loss))
    ]
    assert learners[0].online.views.keys() == learners[1].online.views.keys()
    for _ in range(5):
        (expected, facts), (found, own_facts) = (learner.learn(batch(8)) for learner in learners)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert own_facts == pytest.approx(facts, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(
        learners[1].flat_parameters(), learners[0].flat_parameters(), rtol=1e-4, atol=1e-5
    )


def test_the_target_and_copies_of_a_custom_network_share_no_memory() -> None:
    learner = DQN(own("Twin"), lr=1e-2, target_period=100)
    before = learner.target.flat.clone()
    twin = learner.online.copy()
    obs = torch.randn(2, 4)
    q = twin(twin.to_input(obs)).detach().clone()
    learner.learn(batch(8))
    assert torch.equal(learner.target.flat, before)
    assert not torch.equal(learner.online.flat, before)
    assert torch.equal(twin(twin.to_input(obs)), q)
    twin.load_flat(learner.flat_parameters())
    assert not torch.equal(twin(twin.to_input(obs)), q)


def test_equal_seeds_make_equal_networks_and_leave_torchs_generator_alone() -> None:
    state = torch.get_rng_state()
    a, b, c = (own("Lazy", seed=seed).flat for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), state)


def test_unused_parameters_do_not_change() -> None:
    learner = DQN(own("Unused"), lr=1e-2)
    before = learner.online.views["spare.weight"].clone()
    learner.learn(batch(8))
    assert torch.equal(learner.online.views["spare.weight"], before)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("OneValue", r"Q values of shape \(B, 3\).*\(2, 1\)"),
        ("Buffers", "0.running_mean"),
        ("Broken", r"\(2, 4\): RuntimeError: mat1 and mat2"),
        ("NoArguments", "TypeError"),
        ("no_module", "torch.nn.Module, got str"),
        ("Twinn", "'Twinn' is not there in module"),
        ("CPU", "'CPU' is not callable in module"),
    ],
)
def test_an_unusable_network_is_one_error_line(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        own(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mean", r"returned shape \(\) for \(3,\) \(reduction='none'\?\)"),
        ("constant", "must be a differentiable function"),
        ("root", "or its slope is not finite"),
        ("hubber", "'hubber' is not there"),
    ],
)
def test_an_unusable_loss_is_one_error(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        losses.named(f"{HERE}:{name}")


@pytest.mark.parametrize("switches", [{}, {"dueling": False}, {"layer_norm": True, "max_pool": 3}])
def test_impala_learns_from_images_and_can_be_written_as_onnx(
    switches: dict[str, Any], tmp_path: Path
) -> None:
    network = networks.build(
        (3, 40, 44), np.uint8, 3, 16, network="impala", channels=8, device="cpu", **switches
    )
    learner = DQN(network, optimiser="adam", lr=5e-3, target_period=1000)
    losses_seen = [learner.learn(batch(16, (3, 40, 44), "uint8"))[1]["td_loss"] for _ in range(40)]
    assert losses_seen[-1] < 0.8 * losses_seen[0]
    pytest.importorskip("onnxruntime")
    assert export(learner.online, tmp_path / "impala.onnx", "uint8") < 1e-3


@pytest.mark.parametrize(
    "switches",
    [
        {"dueling": False},
        {"layer_norm": True},
        {"max_pool": 2},
        {"max_pool": 50},
        {"dueling": False, "layer_norm": True, "max_pool": 3},
    ],
)
@pytest.mark.parametrize("shape", [(2, 40, 44), (1, 10, 12), (3, 20, 24), (5,)])
def test_options_of_the_built_in_network_match_torchs_layers(
    switches: dict[str, Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    dtype = np.uint8 if len(shape) == 3 else np.float32
    network = networks.build(
        shape, dtype, 3, 8, channels=4, device="cpu", precision="float32", **switches
    )
    obs = batch(6, shape, np.dtype(dtype).name)["obs"]
    views, x = network.views, torch.from_numpy(obs).float() / (255 if len(shape) == 3 else 1)
    strides = {10: (1, 1, 1), 20: (2, 2, 1), 40: (4, 2, 1)}.get(shape[1] if shape[1:] else 0, ())
    names = [*(f"conv{n + 1}" for n in range(len(strides))), *(["dense1"] if not strides else [])]
    for name, stride in zip(names, [*strides, 0], strict=False):
        weight, bias = views[f"{name}.weight"], views[f"{name}.bias"]
        x = F.conv2d(x, weight, bias, stride) if stride else F.linear(x, weight, bias)
        normalised = not stride and switches.get("layer_norm")
        x = F.relu(F.layer_norm(x, x.shape[1:]) if normalised else x)
    if strides:
        if side := switches.get("max_pool"):
            x = F.adaptive_max_pool2d(x, (min(side, x.shape[2]), min(side, x.shape[3])))
        x = x.permute(0, 2, 3, 1).flatten(1)
    x = F.linear(x, views["streams.weight"], views["streams.bias"])
    x = F.relu(F.layer_norm(x, x.shape[1:]) if switches.get("layer_norm") else x)
    if switches.get("dueling", True):
        value = F.linear(x[:, :8], views["value.weight"], views["value.bias"])
        a = F.linear(x[:, 8:], views["advantage.weight"], views["advantage.bias"])
        expected = value + a - a.mean(1, keepdim=True)
    else:
        assert "value.weight" not in views
        expected = F.linear(x, views["advantage.weight"], views["advantage.bias"])
    found = network(network.to_input(obs)).detach()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if "max_pool" in switches:
        pytest.importorskip("onnxruntime")
        assert export(network, tmp_path / "p.onnx", np.dtype(dtype).name) < 1e-3


@pytest.mark.parametrize("dueling", [True, False])
def test_a_network_with_quantiles_can_be_written_as_onnx(tmp_path: Path, dueling: bool) -> None:
    pytest.importorskip("onnxruntime")
    network = networks.build(
        (4, 40, 40), np.uint8, 3, 8, device="cpu", precision="float32", quantiles=5, dueling=dueling
    )
    assert export(network, tmp_path / "q.onnx", "uint8") < 1e-3


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((3, 6, 40), "at least 7 pixels.*FlattenObservation"),
        ((3, 480, 640), "zapex.envs.wrappers:Grey84, or give --max-pool 6"),
    ],
)
def test_an_unsuitable_image_size_names_the_wrapper(shape: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        networks.build(shape, np.uint8, 3, 8, device="cpu")
    if shape[1] > 100:
        networks.build(shape, np.uint8, 3, 8, device="cpu", max_pool=6)


def test_targets_are_those_of_the_papers() -> None:
    rows = batch(64)
    found = {}
    for name, options in {
        "double": {},
        "plain": {"double": False},
        "munchausen": {"munchausen": True},
    }.items():
        dqn = DQN(networks.build((4,), np.float32, 3, 8, device="cpu", seed=1), **options)
        dqn.target.load_flat(networks.build((4,), np.float32, 3, 8, device="cpu", seed=2).flat)
        online, target = (
            [net(net.to_input(rows[n])).detach().double().numpy() for n in ("obs", "next_obs")]
            for net in (dqn.online, dqn.target)
        )
        at, action = np.arange(64), rows["action"]
        if name == "double":
            expected = rows["reward"] + 0.9 * target[1][at, online[1].argmax(1)]
        elif name == "plain":
            expected = rows["reward"] + 0.9 * target[1].max(1)
        else:

            def log_policy(q: Any) -> Any:
                z = (q - q.max(1, keepdims=True)) / 0.03
                return z - np.log(np.exp(z).sum(1, keepdims=True))

            bonus = 0.9 * np.clip(0.03 * log_policy(target[0])[at, action], -1, 0)
            log_next = log_policy(target[1])
            soft = (np.exp(log_next) * (target[1] - 0.03 * log_next)).sum(1)
            expected = rows["reward"] + bonus + 0.9 * soft
        expected -= online[0][at, action]
        found[name], _ = dqn.learn(rows)
        np.testing.assert_allclose(found[name], expected, rtol=1e-3, atol=1e-4)
    assert not np.allclose(found["double"], found["plain"])
