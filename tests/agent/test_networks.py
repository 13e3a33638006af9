"""The networks against plain torch modules with the same parameters."""

import numpy as np
import pytest
import torch
from torch import nn

from zapex.agent import fused, networks
from zapex.errors import ConfigError

SMALL = {"obs_shape": (2, 40, 44), "obs_dtype": np.uint8, "num_actions": 3, "hidden": 16}


def build(**changes):
    return networks.build(**(SMALL | {"device": "cpu", "precision": "float32"} | changes))


def images(count, shape=(2, 40, 44), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def q_values(network, obs):
    with torch.no_grad():
        return network(network.to_input(obs)).numpy()


def naive_q(network, obs):
    """The same arithmetic by torch.nn in float64; features in (height, width, channel) order."""
    views = {name: view.double() for name, view in network.views.items()}
    x = torch.from_numpy(obs).double()

    def put(module, name):
        state = {"weight": views[f"{name}.weight"], "bias": views[f"{name}.bias"]}
        module.load_state_dict(state)
        return module

    def dense(name):
        out, features = views[f"{name}.weight"].shape
        return put(nn.Linear(features, out, dtype=torch.float64), name)

    if "conv1.weight" in views:
        x = x / 255.0
        for name, stride in (("conv1", 4), ("conv2", 2), ("conv3", 1)):
            out, channels, kernel, _ = views[f"{name}.weight"].shape
            conv = nn.Conv2d(channels, out, kernel, stride, dtype=torch.float64)
            x = torch.relu(put(conv, name)(x))
        x = x.permute(0, 2, 3, 1).flatten(1)
    else:
        x = torch.relu(dense("dense1")(x.reshape(len(x), -1)))
    value, advantage = torch.relu(dense("streams")(x)).chunk(2, dim=1)
    value, advantage = dense("value")(value), dense("advantage")(advantage)
    return (value + advantage - advantage.mean(1, keepdim=True)).detach().numpy()


def channels_last(obs):
    return np.ascontiguousarray(obs.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("stack", [1, 3, 4, 5])
def test_frames_become_pixels_whatever_the_stack(stack):
    obs = images(3, (stack, 37, 41))
    for memory in (obs, channels_last(obs), images(6, (stack, 37, 41))[::2]):
        out = fused.channels_last(torch.from_numpy(memory))
        np.testing.assert_array_equal(out.numpy(), memory)
        assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_image_q_values_equal_a_plain_module_in_either_memory_layout(layout):
    network, obs = build(), images(5)
    if layout == "NHWC":
        obs = channels_last(obs)
    np.testing.assert_allclose(q_values(network, obs), naive_q(network, obs), atol=2e-6)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4,), np.float32), ((), np.int64), ((2, 3), np.float64), ((7,), np.uint8)]
)
def test_anything_else_is_a_vector(shape, dtype):
    network = build(obs_shape=shape, obs_dtype=dtype)
    obs = (np.random.default_rng(1).random((6, *shape)) * 9).astype(dtype)
    assert network.views["dense1.weight"].shape == (16, max(1, int(np.prod(shape))))
    np.testing.assert_allclose(q_values(network, obs), naive_q(network, obs), atol=2e-6)


def test_bfloat16_is_near_float32_and_its_output_layers_are_float32():
    exact = build(obs_shape=(4, 84, 84), hidden=512)
    rough = build(obs_shape=(4, 84, 84), hidden=512, precision="bfloat16")
    assert rough.leaves["conv1.weight"].dtype == torch.bfloat16
    assert rough.leaves["advantage.weight"].dtype == torch.float32
    obs = images(32, (4, 84, 84))
    assert np.abs(q_values(exact, obs) - q_values(rough, obs)).max() < 5e-3
    assert len(np.unique(q_values(rough, obs))) == 32 * 3


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("as_buffer", [lambda a: a, bytes, bytearray, lambda a: a.view(np.uint8)])
def test_flat_parameters_make_an_equal_network_elsewhere(precision, as_buffer):
    here, there = build(precision=precision, seed=1), build(precision=precision, seed=2)
    obs = images(4)
    assert not np.array_equal(q_values(here, obs), there.q_values(obs))
    there.load_flat(as_buffer(here.flat.numpy()))
    np.testing.assert_array_equal(there.q_values(obs), q_values(here, obs))


