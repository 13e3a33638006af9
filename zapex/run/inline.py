"""A run in one process and one thread, repeatable bit for bit from its seed."""

import os

from zapex.chunks.batch import aligned_zeros
from zapex.errors import ZapexError
from zapex.run.collector import Caller, Collector, Ending
from zapex.run.run import Clock, Run
from zapex.run.supervisor import Supervisor
from zapex.run.topology import Start, make_role, totals_of
from zapex.shm_transport import HostMemory

_ROUND_NS = 10_000_000  # time is counted in rounds
_ROUNDS_A_LOOK = 16  # between checks of limits; a count, so that repeated runs end alike


def run_inline(run: Run, base: dict[str, float], caller: Caller | None = None) -> Ending:
    """Run all duty cycles in turn, until a limit, a signal or the caller ends it."""
    rounds = 0
    clock = Clock(lambda: rounds * _ROUND_NS)
    plan = run.plan
    eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in plan.roles]
    memory = aligned_zeros(plan.nbytes), aligned_zeros(plan.experience_bytes)
    host = HostMemory(plan, *memory, eventfds, create=True)
    # The learner is first: actors wait for its parameters.
    names = sorted((name for name, _ in run.processes), key=lambda name: name != "learner")
    for name in names:
        host.set_incarnation(name, 1)
    with Supervisor() as supervisor, Collector(run, host, base, caller) as collector:
        supervisor.install_signal_handlers(outlives_terminal=True)
        totals = totals_of(host, base, collector.started_ns)
        roles = [make_role(Start(name, run, host, 1, clock, totals)) for name in names]
        while not collector.ending.reason:
            try:
                for role in roles:
                    role.do_work()
            except SystemExit as error:  # of an environment; it must not look like success
                raise ZapexError(f"a role must not exit by itself: {error!r}") from error
            rounds += 1
            collector.collect()
            collector.tick()
            if rounds % _ROUNDS_A_LOOK == 0:
                collector.take_notices()
                now = totals()
                collector.check_limits(now["frames"], now["wall_s"])
            if supervisor.hung_up or collector.monitor.terminal_is_gone:
                supervisor.hung_up = False
                collector.leave_terminal()
            if supervisor.stop_signal is not None:
                collector.end(f"stopped by {supervisor.stop_signal.name}")
        for role in roles:
            role.close()
        collector.collect()
        collector.take_notices()
        collector.look_at_memory()
    for fd in eventfds:
        os.close(fd)
    return collector.finish()
