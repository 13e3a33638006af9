"""Checkpoints: whole or not there, whatever is killed, cut short or flipped."""

import contextlib
import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zapex.agent import networks
from zapex.agent.learning import DQN
from zapex.config.settings import LearnerConfig
from zapex.envs import environments
from zapex.envs.environments import EnvironmentSpec
from zapex.errors import CheckpointError
from zapex.machine import disk
from zapex.run import checkpoints
from zapex.run.checkpoints import BEST, BestNetwork, RunCheckpoints, step_name

DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", ">f4", ">i8"]


def save(run_dir, name, mark=0.0, **state):
    """A checkpoint whose tensors and state both say `mark`."""
    tensors = {"online.bias": np.full(5, mark, np.float32), "target.bias": np.full((2, 3), mark)}
    return checkpoints.save(run_dir / "checkpoints", name, tensors, {"mark": mark, **state})


def mark_of(path):
    """The mark of a checkpoint, after a check that all of it is of one save."""
    found = checkpoints.load(path)
    assert {float(x) for tensor in found.tensors.values() for x in tensor.flat} == {
        found.state["mark"]
    }
    return found.state["mark"]


def files(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def same(left, right):
    return (
        left.tensors.keys() == right.tensors.keys()
        and all(np.array_equal(left.tensors[key], right.tensors[key]) for key in left.tensors)
        and left.state == right.state
    )


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.data())
def test_tensors_of_any_dtype_shape_and_strides_come_back_as_they_were(tmp_path_factory, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    tensors = {}
    for number in range(data.draw(st.integers(0, 4))):
        shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
        dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
        array = np.asarray(rng.integers(100, size=shape)).astype(dtype)
        tensors[f"t{number}"] = array.T if data.draw(st.booleans()) else np.flip(array)
    run_dir = tmp_path_factory.mktemp("run")
    found = checkpoints.load(checkpoints.save(run_dir, step_name(0), tensors, {}))
    assert found.tensors.keys() == tensors.keys()
    for name, array in tensors.items():
        assert found.tensors[name].dtype == array.dtype.newbyteorder("=")
        assert found.tensors[name].shape == array.shape
        np.testing.assert_array_equal(found.tensors[name], array)


def test_numbers_of_numpy_and_infinities_are_state_too(tmp_path):
    state = {"steps": np.int64(2**62), "best": -np.inf, "returns": np.arange(3), "on": np.True_}
    found = checkpoints.load(checkpoints.save(tmp_path, BEST, {}, state)).state
    assert found == {"steps": 2**62, "best": -np.inf, "returns": [0, 1, 2], "on": True}


def test_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="Posix"):
        save(tmp_path, BEST, where=tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_weights_in_channels_last_memory_are_saved_in_their_shape(tmp_path):
    import torch

    weight = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    strided = weight.contiguous(memory_format=torch.channels_last)
    found = checkpoints.load(checkpoints.save(tmp_path, BEST, {"w": strided}, {}))
    np.testing.assert_array_equal(found.tensors["w"], weight.numpy())


# --- which are kept -----------------------------------------------------------------------------


def test_the_last_three_and_the_best_are_kept(tmp_path):
    save(tmp_path, BEST, 0.5)
    for mark, steps in enumerate((5, 20, 10**12 - 1, 10**12, 2**45)):
        save(tmp_path, step_name(steps), mark)
    assert [mark_of(path) for path in checkpoints.listing(tmp_path)] == [2, 3, 4]
    assert checkpoints.latest(tmp_path).name == f"step-{2**45}.safetensors"
    assert mark_of(checkpoints.best(tmp_path)) == 0.5


def test_the_order_is_that_of_the_saves_not_of_the_names(tmp_path):
    """A run that was killed and resumed may count fewer steps than a checkpoint's name says."""
    for mark, steps in enumerate((100, 200, 300, 150, 120)):
        path = save(tmp_path, step_name(steps), mark)
        assert checkpoints.latest(tmp_path) == path
    assert [mark_of(path) for path in checkpoints.listing(tmp_path)] == [2, 3, 4]
    assert mark_of(save(tmp_path, step_name(150), 5)) == 5
    assert [mark_of(path) for path in checkpoints.listing(tmp_path)] == [2, 4, 5]


def test_an_unreadable_checkpoint_counts_as_the_newest_and_names_the_one_before(tmp_path):
    save(tmp_path, step_name(2), 2)
    broken = save(tmp_path, step_name(1), 1)
    broken.write_bytes(b"")
    assert checkpoints.latest(tmp_path) == broken
    with pytest.raises(CheckpointError, match="remove it to resume from step-000000000002"):
        checkpoints.load(broken)
    broken.unlink()
    save(tmp_path, step_name(1), 3)
    assert mark_of(checkpoints.latest(tmp_path)) == 3


def test_saving_the_same_name_again_replaces_it(tmp_path):
    for name in (BEST, step_name(7)):
        for mark in (1.0, 2.0):
            assert mark_of(save(tmp_path, name, mark)) == mark
    assert files(tmp_path) == ["best.safetensors", "step-000000000007.safetensors"]


def test_unrelated_files_are_no_checkpoints_and_stay(tmp_path):
    save(tmp_path, step_name(1))
    strangers = ["notes.txt", "step-2.safetensors", "step-copy.safetensors", ".hidden"]
    for name in strangers:
        (tmp_path / "checkpoints" / name).write_text("")
    save(tmp_path, step_name(2))
    assert len(checkpoints.listing(tmp_path)) == 2
    assert set(strangers) < set(files(tmp_path))


def test_a_run_may_have_no_checkpoints_yet(tmp_path):
    assert checkpoints.listing(tmp_path / "nowhere") == []
    assert checkpoints.latest(tmp_path) is None
    assert checkpoints.best(tmp_path) is None


# --- killed at any moment -----------------------------------------------------------------------


class EveryLine:
    """Calls `act(number)` before each line of a save that runs, the number growing."""

    def __init__(self, act):
        self.act = act
        self.lines = 0

    def _trace(self, frame, event, arg):
        if frame.f_code.co_filename not in (checkpoints.__file__, disk.__file__):
            return None
        if event == "line":
            self.lines += 1
            self.act(self.lines)
        return self._trace

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)


