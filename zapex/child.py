"""One role in one process: what `python -m zapex.child` runs, and the loop around a duty cycle."""

import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zapex.idle import Waiter
from zapex.shm_segment import Segment
from zapex.shm_transport import Host
from zapex.supervisor import child_setup
from zapex.topology import Clock, DutyCycle, Run, make_role, totals_of

_LONGEST_WAIT_S = 0.2  # also how soon a waiting role sees that it shall stop
_PATIENCE_S = 1.0  # for the duty cycle under way; what follows is saving


@dataclass(frozen=True)
class Order:
    """What the parent tells a child, as JSON on its command line; descriptors are inherited."""

    name: str
    config: dict[str, Any]
    spec: dict[str, Any]
    run_dir: str
    control_fd: int
    experience_fd: int
    eventfds: list[int]
    base: dict[str, float]
    started_ns: int

    def to_json(self) -> str:
        """The command line's text."""
        return json.dumps(vars(self))


class BrokenOff(BaseException):
    """A duty cycle was still at it long after it should have ended."""


class Stop:
    """Set by SIGTERM; a role finishes its duty cycle and ends.

    A cycle that compiles a kernel or waits for a busy machine is broken off after a while: what
    there is to save has to be saved before the parent loses its patience.
    """

    def __init__(self) -> None:
        self.asked = False
        self._over = False
        signal.signal(signal.SIGALRM, self._break_off)
        signal.signal(signal.SIGTERM, self._ask)

    def over(self) -> None:
        """The last duty cycle has ended; nothing is broken off from here on."""
        self._over = True
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)

    def _break_off(self, number: int, frame: object) -> None:
        if not self._over:
            self._over = True
            raise BrokenOff


def run_role(role: DutyCycle, waiter: Waiter, stop: Stop) -> None:
    """Duty cycles until told to stop; a role without work waits, and looks again in time."""
    with contextlib.suppress(BrokenOff):
        while not stop.asked:
            if not role.do_work():
                waiter.wait(lambda: stop.asked or role.ready(), _LONGEST_WAIT_S)
        stop.over()


def main(text: str) -> None:
    """Run one role until SIGTERM."""
    order = Order(**json.loads(text))
    incarnation = child_setup(order.name)
    # SIGTERM keeps its default action for now: a role that is still starting has nothing to save.
    from zapex.config import Config
    from zapex.environments import EnvironmentSpec

    run = Run(
        Config.from_dict(order.config),
        EnvironmentSpec(**order.spec),
        Path(order.run_dir),
        int(order.base.get("steps", 0)),
    )
    plan = run.plan
    host = Host(
        plan,
        Segment.attach(order.control_fd, plan.nbytes).buffer,
        Segment.attach(order.experience_fd, plan.replay.nbytes).buffer,
        order.eventfds,
    )
    totals = totals_of(host, order.base, order.started_ns)
    role = make_role(order.name, run, host, incarnation, Clock(), totals)
    index = plan.role_index(order.name)
    waiter = Waiter(host.sleeping, host.sleeping_word(order.name), order.eventfds[index])
    run_role(role, waiter, Stop())
    role.close()
    # It ends by the signal that it obeyed. Status 0 would say that its work is done, and a role
    # that somebody else told to end would not be started again.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1])
