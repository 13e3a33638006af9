"""One role in one process, started by `zapex.run.birth`."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zapex.errors import Fenced, Refused, RunOver
from zapex.machine.child import DONE, Stop, end_by_sigterm, run_until_stopped
from zapex.machine.resources import near_gpu
from zapex.machine.segment import Segment
from zapex.machine.waiting import Waiter, rest_until, spin_seconds
from zapex.run.run import Membership, Run
from zapex.run.topology import LinkedRole, Start, make_role, totals_of
from zapex.shm_transport import HostMemory

_LONGEST_WAIT_S = 0.2  # also how soon a waiting role notices that it must stop


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
    membership: dict[str, Any] | None = None
    wrap: str = ""
    parameters: int = 0
    path: Sequence[str] = ()  # where the parent finds modules

    def to_json(self) -> str:
        """The order as the text of a command line."""
        return json.dumps(vars(self))

    def run(self) -> Run:
        """The run as this child sees it."""
        from zapex.config.settings import Config
        from zapex.envs.environments import EnvironmentSpec

        facts = self.membership
        return Run(
            Config.from_dict(self.config),
            EnvironmentSpec(**self.spec),
            Path(self.run_dir),
            int(self.base.get("steps", 0)),
            Membership(**facts | {n: tuple(facts[n]) for n in _TUPLES}) if facts else None,
            self.parameters,
            self.wrap,
        )


_TUPLES = ("numbers", "urls")  # lists, as JSON has them


def main(text: str, incarnation: int) -> None:
    """Run one role until SIGTERM; `zapex.run.birth` calls it once this is a supervised child."""
    # SIGTERM keeps its default action while a role is starting: it has nothing to save.
    order = Order(**json.loads(text))
    sys.path += [entry for entry in order.path if entry not in sys.path]  # after what is installed
    run = order.run()
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
    _play(Start(order.name, run, host, incarnation, totals=totals))
    end_by_sigterm()


def _play(start: Start) -> None:
    # The parent is told of the replay's refusal; another start would not help.
    try:
        role = make_role(start)
        linked = role if isinstance(role, LinkedRole) else None
        wait = _wait(start, linked.fds if linked is not None else ())
        try:
            run_until_stopped(role, lambda ready: wait(ready, _LONGEST_WAIT_S), Stop())
        except (RunOver, Fenced, Refused):
            if linked is not None:
                linked.save()
            raise
    except (RunOver, Fenced, Refused) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        start.notices.verdict(error)
        sys.exit(DONE)
    role.close()


def _wait(start: Start, also: Sequence[int] | None) -> Callable[[Callable[[], bool], float], bool]:
    if also is None:
        return lambda ready, timeout_s: rest_until(ready, timeout_s, lambda left_s: None)
    host, spin_s = start.host, spin_seconds(busy_threads(start.run))
    fd = host.eventfds[host.plan.role_index(start.name)]
    return Waiter(host.sleeping, host.sleeping_word(start.name), fd, spin_s, also).wait


def busy_threads(run: Run) -> int:
    """Threads of this host's roles that would use a whole core each."""
    threads = {"learner": run.most_learner_threads()}
    threads["evaluator"] = 0  # from time to time
    return sum(
        threads[role] if role in threads else run.acting_threads(role) for _, role in run.plan.roles
    )