def test_a_parameter_buffer_of_another_length_is_refused():
    network = build()
    with pytest.raises(ConfigError, match=f"{4 * network.num_parameters} bytes, got 12"):
        network.load_flat(bytes(12))


def test_the_smallest_image_works_and_unsuitable_input_is_refused():
    for side in (36, 35, 16, 15, 7):
        network = build(obs_shape=(1, side, side))
        assert q_values(network, images(1, (1, side, side))).shape == (1, 3)
    for shape in ((1, 6, 36), (84, 84, 4)):
        with pytest.raises(ConfigError, match=r"at least 7 pixels.*FlattenObservation"):
            build(obs_shape=shape)
    with pytest.raises(ConfigError, match="int8"):
        build(precision="int8")
    with pytest.raises(ConfigError, match=r"\(0,\)"):
        build(obs_shape=(0,), obs_dtype=np.float32)


def test_observations_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match=r"\(B, 2, 40, 44\), got \(3, 40, 44, 2\)"):
        build().q_values(images(3, (40, 44, 2)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_packed_network_gives_the_same_values_and_follows_new_parameters(precision):
    plain, packed = build(precision=precision), build(precision=precision)
    for value in (0.5, 2.0):
        for network in (plain, packed):
            network.flat.mul_(value)
            network.refresh()
        packed.pack(6)
        for count in (6, 4):
            expected = q_values(plain, images(count))
            np.testing.assert_allclose(q_values(packed, images(count)), expected, atol=1e-5)


@pytest.mark.parametrize("stride", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_layer_and_its_gradients_match_plain_operators(stride, dtype, monkeypatch):
    if not fused.AVAILABLE:
        pytest.skip("torch was built without oneDNN")
    shape, weights = ((3, 4, 9, 9), (5, 4, 3, 3)) if stride else ((3, 7), (5, 7))
    generator = torch.Generator().manual_seed(stride)

    def tensor(*size):
        return torch.randn(size, generator=generator).to(dtype).requires_grad_()

    operands = [tensor(*shape), tensor(*weights), tensor(5)]
    answers = []
    for available in (True, False):
        monkeypatch.setattr(fused, "AVAILABLE", available)
        monkeypatch.setattr(fused, "_SMALL", 0)
        y = fused.layer(*operands, stride)
        slope = torch.arange(y.numel()).reshape(y.shape).to(dtype).sin()
        answers.append([y, *torch.autograd.grad(y, operands, slope)])
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for mine, plain in zip(*answers, strict=True):
        torch.testing.assert_close(mine, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_blocks_are_the_channels_of_one_pixel(dtype):
    seen = torch.from_numpy(images(3, (2, 40, 44))).to(dtype)
    blocks = fused.in_blocks(seen)
    torch.testing.assert_close(
        blocks, torch.nn.functional.pixel_unshuffle(seen.float(), 4).to(dtype)
    )
    assert blocks.is_contiguous(memory_format=torch.channels_last)


def test_a_network_that_sees_blocks_computes_and_learns_the_same():
    """As on a GPU, which alone sees images in blocks."""
    plain, seen = build(), images(6)
    blocks = build()
    blocks._in_blocks = fused.fits_blocks(blocks._trunk[0], (2, 40, 44))
    blocks._bind(blocks.flat)
    assert blocks.leaves["conv1.weight"].shape == (32, 32, 2, 2)
    gradients = []
    for network in (plain, blocks):
        q = network(network.to_input(seen))
        np.testing.assert_allclose(q.detach().numpy(), naive_q(plain, seen), atol=2e-6)
        leaves = list(network.leaves.values())
        flat = torch.zeros_like(network.flat)
        network.gather_gradients(torch.autograd.grad(q.square().sum(), leaves), network.split(flat))
        gradients.append(flat)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_images_whose_sides_are_no_multiples_of_four_are_not_seen_in_blocks():
    first = build()._trunk[0]
    assert fused.fits_blocks(first, (4, 84, 84))
    assert not fused.fits_blocks(first, (4, 84, 83))
