"""What the actors of the chaos harness play: every frame names its writer and can be recomputed.

A life of an actor plays streams of episodes of known length. Frame `number` of a stream is a
function of (actor, incarnation, stream, number), its stamp, and begins with it. The Q values are a
function of the stamp, too, and so is everything that the actor makes of them: whoever sees a row
recomputes it, and it is whole and of whom it says, or it is not.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import ACTOR, COUNT, INCARNATION, NO_FRAME, STREAM
from zapex.chunks.schema import Column, Schema
from zapex.chunks.store import ChunkStore
from zapex.envs.streams import Step

STACK, FRAME_WORDS, ACTIONS = 2, 24, 16
N_STEP, GAMMA = 2, 0.5
SCHEMA = Schema(
    {
        "obs": Column((FRAME_WORDS,), np.int64, stack=STACK),
        "action": Column((), np.int64),
    },
    n_step=N_STEP,
    gamma=GAMMA,
)
Longs = NDArray[np.int64]

_MIX = np.array(
    [6364136223846793005, 3037000493, 1442695040888963407, 2862933555777941757], np.int64
)


class Violation(Exception):
    """A promise was broken; the first word says which: torn, foreign, lost, doubled."""


def identity(stamps: Longs) -> Longs:
    """A number for each stamp (B, 4): actor, incarnation, stream, number of the frame."""
    mixed: Longs = (stamps * _MIX).sum(axis=1)
    return mixed


def length_of(stamps: Longs) -> Longs:
    """How many transitions an episode of each stream has; it has one frame more."""
    return 37 + 2 * (stamps[:, 2] % 3)


def at_frame(stamps: Longs, numbers: Longs) -> Longs:
    """The stamps of other frames of the same streams."""
    moved = stamps.copy()
    moved[:, 3] = numbers
    return moved


def observations(stamps: Longs) -> Longs:
    """(B, STACK, FRAME_WORDS): what is seen at each frame."""
    seen = np.zeros((len(stamps), STACK, FRAME_WORDS), np.int64)
    for place, number in enumerate((stamps[:, 3] - 1, stamps[:, 3])):
        at = at_frame(stamps, number)
        seen[:, place, :4] = at
        seen[:, place, 4:] = (identity(at)[:, None] + np.arange(4, FRAME_WORDS) * 97) | 1
    seen[stamps[:, 3] % (length_of(stamps) + 1) == 0, 0] = 0
    return seen


def rewards(stamps: Longs) -> NDArray[np.float64]:
    """The reward of the step from each frame."""
    return (stamps[:, 3] % 7).astype(np.float64)


def best_of(stamps: Longs) -> tuple[Longs, NDArray[np.float64]]:
    """The action with the largest Q value at each frame, and that value: a multiple of 1."""
    mixed = identity(stamps)
    return (mixed >> 33) & (ACTIONS - 1), 1.0 + ((mixed >> 20) & 0x7FF)


def q_values(obs: Longs) -> NDArray[np.float32]:
    """(B, ACTIONS): at what is seen, by the newest frame alone."""
    action, value = best_of(obs[:, -1, :4])
    q = np.repeat(value.astype(np.float32)[:, None] - 1, ACTIONS, axis=1)
    q[np.arange(len(q)), action] += 1
    return q


def transitions(stamps: Longs) -> dict[str, Any]:
    """The rows that begin at these frames, column by column."""
    length = length_of(stamps)
    episode, step = np.divmod(stamps[:, 3], length + 1)
    steps = np.minimum(N_STEP, length - step)
    ends = step + steps == length
    after = at_frame(stamps, stamps[:, 3] + steps)
    reward = rewards(stamps)
    reward[steps == N_STEP] += GAMMA * rewards(at_frame(stamps, stamps[:, 3] + 1))[steps == N_STEP]
    discount = np.where(ends & (episode % 2 == 0), 0.0, GAMMA**steps)
    action, value = best_of(stamps)
    return {
        "obs": observations(stamps), "next_obs": observations(after), "action": action,
        "reward": reward, "discount": discount,
        # Exact in float32, a multiple of 1/4: a leaf of the tree names its transition.
        "priority": np.abs(reward + discount * best_of(after)[1] - value),
    }  # fmt: skip


def priorities(stamps: Longs) -> NDArray[np.float64]:
    """What the actor says of the rows that begin at these frames."""
    found: NDArray[np.float64] = transitions(stamps)["priority"]
    return found


class ChaosStreams:
    """The games of one life of an actor, as its environments."""

    finished = ()
    spec = SimpleNamespace(frames_per_step=1)

    def __init__(self, actor: int, incarnation: int, streams: int) -> None:
        self.num_streams = streams
        self._stamps = np.zeros((streams, 4), np.int64)
        self._stamps[:, 0], self._stamps[:, 1] = actor, incarnation
        self._stamps[:, 2] = actor * streams + np.arange(streams)
        self._over = np.zeros(streams, np.bool_)

    def reset(self) -> Longs:
        return observations(self._stamps)

    def step(self, actions: Longs) -> Step:
        stamps, started = self._stamps, self._over
        if (actions != best_of(stamps)[0])[~started].any():
            raise Violation(f"foreign: actions {actions} at {stamps.tolist()}")
        reward = np.where(started, 0.0, rewards(stamps)).astype(np.float32)
        stamps[:, 3] += 1
        episode, step = np.divmod(stamps[:, 3], length_of(stamps) + 1)
        self._over = step == length_of(stamps)
        over, cut = self._over & (episode % 2 == 0), self._over & (episode % 2 == 1)
        nothing = np.zeros(self.num_streams, np.bool_)
        return Step(observations(stamps), reward, over, cut, nothing, started)


def check_rows(rows: Any, where: str) -> Longs:
    """Every column of `rows` (a mapping of arrays (B, ...)) is what it must be; their stamps."""
    stamps: Longs = rows["obs"][:, -1, :4].copy()
    wanted = transitions(stamps)
    for name, found in rows.items():
        same = (found == wanted[name]).all(axis=tuple(range(1, found.ndim)))
        if not same.all():
            row = int(np.argmin(same))
            raise Violation(
                f"torn: {where}: {name} of the row {row} that is stamped {stamps[row].tolist()} is "
                f"{np.ravel(found[row])[:4]}, not {np.ravel(wanted[name][row])[:4]}"
            )
    return stamps


def stamp_of(store: ChunkStore, slot: int, row: int) -> Longs:
    """The stamp of one row, by the newest frame of its observation."""
    stamp: Longs = store.column(slot, "obs")[store.column(slot, "obs_frames")[row, -1], :4]
    return stamp


def chunk_rows(store: ChunkStore, slot: int) -> dict[str, NDArray[Any]]:
    """The naive twin of the gather kernel: a chunk's rows, column by column."""
    count = int(store.header_rows[slot, COUNT])
    held = store.column(slot, "obs")
    rows = {
        name: store.column(slot, name)[:count].copy()
        for name in ("action", "reward", "discount", "priority")
    }
    for name in ("obs", "next_obs"):
        which = store.column(slot, f"{name}_frames")[:count].astype(np.int64)
        seen = held[np.where(which == NO_FRAME, 0, which)].copy()
        seen[which == NO_FRAME] = 0
        rows[name] = seen
    return rows


def check_chunk(store: ChunkStore, slot: int) -> int:
    """A live chunk is whole and all of one stream, its rows successive; its first row's number."""
    header = store.header_rows[slot]
    if not 1 <= header[COUNT] <= store.layout.chunk:
        raise Violation(f"torn: slot {slot} has {header[COUNT]} rows")
    where = f"slot {slot} of life {header[[ACTOR, INCARNATION]].tolist()}"
    stamps = check_rows(chunk_rows(store, slot), where)
    if (stamps[:, :3] != header[[ACTOR, INCARNATION, STREAM]]).any():
        raise Violation(f"foreign: {where} holds rows of {stamps[0].tolist()}")
    length = length_of(stamps)
    episode, step = np.divmod(stamps[:, 3], length + 1)
    numbers = episode * length + step
    if (np.diff(numbers) != 1).any():
        raise Violation(f"torn: {where}: its rows are {stamps.tolist()}")
    return int(numbers[0])
