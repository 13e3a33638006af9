"""Samples per insert: whether the actors and the learner may continue or must wait, and why.

The learner is *owed* `samples_per_insert` samples for every transition granted to an actor since
`min_size_to_sample` transitions were committed. A grant must wait if it would make more than
`tolerance` samples owed. A batch must wait if too few samples are owed. Both cannot wait at once:

    no grant:   owed + grant * samples_per_insert > tolerance
    no sample:  owed < batch
    both:       grant * samples_per_insert + batch > tolerance, but the constructor refuses this

An insert is charged when it is granted, because its room is then in use. If a chunk closes early or
an actor dies, the unused part is refunded. Compare Reverb's SampleToInsertRatio.
"""

from dataclasses import dataclass
from fractions import Fraction

from zapex.errors import ConfigError, ReplayError


@dataclass(frozen=True, kw_only=True)
class LimiterConfig:
    """The settings of a limiter. Settings that could deadlock are refused.

    All counts are transitions. `grant` is the most that one `insert` charges (streams x K).
    `batch` is the most that one `sample` draws. `capacity` is the most that the replay can hold.
    If `samples_per_insert` is 0, `min_size_to_sample` is the only limit.
    """

    samples_per_insert: float
    min_size_to_sample: int
    tolerance: int
    grant: int
    batch: int
    capacity: int

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        ratio = self.samples_per_insert
        if not 0 <= ratio < float("inf"):
            raise ConfigError(f"samples_per_insert must be 0 (no limit) or positive, got {ratio}")
        for name in ("min_size_to_sample", "grant", "batch", "capacity"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.min_size_to_sample > self.capacity:
            raise ConfigError(
                f"min_size_to_sample={self.min_size_to_sample} is above the capacity of "
                f"{self.capacity}: this will deadlock as soon as the replay is full, because the "
                "learner waits for transitions that never fit; lower min_size_to_sample to "
                f"{self.capacity} or raise capacity"
            )
        # Exact: a rounded sum could accept settings that deadlock.
        needed = Fraction(ratio) * self.grant + self.batch
        if ratio and self.tolerance < needed:
            raise ConfigError(
                f"tolerance={self.tolerance} is below one grant plus one batch "
                f"({self.grant} x {ratio:g} + {self.batch} samples): this will deadlock as soon "
                "as the samples owed are too many for another grant and too few for a batch; raise "
                f"tolerance to {-int(-needed // 1)} or more"
            )

    def explain(self, committed: int, owed: float | None, batch: int = 0) -> str:
        """Which side waits, and for what, in one line.

        committed: transitions committed so far. owed: samples that the learner may still draw;
        None while `committed` is below min_size_to_sample. batch: samples asked for; 0: `batch`.
        """
        ratio, batch = self.samples_per_insert, batch or self.batch
        if owed is None:
            return (
                f"the learner waits: {committed} of min_size_to_sample={self.min_size_to_sample} "
                "transitions are committed"
            )
        if ratio and owed + self.grant * ratio > self.tolerance:
            return (
                f"actors wait for the learner: it is {owed:.0f} samples behind "
                f"samples_per_insert={ratio:g}, and another grant of {self.grant} would pass "
                f"tolerance={self.tolerance}"
            )
        if ratio and owed < batch:
            return (
                f"the learner waits for actors: {owed:.0f} samples are left for a batch of "
                f"{batch} at samples_per_insert={ratio:g}"
            )
        return "no role waits"


class RateLimiter:
    """Counts grants, commits, refunds and samples. It never blocks; it answers.

    Not thread-safe: only the replay's duty cycle uses it. A replay that attaches to used memory
    passes its counts: `committed` transitions are live, `granted` are held by actors. Samples are
    then owed only for the granted ones.

        if limiter.can_insert(n): limiter.insert(n); ...grant...
        limiter.commit(k)             # k of them can now be drawn
        limiter.refund(n - k)         # the chunk closed early, or its actor died
        if limiter.can_sample(batch): limiter.sample(batch); ...answer...
    """

    def __init__(self, config: LimiterConfig, *, committed: int = 0, granted: int = 0) -> None:
        self.config = config
        # Only integers, so no drift: owed = charged * numerator / denominator - sampled.
        self._numerator, self._denominator = Fraction(config.samples_per_insert).as_integer_ratio()
        self._committed = committed
        self.outstanding = granted  # transitions granted to actors
        # Whether min_size_to_sample was committed, so that samples may be drawn.
        self.open = committed >= config.min_size_to_sample
        self._charged = granted if self.open else 0
        self._sampled = 0

    @property
    def owed(self) -> float:
        """Samples that the learner may still draw for what was granted; negative after refunds."""
        return self._charged * self._numerator / self._denominator - self._sampled

    def can_insert(self, n: int) -> bool:
        """Whether `n` transitions may be granted now."""
        self._check("grant", n, self.config.grant)
        if not self.open or not self._numerator:
            return True
        ceiling = (self.config.tolerance + self._sampled) * self._denominator
        return (self._charged + n) * self._numerator <= ceiling

    def insert(self, n: int) -> None:
        """Charge a grant of `n` transitions, once `can_insert` allowed it."""
        self.outstanding += n
        if self.open:
            self._charged += n

    def commit(self, n: int) -> None:
        """Count `n` granted transitions that can now be drawn; no actor holds them."""
        self._check("commit", n, self.outstanding)
        self.outstanding -= n
        self._committed += n
        if not self.open and self._committed >= self.config.min_size_to_sample:
            self.open = True
            self._charged = self.outstanding

    def refund(self, n: int) -> None:
        """Refund `n` granted transitions that will not come (early close, or dead actor)."""
        self._check("refund", n, self.outstanding)
        self.outstanding -= n
        if self.open:
            self._charged -= n

    def can_sample(self, n: int) -> bool:
        """Whether `n` transitions may be drawn now."""
        self._check("batch", n, self.config.batch)
        if not self.open or not self._numerator:
            return self.open
        return (self._sampled + n) * self._denominator <= self._charged * self._numerator

    def sample(self, n: int) -> None:
        """Count a batch of `n`, once `can_sample` allowed it."""
        self._sampled += n

    def explain(self, batch: int = 0) -> str:
        """Which side waits, and for what, in one line. batch: as in `LimiterConfig.explain`."""
        return self.config.explain(self._committed, self.owed if self.open else None, batch)

    @staticmethod
    def _check(what: str, n: int, most: int) -> None:
        if not 0 <= n <= most:
            raise ReplayError(f"a {what} must be of 0 to {most} transitions, got {n}")