def a_run(run_dir):
    """Three steps and a best, all marked 1."""
    for steps in (1, 2, 3):
        save(run_dir, step_name(steps), 1.0)
    save(run_dir, BEST, 1.0)


def assert_whole(run_dir):
    """Nothing of a run is lost: enough steps, a best, and each of them loads."""
    paths = checkpoints.listing(run_dir)
    assert len(paths) >= 3
    assert all(mark_of(path) in (1.0, 2.0) for path in paths)
    assert mark_of(checkpoints.best(run_dir)) in (1.0, 2.0)


def copy(run_dir, to):
    shutil.copytree(run_dir, to)
    return to


@pytest.mark.parametrize("name", [BEST, step_name(3), step_name(4)])
def test_a_kill_at_any_line_leaves_whole_checkpoints_and_the_next_save_cleans_up(tmp_path, name):
    run_dir, killed = tmp_path / "run", tmp_path / "killed"
    a_run(run_dir)
    # What a kill leaves behind is what the disk holds at that line.
    with EveryLine(lambda number: copy(run_dir, killed / str(number))) as lines:
        save(run_dir, name, 2.0)
    assert lines.lines > 20
    seen = set()
    for number in range(1, lines.lines + 1):
        left = killed / str(number)
        assert_whole(left)
        seen.add(tuple(files(left)))
        for temporary in left.glob("checkpoints/.*"):
            # As if another process had written it; no process has a number that large.
            temporary.rename(temporary.with_suffix(".tmp-999999999"))
        save(left, name, 2.0)
        assert files(left) == files(run_dir)
        assert mark_of(left / "checkpoints" / f"{name}.safetensors") == 2.0
    assert len(seen) >= 2  # the lines before, with and after the temporary file


