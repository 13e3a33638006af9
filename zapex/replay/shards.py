"""One batch from several replays: how many rows each one draws, and the weights of all rows.

A batch is one as if one replay held everything. With totals T_s and T = sum of T_s, a row of leaf p
in shard s has the probability T_s / T * p / T_s = p / T, as in one tree.

The shares are of the totals that were known when the batch was asked for, and the draw is of the
totals of then. So a leaf counts as p * known T_s / drawn T_s: that is the probability really used,
times a constant, and weights of (N q)^-beta over their largest follow from it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.keys import with_shard
from zapex.errors import ConfigError
from zapex.replay.draw import Draw
from zapex.sumtree_numba import Method

MOST_SHARDS = 128  # a key's sign bit is not used


def check_method(method: Method) -> None:
    """Raise ConfigError for a draw that several replays cannot share out by their totals."""
    if method == "without_replacement":
        raise ConfigError(
            'a batch of several replays is drawn "stratified" or "independent": without '
            "replacement, how many rows come from each one depends on every leaf"
        )


def share_out(
    totals: NDArray[np.float64], rows: int, rng: np.random.Generator, method: Method
) -> NDArray[np.int64]:
    """How many of `rows` each shard draws: on average rows * T_s / T.

    Args:
        totals: (N,) sum of all leaves of each shard; 0 for one without a share. Not all are 0.
        rows: of the whole batch.
        rng: its numbers decide what is left over.
        method: "stratified": equally spaced points over all totals, so a count is rounded up or
            down; "independent": as if each row chose its shard alone.

    Returns:
        (N,) counts; they add up to `rows`.
    """
    ends = np.cumsum(totals)
    if method == "independent":
        return rng.multinomial(rows, totals / ends[-1])
    points = (np.arange(rows) + rng.random()) * (ends[-1] / rows)
    # A rounded point may lie at the very end.
    last = int(np.flatnonzero(totals)[-1])
    shards = np.minimum(np.searchsorted(ends, points, side="right"), last)
    return np.bincount(shards, minlength=len(totals))


class Part(NamedTuple):
    """What one shard has drawn for a batch. known: its total when the rows were shared out."""

    shard: int
    known: float
    draw: Draw


class Shares:
    """What is known of each shard: its total, transitions and smallest leaf; who is away.

    A shard is away when it has not answered in time. Then it has no share, until it answers.

    Attributes:
        totals: (N,) sums of all leaves; 0 if a shard is away or empty.
        counts: (N,) transitions.
        lost, back: how often a shard's share went, and came back.
    """

    def __init__(self, shards: int) -> None:
        self.totals = np.zeros(shards)
        self.counts = np.zeros(shards, np.int64)
        self._smallest = np.full(shards, math.inf)
        self._away = np.zeros(shards, bool)
        self.lost = self.back = 0

    @property
    def away(self) -> list[int]:
        """Shards that have not answered in time."""
        return np.flatnonzero(self._away).tolist()

    def is_away(self, shard: int) -> bool:
        """Whether a shard has no share because it does not answer."""
        return bool(self._away[shard])

    def learn(self, shard: int, total: float, count: int, smallest: float = math.inf) -> bool:
        """Note what a shard has said of itself. Returns whether it was away until now."""
        self.totals[shard], self.counts[shard] = total, count
        self._smallest[shard] = smallest if smallest > 0 else math.inf
        returns = self.is_away(shard)
        self._away[shard] = False
        self.back += returns
        return returns

    def lose(self, shard: int) -> bool:
        """Take a shard's share from it. Returns whether it was there until now."""
        leaves = not self.is_away(shard)
        self._away[shard] = True
        self.totals[shard] = self.counts[shard] = 0
        self._smallest[shard] = math.inf
        self.lost += leaves
        return leaves

    def together(self, parts: Sequence[Part]) -> Draw:
        """The draw of a whole batch, with the shards in its keys, in the order of `parts`."""
        keys = [with_shard(part.draw.keys, part.shard) for part in parts]
        leaves = [part.draw.leaves * (part.known / part.draw.total) for part in parts]
        return Draw(
            np.concatenate(keys),
            np.concatenate([part.draw.indices for part in parts]),
            np.concatenate(leaves),
            float(self.totals.sum()),
            int(self.counts.sum()),
            min(float(self._smallest.min()), *(float(some.min()) for some in leaves)),
        )
