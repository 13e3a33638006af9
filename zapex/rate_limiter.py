"""Samples per insert: who may go on, who waits, and why.

The learner is *owed* `samples_per_insert` samples for every transition granted to an actor since
`min_size` transitions were committed. Grants stop before more than `tolerance` samples are owed,
samples stop when none are. So the two can never wait for each other at once:

    no grant:   owed + grant * samples_per_insert > tolerance
    no sample:  owed < batch
    both:       grant * samples_per_insert + batch > tolerance, which the constructor refuses

Inserts are charged when they are granted, because then the room is gone; what a chunk that closed
early or a dead actor did not use is refunded. Compare Reverb's SampleToInsertRatio.
"""

from dataclasses import dataclass
from fractions import Fraction

from zapex.errors import ConfigError, ReplayError


@dataclass(frozen=True, kw_only=True)
class LimiterConfig:
    """What a limiter is built from; refuses whatever could deadlock.

    All counts are transitions. `grant` is the most that one `insert` charges (streams x K),
    `batch` the most that one `sample` draws, `capacity` the most that the replay can hold.
    `samples_per_insert` 0 is no limit: then only `min_size` is waited for.
    """

    samples_per_insert: float
    min_size: int
    tolerance: int
    grant: int
    batch: int
    capacity: int

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        ratio = self.samples_per_insert
        if not 0 <= ratio < float("inf"):
            raise ConfigError(f"samples_per_insert must be 0 (no limit) or positive, got {ratio}")
        for name in ("min_size", "grant", "batch", "capacity"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.min_size > self.capacity:
            raise ConfigError(
                f"min_size={self.min_size} is above the capacity of {self.capacity}: this will "
                "deadlock as soon as the replay is full, because the learner waits for "
                f"transitions that never fit; lower min_size to {self.capacity} or raise capacity"
            )
        # Exact: a rounded sum could accept what then stands still.
        needed = Fraction(ratio) * self.grant + self.batch
        if ratio and self.tolerance < needed:
            raise ConfigError(
                f"tolerance={self.tolerance} is below one grant plus one batch "
                f"({self.grant} x {ratio:g} + {self.batch} samples): this will deadlock as soon "
                "as too much is owed for another grant and too little for another batch; raise "
                f"tolerance to {-int(-needed // 1)} or more"
            )


class RateLimiter:
    """Counts grants, commits, refunds and samples; never blocks, only answers.

    Not thread-safe: the replay's duty cycle owns it. A replay that attaches to memory that
    already holds something says what: `committed` transitions are live, `granted` are out with
    actors. It then owes only for what is out.

        if limiter.can_insert(n): limiter.insert(n); ...grant...
        limiter.commit(k)             # k of them can now be drawn
        limiter.refund(n - k)         # the chunk closed early, or its actor died
        if limiter.can_sample(batch): limiter.sample(batch); ...answer...
    """

    def __init__(self, config: LimiterConfig, *, committed: int = 0, granted: int = 0) -> None:
        self.config = config
        # Integers throughout: owed = charged * numerator / denominator - sampled, with no drift.
        self._numerator, self._denominator = Fraction(config.samples_per_insert).as_integer_ratio()
        self._committed = committed
        self._outstanding = granted
        self._open = committed >= config.min_size
        self._charged = granted if self._open else 0
        self._sampled = 0

    @property
    def open(self) -> bool:
        """min_size has been committed: samples may be drawn."""
        return self._open

    @property
    def owed(self) -> float:
        """Samples that the learner may still draw for what was granted; negative after refunds."""
        return self._charged * self._numerator / self._denominator - self._sampled

    def can_insert(self, n: int) -> bool:
        """Whether `n` transitions may be granted now."""
        self._check("grant", n, self.config.grant)
        if not self._open or not self._numerator:
            return True
        ceiling = (self.config.tolerance + self._sampled) * self._denominator
        return (self._charged + n) * self._numerator <= ceiling

    def insert(self, n: int) -> None:
        """Charge a grant of `n` transitions. Raises ReplayError when it may not be made now."""
        if not self.can_insert(n):
            raise ReplayError(f"a grant of {n} before its time: {self.explain()}")
        self.charge(n)

    def charge(self, n: int) -> None:
        """Count `n` transitions that are on their way, whoever else came in since they might."""
        self._outstanding += n
        if self._open:
            self._charged += n

    def commit(self, n: int) -> None:
        """`n` granted transitions can now be drawn; they are no longer out with an actor."""
        self._check("commit", n, self._outstanding)
        self._outstanding -= n
        self._committed += n
        if not self._open and self._committed >= self.config.min_size:
            self._open = True
            self._charged = self._outstanding

    def refund(self, n: int) -> None:
        """`n` granted transitions will never come: an early close, or a death."""
        self._check("refund", n, self._outstanding)
        self._outstanding -= n
        if self._open:
            self._charged -= n

    def can_sample(self, n: int) -> bool:
        """Whether `n` transitions may be drawn now."""
        self._check("batch", n, self.config.batch)
        if not self._open or not self._numerator:
            return self._open
        return (self._sampled + n) * self._denominator <= self._charged * self._numerator

    def sample(self, n: int) -> None:
        """Count a batch of `n`. Raises ReplayError when it may not be drawn now."""
        if not self.can_sample(n):
            raise ReplayError(f"a batch of {n} before its time: {self.explain()}")
        self._sampled += n

    def explain(self) -> str:
        """Who waits, and for what, in one line."""
        config = self.config
        if not self._open:
            return (
                f"the learner waits: {self._committed} of min_size={config.min_size} transitions "
                "are committed"
            )
        if not self.can_insert(config.grant):
            return (
                f"actors wait for the learner: it is {self.owed:.0f} samples behind "
                f"samples_per_insert={config.samples_per_insert:g}, and another grant of "
                f"{config.grant} would pass tolerance={config.tolerance}"
            )
        if not self.can_sample(config.batch):
            return (
                f"the learner waits for actors: {self.owed:.0f} samples are left for a batch of "
                f"{config.batch} at samples_per_insert={config.samples_per_insert:g}"
            )
        return "nobody waits"

    @staticmethod
    def _check(what: str, n: int, most: int) -> None:
        if not 0 <= n <= most:
            raise ReplayError(f"a {what} must be of 0 to {most} transitions, got {n}")
