"""The learner against naive twins."""

import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import naive
from zapex.agent import losses, networks
from zapex.agent.architecture import layers, parameter_shapes, state_shapes
from zapex.agent.learning import DQN, memory_given_back
from zapex.agent.optimisers import Adam, CentredRMSProp
from zapex.errors import CheckpointError, ConfigError, ZapexError

SHAPE = (2, 40, 44)


def make(precision="float32", shape=SHAPE, dtype=np.uint8, seed=1, **options):
    network = networks.build(
        shape, dtype, 3, hidden=16, precision=precision, device="cpu", seed=seed
    )
    learner = DQN(network, **options)
    # Another target, so that a mix-up of the two networks shows.
    other = networks.build(shape, dtype, 3, hidden=16, device="cpu", seed=seed + 50)
    learner.target.load_flat(other.flat)
    return learner


def batch_of(size, seed=0, shape=SHAPE, dtype=np.uint8):
    rng = np.random.default_rng(seed)

    def obs():
        if dtype == np.uint8:
            return rng.integers(0, 256, (size, *shape), dtype=np.uint8)
        return rng.normal(size=(size, *shape)).astype(dtype)

    return {
        "obs": obs(),
        "next_obs": obs(),
        "action": rng.integers(3, size=size),
        "reward": rng.normal(size=size).astype(np.float32),
        "discount": rng.choice(np.float32([0, 0.97]), size),
        "weights": rng.random(size, dtype=np.float32),
    }


def q_rows(network, obs):
    with torch.no_grad():
        return network(network.to_input(obs)).double().tolist()


def flats(learner):
    tensors = [learner.online.flat, learner.target.flat, *learner.optimiser.state.values()]
    tensors += [] if learner.average is None else [learner.average]
    return torch.cat(tensors).clone()


@pytest.mark.parametrize("size", [1, 16, 33])
def test_td_errors_are_the_double_dqn_targets_minus_the_predictions(size):
    learner, batch = make(), batch_of(size)
    expected = naive.double_dqn_td_errors(
        batch,
        q_rows(learner.online, batch["obs"]),
        q_rows(learner.target, batch["next_obs"]),
        q_rows(learner.online, batch["next_obs"]),
    )
    td_errors, metrics = learner.learn(batch)
    assert (td_errors.dtype, td_errors.shape) == (np.float32, (size,))
    np.testing.assert_allclose(td_errors, expected, atol=1e-5)
    assert metrics["td_error"] == pytest.approx(np.abs(expected).mean(), abs=1e-5)


@pytest.mark.parametrize("loss", ["huber", "squared"])
@pytest.mark.parametrize(("shape", "dtype"), [(SHAPE, np.uint8), ((5,), np.float32)])
def test_the_gradient_is_that_of_the_weighted_mean_loss(loss, shape, dtype):
    learner = make(loss=loss, max_grad_norm=0, shape=shape, dtype=dtype)
    batch = batch_of(12, shape=shape, dtype=dtype)
    batch["reward"] *= 4  # both sides of Huber's bend
    twin = learner.online.copy()
    td_errors, metrics = learner.learn(batch)
    slopes = np.clip(td_errors, -1, 1) if loss == "huber" else td_errors
    losses = np.where(
        np.abs(slopes) == np.abs(td_errors), td_errors**2 / 2, np.abs(td_errors) - 0.5
    )
    assert metrics["td_loss"] == pytest.approx((batch["weights"] * losses).mean(), rel=1e-4)
    chosen = twin(twin.to_input(batch["obs"]))[range(12), batch["action"]]
    pull = -torch.from_numpy(slopes * batch["weights"] / 12)
    gradients = torch.autograd.grad(chosen, list(twin.leaves.values()), pull)
    expected = torch.cat([g.flatten() for g in gradients])
    if dtype == np.uint8:
        first = twin.views["conv1.weight"].numel()
        expected[:first] = (gradients[0].contiguous() / 255).flatten()
    torch.testing.assert_close(learner.gradient, expected, rtol=1e-4, atol=1e-7)
    assert metrics["gradient_norm"] == pytest.approx(float(expected.norm()), rel=1e-4)


