"""A learner over a device that copies late, over one that only counts, and over a GPU."""

import itertools
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zapex.agent.device
import zapex.roles.learner
from tests.support.late_device import Counting, LateQueues, MetaQueues, Misuse, random_batch
from zapex.agent import networks
from zapex.agent.device import CudaQueues, Device, DevicePolicy, Pipeline, Sizes
from zapex.agent.learning import DQN
from zapex.chunks.batch import Batch, split
from zapex.chunks.layout import BatchLayout
from zapex.chunks.schema import Column, Schema
from zapex.errors import Diverged
from zapex.host.metrics import RoleMetrics
from zapex.roles.learner import Learner
from zapex.transport import Sampled

ROWS, ACTIONS = 8, 3
IMAGES = Schema({"obs": Column((36, 36), np.uint8, stack=2), "action": Column((), np.int64)})
VECTORS = Schema({"obs": Column((5,), np.float32), "action": Column((), np.int64)})


def network_on(device: str, schema: Schema, precision: str = "float32") -> networks.Network:
    column = schema.obs_columns["obs"]
    return networks.build(
        column.value_shape, np.dtype(column.dtype).type, ACTIONS, hidden=16, channels=4,
        precision=precision, device=device, seed=3,
    )  # fmt: skip


def dqn_on(device: str, schema: Schema = IMAGES, **options: Any) -> DQN:
    return DQN(
        network_on(device, schema),
        **{"lr": 1e-3, "target_period": 4, "average_targets": 2, "largest": 2.0**32, **options},
    )


class Source:
    """So many batches; like a thread it fills the memory of the next one at once."""

    outstanding = 0

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self.updates: list[tuple[np.ndarray, np.ndarray]] = []
        self._filled = -1
        self._number = -1

    def request(self) -> None:
        pass

    def ready(self) -> bool:
        return True

    def poll(self, batch: Batch, following: Batch | None = None) -> Sampled | None:
        if self._number + 1 == self._batches:
            return None
        self._number += 1
        if self._filled < self._number:
            random_batch(batch, self._number, ACTIONS)
        if following is not None:
            random_batch(following, self._number + 1, ACTIONS)
            self._filled = self._number + 1
        return Sampled(torn=0, live=1)

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> bool:
        self.updates.append((keys, priorities))
        return True


class Parameters:
    version = 0

    def publish(self, version: int, parameters: np.ndarray) -> None:
        pass


class NoCheckpoints:
    def due(self) -> bool:
        return False

    def save(self, dqn: Any, version: int) -> None:
        pass


