"""One role in one process: `python -m zapex.run.child ORDER`.

It is bound to its parent before it imports anything large. A parent may die while its children
start, which takes seconds on a busy machine. Until a child has asked the kernel to end it with its
parent, nothing would end it.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zapex.errors import CheckpointError, ConfigError, Diverged, Fenced, Refused, RunOver
from zapex.machine.child import DONE, Stop, child_setup, end_by_sigterm, run_until_stopped

if TYPE_CHECKING:  # all of it imports numpy and numba
    from zapex.run.topologies import Start

_LONGEST_WAIT_S = 0.2  # also how soon a waiting role notices that it must stop


@dataclass(frozen=True)
class Order:
    """What the parent hands to a child, as JSON on its command line; descriptors are inherited.

    Attributes:
        run: a Run as plain values.
        base: the run's counters when it was resumed.
        path: where the parent finds modules.
    """

    name: str
    run: dict[str, Any]
    control_fd: int
    experience_fd: int
    eventfds: list[int]
    base: dict[str, float]
    started_ns: int
    path: Sequence[str] = ()

    def to_json(self) -> str:
        """The order as the text of a command line."""
        return json.dumps(vars(self), default=str)  # str: of paths


def main(text: str) -> None:
    """Become the role that the order in `text` names, and run it until SIGTERM."""
    # SIGTERM keeps its default action while a role is starting: it has nothing to save.
    incarnation = child_setup(json.loads(text)["name"])
    try:
        play(Order(**json.loads(text)), incarnation)
    except (ConfigError, CheckpointError, Diverged) as error:
        print(" ".join(str(error).split()), flush=True)
        # A status of sysexits.h: the supervisor does not restart the role.
        sys.exit(os.EX_CONFIG)
    end_by_sigterm()


def play(order: Order, incarnation: int) -> None:
    """Make the role over its host's memory, and run it until SIGTERM."""
    import numpy as np

    from zapex.machine.reading import typed
    from zapex.machine.resources import near_gpu
    from zapex.machine.segment import Segment
    from zapex.run.run import Run
    from zapex.run.topologies import Attended, Start, make_role, totals_of
    from zapex.shm_transport import HostMemory

    sys.path += [entry for entry in order.path if entry not in sys.path]  # after what is installed
    run: Run = typed(Run, order.run)
    plan = run.plan
    experience = np.empty(0, np.uint8)
    if order.experience_fd >= 0:
        experience = Segment.attach(order.experience_fd, plan.replay.nbytes).buffer
    control = Segment.attach(order.control_fd, plan.nbytes).buffer
    host = HostMemory(plan, control, experience, order.eventfds)
    near = near_gpu() if run.config.run.numa == "gpu" and order.name == "learner" else ()
    if near := os.sched_getaffinity(0).intersection(near):
        os.sched_setaffinity(0, near)  # before torch starts threads; batches are touched here first
    totals = totals_of(host, order.base, order.started_ns)
    start = Start(order.name, run, host, incarnation, totals=totals)
    try:
        role = make_role(start)
        attended = role if isinstance(role, Attended) else None
        wait = _wait(start, attended.fds if attended is not None else ())
        try:
            run_until_stopped(role, lambda ready: wait(ready, _LONGEST_WAIT_S), Stop())
        except (RunOver, Fenced, Refused):
            if attended is not None:
                attended.leave()
            raise
    except (RunOver, Fenced, Refused) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        start.notices.send_end(error)  # the parent decides what follows
        sys.exit(DONE)
    role.close()


def _wait(start: "Start", fds: Sequence[int] | None) -> Callable[[Callable[[], bool], float], bool]:
    """What waits for the role's eventfd or `fds`. None: `ready` must be called all the time."""
    from zapex.machine.waiting import Waiter, rest_until, spin_seconds
    from zapex.run.topologies import busy_threads

    if fds is None:
        return lambda ready, timeout_s: rest_until(ready, timeout_s, lambda left_s: None)
    host, run = start.host, start.run
    spin_s = spin_seconds(sum(busy_threads(run, role) for _, role in run.plan.roles))
    eventfd = host.eventfds[host.plan.role_index(start.name)]
    return Waiter(host.sleeping, host.sleeping_word(start.name), eventfd, spin_s, fds).wait


if __name__ == "__main__":
    main(sys.argv[1])
