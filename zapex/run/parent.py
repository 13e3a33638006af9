"""The parent of a run's processes on one host: owns the memory, starts roles and ends them.

`run_inline` runs them in one process and thread instead, repeatable bit for bit from the seed.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np

from zapex.chunks.batch import aligned_zeros
from zapex.errors import ZapexError
from zapex.host.plan import NOTICE
from zapex.host.roster import SaveWords
from zapex.machine.child import DONE, thread_environment
from zapex.machine.segment import Populator, Segment, interleaved
from zapex.machine.supervisor import Died, Event, Exited, GaveUp, ProcessSpec, Started, Supervisor
from zapex.run.child import Order
from zapex.run.collector import Caller, Collector, Ending
from zapex.run.keeping import SaveDeadline
from zapex.run.run import Clock, Run
from zapex.run.topologies import Start, make_role, most_learner_threads, totals_of
from zapex.shm_transport import HostMemory

_TICK_S = 0.1
_FAREWELL_S = 10.0  # the replay waits six seconds for hosts that do not answer
_GRACE_S = 3.5  # of the five seconds within which all ends, the curve included
_ROUND_NS = 10_000_000  # inline, time is counted in rounds
_ROUNDS_A_LOOK = 16  # between checks of limits; a count, so that repeated runs end alike


def run_processes(run: Run, base: dict[str, float], caller: Caller | None = None) -> Ending:
    """Start the roles, watch them, and end them within five seconds of a request."""
    plan = run.plan
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(Segment.create("zapex-control", plan.nbytes))
        eventfds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in plan.roles]
        for fd in eventfds:
            stack.callback(os.close, fd)
        fds, slots = [control.fd], np.empty(0, np.uint8)
        populator = None
        if plan.experience_bytes:
            huge, spread = run.config.replay.huge_pages, run.config.run.numa == "interleave"
            with interleaved(spread and huge):  # other memory is reserved while roles start
                experience = stack.enter_context(
                    Segment.create(
                        "zapex-experience", plan.experience_bytes, huge_pages=huge, reserve=False
                    )
                )
            slots, populator = experience.buffer, Populator(experience, interleave=spread)
            fds.append(experience.fd)
        host = HostMemory(plan, control.buffer, slots, eventfds, create=True)
        control.populate()
        blocks = {name: host.metrics(name) for name, _ in plan.roles}
        with (
            Supervisor(
                on_death=lambda event: host.set_incarnation(event.name, 0),
                is_up=lambda name, pid: blocks[name].pid == pid,
            ) as supervisor,
            Collector(run, host, base, caller) as collector,
        ):
            supervisor.install_signal_handlers(outlives_terminal=True)
            try:
                for spec in _process_specs(collector, fds):
                    _report(collector, supervisor.start(spec))
                if populator is not None:
                    populator.start()
                _watch(supervisor, collector, populator)
            finally:
                _shut_down(supervisor, collector)
                if populator is not None:
                    populator.stop()
            collector.collect()
            collector.take_notices()
            collector.look_at_memory()
    return collector.finish()


def _process_specs(collector: Collector, fds: list[int]) -> Iterator[ProcessSpec]:
    """fds: descriptors of the shared memory, the control block's first."""
    run, eventfds = collector.run, list(collector.host.eventfds)
    config = run.config
    logs = run.run_dir / "logs"
    logs.mkdir(exist_ok=True)
    # The parameters of a custom network are counted once for all.
    facts = asdict(replace(run, parameters=run.plan.parameter_bytes // 4))
    acts = "inference" if "inference" in run.part.roles else "actor"  # the other has no torch
    threads = {acts: config.actor.actor_threads, "learner": most_learner_threads(run)}
    for name, role in run.processes:
        order = Order(
            name=name,
            run=facts,
            control_fd=fds[0],
            experience_fd=fds[1] if len(fds) > 1 else -1,
            eventfds=eventfds,
            base=collector.base,
            started_ns=collector.started_ns,
            path=[os.path.abspath(entry) for entry in sys.path],
        )
        yield ProcessSpec(
            name=name,
            argv=[sys.executable, "-P", "-m", "zapex.run.child", order.to_json()],
            pass_fds=[*fds, *eventfds],
            env=thread_environment(threads.get(role, 1)),
            restart=True,
            done_status=DONE,
            log_path=logs / f"{name.replace(' ', '-')}.log",
        )


def _watch(supervisor: Supervisor, collector: Collector, populator: Populator | None) -> None:
    """Watch until the run ends, or a signal ends it."""
    while not collector.ending.reason:
        for event in supervisor.poll(_TICK_S):
            _report(collector, event)
        if populator is not None and populator.error is not None:
            collector.end(str(populator.error), failed=True)
        collector.collect()
        collector.take_notices()
        collector.tick()
        collector.check_limits()
        if supervisor.hung_up or collector.monitor.terminal_is_gone:
            supervisor.hung_up = False
            collector.leave_terminal()
        if supervisor.stop_signal is not None:
            collector.end(f"stopped by {supervisor.stop_signal.name}")
    if collector.ending.over and "endings" in collector.host.plan.rings:
        _let_replay_end_other_hosts(supervisor, collector)


def _shut_down(supervisor: Supervisor, collector: Collector) -> None:
    """End all roles; the one with the experience has time to save it."""
    part, host = collector.run.part, collector.host
    if not part.holds_replay or collector.run.config.replay.save_replay == "never":
        events = supervisor.shutdown(_GRACE_S)
    else:
        again = "Ctrl-C" if supervisor.stop_signal is not None else "Ctrl-C twice"
        deadline = SaveDeadline(SaveWords(host.part_of("saves")), collector.monitor.message, again)

        def keep_waiting() -> bool:
            collector.collect()
            waits = deadline.keep_waiting()
            collector.tick()
            return waits

        events = supervisor.shutdown(_GRACE_S, part.intake, keep_waiting)
    for event in events:
        _report(collector, event)


def _let_replay_end_other_hosts(supervisor: Supervisor, collector: Collector) -> None:
    """Let this host's replay end the other hosts. Then it ends by itself."""
    record = np.zeros(1, NOTICE)
    record["text"] = collector.ending.reason.encode()
    collector.host.ring("endings").producer().try_offer(record)
    deadline_s = time.monotonic() + _FAREWELL_S
    while time.monotonic() < deadline_s and supervisor.stop_signal is None:
        for event in supervisor.poll(_TICK_S):
            _report(collector, event)
            if isinstance(event, Exited) and event.name == "replay":
                return
        collector.collect()


def _report(collector: Collector, event: Event) -> None:
    """Report to the roles and the user what happened to a process; the run may end."""
    if isinstance(event, Started):
        collector.host.set_incarnation(event.name, event.incarnation)
    elif isinstance(event, Exited):
        if not collector.ending.reason:
            collector.has_ended(event.name)
    else:
        collector.monitor.message(str(event))
        if isinstance(event, Died):
            collector.deaths.append(str(event))
        if isinstance(event, GaveUp):
            collector.end(str(event), failed=True)


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
                collector.check_limits()
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