def learned(
    queues: Any, steps: int, dqn: DQN, schema: Schema = IMAGES, modules: Any = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The priorities of so many steps; queues None: without a device."""
    layout = BatchLayout(schema, ROWS)
    made = modules or types.SimpleNamespace(
        Device=Device, Pipeline=Pipeline, Learner=Learner, batches=3
    )
    trainer = None
    if queues is not None:
        device = made.Device(queues, layout.nbytes, dqn.results(ROWS))
        trainer = made.Pipeline(dqn, device, lambda block: split(layout, block))
    source, pinned = Source(steps), dqn.online.device.type == "cuda"
    any_dqn: Any = dqn
    learner = made.Learner(
        any_dqn,
        source,
        Parameters(),
        [Batch.empty(layout, pinned) for _ in range(made.batches)],
        RoleMetrics(bytearray(RoleMetrics.required_bytes()), "learner", create=True),
        NoCheckpoints(),
        prefetch=3,
        publish_period_s=1e9,
        clock_s=lambda: 0.0,
        trainer=trainer,
    )
    while learner.do_work():
        pass
    return source.updates


def check_learned(queues: Any, steps: int, modules: Any = None, **options: Any) -> None:
    """On the device the same is learned, with the same priorities, as at once on the CPU."""
    schema = options.pop("schema", IMAGES)
    there, here = dqn_on(str(queues.device), schema, **options), dqn_on("cpu", schema, **options)
    seen, expected = (
        learned(each, steps, dqn, schema, modules if each else None)
        for each, dqn in ((queues, there), (None, here))
    )
    assert len(seen) == len(expected) == steps
    for (keys, errors), (other_keys, others) in zip(seen, expected, strict=True):
        np.testing.assert_array_equal(keys, other_keys)
        np.testing.assert_allclose(errors, others, atol=2e-4)
    torch.testing.assert_close(there.online.flat.cpu(), here.online.flat, atol=2e-4, rtol=1e-3)
    assert there.average is not None
    torch.testing.assert_close(there.average.cpu(), here.average, atol=2e-4, rtol=1e-3)


OPTIONS: Sequence[dict[str, Any]] = [
    {"optimiser": "adam"},
    {"optimiser": "rmsprop"},
    {"loss": "squared", "max_grad_norm": 0.01},
    {"schema": VECTORS},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_a_late_device_learns_the_same(seed: int, options: dict[str, Any]) -> None:
    check_learned(LateQueues(seed), 13, **options)  # nothing waits for the target after the twelfth


def mutant(module: Any, *changes: tuple[str, str]) -> Any:
    """The module with parts of its text replaced."""
    text = Path(module.__file__).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    made = types.ModuleType("mutant")
    sys.modules["mutant"] = made  # dataclasses look there
    exec(compile(text, module.__file__, "exec"), made.__dict__)
    return made


DEVICE, LEARNER = zapex.agent.device, zapex.roles.learner
NO_CHECK = ("if self._taken[self._next]:", "if False:")
MUTANTS: dict[str, dict[Any, list[tuple[str, str]]]] = {
    "the computer does not wait": {
        DEVICE: [("self.queues.computer_waits(ticket.copied)  # WAIT", "pass  #")]
    },
    "the host does not wait": {
        DEVICE: [("self.queues.host_waits(ticket.landed)  # WAIT", "pass  #")]
    },
    "the buffers do not take turns": {DEVICE: [("self._next = (self._next + 1) % _SEATS", "pass")]},
    "one buffer": {DEVICE: [NO_CHECK, ("self._next = (self._next + 1) % _SEATS", "pass")]},
    "a buffer too few": {DEVICE: [("late = 1", "late = 2")]},
    "a buffer is swapped early": {DEVICE: [NO_CHECK, ("late = 1", "late = 2")]},
    "the host's memory is filled early": {  # three batches in turn would hide it
        LEARNER: [
            ("append((batch, sampled))", "append((batch, sampled)); self._free.append(batch)"),
            ("        self._free.append(batch)\n        metrics.set", "        metrics.set"),
        ]
    },
    "the target does not wait for the step": {
        DEVICE: [
            (
                "queues.compute(lambda enter: self._dqn.renew_target())",
                "x = self._dqn.renew_target()",
            )
        ]
    },
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_is_noticed(name: str) -> None:
    made = {module: mutant(module, *MUTANTS[name].get(module, [])) for module in (DEVICE, LEARNER)}
    modules = types.SimpleNamespace(
        Device=made[DEVICE].Device,
        Pipeline=made[DEVICE].Pipeline,
        Learner=made[LEARNER].Learner,
        batches=2 if LEARNER in MUTANTS[name] else 3,
    )

    def check() -> None:
        for seed in range(20):
            check_learned(LateQueues(seed), 12, modules)

    with pytest.raises((AssertionError, RuntimeError, Diverged)):
        check()


@pytest.mark.parametrize("schema", [IMAGES, VECTORS])
@pytest.mark.parametrize("optimiser", ["adam", "rmsprop"])
def test_a_step_copies_one_batch_and_one_result_and_waits_once(
    schema: Schema, optimiser: str
) -> None:
    layout = BatchLayout(schema, ROWS)
    dqn = dqn_on("meta", schema, optimiser=optimiser)
    batch = Batch.empty(layout)
    random_batch(batch, 0, ACTIONS)
    with Counting() as counting:
        device = Device(MetaQueues(counting), layout.nbytes, dqn.results(ROWS))
        trainer = Pipeline(dqn, device, lambda block: split(layout, block))
        trainer.begin(batch)
        for _ in range(8):  # the target is renewed twice
            counting.copied_in, counting.copied_out, counting.waits = [], [], 0
            trainer.begin(batch)
            trainer.finish()
            assert counting.copied_in == [layout.nbytes]
            assert counting.copied_out == [4 * dqn.results(ROWS)]
            assert counting.waits == 1


def test_a_column_on_another_device_is_found() -> None:
    layout = BatchLayout(IMAGES, ROWS)
    dqn, batch = dqn_on("meta"), Batch.empty(layout)
    columns = split(layout, batch.block.to("meta")) | {"reward": batch.torch()["reward"]}
    with Counting(), pytest.raises(Misuse, match=r"cpu.*meta"):
        dqn.step(columns, torch.empty(dqn.results(ROWS), device="meta"))


@pytest.mark.parametrize("optimiser", ["adam", "rmsprop"])
def test_a_step_that_diverges_changes_nothing_and_raises_in_finish(
    optimiser: str,
) -> None:
    dqn, layout = dqn_on("cpu", optimiser=optimiser, largest=None), BatchLayout(IMAGES, ROWS)
    device = Device(LateQueues(0), layout.nbytes, dqn.results(ROWS))
    trainer = Pipeline(dqn, device, lambda block: split(layout, block))
    batches = [Batch.empty(layout) for _ in range(2)]
    for number, batch in enumerate(batches):
        random_batch(batch, number, ACTIONS)
    batches[1].reward[2] = np.inf
    trainer.begin(batches[0])
    trainer.finish()
    tensors = dqn.state_dict_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    steps = dqn.optimiser.steps
    trainer.begin(batches[1])
    with pytest.raises(Diverged, match="2 batches"):
        trainer.finish()
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    assert dqn.optimiser.steps == steps == 1


def test_a_third_batch_is_refused_while_two_are_under_way() -> None:
    device = Device(LateQueues(0), 16, 4)
    memory = torch.zeros(16, dtype=torch.uint8)
    device.upload(memory)
    device.upload(memory)
    with pytest.raises(RuntimeError, match="until its result"):
        device.upload(memory)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("graphs", [False, True])
def test_a_gpu_learns_the_same(graphs: bool, options: dict[str, Any]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    check_learned(CudaQueues(torch.device("cuda"), graphs), 20, **options)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_a_gpus_phases_are_timed(graphs: bool) -> None:
    dqn, layout = dqn_on("cuda"), BatchLayout(IMAGES, ROWS)
    device = Device(CudaQueues(torch.device("cuda"), graphs), layout.nbytes, dqn.results(ROWS))
    trainer = Pipeline(dqn, device, lambda block: split(layout, block))
    batch = Batch.empty(layout, pin_memory=True)
    random_batch(batch, 0, ACTIONS)
    for _ in range(10):
        trainer.begin(batch)
        times = trainer.finish()[2]
    assert set(times) == {"forward", "backward", "optimiser"}
    assert all(value > 0 for value in times.values())


def acting(queues: Any, schema: Schema, precision: str = "float32") -> DevicePolicy:
    network = network_on(str(queues.device), schema, precision)
    return DevicePolicy(network, queues, ROWS, np.dtype(schema.obs_columns["obs"].dtype))


def act_and_compare(queues: Any, schema: Schema, tolerance: float) -> None:
    """Batched forward passes there and here, with parameters that change between two of them."""
    column, rng = schema.obs_columns["obs"], np.random.default_rng(1)
    theirs = acting(queues, schema)
    ours = dqn_on("cpu", schema).online
    for turn in range(8):
        shape = (ROWS, *column.value_shape)
        image = column.dtype == np.uint8
        obs = rng.integers(0, 256, shape, np.uint8) if image else rng.normal(size=shape)
        obs = obs.astype(column.dtype)
        if turn % 3 == 2:
            parameters = rng.normal(0, 0.1, len(theirs._network.flat)).astype(np.float32)
            theirs.load_flat(parameters)
            ours.load_flat(parameters)
        q = theirs.q_values(obs)
        assert q.shape == (ROWS, ACTIONS)
        np.testing.assert_allclose(q, ours.q_values(obs), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("schema", [IMAGES, VECTORS])
@pytest.mark.parametrize("seed", range(3))
def test_acting_on_a_late_device_gives_the_same_values(schema: Schema, seed: int) -> None:
    act_and_compare(LateQueues(seed), schema, 1e-5)


def test_acting_on_a_device_waits_only_for_the_result() -> None:
    counting = Counting()
    policy = acting(MetaQueues(counting), IMAGES)
    obs = np.zeros((ROWS, *IMAGES.obs_columns["obs"].value_shape), np.uint8)
    with counting:
        for _ in range(3):
            policy.q_values(obs)
    assert counting.waits == 3
    assert counting.copied_in[-1] == obs.nbytes
    assert counting.copied_out[-1] == 4 * ROWS * ACTIONS


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("schema", [IMAGES, VECTORS])
def test_a_gpu_acts_the_same(schema: Schema) -> None:
    act_and_compare(CudaQueues(torch.device("cuda")), schema, 1e-2)


def check_sizes(device: str, queues: Callable[[], Any], tolerance: float) -> None:
    """Groups of two, in any number: the values are those of the rows that were asked for."""
    column, rng, made = VECTORS.obs_columns["obs"], np.random.default_rng(1), []
    network = dqn_on(device, VECTORS).online
    ours = dqn_on("cpu", VECTORS).online

    def make(streams: int) -> DevicePolicy:
        made.append(streams)
        return DevicePolicy(network, queues(), streams, np.dtype(column.dtype))

    theirs = Sizes(make, network, 2)
    # Each size often enough that a GPU records it as a graph.
    for turn, groups in enumerate([1, 3, 4, 2, 5, 1, 7, 8, 3] * 5):
        obs = rng.normal(size=(2 * groups, *column.value_shape)).astype(column.dtype)
        if turn % 3 == 2:
            parameters = rng.normal(0, 0.1, len(network.flat)).astype(np.float32)
            theirs.load_flat(parameters)
            ours.load_flat(parameters)
        q = theirs.q_values(obs)
        assert q.shape == (2 * groups, ACTIONS)
        np.testing.assert_allclose(q, ours.q_values(obs), rtol=tolerance, atol=tolerance)
    assert made == [2, 8, 4, 16]


def test_a_varying_number_of_observations_uses_few_sizes() -> None:
    seeds = itertools.count()
    check_sizes("cpu", lambda: LateQueues(next(seeds)), 1e-5)


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_computes_a_changing_number_of_observations() -> None:
    check_sizes("cuda", lambda: CudaQueues(torch.device("cuda")), 1e-2)