def test_the_quantile_loss_and_its_slopes_are_the_twins():
    rng = np.random.default_rng(2)
    predictions, targets = rng.normal(size=(2, 9, 7)) * 2
    mine = torch.tensor(predictions, dtype=torch.float32, requires_grad=True)
    rows = losses.quantile_huber(mine, torch.tensor(targets, dtype=torch.float32))
    (slopes,) = torch.autograd.grad(rows.sum(), mine)
    for i in range(9):
        loss, slope = naive.quantile_row(predictions[i].tolist(), targets[i].tolist())
        assert rows[i].item() == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(slopes[i].numpy(), slope, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"double": False}, {"munchausen": True}])
@pytest.mark.parametrize("dueling", [True, False])
def test_quantiles_have_targets_of_their_own_and_q_their_errors(dueling, options):
    """In float64, row by row."""
    online, other = (
        networks.build(
            (5,), np.float32, 3, hidden=16, device="cpu", quantiles=4, seed=seed, dueling=dueling
        )
        for seed in (1, 2)
    )
    learner, batch = DQN(online, max_grad_norm=0, **options), batch_of(12, 0, (5,), np.float32)
    learner.target.load_flat(other.flat)

    def values(network, obs):
        with torch.no_grad():
            return network.head(network.features(network.to_input(obs))).double().numpy()

    before = values(online, batch["obs"])
    follows, seen = (values(learner.target, batch[name]) for name in ("next_obs", "obs"))
    chosen = values(online, batch["next_obs"])
    assert before.shape == (12, 3, 4)
    np.testing.assert_allclose(q_rows(online, batch["obs"]), before.mean(2), atol=1e-6)
    expected_td, loss = [], 0.0
    for i, action in enumerate(batch["action"]):
        reward, after = batch["reward"][i].astype(float), follows[i]
        if options.get("munchausen"):
            policy = _policy(after.mean(1))
            after = (policy[:, None] * (after - 0.03 * np.log(policy)[:, None])).sum(0)
            reward += 0.9 * max(-1.0, 0.03 * np.log(_policy(seen[i].mean(1))[action]))
        else:
            after = after[(after if options else chosen[i]).mean(1).argmax()]
        target = reward + batch["discount"][i] * after
        expected_td.append(target.mean() - before[i, action].mean())
        row, _ = naive.quantile_row(before[i, action].tolist(), target.tolist())
        loss += row * batch["weights"][i] / 12
    td_errors, metrics = learner.learn(batch)
    np.testing.assert_allclose(td_errors, expected_td, atol=1e-5)
    assert metrics["td_loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["q_values"] == pytest.approx(before[range(12), batch["action"]].mean(), abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"double": False}, {"munchausen": True}])
@pytest.mark.parametrize("quantiles", [0, 4])
def test_a_target_that_shares_the_trunk_is_one_with_the_online_trunk(options, quantiles):
    """As learned by the same network and a whole target with that trunk and its own heads."""
    learners = []
    for shares in (True, False):
        online, other = (
            networks.build(SHAPE, np.uint8, 3, 16, device="cpu", quantiles=quantiles, seed=seed,
                           precision="float32")
            for seed in (1, 2)
        )  # fmt: skip
        learner = DQN(online, share_trunk=shares, **options)
        learner.target.load_flat(other.flat)
        if not shares:
            for name, view in learner.target.views.items():
                if not name.startswith(("value", "advantage")):
                    view.copy_(online.views[name])
            learner.target.refresh()
        learners.append(learner)
    batch = batch_of(16)
    mine, whole = (learner.learn(batch)[0] for learner in learners)
    np.testing.assert_allclose(mine, whole, atol=1e-5)
    flat, expected = (learner.online.flat for learner in learners)
    torch.testing.assert_close(flat, expected, rtol=1e-4, atol=1e-6)
    learners[0].renew_target()
    assert torch.equal(learners[0].target.flat, flat)


def _policy(q):
    return np.exp((q - q.max()) / 0.03) / np.exp((q - q.max()) / 0.03).sum()


def test_only_nature_has_quantiles():
    with pytest.raises(ConfigError, match=r"--quantiles .*impala"):
        networks.build(SHAPE, np.uint8, 3, network="impala", quantiles=4, device="cpu")


def test_a_custom_loss_may_compute_in_another_dtype(monkeypatch):
    def squared(prediction, target):
        return 0.5 * (prediction.double() - target) ** 2

    module = types.SimpleNamespace(squared=squared)
    monkeypatch.setitem(sys.modules, "loss_in_float64", module)
    learners = make(loss="loss_in_float64:squared"), make(loss="squared")
    for learner in learners:
        learner.learn(batch_of(8))
    torch.testing.assert_close(flats(learners[0]), flats(learners[1]))


def test_a_weight_of_0_teaches_nothing():
    learner, batch = make(), batch_of(6)
    batch["weights"][:] = 0
    before = learner.online.flat.clone()
    td_errors, _ = learner.learn(batch)
    assert torch.equal(learner.online.flat, before)
    assert np.all(td_errors != 0)


def test_only_a_gradient_above_the_limit_is_clipped():
    batch = batch_of(8)
    norm = make(max_grad_norm=0).learn(batch)[1]["gradient_norm"]
    free, wide, tight = (make(max_grad_norm=m) for m in (0, norm * 2, norm / 4))
    for learner in (free, wide, tight):
        assert learner.learn(batch)[1]["gradient_norm"] == pytest.approx(norm)
    mean = "mean"
    assert torch.equal(free.optimiser.state[mean], wide.optimiser.state[mean])
    clipped = free.optimiser.state[mean] / 4
    torch.testing.assert_close(tight.optimiser.state[mean], clipped, rtol=1e-4, atol=1e-9)


def test_the_target_follows_after_every_period():
    learner, batch = make(target_period=3), batch_of(4)
    follows = []
    for _ in range(7):
        learner.learn(batch)
        follows.append(torch.equal(learner.online.flat, learner.target.flat))
    assert follows == [False, False, True, False, False, True, False]
    np.testing.assert_array_equal(
        q_rows(learner.target, batch["obs"]), q_rows(learner.target.copy(), batch["obs"])
    )


def test_the_average_is_an_exponential_mean_of_the_targets_from_the_nth_on():
    learner, targets = make(optimiser="adam", lr=0.01, target_period=2, average_targets=3), []
    for seed in range(13):
        learner.learn(batch_of(4, seed))
        if seed % 2:
            targets.append(learner.target.flat.double())
        assert (learner.average is None) is (len(targets) < 3)
    expected = targets[2]
    for target in targets[3:]:
        expected = expected * 2 / 3 + target / 3
    torch.testing.assert_close(learner.average.double(), expected, rtol=1e-5, atol=1e-7)
    assert make(target_period=1).average is None


def test_a_state_without_an_average_begins_with_the_newest_parameters():
    first = make(target_period=1)
    first.learn(batch_of(4))
    second = make(target_period=1, average_targets=1, seed=9)
    second.load_state(first.state_dict_tensors(), first.counters())
    assert torch.equal(second.average, first.online.flat)
    second.learn(batch_of(4))
    first.load_state(second.state_dict_tensors(), second.counters())
    assert first.average is None


@pytest.mark.parametrize("name", ["rmsprop", "adam"])
def test_each_optimiser_is_its_closed_form(name):
    learner = make(optimiser=name, lr=0.01, optimiser_eps=1e-4, max_grad_norm=0)
    start = learner.online.flat.clone()
    gradients = []
    for seed in range(3):
        learner.learn(batch_of(8, seed))
        gradients.append(learner.gradient.double())
    twin = naive.centred_rmsprop if name == "rmsprop" else naive.adam
    options = {"decay": 0.95} if name == "rmsprop" else {}
    expected = twin(start.double(), gradients, lr=0.01, eps=1e-4, **options)
    torch.testing.assert_close(learner.online.flat.double(), expected, rtol=1e-4, atol=2e-6)


def test_adam_rel_counts_its_steps_from_each_target_on_with_the_means_that_it_has():
    learner = make(optimiser="adam-rel", lr=0.01, optimiser_eps=1e-4, max_grad_norm=0,
                   target_period=2)  # fmt: skip
    start, gradients = learner.online.flat.clone(), []
    for seed in range(5):
        learner.learn(batch_of(8, seed))
        gradients.append(learner.gradient.double())
    expected = naive.adam(start.double(), gradients, lr=0.01, eps=1e-4, restart=2)
    torch.testing.assert_close(learner.online.flat.double(), expected, rtol=1e-4, atol=2e-6)
    assert learner.counters() == {"batches": 5, "optimiser_steps": 1}


@pytest.mark.parametrize(("kind", "options"), [(CentredRMSProp, (1.5e-7, 0.95)), (Adam, (1e-8,))])
def test_tensor_operations_of_an_optimiser_match_the_cpus_kernel(kind, options):
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(5, 1000, generator=generator) * 10.0 ** torch.arange(-6, 4).repeat(100)
    loop, queued = (kind(torch.ones(1000), torch.empty(1000), 0.01, *options) for _ in range(2))
    queued._arrays = ()  # as on a GPU
    for gradient in gradients:
        for optimiser in (loop, queued):
            optimiser.gradient.copy_(gradient)
            optimiser.step(torch.tensor(0.7), torch.tensor(True))
            optimiser.gradient.fill_(torch.nan)
            optimiser.step(torch.tensor(0.7), torch.tensor(False))
    for name in ("parameters", "mean", "mean_square"):
        mine, other = (getattr(stepper, name) for stepper in (loop, queued))
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    assert loop.steps == queued.steps == len(gradients)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{"optimiser": "adam", "lr": 1e-3}, {"lr": 3e-4}])
def test_repeating_a_batch_lowers_its_loss(precision, options):
    learner, batch = make(precision, **options), batch_of(16)
    batch["discount"][:] = 0
    losses = [learner.learn(batch)[1]["td_loss"] for _ in range(80)]
    assert losses[-1] < 0.1 * losses[0]


