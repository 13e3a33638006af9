"""What the paced roles move: chunks of a real game, and the setting of the paper's messages.

A push is 800 transitions (arXiv 2110.13506: 43 MB as plain uint8 pairs), parameters are 13.17 MB.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.paper.baseline import PairMaker
from benchmarks.transport.server import Setting, atari
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.builder import ChunkBuilder
from zapex.chunks.layout import ACTOR, COMMITTED, COUNT, INCARNATION, STATE, STREAM, ChunkLayout
from zapex.chunks.schema import Column, Schema
from zapex.chunks.store import ChunkStore

CAPACITY = 8_192
PAIR_BYTES = 2 * 4 * 84 * 84


def setting_of(actors: int, quick: bool) -> Setting:
    """Of so many actors and a learner; quick: an eighth of a push."""
    setting = atari(actors, CAPACITY)
    return replace(setting, rows=(64, 36)) if quick else setting


def store_of(setting: Setting, slots: int) -> ChunkStore:
    """New memory for chunks."""
    layout = setting.layout.chunk_layout
    return ChunkStore(aligned_zeros(ChunkStore.required_bytes(layout, slots)), layout, slots)


def record(setting: Setting) -> np.ndarray:
    """Bodies (chunks, body bytes) of whole chunks of Breakout, played at random.

    Call it in a process of its own: the games have threads.
    """
    from zapex.envs import environments, streams

    spec = environments.check("ALE/Breakout-v5")
    played = streams.make(spec, 1, seed=1)
    wanted, everyone = len(setting.rows), np.ones(1, np.bool_)
    store = store_of(setting, 4 * wanted)
    store.header_rows[:, STATE] = 0
    builder = ChunkBuilder(store, 1, actor=0, incarnation=1)
    free = iter(range(store.slots))
    rng, whole = np.random.default_rng(1), list[int]()

    def done(call: Any) -> None:
        while call() < 1:
            builder.provide(np.array([next(free)], np.int64))

    obs = played.reset()
    done(lambda: builder.begin(everyone, {"obs": obs}))
    while len(whole) < wanted:
        step = played.step(rng.integers(spec.num_actions, size=1))
        if step.started.any():
            done(lambda step=step: builder.begin(everyone, {"obs": step.obs}))
        else:
            over = step.episode_ends
            builder.staged["action"] = rng.integers(spec.num_actions, size=1)
            values, reward = rng.normal(size=(2, 1)), step.reward.astype(np.float64)
            done(
                lambda s=step, r=reward, o=over, v=values: builder.add(
                    {"obs": s.obs}, r, o, o, cut=s.life_lost, values=v
                )
            )
        for slot in builder.take_closed().tolist():
            if store.header_rows[slot, COUNT] == setting.chunk:
                whole.append(slot)
    played.close()
    return np.stack([_body(store, slot) for slot in whole[:wanted]])


def _body(store: ChunkStore, slot: int) -> np.ndarray:
    start = store.body(slot)
    return store.mem[start : start + store.layout.body_bytes].copy()


def fill(setting: Setting, store: ChunkStore, bodies: np.ndarray) -> None:
    """Write the recorded chunks into all slots, as an actor of number 0 commits them."""
    pushed = len(setting.rows)
    for slot in range(store.slots):
        start, body = store.body(slot), bodies[slot % pushed]
        store.mem[start : start + len(body)] = body
        header = store.header_rows[slot]
        header[COUNT], header[ACTOR] = setting.rows[slot % pushed], 0
        header[INCARNATION], header[STREAM], header[STATE] = 1, 0, COMMITTED


def plain(setting: Setting) -> Setting:
    """The same transitions as plain pairs: a chunk of them shares no frame.

    s and s' stand in columns of their own, so zapex's own messages carry them over ZeroMQ.
    """
    whole = Column((4, 84, 84), np.uint8)
    columns = {
        "obs": Column((1,), np.uint8), "action": Column((), np.int64), "s": whole, "s_next": whole,
    }  # fmt: skip
    return replace(setting, schema=Schema(columns, n_step=3, gamma=0.99))


def plain_bodies(setting: Setting, bodies: np.ndarray) -> np.ndarray:
    """The recorded chunks in the layout of `plain`."""
    store = store_of(setting, len(bodies))
    fill(setting, store, bodies)
    store.header_rows[:, 1] = 1  # a generation that keys can have
    maker, layout = PairMaker(store), ChunkLayout(plain(setting).schema, setting.chunk)
    made = np.zeros((len(bodies), layout.body_bytes), np.uint8)
    for slot, rows in enumerate(setting.rows):
        columns = maker.columns(slot)
        for name, source in (("s", "obs"), ("s_next", "next_obs")):
            layout.column(name, made[slot], 0)[:rows] = columns[source]
        for name in ("action", "reward", "discount", "priority"):
            layout.column(name, made[slot], 0)[:rows] = columns[name]
    return made