@pytest.mark.parametrize("call", ["fsync", "replace", "open", "unlink"])
def test_a_failing_disk_is_one_error_and_leaves_the_old_files(tmp_path, monkeypatch, call):
    a_run(tmp_path)
    before = files(tmp_path)

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(CheckpointError, match=r"best.*No space left on device"):
            save(tmp_path, BEST, 2.0)
    assert_whole(tmp_path)
    save(tmp_path, BEST, 2.0)
    assert files(tmp_path) == before


def test_the_file_is_on_the_disk_before_its_name_and_its_name_before_old_ones_go(
    tmp_path, monkeypatch
):
    a_run(tmp_path)
    calls = []

    def record(name):
        real = getattr(os, name)

        def call(*args, **kwargs):
            of = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[0])
            calls.append((name, "tmp" if ".tmp-" in of else os.path.basename(of)))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "replace", "unlink"):
        record(name)
    save(tmp_path, step_name(4), 2.0)
    calls.remove(("unlink", "tmp"))  # there was nothing to remove any more
    assert calls == [
        ("fsync", "tmp"),
        ("replace", "tmp"),
        ("fsync", "checkpoints"),
        ("unlink", "step-000000000001.safetensors"),
    ]


def test_a_file_that_a_live_process_writes_is_left_alone(tmp_path):
    save(tmp_path, BEST)
    theirs = tmp_path / "checkpoints" / f".best.tmp-{os.getppid()}"
    own = tmp_path / "checkpoints" / f".best.tmp-{os.getpid()}"
    theirs.write_text("half")
    own.write_text("of an earlier process with the same number")
    save(tmp_path, step_name(1))
    assert theirs.exists()
    assert not own.exists()


SAVER = """
import itertools, sys
from pathlib import Path
import numpy as np
from zapex.run import checkpoints
for mark in itertools.count(int(sys.argv[2])):
    tensors = {"weights": np.full(100_000, mark)}
    for name in (checkpoints.step_name(mark), checkpoints.BEST):
        checkpoints.save(Path(sys.argv[1], 'checkpoints'), name, tensors, {"mark": mark})
    print(mark, flush=True)
"""


