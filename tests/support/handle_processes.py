"""What other processes do in tests/library/test_handle.py; importable, as spawn needs it."""

import multiprocessing
import os
import time

import numpy as np

import zapex
from tests.chunks.test_builder import Game
from tests.library.test_writer import GAMMA, new_replay
from tests.support.naive import NaiveNStep
from zapex import Column, PrioritizedReplay, Schema

CONTEXTS = ("spawn", "forkserver")
STREAMS, STEPS = 2, 150
# Rows that say themselves whether they are whole: every number of a row is the same.
PATTERN = Schema({"obs": Column((257,), np.int64), "action": Column((), np.int64)}, n_step=1)


class VectorGame:
    """Streams that reset themselves in the step after an end."""

    def __init__(self, rng):
        self.rng, self.game, self.over = rng, Game(STREAMS, 2, "zero"), np.zeros(STREAMS, bool)

    def reset(self):
        for i in range(STREAMS):
            self.game.reset(i)
        return self.game.seen.copy()

    def step(self):
        """(next_obs, reward, terminated, truncated, begun)."""
        begun = self.over
        for i in range(STREAMS):
            self.game.reset(i) if begun[i] else self.game.step(i)
        reward = np.where(begun, 0.0, self.rng.integers(-3, 4, STREAMS))
        terminated = ~begun & (self.rng.random(STREAMS) < 0.1)
        truncated = ~begun & (self.rng.random(STREAMS) < 0.1)
        self.over = terminated | truncated
        return self.game.seen.copy(), reward, terminated, truncated, begun


def play(seed, writer, *, steps=STEPS):
    """Play a game of `seed` into `writer` (None: nowhere); the naive twins' transitions."""
    rng = np.random.default_rng(seed)
    env = VectorGame(rng)
    twins = [NaiveNStep(3, GAMMA) for _ in range(STREAMS)]
    obs = env.reset()
    if writer is not None:
        writer.reset(obs)
    for i, twin in enumerate(twins):
        twin.begin(obs[i])
    for step in range(steps):
        obs, reward, terminated, truncated, begun = env.step()
        action = 1_000_000 * seed + 1000 * step + np.arange(STREAMS)
        mask = rng.random((STREAMS, 2)).astype(np.float32)
        priority = rng.integers(1, 1000, STREAMS) / 64  # as float32 too
        if writer is not None:
            writer.add(
                action=action, reward=reward, next_obs=obs, terminated=terminated,
                truncated=truncated, priority=-priority, mask=mask,
            )  # fmt: skip
        for i, twin in enumerate(twins):
            if begun[i]:
                twin.begin(obs[i])
            else:
                twin.add(
                    (action[i], mask[i], priority[i]), reward[i], obs[i],
                    bool(terminated[i]), bool(env.over[i]), 0.0, 0.0,
                )  # fmt: skip
    return [row for twin in twins for row in twin.transitions]


def play_from_afar(handle, seed):
    with zapex.connect(handle) as client, client.writer(STREAMS) as writer:
        play(seed, writer)


def rows_from(seed, count=200):
    """Whole transitions with keywords of `extend`, and the twins' rows."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (count + 4, 3, 2), np.uint8)
    stacks = np.stack([frames[:-1], frames[1:]], axis=1)
    rows = {
        "obs": stacks[:count], "action": 1_000_000 * seed + np.arange(count),
        "mask": rng.random((count, 2)).astype(np.float32), "reward": rng.normal(size=count),
        "next_obs": stacks[3 : count + 3], "terminated": rng.random(count) < 0.1,
        "priorities": rng.integers(1, 1000, count) / 64,
    }  # fmt: skip
    expected = [
        (rows["obs"][i], (rows["action"][i], rows["mask"][i], rows["priorities"][i]),
         rows["reward"][i], 0.0 if rows["terminated"][i] else GAMMA**3, rows["next_obs"][i], 0.0)
        for i in range(count)
    ]  # fmt: skip
    return rows, expected


def extend_from_afar(handle, seed):
    rows, _ = rows_from(seed)
    with zapex.connect(handle) as client:
        for first in range(0, 200, 30):
            client.extend(**{name: value[first : first + 30] for name, value in rows.items()})


def update_from_afar(handle, queue):
    with zapex.connect(handle) as client:
        batch = client.sample(64)
        queue.put((batch.keys.tolist(), client.update_priorities(batch.keys, batch.indices + 1.0)))
        queue.put(client.update_priorities(np.array([-1, batch.keys[0] ^ 1 << 40]), np.ones(2)))


def pattern_steps(start):
    """Steps whose observations say their number 257 times."""
    for number in range(start, 1 << 60):
        yield number, np.full((1, 257), number)


def write_for_ever(handle, start):
    """One stream, until it is killed."""
    writer = zapex.connect(handle).writer(1)
    for number, obs in pattern_steps(start):
        if number == start:
            writer.reset(obs)
            continue
        writer.add(
            action=np.array([number]), reward=np.ones(1), next_obs=obs,
            terminated=np.zeros(1, bool), truncated=np.zeros(1, bool),
        )  # fmt: skip


def own_a_replay(pipe, fill=100):
    """An owner, until it is killed."""
    replay = new_replay(n=3)
    rows, _ = rows_from(1)
    replay.extend(**{name: value[:fill] for name, value in rows.items()})
    pipe.send((replay.handle, os.getpid()))
    time.sleep(600)


def fork_an_owner(pipe):
    """In the fork of an owner the replay is not to be used, and a handle is."""
    replay = PrioritizedReplay(1000, PATTERN)
    replay.extend(obs=np.zeros((9, 257), np.int64), action=np.arange(9), reward=np.ones(9),
                  next_obs=np.ones((9, 257), np.int64), terminated=np.zeros(9, bool))  # fmt: skip
    handle = replay.handle
    client = zapex.connect(handle)
    process = multiprocessing.get_context("fork").Process(
        target=in_a_fork, args=(replay, client, handle, pipe)
    )
    process.start()
    process.join(60)
    pipe.send(len(client))


def in_a_fork(replay, client, handle, pipe):
    for call in (replay.stats, lambda: replay.sample(1), client.stats):
        try:
            call()
        except zapex.errors.ReplayError as error:
            pipe.send(str(error))
    pipe.send(len(zapex.connect(handle)))
