"""What every transition must be, computed once: tests/stress/chaos_content.py as a table.

A row of the table is a frame of a life (actor, incarnation, stream) and the transition that begins
there. Lives come into the table in blocks, as they are asked for.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.stress.chaos_content import (
    ACTIONS,
    Violation,
    best_of,
    length_of,
    rewards,
    transitions,
)
from zapex.envs.streams import Step

Life = tuple[int, int, int]
Longs = NDArray[np.int64]
_BLOCK = 256


class Truth:
    """The table."""

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
        episode, step = np.divmod(stamps[:, 3], length_of(stamps) + 1)
        found = transitions(stamps)
        found["value"], found["step_reward"] = best_of(stamps)[1], rewards(stamps)
        found["step"], found["episode"] = step, episode
        found["number"] = episode * length_of(stamps) + step
        base, self._size = self._size, self._size + _BLOCK
        for name, column in found.items():
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
    """The games of one life of an actor, as its environments: ChaosStreams of the stress tests."""

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