def test_sigkill_during_saves_loses_nothing(tmp_path):
    rng = np.random.default_rng(3)
    mark = 0
    for _ in range(5):
        argv = [sys.executable, "-c", SAVER, str(tmp_path), str(mark)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(4):
                mark = int(process.stdout.readline())
            time.sleep(rng.uniform(0, 0.01))
            process.send_signal(signal.SIGKILL)
            mark = max([mark, *map(int, process.stdout.read().split())])
        kept = [mark_of(path) for path in checkpoints.listing(tmp_path)]
        assert mark in kept
        assert len(kept) >= 3
        assert mark_of(checkpoints.best(tmp_path)) in (mark, mark + 1)


# --- damaged, foreign, of another schema --------------------------------------------------------


def test_a_flipped_bit_anywhere_and_every_lost_tail_is_noticed(tmp_path):
    path = save(tmp_path, step_name(1), 1.0)
    whole, content = checkpoints.load(path), path.read_bytes()
    damaged = [content[:length] for length in range(len(content))] + [content + b"\0", b""]
    bits = np.random.default_rng(0).integers(8, size=len(content))
    for position, bit in enumerate(bits.tolist()):
        flipped = bytearray(content)
        flipped[position] ^= 1 << bit
        damaged.append(bytes(flipped))
    for version in damaged:
        path.write_bytes(version)
        # The header may end in another kind of white space; nothing else may change unnoticed.
        with contextlib.suppress(CheckpointError):
            assert same(checkpoints.load(path), whole)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "there is no checkpoint"),
        (lambda path: path.mkdir(), "cannot read"),
        (lambda path: safetensors.numpy.save_file({"a": np.zeros(3)}, path), "not a checkpoint"),
        (lambda path: path.write_bytes(b"notes"), "damaged"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named(tmp_path, make, says):
    path = tmp_path / "best.safetensors"
    make(path)
    with pytest.raises(CheckpointError, match=says) as caught:
        checkpoints.load(path)
    assert str(path) in str(caught.value)


def test_another_format_names_both(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "FORMAT", "zapex checkpoint 2")
        path = save(tmp_path, BEST)
    with pytest.raises(CheckpointError, match=r"'zapex checkpoint 2'.*'zapex checkpoint 1'"):
        checkpoints.load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schema", []),
        ("policy", 1),
        ("counters", "x"),
        ("totals", [1]),
        ("params_version", "3"),
        ("mean_return", "high"),
        ("returns", ["a"]),
        ("returns", 3),
    ],
)
def test_fact_of_the_wrong_type_is_named(tmp_path, name, value):
    path = save(tmp_path, BEST, **{name: value})
    with pytest.raises(CheckpointError, match=name):
        checkpoints.load(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"observation_shape": [4, "x"]},
        {"num_actions": None},
        {"observation_dtype": "?!"},
        {"stack": 0},
    ],
)
def test_unusable_environment_of_a_checkpoint_is_named(tmp_path, wrong):
    spec = dataclasses.asdict(environments.check("CartPole-v1"))
    policy = {"environment": spec | wrong, "network": {}}
    path = save(tmp_path, BEST, policy=policy)
    with pytest.raises(CheckpointError, match="made from"):
        checkpoints.made_with(checkpoints.load(path))


def test_best_without_a_finite_mean_is_replaced_by_the_next_evaluation(tmp_path):
    spec = environments.check("CartPole-v1")
    for mean in ({}, {"mean_return": float("nan")}):
        save(tmp_path, BEST, **mean)
        network = networks.build((4,), np.float32, 2, 8, device="cpu", precision="float32")
        best = BestNetwork(tmp_path, spec, network, lambda code: None)
        best.offer([1.0], 1, {})
        assert checkpoints.load(checkpoints.best(tmp_path)).state["mean_return"] == 1.0


def test_a_checkpoint_of_another_schema_names_both_sides(tmp_path):
    pong = {"env": "ALE/Pong-v5", "obs shape": (4, 84, 84), "actions": np.int64(6)}
    found = checkpoints.load(save(tmp_path, BEST, schema=pong))
    checkpoints.check_schema(found, pong)
    checkpoints.check_schema(found, {"actions": 6})
    breakout = pong | {"env": "ALE/Breakout-v5", "actions": 4}
    with pytest.raises(CheckpointError, match=r"Pong-v5, actions 6.*Breakout-v5, actions 4"):
        checkpoints.check_schema(found, breakout)
    with pytest.raises(CheckpointError, match=r"frame skip unknown.*frame skip None"):
        checkpoints.check_schema(found, {"frame skip": None})


# --- what a run keeps of its learner --------------------------------------------------------------

SPEC = EnvironmentSpec("Toy-v0", {}, (3,), "float32", 1, 2, 1, False, "a toy")


class Disk:
    """A disk that is full while `full`; `codes` is what a run was told."""

    def __init__(self, monkeypatch):
        self.full, self.codes = False, []
        fsync = os.fsync

        def refuse(descriptor):
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", refuse)


@pytest.fixture
def full_disk(monkeypatch):
    return Disk(monkeypatch)


def network(seed=0):
    return networks.build((3,), np.float32, 2, hidden=4, device="cpu", seed=seed)


