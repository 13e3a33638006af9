"""Naive twins: the same answers, written so that they can be seen to be right."""

import math
from fractions import Fraction


class NaiveLimiter:
    """The limiter as a log that is counted anew for every question, in exact fractions."""

    def __init__(self, samples_per_insert, min_size, tolerance):
        self.ratio = Fraction(samples_per_insert)
        self.min_size = min_size
        self.tolerance = tolerance
        self.log = []

    def note(self, what, n):
        self.log.append((what, n))

    def _owed(self):
        """None until min_size is committed; then what was granted and is not yet sampled."""
        committed = out = 0
        owed = None
        for what, n in self.log:
            committed += n if what == "commit" else 0
            out += {"insert": n, "commit": -n, "refund": -n, "sample": 0}[what]
            if owed is None:
                owed = out * self.ratio if committed >= self.min_size else None
            else:
                change = {"insert": self.ratio, "commit": 0, "refund": -self.ratio, "sample": -1}
                owed += change[what] * n
        return owed

    def can_insert(self, n):
        owed = self._owed()
        return owed is None or self.ratio == 0 or owed + n * self.ratio <= self.tolerance

    def can_sample(self, n):
        owed = self._owed()
        return owed is not None and (self.ratio == 0 or owed >= n)


class NaiveSumTree:
    """Priorities in a list; every answer is computed anew with exact sums."""

    def __init__(self, capacity):
        self.leaves = [0.0] * capacity

    def update(self, indices, priorities):
        for index, priority in zip(indices, priorities, strict=True):
            self.leaves[index] = priority

    @property
    def total(self):
        return math.fsum(self.leaves)

    @property
    def min_positive(self):
        return min((leaf for leaf in self.leaves if leaf > 0.0), default=math.inf)

    def find(self, prefix_sum):
        """Smallest i whose cumulative sum exceeds the value; else the last positive leaf."""
        exact = Fraction(0)
        last_positive = -1
        for i, leaf in enumerate(self.leaves):
            exact += Fraction(leaf)
            if leaf > 0.0:
                last_positive = i
                if exact > prefix_sum:
                    return i
        return last_positive
