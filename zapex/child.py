"""One role in one process: what `zapex.birth` leads to, and the loop around a duty cycle."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zapex.errors import Fenced, Refused, RunOver
from zapex.idle import Waiter, spin_seconds
from zapex.run import Clock, DutyCycle, Place, Run
from zapex.shm_segment import Segment
from zapex.shm_transport import Host
from zapex.topology import make_role, totals_of

_LONGEST_WAIT_S = 0.2  # also how soon a waiting role sees that it shall stop
_PATIENCE_S = 1.0  # for the duty cycle under way; what follows is saving
_AGAIN_S = 0.05


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
    place: dict[str, Any] | None = None

    def to_json(self) -> str:
        """The command line's text."""
        return json.dumps(vars(self))


class BrokenOff(BaseException):
    """A duty cycle was still at it long after it should have ended."""


class Stop:
    """Set by SIGTERM; a role finishes its duty cycle and ends.

    A cycle that compiles a kernel or waits for a busy machine is broken off after a while: what
    there is to save has to be saved before the parent loses its patience. Numba compiles with
    callbacks from C, and what is raised in one of those goes nowhere: it comes again at once.
    """

    def __init__(self) -> None:
        self.asked = self.broken_off = False
        self._over = False
        self._unraisable = sys.unraisablehook
        sys.unraisablehook = self._lost
        signal.signal(signal.SIGALRM, self._break_off)
        signal.signal(signal.SIGTERM, self._ask)

    def over(self) -> None:
        """The last duty cycle has ended; nothing is broken off from here on."""
        self._over = True
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        sys.unraisablehook = self._unraisable

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)

    def _break_off(self, number: int, frame: object) -> None:
        if not self._over:
            self._over = self.broken_off = True
            raise BrokenOff

    def _lost(self, lost: Any) -> None:
        if not issubclass(lost.exc_type, BrokenOff):
            self._unraisable(lost)
        else:
            self._over = False
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


def run_role(role: DutyCycle, waiter: Waiter, stop: Stop) -> None:
    """Duty cycles until told to stop; a role without work waits, and looks again in time."""
    with contextlib.suppress(BrokenOff):
        try:
            while not stop.asked:
                if not role.do_work():
                    waiter.wait(lambda: stop.asked or role.ready(), _LONGEST_WAIT_S)
        except Exception:
            if not stop.broken_off:  # else it is what Numba makes of a callback that failed
                raise
        stop.over()
    stop.over()  # here after a break


def main(text: str, incarnation: int) -> None:
    """Run one role until SIGTERM; `zapex.birth` calls it once this is a supervised child."""
    order = Order(**json.loads(text))
    # SIGTERM keeps its default action for now: a role that is still starting has nothing to save.
    from zapex.config import Config
    from zapex.environments import EnvironmentSpec

    run = Run(
        Config.from_dict(order.config),
        EnvironmentSpec(**order.spec),
        Path(order.run_dir),
        int(order.base.get("steps", 0)),
        _place(order.place),
    )
    plan = run.plan
    experience = np.empty(0, np.uint8)
    if order.experience_fd >= 0:
        experience = Segment.attach(order.experience_fd, plan.replay.nbytes).buffer
    control = Segment.attach(order.control_fd, plan.nbytes).buffer
    host = Host(plan, control, experience, order.eventfds)
    _play(order, run, host, incarnation)
    # It ends by the signal that it obeyed. Status 0 would say that its work is done, and a role
    # that somebody else told to end would not be started again.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _place(facts: dict[str, Any] | None) -> Place | None:
    return Place(**{**facts, "numbers": tuple(facts["numbers"])}) if facts else None


def _play(order: Order, run: Run, host: Host, incarnation: int) -> None:
    totals = totals_of(host, order.base, order.started_ns)
    if run.place is None or order.name not in ("relay", "replay", "learner"):
        role = make_role(order.name, run, host, incarnation, Clock(), totals)
        run_role(role, _waiter(order, run, host), Stop())
        role.close()
        return
    from zapex.hosts import Notices, make_networked

    # From here on a verdict of the replay's is told to the parent; another life would mend nothing.
    try:
        networked = make_networked(order.name, run, host, incarnation, Clock(), totals)
        try:
            run_role(networked, _waiter(order, run, host, networked.fds), Stop())
        except (RunOver, Fenced, Refused):
            networked.save()
            raise
    except (RunOver, Fenced, Refused) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        Notices(host).verdict(error)
        sys.exit(0)
    networked.close()


def _waiter(order: Order, run: Run, host: Host, also: Sequence[int] = ()) -> Waiter:
    fd = order.eventfds[host.plan.role_index(order.name)]
    word = host.sleeping_word(order.name)
    return Waiter(host.sleeping, word, fd, spin_seconds(busy_threads(run)), also)


def busy_threads(run: Run) -> int:
    """Threads of this host's roles that would use a core each if they could."""
    actor, learner = run.config.actor, run.config.learner
    threads = {
        "actor": max(actor.actor_threads, actor.env_threads),
        "learner": learner.learner_threads,
        "evaluator": 0,  # now and then
    }
    return sum(threads.get(role, 1) for _, role in run.plan.roles)
