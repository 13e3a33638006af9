"""What a point that does not fit on this host would be: a closed queue of actors at one server.

Exact mean value analysis (Reiser & Lavenberg, J. ACM 27(2), 1980) of one queueing station and a
delay: an actor computes and moves bytes on its own for Z seconds, then needs the server (Redis, the
replay, or a learner that serves itself) for S seconds and waits for those before it.
"""

from typing import NamedTuple


class Cycle(NamedTuple):
    """One actor's cycle, measured where it is alone.

    compute_s: at its own work. transfer_s: pushing and pulling, all of it. service_s: what the
    server's core works for it meanwhile.
    """

    compute_s: float
    transfer_s: float
    service_s: float


def transfer_s(cycle: Cycle, actors: int) -> float:
    """Seconds of pushing and pulling in a cycle, with so many actors at the server."""
    service = min(cycle.service_s, cycle.transfer_s)
    alone = cycle.compute_s + cycle.transfer_s - service
    queue, response = 0.0, service
    for present in range(1, actors + 1):
        response = service * (1.0 + queue)
        queue = present * response / (alone + response)
    return cycle.transfer_s - service + response


def share(cycle: Cycle, actors: int) -> float:
    """Of an actor's time: pushing and pulling."""
    moved = transfer_s(cycle, actors)
    return moved / (cycle.compute_s + moved)
