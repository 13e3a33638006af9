"""The returns and lengths of games of one policy, in the game's own score."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Games:
    """Returns and lengths of games of one policy."""

    returns: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """The returns' standard deviation (of these games, not of the mean)."""
        return float(np.std(self.returns))
