"""One replay alone in a fresh process: fills it with Atari transitions, then works when told to.

    python -m benchmarks.peers.replays NAME@N_STEP CAPACITY SWEEP_BYTES

answers each line "BATCH CALLS" with CALLS rows [sample ns, update ns]. All get the same frames, one
long stream of them, and do the same work: draw BATCH transitions (s, a, n-step return, s') by
priority with their weights, as arrays, then give them new priorities. s' is n steps after s. Before
each of the two the caches are swept (but see Reverb). Only zapex can fill given arrays; "zapex,
new" makes new ones as all others do.

"roof" is the memory's own row: it reads each transition's own frames, 4 and 4 of which 4 - n are
the same, at random places of a store of the replay's size, and writes them with streaming stores,
as zapex does, into given memory or ", new".

"..., sequences": BATCH sequences of LENGTH steps for recurrent networks, with n = 1, and nothing to
update. zapex gives the stacks of both ends (LENGTH + STACK frames, each once), TorchRL's
SliceSampler, which knows no priorities, LENGTH single frames. Its roof: the same bytes as zapex's,
each sequence's frames side by side.
"""

import os
import sys
import time
from functools import partial

import numpy as np

from benchmarks.peers.serving import serve

STACK, SIDE = 4, 84
FRAMES = 512
N_STEPS = (1, 3, 5)
LENGTH = 80  # of a sequence, as R2D2's
GAMMA = 0.99
rng = np.random.default_rng(1)


def stream(capacity, rows=256):
    """(stacks, actions, rewards, terminated) of `rows` successive steps each.

    stacks: (rows + 1, STACK, SIDE, SIDE); what follows row i is row i + 1.
    """
    frames = rng.integers(0, 255, (FRAMES, SIDE, SIDE), np.uint8)
    for start in range(0, capacity, rows):
        at = (start + np.arange(rows + 1)[:, None] + np.arange(STACK)) % FRAMES
        yield (
            frames[at], rng.integers(0, 6, rows), rng.normal(size=rows).astype(np.float32),
            np.zeros(rows, bool),
        )  # fmt: skip


def pairs(capacity, n_step):
    """(obs, next_obs, action, reward, terminated) for who stores pairs; s' is n steps after s."""
    frames = rng.integers(0, 255, (FRAMES, SIDE, SIDE), np.uint8)
    for start in range(0, capacity, 256):
        at = (start + np.arange(256)[:, None] + np.arange(STACK)) % (FRAMES - n_step)
        yield (
            frames[at], frames[at + n_step], rng.integers(0, 6, 256),
            rng.normal(size=256).astype(np.float32), rng.random(256) < 0.01,
        )  # fmt: skip


class Zapex:
    package = "zapex"

    def __init__(self, capacity, n_step, reused=True):
        from zapex import Column, PrioritizedReplay, Schema

        columns = {"obs": Column((SIDE, SIDE), np.uint8, STACK), "action": Column((), np.int64)}
        self.replay = PrioritizedReplay(capacity, Schema(columns, n_step=n_step), seed=0)
        self.reused, self.out = reused, None
        writer = self.replay.writer(1)
        none = np.zeros(1, bool)
        for number, (stacks, action, reward, terminated) in enumerate(stream(capacity + n_step)):
            if not number:
                writer.reset(stacks[:1])
            for i in range(len(action)):
                writer.add(
                    action=action[i : i + 1], reward=reward[i : i + 1],
                    next_obs=stacks[i + 1 : i + 2], terminated=terminated[i : i + 1],
                    truncated=none,
                )  # fmt: skip

    def sample(self, n):
        if not self.reused:
            return self.replay.sample(n, 0.4).keys
        if self.out is None or len(self.out.keys) != n:
            self.out = self.replay.empty_batch(n)
        return self.replay.sample(n, 0.4, out=self.out).keys

    def update(self, keys, priorities):
        self.replay.update_priorities(keys, priorities)


class Cpprb:
    """shared: "" for plain pairs, "next_of", or "stack_compress" as well."""

    package = "cpprb"

    def __init__(self, capacity, n_step, shared=""):
        import cpprb

        image = {"shape": (SIDE, SIDE, STACK), "dtype": np.uint8}
        columns = {"obs": image, "act": {"dtype": np.int64}, "rew": {}, "done": {}}
        more = {}
        if not shared:
            columns["next_obs"] = image
        else:
            more["next_of"] = "obs"
        if shared == "stack_compress":
            more["stack_compress"] = "obs"
        if n_step > 1:
            more["Nstep"] = {"size": n_step, "gamma": GAMMA, "rew": "rew", "next": "next_obs"}
        self.buffer = cpprb.PrioritizedReplayBuffer(capacity, columns, alpha=0.6, **more)
        for stacks, action, reward, terminated in stream(capacity + n_step):
            last = np.ascontiguousarray(stacks.transpose(0, 2, 3, 1))
            self.buffer.add(
                obs=last[:-1], next_obs=last[1:], act=action, rew=reward, done=terminated
            )
        assert self.buffer.sample(2, 0.4)["next_obs"].shape == (2, SIDE, SIDE, STACK)

    def sample(self, n):
        return self.buffer.sample(n, 0.4)["indexes"]

    def update(self, indices, priorities):
        self.buffer.update_priorities(indices, priorities)