def test_memory_layout_and_type_of_batch_do_not_matter():
    batch = batch_of(16)
    nhwc = {
        name: np.ascontiguousarray(batch[name].transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        for name in ("obs", "next_obs")
    }
    tensors = types.SimpleNamespace(**{k: torch.from_numpy(v) for k, v in batch.items()})
    expected, _ = make().learn(batch)
    for other in (batch | nhwc, tensors):
        np.testing.assert_array_equal(make().learn(other)[0], expected)


@pytest.mark.parametrize(
    "options",
    [
        {"optimiser": "adam", "target_period": 4},
        {"optimiser": "rmsprop", "target_period": 1, "average_targets": 2},
        {"optimiser": "adam", "target_period": 2, "average_targets": 3},
    ],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_learner_continues_bit_for_bit(options, precision):
    first = make(precision, **options)
    for seed in range(3):
        first.learn(batch_of(8, seed))
    tensors = {name: t.clone() for name, t in first.state_dict_tensors().items()}
    second = make(precision, seed=9, **options)
    second.load_state(tensors, first.counters())
    for seed in range(3, 7):
        td_errors = [learner.learn(batch_of(8, seed))[0] for learner in (first, second)]
        np.testing.assert_array_equal(*td_errors)
    assert torch.equal(flats(first), flats(second))
    assert (first.average is not None) is ("average_targets" in options)
    assert first.counters() == second.counters() == {"batches": 7, "optimiser_steps": 7}


@pytest.mark.parametrize("optimiser", ["rmsprop", "adam"])
@pytest.mark.parametrize(("shape", "dtype"), [((5,), np.float32), ((2, 36, 40), np.uint8)])
@pytest.mark.parametrize("quantiles", [0, 5])
def test_a_states_tensors_are_known_without_a_network(shape, dtype, optimiser, quantiles):
    network = networks.build(shape, dtype, 3, 8, quantiles=quantiles, device="cpu")
    tensors = DQN(network, optimiser=optimiser).state_dict_tensors()
    expected = state_shapes(parameter_shapes(layers(shape, dtype, 3, 8, quantiles=quantiles)))
    assert {n: tuple(t.shape) for n, t in tensors.items()} == expected


def test_a_state_of_another_shape_is_refused_by_name_and_changes_nothing():
    learner = make()
    before = flats(learner)
    other = make(shape=(3, 40, 44))
    with pytest.raises(CheckpointError, match=r"conv1.weight is \(32, 3, 8, 8\), here \(32, 2"):
        learner.load_state(other.state_dict_tensors(), other.counters())
    tensors = learner.state_dict_tensors()
    bias = tensors.pop("online.value.bias")
    with pytest.raises(CheckpointError, match=r"online.value.bias is missing, here \(1,\)"):
        learner.load_state(tensors, learner.counters())
    with pytest.raises(CheckpointError, match=r"surplus is \(.*\), here unknown"):
        learner.load_state(
            tensors | {"online.value.bias": bias, "surplus": bias}, learner.counters()
        )
    with pytest.raises(CheckpointError, match="batches"):
        learner.load_state(tensors | {"online.value.bias": bias}, {"optimiser_steps": 1})
    assert torch.equal(flats(learner), before)


@pytest.mark.parametrize("loss", ["huber", "squared"])
@pytest.mark.parametrize("reward", [np.inf, np.nan])
def test_an_infinite_reward_raises_and_changes_no_parameter(loss, reward):
    learner, batch = make(loss=loss), batch_of(4)
    batch["reward"][0] = reward
    before = flats(learner)
    with pytest.raises(ZapexError, match="0 batches"):
        learner.learn(batch)
    assert torch.equal(flats(learner), before)


@pytest.mark.parametrize(("shape", "dtype"), [(SHAPE, np.uint8), ((5,), np.float32)])
def test_rows_that_cannot_be_learned_from_are_left_out(shape, dtype):
    bad, good = (batch_of(8, shape=shape, dtype=dtype) for _ in range(2))
    bad["reward"][[1, 4]] = np.nan, 1e30
    if dtype == np.float32:
        bad["obs"][5, 2] = -np.inf
    rows = [1, 4, 5] if dtype == np.float32 else [1, 4]
    for column in good.values():
        column[rows] = 0
    learner, other = (make(shape=shape, dtype=dtype, largest=2.0**32) for _ in range(2))
    (errors, facts), (expected, _) = learner.learn(bad), other.learn(good)
    expected[rows] = 0.0
    np.testing.assert_allclose(errors, expected, atol=1e-5)
    assert facts["left_out"] == len(rows)
    torch.testing.assert_close(learner.online.flat, other.online.flat)


def test_memory_of_a_checkpoint_returns_to_the_system():
    def anonymous_kib():
        status = Path("/proc/self/status").read_text()
        return int(next(x for x in status.splitlines() if x.startswith("RssAnon")).split()[1])

    make()  # from here on the heap keeps what is freed
    with memory_given_back():
        before = anonymous_kib()
        copy = np.ones(8 << 20)
        assert anonymous_kib() > before + 60_000
        del copy
        assert anonymous_kib() < before + 1_000


def test_without_a_learner_on_the_cpu_malloc_keeps_its_defaults():
    """A process of its own: malloc cannot be asked, and the tests before have changed it."""
    code = """
from pathlib import Path
from zapex.agent.learning import memory_given_back
import numpy as np

def kib():
    status = Path("/proc/self/status").read_text()
    return int(next(x for x in status.splitlines() if x.startswith("RssAnon")).split()[1])

with memory_given_back():
    pass
keep = []
before = kib()
for _ in range(3):  # a block above each hole keeps the heap from being trimmed
    copy = np.ones(8 << 20)
    keep.append(np.ones(1 << 17))
    del copy
assert kib() < before + 30_000, (before, kib())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