def test_a_checkpoint_that_the_disk_refuses_is_retried_soon(tmp_path, full_disk):
    now_s = 0.0
    saves = RunCheckpoints(
        tmp_path, SPEC, 1, lambda: now_s, 600.0, lambda: {"steps": 1.0}, full_disk.codes.append
    )
    dqn = DQN(network())
    now_s, full_disk.full = 600.0, True
    assert saves.due()
    saves.save(dqn, 1)
    assert full_disk.codes == [errno.ENOSPC]
    assert not saves.due()
    now_s += 30.0
    assert saves.due()
    full_disk.full = False
    saves.save(dqn, 2)
    assert full_disk.codes == [errno.ENOSPC, 0]
    assert checkpoints.latest(tmp_path) is not None
    now_s += 599.0
    assert not saves.due()


def test_a_best_network_that_the_disk_refused_is_written_later(tmp_path, full_disk):
    played = network()
    best = BestNetwork(tmp_path, SPEC, played, full_disk.codes.append)
    full_disk.full = True
    best.offer([7.0, 9.0], 3, {"steps": 1.0})
    wanted = played.flat.clone().numpy()
    played.flat.zero_()
    best.offer([1.0], 4, {"steps": 2.0})  # worse: the one before is still to be written
    assert checkpoints.best(tmp_path) is None
    full_disk.full = False
    best.offer([2.0], 5, {"steps": 3.0})
    path = checkpoints.best(tmp_path)
    assert path is not None
    found = checkpoints.load(path)
    assert (found.state["mean_return"], found.state["params_version"]) == (8.0, 3)
    kept = np.concatenate([found.tensors[f"online.{n}"].ravel() for n in played.shapes])
    np.testing.assert_array_equal(kept, wanted)
    assert full_disk.codes == [errno.ENOSPC, errno.ENOSPC, 0]


@pytest.mark.parametrize("lost", ["online.value.bias", "optimiser.mean.value.bias"])
def test_a_missing_tensor_is_named_when_a_run_resumes(tmp_path, lost):
    dqn = DQN(network())
    tensors = dqn.state_dict_tensors()
    del tensors[lost]
    state = {
        "counters": dqn.counters(),
        "params_version": 1,
        "schema": {
            "env_id": "Toy-v0",
            "observation_shape": [3],
            "observation_dtype": "float32",
            "num_actions": 2,
        },
    }
    checkpoints.save(tmp_path / "checkpoints", checkpoints.step_name(1), tensors, state)
    saves = RunCheckpoints(tmp_path, SPEC, 1, lambda: 0.0, 0.0, dict, str)
    with pytest.raises(CheckpointError, match=f"step-0+1.*: {lost} is missing"):
        saves.restore(dqn)


def test_an_average_is_what_a_checkpoint_plays(tmp_path):
    config = LearnerConfig(hidden=4, device="cpu")
    tensors, views = DQN(network()).state_dict_tensors(), network().views
    for part, value in (("online", 1.0), ("average", 2.0)):
        tensors |= {f"{part}.{name}": torch.full_like(t, value) for name, t in views.items()}
        path = checkpoints.save(tmp_path / "checkpoints", checkpoints.step_name(1), tensors, {})
        loaded = checkpoints.load_network(checkpoints.load(path), SPEC, config)
        assert torch.equal(loaded.flat, torch.full_like(loaded.flat, value))


def test_a_missing_or_wrong_tensor_is_named_when_a_network_is_loaded(tmp_path):
    config = LearnerConfig(hidden=4, device="cpu")
    tensors = DQN(network()).state_dict_tensors()
    for change, says in (
        ({"average.advantage.bias": np.zeros(2, np.float32)}, "missing there"),
        ({"online.value.bias": None}, "value.bias is missing there"),
        ({"online.value.bias": np.zeros(1)}, r"value.bias is float64 \(1,\) there"),
    ):
        kept = {name: t for name, t in (tensors | change).items() if t is not None}
        path = checkpoints.save(tmp_path / "checkpoints", checkpoints.step_name(1), kept, {})
        with pytest.raises(CheckpointError, match=says):
            checkpoints.load_network(checkpoints.load(path), SPEC, config)