class TorchRL:
    """Whole pairs, as its own examples store them; s' is n steps away when they are stored."""

    package = "torchrl"

    def __init__(self, capacity, n_step):
        import torch
        from tensordict import TensorDict

        # torchrl's wheels name symbols that other torch versions lack; the tree needs none of them.
        flags = sys.getdlopenflags()
        sys.setdlopenflags(os.RTLD_LAZY)
        try:
            from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
        finally:
            sys.setdlopenflags(flags)

        torch.set_num_threads(1)
        self.torch = torch
        self.buffer = TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=LazyTensorStorage(capacity), batch_size=1
        )
        names = ("obs", "next_obs", "action", "reward", "terminated")
        for arrays in pairs(capacity, n_step):
            columns = {n: torch.from_numpy(a) for n, a in zip(names, arrays, strict=True)}
            self.buffer.extend(TensorDict(columns, batch_size=[len(arrays[0])]))

    def sample(self, n):
        return self.buffer.sample(n)["index"]

    def update(self, indices, priorities):
        self.buffer.update_priority(indices, self.torch.from_numpy(priorities.astype(np.float32)))


class ZapexSequences(Zapex):
    """Frames come out side by side, each once, into a given batch."""

    def sample(self, n):
        self.out = self.replay.sample_sequences(n, LENGTH, out=self.out)
        return self.out.keys

    def update(self, keys, priorities):
        """Nothing, as the others here."""


class TorchRLSlices:
    """Single frames of episodes of 1,000 steps."""

    package = "torchrl"

    def __init__(self, capacity, n_step):
        import torch
        from tensordict import TensorDict

        flags = sys.getdlopenflags()
        sys.setdlopenflags(os.RTLD_LAZY)  # as above
        try:
            from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler
        finally:
            sys.setdlopenflags(flags)

        torch.set_num_threads(1)
        sampler = SliceSampler(slice_len=LENGTH, traj_key="episode")
        self.buffer = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler)
        step = 0
        for stacks, action, reward, terminated in stream(capacity):
            columns = {
                "obs": stacks[:-1, -1], "action": action, "reward": reward, "done": terminated,
                "episode": (step + np.arange(len(action))) // 1000,
            }  # fmt: skip
            step += len(action)
            columns = {name: torch.from_numpy(array) for name, array in columns.items()}
            self.buffer.extend(TensorDict(columns, batch_size=[len(action)]))

    def sample(self, n):
        batch = self.buffer.sample(n * LENGTH)
        assert batch["obs"].shape == (n * LENGTH, SIDE, SIDE)
        return range(n)

    def update(self, indices, priorities):
        """Nothing: there are no priorities."""


class Tianshou:
    """Its own frame stack: the newest frame of each stack is stored, s' is found n steps on."""

    package = "tianshou"

    def __init__(self, capacity, n_step):
        from tianshou.data import Batch, PrioritizedReplayBuffer

        self.n_step = n_step
        self.buffer = PrioritizedReplayBuffer(
            capacity, alpha=0.6, beta=0.4, stack_num=STACK, ignore_obs_next=True,
            save_only_last_obs=True,
        )  # fmt: skip
        for stacks, action, reward, terminated in stream(capacity):
            for i in range(len(action)):
                self.buffer.add(
                    Batch(
                        obs=stacks[i], act=action[i], rew=reward[i], terminated=terminated[i],
                        truncated=False, obs_next=stacks[i + 1], info={},
                    )
                )  # fmt: skip

    def sample(self, n):
        indices = self.buffer.sample_indices(n)
        batch = self.buffer[indices]  # obs, obs_next, act, rew and weight
        if self.n_step > 1:  # as compute_nstep_return finds s' and the rewards in between
            last, returns = indices, batch.rew.copy()
            for step in range(1, self.n_step):
                last = self.buffer.next(last)
                returns += GAMMA**step * self.buffer.rew[last]
            batch.obs_next = self.buffer.get(self.buffer.next(last), "obs")
        assert batch.obs.shape == batch.obs_next.shape == (n, STACK, SIDE, SIDE)
        return indices

    def update(self, indices, priorities):
        self.buffer.update_weight(indices, priorities)


