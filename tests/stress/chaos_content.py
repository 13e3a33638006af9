"""What the actors of the chaos harness write: every row names its writer and can be recomputed.

A life of an actor plays streams of episodes of known length; transition `number` of a stream is a
function of (actor, incarnation, stream, number), and so is every byte of it. Whoever sees a row
recomputes it: it is whole and of whom it says, or it is not.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import ACTOR, COUNT, INCARNATION, NO_FRAME, STREAM
from zapex.chunks.schema import Column, Schema
from zapex.chunks.store import ChunkStore

STACK, FRAME_WORDS = 2, 24
N_STEP, GAMMA = 2, 0.5
SCHEMA = Schema(
    {
        "obs": Column((FRAME_WORDS,), np.int64, stack=STACK),
        "action": Column((), np.int64),
        "stamp": Column((4,), np.int64),  # actor, incarnation, stream, number
    },
    n_step=N_STEP,
    gamma=GAMMA,
)
Longs = NDArray[np.int64]

_A, _B, _C, _D, _E = (
    np.int64(n)
    for n in (6364136223846793005, 3037000493, 1442695040888963407, 2862933555777941757, 97)
)


class Violation(Exception):
    """A promise was broken; the first word says which: torn, foreign, lost, doubled."""


def _who(stamps: Longs) -> Longs:
    """A number for each (actor, incarnation, stream), (B,)."""
    return stamps[:, 0] * _A + stamps[:, 1] * _B + stamps[:, 2] * _C


def episode_steps(streams: Longs) -> Longs:
    """How many transitions an episode of each stream has."""
    return 37 + 2 * (streams % 3)


def frames(stamps: Longs, numbers: Longs) -> Longs:
    """Frame `numbers` (B,) of the streams of `stamps` (B, 4): (B, FRAME_WORDS), never zero."""
    first = _who(stamps) + numbers * _D
    return (first[:, None] + np.arange(FRAME_WORDS) * _E) | 1


def observations(stamps: Longs, episode: Longs, step: Longs) -> Longs:
    """(B, STACK, FRAME_WORDS): what is seen after `step` steps of an episode."""
    newest = episode * (episode_steps(stamps[:, 2]) + 1) + step
    seen = np.stack([frames(stamps, newest - 1), frames(stamps, newest)], axis=1)
    seen[step == 0, 0] = 0
    return seen


def rewards(numbers: Longs) -> NDArray[np.float64]:
    """The reward of each step."""
    return (numbers % 7).astype(np.float64)


def priorities(stamps: Longs) -> NDArray[np.float64]:
    """What its actor says; exact in float32, so a leaf of the tree names its transition."""
    mixed = (_who(stamps) + stamps[:, 3] * _D) >> 20
    return 1.0 + (mixed & 0x1FFF).astype(np.float64)


def actions(stamps: Longs) -> Longs:
    """The action of each step: a checksum of its stamp."""
    return _who(stamps) ^ (stamps[:, 3] * _D)


def check_rows(rows: Any, where: str) -> None:
    """Every column of `rows` (a mapping of arrays (B, ...)) is what its stamp says it must be."""
    stamps: Longs = rows["stamp"]
    length = episode_steps(stamps[:, 2])
    episode, step = stamps[:, 3] // length, stamps[:, 3] % length
    after = np.minimum(step + N_STEP, length)
    steps = after - step
    reward = rewards(stamps[:, 3])
    reward[steps == N_STEP] += GAMMA * rewards(stamps[steps == N_STEP, 3] + 1)
    discount = np.where((after == length) & (episode % 2 == 0), 0.0, GAMMA**steps)
    wanted = {
        "action": actions(stamps),
        "obs": observations(stamps, episode, step),
        "next_obs": observations(stamps, episode, after),
        "reward": reward,
        "discount": discount,
    }
    for name, values in wanted.items():
        same = (rows[name] == values).all(axis=tuple(range(1, values.ndim)))
        if not same.all():
            row = int(np.argmin(same))
            raise Violation(
                f"torn: {where}: {name} of the row {row} that is stamped {stamps[row].tolist()} is "
                f"{np.ravel(rows[name][row])[:4]}, not {np.ravel(values[row])[:4]}"
            )


def chunk_rows(store: ChunkStore, slot: int) -> dict[str, NDArray[Any]]:
    """The naive twin of the gather kernel: a chunk's rows, column by column."""
    count = int(store.header_rows[slot, COUNT])
    held = store.column(slot, "obs")
    rows = {
        name: store.column(slot, name)[:count].copy()
        for name in ("action", "stamp", "reward", "discount", "priority")
    }
    for name in ("obs", "next_obs"):
        which = store.column(slot, f"{name}_frames")[:count].astype(np.int64)
        seen = held[np.where(which == NO_FRAME, 0, which)].copy()
        seen[which == NO_FRAME] = 0
        rows[name] = seen
    return rows


def check_chunk(store: ChunkStore, slot: int) -> int:
    """A live chunk is whole and all of one stream, its rows successive; its first number."""
    header = store.header_rows[slot]
    if not 1 <= header[COUNT] <= store.layout.chunk:
        raise Violation(f"torn: slot {slot} has {header[COUNT]} rows")
    rows = chunk_rows(store, slot)
    where = f"slot {slot} of life {header[[ACTOR, INCARNATION]].tolist()}"
    check_rows(rows, where)
    stamps = rows["stamp"]
    if not (rows["priority"] == priorities(stamps)).all():
        raise Violation(f"torn: {where}: priorities {rows['priority']}, not {priorities(stamps)}")
    first = stamps[0].copy()
    if first[:3].tolist() != header[[ACTOR, INCARNATION, STREAM]].tolist():
        raise Violation(f"foreign: {where} holds rows of {first.tolist()}")
    successive = stamps[0] + np.outer(np.arange(len(stamps)), [0, 0, 0, 1])
    if not (stamps == successive).all():
        raise Violation(f"torn: {where}: its rows are {stamps.tolist()}")
    return int(stamps[0, 3])
