"""What a simulated run did, and what kept it from doing more."""

from dataclasses import dataclass

from zapex.studies import bounds

_FULL, _BUSY = 0.97, 0.85
_SHARED = (bounds.CORES, bounds.THREADS)
_ACTORS_WAY = (bounds.RELAYS, bounds.HOST_UP, bounds.SITE_UP, bounds.REPLAY_IN, *_SHARED)
_LEARNERS_WAY = (bounds.REPLAY_OUT, bounds.LEARNER_IN, *_SHARED)


@dataclass(frozen=True)
class Outcome:
    """What a simulated run does.

    loads: share of time that the busiest resource of each kind works. batch_wait: share of time in
    which the learner has no batch. staleness_batches: learned between a batch's request and its
    use. batch_age_s: from a batch's draw to its use. parameters_age_s: of those that actors play
    with, and parameters_age_batches: learned meanwhile. push_s: from a burst's end to its ack.
    limit, learner_limit: what keeps actors, and the learner, from going faster.
    """

    actors: int
    steps_per_s: float
    batches_per_s: float
    staleness_batches: float
    batch_age_s: float
    batch_wait: float
    parameters_age_s: float
    parameters_age_batches: float
    push_s: float
    loads: dict[str, float]
    limit: str
    learner_limit: str


def limits(loads: dict[str, float], held: float, short: float) -> tuple[str, str]:
    """What keeps the actors from more steps, and the learner from more batches.

    held, short: shares of the replay's turns after which the limiter keeps actors, or the learner.
    """
    found = []
    for own, kept, others, trip in (
        (bounds.ACTORS, held, _ACTORS_WAY, "round trips to the replay"),
        (bounds.LEARNER, short, _LEARNERS_WAY, "round trips to the replay (raise --prefetch)"),
    ):
        worst = max(others, key=lambda name: loads[name])
        if loads[own] >= _FULL:
            found.append(own)
        elif kept > 0.5:
            found.append(bounds.LEARNER if own == bounds.ACTORS else bounds.ACTORS)
        else:
            found.append(worst if loads[worst] >= _BUSY else trip)
    return found[0], found[1]