class Reverb:
    """Its sampler fetches ahead in threads of its own, while nobody counts the time.

    So only rounds of consecutive pairs say what one takes: nothing is swept before them.
    """

    package = "dm-reverb"
    pairs_a_call = 8

    def __init__(self, capacity, n_step):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import reverb
        import tensorflow as tf

        image = tf.TensorSpec((STACK, SIDE, SIDE), tf.uint8)
        numbers = [tf.TensorSpec((), kind) for kind in (tf.int64, tf.float32, tf.bool)]
        table = reverb.Table(
            "replay", sampler=reverb.selectors.Prioritized(0.6), max_size=capacity,
            remover=reverb.selectors.Fifo(), rate_limiter=reverb.rate_limiters.MinSize(1),
            signature=[image, image, *numbers],
        )  # fmt: skip
        self.reverb = reverb
        self.server = reverb.Server([table])
        self.address = f"localhost:{self.server.port}"
        self.client = reverb.Client(self.address)
        self.batches = None
        writer = self.client.trajectory_writer(num_keep_alive_refs=1)

        for columns in pairs(capacity, n_step):
            for row in zip(*columns, strict=True):
                writer.append(list(row))
                writer.create_item("replay", 1.0, tuple(column[-1] for column in writer.history))
            writer.flush()
        writer.close()

    def sample(self, n):
        if self.batches is None:
            dataset = self.reverb.TrajectoryDataset.from_table_signature(
                self.address, "replay", max_in_flight_samples_per_worker=n,
                num_workers_per_iterator=1,
            )  # fmt: skip
            self.batches = iter(dataset.batch(n))
        drawn = next(self.batches)
        for column in drawn.data:
            column.numpy()
        # What weights are made of; its weights are left to the caller.
        drawn.info.probability.numpy()
        return drawn.info.key.numpy()

    def update(self, keys, priorities):
        updates = dict(zip(keys.tolist(), priorities.tolist(), strict=True))
        self.client.mutate_priorities("replay", updates=updates)


class Roof:
    """The frames of a batch moved, and nothing else: what no replay can be faster than."""

    package = "zapex"

    def __init__(self, capacity, n_step, reused=True):
        from zapex.machine.atomics import fence_full, stream_bytes
        from zapex.machine.jit import kernel

        size = SIDE * SIDE

        @kernel
        def move(store, starts, out):
            for row in range(starts.shape[0]):
                for side in range(2):
                    for j in range(STACK):
                        frame = starts[row] + side * n_step + j
                        place = (2 * row + side) * STACK + j
                        stream_bytes(out, place * size, store, frame * size, size)
            fence_full()

        self.move, self.last = move, capacity - STACK - n_step
        self.store = np.ones(capacity * size, np.uint8)
        self.reused, self.out = reused, np.zeros(0, np.uint8)

    def sample(self, n):
        starts = rng.integers(0, self.last, n)
        nbytes = n * 2 * STACK * SIDE * SIDE
        if not self.reused or len(self.out) != nbytes:
            self.out = np.empty(nbytes, np.uint8)
        self.move(self.store, starts, self.out)
        return starts

    def update(self, indices, priorities):
        """Nothing: priorities are not bytes of a batch."""


class RoofSequences(Roof):
    """The frames of sequences."""

    def __init__(self, capacity, n_step):
        from zapex.machine.atomics import fence_full, stream_bytes
        from zapex.machine.jit import kernel

        size = SIDE * SIDE
        run = (LENGTH + n_step + STACK - 1) * size

        @kernel
        def move(store, starts, out):
            for row in range(starts.shape[0]):
                stream_bytes(out, row * run, store, starts[row] * size, run)
            fence_full()

        self.move, self.last, self.run = move, capacity - run // size, run
        self.store, self.out = np.ones(capacity * size, np.uint8), np.zeros(0, np.uint8)

    def sample(self, n):
        starts = rng.integers(0, self.last, n)
        if len(self.out) != n * self.run:
            self.out = np.zeros(n * self.run, np.uint8)
        self.move(self.store, starts, self.out)
        return starts


CONTENDERS = {
    "roof": Roof,
    "roof, new": partial(Roof, reused=False),
    "zapex": Zapex,
    "zapex, new": partial(Zapex, reused=False),
    "cpprb": Cpprb,
    "cpprb, next_of": partial(Cpprb, shared="next_of"),
    "cpprb, stack_compress": partial(Cpprb, shared="stack_compress"),
    "torchrl": TorchRL,
    "tianshou": Tianshou,
    "reverb": Reverb,
}
SEQUENCES = {
    "roof, sequences": RoofSequences,
    "zapex, sequences": ZapexSequences,
    "torchrl, sequences": TorchRLSlices,
}
OURS = tuple(name for name in CONTENDERS if name.startswith(("roof", "zapex")))
"""Who needs no other library."""


def measure(replay, sweep, batch, calls):
    pairs_a_call = getattr(replay, "pairs_a_call", 1)
    times = []
    for _ in range(calls):
        sampled = updated = 0
        for _ in range(pairs_a_call):
            new = rng.random(batch) + 1e-6
            if pairs_a_call == 1:
                sweep()
            start = time.perf_counter_ns()
            rows = replay.sample(batch)
            sampled += (time.perf_counter_ns() - start) // pairs_a_call
            assert len(rows) == batch
            if pairs_a_call == 1:
                sweep()
            start = time.perf_counter_ns()
            replay.update(rows, new)
            updated += (time.perf_counter_ns() - start) // pairs_a_call
        times.append([sampled, updated])
    return times


if __name__ == "__main__":
    everyone = {
        f"{name}@{n}": partial(contender, n_step=n)
        for name, contender in (CONTENDERS | SEQUENCES).items()
        for n in N_STEPS
    }
    serve(everyone, measure)
