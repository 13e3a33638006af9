"""One replay alone in a fresh process: fills it with Atari transitions, then works when told to.

Runs under any Python that has numpy and the contender:

    python benchmarks/peer_replays.py NAME CAPACITY SWEEP_BYTES

answers "ready VERSION" or "missing REASON", then each line "BATCH CALLS" on stdin with a JSON list
of CALLS rows [sample ns, update ns, memcpy ns]. Everybody holds the same frames and does the same
work: draw BATCH transitions by priority with their weights, as arrays, then give them new
priorities. Before each of the two the caches are swept (but see Reverb). memcpy is the least that
an assembled batch takes: its observations' bytes from memory that is not in the caches, into memory
that was used before.
"""

import json
import os
import sys
import time
from importlib import metadata

import numpy as np

FRAMES, STACK, SIDE = 512, 4, 84
rng = np.random.default_rng(1)


def filled(extend, capacity, rows=256):
    """Calls extend(obs, next_obs, action, reward, terminated) until the replay is full."""
    frames = rng.integers(0, 255, (FRAMES, SIDE, SIDE), np.uint8)
    for start in range(0, capacity, rows):
        at = (start + np.arange(rows)[:, None] + np.arange(STACK)) % (FRAMES - 1)
        extend(
            frames[at], frames[at + 1], rng.integers(0, 6, rows),
            rng.normal(size=rows).astype(np.float32), rng.random(rows) < 0.01,
        )  # fmt: skip


class Zapex:
    package = "zapex"

    def __init__(self, capacity):
        from zapex import Column, PrioritizedReplay, Schema

        columns = {"obs": Column((SIDE, SIDE), np.uint8, STACK), "action": Column((), np.int64)}
        self.replay = PrioritizedReplay(capacity, Schema(columns, n_step=1), seed=0)
        self.out = None

        def extend(obs, next_obs, action, reward, terminated):
            self.replay.extend(
                obs=obs, next_obs=next_obs, action=action, reward=reward, terminated=terminated
            )

        filled(extend, capacity)

    def sample(self, n):
        if self.out is None or len(self.out.keys) != n:
            self.out = self.replay.empty_batch(n)
        return self.replay.sample(n, 0.4, out=self.out).keys

    def update(self, keys, priorities):
        self.replay.update_priorities(keys, priorities)


class Cpprb:
    package = "cpprb"

    def __init__(self, capacity):
        import cpprb

        image = {"shape": (STACK, SIDE, SIDE), "dtype": np.uint8}
        self.buffer = cpprb.PrioritizedReplayBuffer(
            capacity,
            {"obs": image, "next_obs": image, "act": {"dtype": np.int64}, "rew": {}, "done": {}},
            alpha=0.6,
        )

        def extend(obs, next_obs, action, reward, terminated):
            self.buffer.add(obs=obs, next_obs=next_obs, act=action, rew=reward, done=terminated)

        filled(extend, capacity)

    def sample(self, n):
        return self.buffer.sample(n, 0.4)["indexes"]

    def update(self, indices, priorities):
        self.buffer.update_priorities(indices, priorities)


class TorchRL:
    package = "torchrl"

    def __init__(self, capacity):
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

        def extend(obs, next_obs, action, reward, terminated):
            columns = {"obs": obs, "next_obs": next_obs, "action": action, "reward": reward,
                       "terminated": terminated}  # fmt: skip
            columns = {name: torch.from_numpy(array) for name, array in columns.items()}
            self.buffer.extend(TensorDict(columns, batch_size=[len(obs)]))

        filled(extend, capacity)

    def sample(self, n):
        return self.buffer.sample(n)["index"]

    def update(self, indices, priorities):
        self.buffer.update_priority(indices, self.torch.from_numpy(priorities.astype(np.float32)))


class Reverb:
    """Its sampler fetches ahead in threads of its own, while nobody counts the time.

    So only rounds of consecutive pairs say what one takes: nothing is swept before them.
    """

    package = "dm-reverb"
    pairs_a_call = 8

    def __init__(self, capacity):
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

        def extend(*columns):
            for row in zip(*columns, strict=True):
                writer.append(list(row))
                writer.create_item("replay", 1.0, tuple(column[-1] for column in writer.history))
            writer.flush()

        filled(extend, capacity)
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


CONTENDERS = {"zapex": Zapex, "cpprb": Cpprb, "torchrl": TorchRL, "reverb": Reverb}


def serve(name, capacity, sweep_bytes):
    contender = CONTENDERS[name]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some libraries log to where the answers go
    try:
        replay = contender(capacity)
    except Exception as error:  # whatever it is, it is the reason why this one does not take part
        print(
            "missing", f"{type(error).__name__}: {error}".splitlines()[0], file=answers, flush=True
        )
        return
    version = "" if name == "zapex" else metadata.version(contender.package)
    print("ready", version, file=answers, flush=True)
    memory = np.zeros(sweep_bytes // 8)
    source = target = np.zeros(0, np.uint8)
    for line in sys.stdin:
        batch, calls = (int(word) for word in line.split())
        nbytes = batch * 2 * STACK * SIDE * SIDE
        if len(target) != nbytes:
            source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        times = []
        for _ in range(calls):
            pairs = getattr(replay, "pairs_a_call", 1)
            sampled = updated = 0
            for _ in range(pairs):
                new = rng.random(batch) + 1e-6
                if pairs == 1:
                    memory += 1.0
                start = time.perf_counter_ns()
                rows = replay.sample(batch)
                sampled += (time.perf_counter_ns() - start) // pairs
                if pairs == 1:
                    memory += 1.0
                start = time.perf_counter_ns()
                replay.update(rows, new)
                updated += (time.perf_counter_ns() - start) // pairs
            memory += 1.0
            start = time.perf_counter_ns()
            np.copyto(target, source)
            times.append([sampled, updated, time.perf_counter_ns() - start])
        print(json.dumps(times), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
