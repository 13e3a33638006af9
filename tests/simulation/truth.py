"""What actors play and every transition must be: each frame names its writer.

A life (actor, incarnation, stream) plays episodes of known length. A frame begins with its stamp,
which is its life and its number, and all of it is a function of that; so are the Q values, and what
an actor makes of the frame. Whoever sees a row knows what it must be. `Truth` is that as a table: a
row of it is a frame and the transition that begins there.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.schema import Column, Schema
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
Life = tuple[int, int, int]
Longs = NDArray[np.int64]

_BLOCK = 256
_MIX = np.array(
    [6364136223846793005, 3037000493, 1442695040888963407, 2862933555777941757], np.int64
)


class Violation(Exception):
    """A promise was broken; the first word says which: torn, foreign, lost, doubled, stuck ..."""


def _identity(stamps: Longs) -> Longs:
    """A number for each stamp (B, 4): actor, incarnation, stream, number of the frame."""
    mixed: Longs = (stamps * _MIX).sum(axis=1)
    return mixed


def length_of(stamps: Longs) -> Longs:
    """How many transitions an episode of each stream has; it has one frame more."""
    return 37 + 2 * (stamps[:, 2] % 3)


def _at_frame(stamps: Longs, numbers: Longs) -> Longs:
    """The stamps of other frames of the same streams."""
    moved = stamps.copy()
    moved[:, 3] = numbers
    return moved


def _observations(stamps: Longs) -> Longs:
    """(B, STACK, FRAME_WORDS): what is seen at each frame."""
    seen = np.zeros((len(stamps), STACK, FRAME_WORDS), np.int64)
    for place, number in enumerate((stamps[:, 3] - 1, stamps[:, 3])):
        at = _at_frame(stamps, number)
        seen[:, place, :4] = at
        seen[:, place, 4:] = (_identity(at)[:, None] + np.arange(4, FRAME_WORDS) * 97) | 1
    seen[stamps[:, 3] % (length_of(stamps) + 1) == 0, 0] = 0
    return seen


def _rewards(stamps: Longs) -> NDArray[np.float64]:
    """The reward of the step from each frame."""
    return (stamps[:, 3] % 7).astype(np.float64)


def _best_of(stamps: Longs) -> tuple[Longs, NDArray[np.float64]]:
    """The action with the largest Q value at each frame, and that value: a multiple of 1."""
    mixed = _identity(stamps)
    return (mixed >> 33) & (ACTIONS - 1), 1.0 + ((mixed >> 20) & 0x7FF)


def _rows_for(stamps: Longs) -> dict[str, NDArray[Any]]:
    """The rows of the table: the transitions that begin at these frames, and what else is known."""
    length = length_of(stamps)
    episode, step = np.divmod(stamps[:, 3], length + 1)
    steps = np.minimum(N_STEP, length - step)
    ends = step + steps == length
    after = _at_frame(stamps, stamps[:, 3] + steps)
    reward, whole = _rewards(stamps), steps == N_STEP
    reward[whole] += GAMMA * _rewards(_at_frame(stamps, stamps[:, 3] + 1))[whole]
    discount = np.where(ends & (episode % 2 == 0), 0.0, GAMMA**steps)
    action, value = _best_of(stamps)
    return {
        "obs": _observations(stamps), "next_obs": _observations(after), "action": action,
        "reward": reward, "discount": discount,
        # Exact in float32, a multiple of 1/4: a leaf of the tree names its transition.
        "priority": np.abs(reward + discount * _best_of(after)[1] - value),
        "value": value, "step_reward": _rewards(stamps), "step": step, "episode": episode,
        "number": episode * length + step,
    }  # fmt: skip


class Truth:
    """The table. Lives come into it in blocks, as they are asked for."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int, int, int], int] = {}
        self._size = 0
        self.columns: dict[str, NDArray[Any]] = {}

    def find(self, stamps: Longs) -> Longs:
        """The rows of these stamps (B, 4): life and number of the frame."""
        found = np.empty(len(stamps), np.int64)
        blocks = self._blocks
        for i, (actor, incarnation, stream, frame) in enumerate(stamps.tolist()):
            place = actor, incarnation, stream, frame // _BLOCK
            base = blocks.get(place)
            if base is None:
                base = self._add(place)
            found[i] = base + frame % _BLOCK
        return found

    def _add(self, place: tuple[int, int, int, int]) -> int:
        if not (0 <= place[3] < 1 << 20 and 0 <= place[0] < 1 << 20):
            raise Violation(f"torn: a frame that says it is {place}")
        stamps = np.empty((_BLOCK, 4), np.int64)
        stamps[:, :3] = place[:3]
        stamps[:, 3] = place[3] * _BLOCK + np.arange(_BLOCK)
        base, self._size = self._size, self._size + _BLOCK
        for name, column in _rows_for(stamps).items():
            held = self.columns.get(name)
            if held is None or self._size > len(held):
                larger = np.empty((max(4096, 2 * self._size), *column.shape[1:]), column.dtype)
                if held is not None:
                    larger[:base] = held[:base]
                held = self.columns[name] = larger
            held[base : self._size] = column
        self._blocks[place] = base
        return base

    def check(self, rows: Any, where: str) -> Longs:
        """Every column of `rows` is what it must be; the rows of the table."""
        table = self.find(rows["obs"][:, -1, :4])
        for name, found in rows.items():
            wanted = self.columns[name][table]
            if not (found == wanted).all():
                raise Violation(f"torn: {where}: {name} is {found.tolist()}, not {wanted.tolist()}")
        return table


class TableStreams:
    """The games of one life of an actor, as its environments."""

    finished = ()
    spec = SimpleNamespace(frames_per_step=1)

    def __init__(self, truth: Truth, actor: int, incarnation: int, streams: int) -> None:
        self.num_streams, self._truth = streams, truth
        self._stamps = np.zeros((streams, 4), np.int64)
        self._stamps[:, :2] = actor, incarnation
        self._stamps[:, 2] = actor * streams + np.arange(streams)
        self._length = length_of(self._stamps)
        self._over = np.zeros(streams, np.bool_)
        self._nothing = np.zeros(streams, np.bool_)

    def reset(self) -> Longs:
        self._at = self._truth.find(self._stamps)
        return self._truth.columns["obs"][self._at]

    def step(self, actions: Longs) -> Step:
        columns, started = self._truth.columns, self._over
        if (actions != columns["action"][self._at])[~started].any():
            raise Violation(f"foreign: actions {actions} at {self._stamps.tolist()}")
        reward = np.where(started, 0.0, columns["step_reward"][self._at]).astype(np.float32)
        self._stamps[:, 3] += 1
        self._at = at = self._truth.find(self._stamps)
        columns = self._truth.columns
        self._over = columns["step"][at] == self._length
        even = columns["episode"][at] % 2 == 0
        over, cut = self._over & even, self._over & ~even
        return Step(columns["obs"][at], reward, over, cut, self._nothing, started)


def values_of(truth: Truth, obs: Longs) -> NDArray[np.float32]:
    """(B, ACTIONS): the Q values at what is seen, by the newest frame alone."""
    at = truth.find(obs[:, -1, :4])
    q = np.repeat(truth.columns["value"][at].astype(np.float32)[:, None] - 1, ACTIONS, axis=1)
    q[np.arange(len(q)), truth.columns["action"][at]] += 1
    return q
