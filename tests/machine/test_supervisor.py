"""Real processes that die, stop and disobey; no test leaves one behind."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from zapex.machine.child import DONE
from zapex.machine.supervisor import (
    Backoff,
    Continued,
    Died,
    Exited,
    GaveUp,
    IgnoredSigterm,
    ProcessSpec,
    Restarting,
    RestartPolicy,
    Started,
    Stopped,
    Supervisor,
    last_traceback,
    status_in_words,
)

pytestmark = pytest.mark.timeout(60)

MANY_STARTS = RestartPolicy(most_short_starts=100, most_short_starts_killed=100, first_s=0.01)
SETUP = "from zapex.machine.child import child_setup\nincarnation = child_setup('actor 3')\n"
READY = "print('ready', flush=True)\n"
SLEEP = "import time\ntime.sleep(60)\n"
IGNORES_SIGTERM = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def spec(tmp_path, source, **changes):
    name = changes.pop("name", "actor 3")
    argv = [sys.executable, "-c", textwrap.dedent(source)]
    return ProcessSpec(name=name, argv=argv, log_path=tmp_path / f"{name}.log", **changes)


def until(supervisor, kind, *, deadline_s=20.0):
    """All events up to the first of this kind."""
    events = []
    deadline = time.monotonic() + deadline_s
    while not any(isinstance(event, kind) for event in events):
        assert time.monotonic() < deadline, f"no {kind} among {events}"
        events += supervisor.poll(timeout_s=0.5)
    return events


def wait_for(condition, *, deadline_s=20.0):
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def wait_for_ready(*specs):
    for one in specs:
        wait_for(lambda path=one.log_path: path.exists() and "ready" in path.read_text())


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    children = psutil.Process().children()  # multiprocessing keeps one or two for good
    descriptors = set(os.listdir("/proc/self/fd"))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert psutil.Process().children() == children  # no other, not even a zombie
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_child_runs_on_when_the_disk_refuses_its_log(tmp_path):
    done = tmp_path / "done"
    source = (
        SETUP
        + f"""
import logging, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
for _ in range(3):
    print("said", flush=True)
    print("said", file=sys.stderr)
    sys.stdout.write("not flushed before the end")
    logging.warning("said")
open({str(done)!r}, "w").close()
"""
    )
    with Supervisor() as supervisor:
        supervisor.start(spec(tmp_path, source))
        assert [type(event) for event in until(supervisor, (Exited, Died))] == [Exited]
    assert done.exists()


def test_child_gets_title_incarnation_descriptors_and_environment(tmp_path):
    read_fd, write_fd = os.pipe()
    source = (
        SETUP
        + f"""
import json, os, signal
facts = {{
    "incarnation": incarnation,
    "title": open("/proc/self/cmdline").read().rstrip("\\0"),
    "threads": os.environ["OMP_NUM_THREADS"],
    "inherited": [name for name in os.environ if name.startswith("ZAPEX_")],
    "ignores_ctrl_c": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
    "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
}}
os.write({write_fd}, json.dumps(facts).encode())
"""
    )
    child = spec(tmp_path, source, pass_fds=[write_fd], env={"OMP_NUM_THREADS": "1"})
    with Supervisor() as supervisor:
        started = supervisor.start(child)
        events = until(supervisor, Exited)
    facts = json.loads(os.read(read_fd, 4096))
    os.close(read_fd)
    os.close(write_fd)
    assert events == [Exited("actor 3", started.pid, started.incarnation)]
    assert facts == {
        "incarnation": started.incarnation,
        "title": "zapex: actor 3",
        "threads": "1",
        "inherited": [],
        "ignores_ctrl_c": True,
        "blocked": [],
    }


def test_death_is_reported_with_status_and_traceback(tmp_path):
    source = SETUP + "print('fine so far')\nraise ValueError('the reward is NaN')\n"
    with Supervisor() as supervisor:
        started = supervisor.start(spec(tmp_path, source))
        (died,) = until(supervisor, Died)
    assert (died.name, died.pid, died.how) == ("actor 3", started.pid, "exit status 1")
    assert died.traceback.startswith("Traceback (most recent call last):")
    assert died.traceback.endswith("ValueError: the reward is NaN")
    assert "fine so far" not in died.traceback


def test_death_without_traceback_is_reported_with_the_last_lines(tmp_path):
    source = SETUP + "import sys\nsys.exit('capacity must be at least 1')\n"
    with Supervisor() as supervisor:
        supervisor.start(spec(tmp_path, source))
        (died,) = until(supervisor, Died)
    assert died.traceback.splitlines()[-1] == "capacity must be at least 1"


def test_native_crash_is_reported_with_python_frames(tmp_path):
    source = SETUP + "import ctypes\nctypes.string_at(0)\n"
    with Supervisor() as supervisor:
        supervisor.start(spec(tmp_path, source))
        (died,) = until(supervisor, Died)
    assert died.how == "killed by SIGSEGV (Segmentation fault)"
    assert died.traceback.startswith("Fatal Python error: Segmentation fault")


def test_traceback_of_an_earlier_incarnation_is_not_reported_again(tmp_path):
    source = SETUP + "import os, sys\nif os.path.exists('{flag}'): os.kill(os.getpid(), 9)\n"
    flag = tmp_path / "second"
    source = source.format(flag=flag) + f"open('{flag}', 'w')\nraise ValueError('first life')\n"
    with Supervisor(policy=MANY_STARTS) as supervisor:
        supervisor.start(spec(tmp_path, source, restart=True))
        first = until(supervisor, Died)[0]
        second = next(e for e in until(supervisor, Died) if isinstance(e, Died))
    assert first.traceback.endswith("ValueError: first life")
    assert second.how.startswith("killed by SIGKILL")
    assert second.traceback == ""


def test_dead_child_restarts_with_a_larger_incarnation_after_on_death(tmp_path):
    reported = []
    with Supervisor(policy=MANY_STARTS, on_death=reported.append) as supervisor:
        first = supervisor.start(spec(tmp_path, SETUP + READY + SLEEP, restart=True))
        supervisor.send_signal("actor 3", signal.SIGKILL)
        died, restarting = until(supervisor, Died)
        assert reported == [died]
        assert isinstance(restarting, Restarting)
        assert supervisor.pids == {}
        (again,) = until(supervisor, Started)
        assert again.incarnation > first.incarnation
        assert supervisor.pids == {"actor 3": again.pid}


def test_incarnation_grows_even_if_the_clock_goes_back(tmp_path):
    future = time.time_ns() + 10**18
    with Supervisor() as supervisor:
        started = supervisor.start(spec(tmp_path, SETUP, last_incarnation=future))
        until(supervisor, Exited)
    assert started.incarnation == future + 1


def test_role_that_cannot_stay_up_is_given_up(tmp_path):
    policy = RestartPolicy(first_s=0.001, most_short_starts=3)
    with Supervisor(policy=policy) as supervisor:
        supervisor.start(spec(tmp_path, SETUP + "raise SystemExit(7)", restart=True))
        events = until(supervisor, GaveUp)
        assert supervisor.poll(timeout_s=0.2) == []
    kinds = [type(event) for event in events]
    assert kinds == [Died, Restarting, Started, Died, Restarting, Started, Died, GaveUp]
    assert "3 times in a row" in events[-1].reason


def test_exit_with_status_0_is_a_death_unless_it_means_done(tmp_path):
    with Supervisor(policy=MANY_STARTS) as supervisor:
        quits = spec(tmp_path, SETUP + "import os; os._exit(0)", restart=True, done_status=DONE)
        supervisor.start(quits)
        died, restarting = until(supervisor, Died)
        assert (died.how, type(restarting)) == ("exit status 0", Restarting)
    with Supervisor() as supervisor:
        done = f"import sys; sys.exit({DONE})"
        supervisor.start(spec(tmp_path, SETUP + done, restart=True, done_status=DONE))
        assert [type(event) for event in until(supervisor, (Exited, Died))] == [Exited]


def test_config_error_is_not_restarted(
    tmp_path,
):
    code = SETUP + "print('so:\\nno GPU here', flush=True); raise SystemExit(78)"  # EX_CONFIG
    with Supervisor() as supervisor:
        supervisor.start(spec(tmp_path, code, restart=True))
        (gave_up,) = until(supervisor, GaveUp)
    assert gave_up == GaveUp("actor 3", "no GPU here")


@pytest.mark.parametrize("works", [False, True])
def test_start_up_time_does_not_count_as_staying_up(tmp_path, works):
    policy = RestartPolicy(first_s=0.001, most_short_starts=2, short_start_s=0.5, jitter=0.0)
    code = SETUP + "import time; time.sleep(0.7); raise SystemExit(7)"
    with Supervisor(policy=policy, is_up=lambda name, pid: works) as supervisor:
        supervisor.start(spec(tmp_path, code, restart=True))
        events = until(supervisor, Died) + until(supervisor, Died)
    assert all(event.lived_s > 0.7 for event in events if isinstance(event, Died))
    assert any(isinstance(event, GaveUp) for event in events) is not works


def test_nothing_restarts_after_a_stop_signal(tmp_path):
    with Supervisor(policy=MANY_STARTS) as supervisor:
        supervisor.start(spec(tmp_path, "raise SystemExit(7)", restart=True))
        until(supervisor, Restarting)
        supervisor.stop_signal = signal.SIGTERM
        time.sleep(0.1)
        assert supervisor.poll(timeout_s=0.1) == []
        assert supervisor.pids == {}


def test_missing_program_is_refused(tmp_path):
    missing = ProcessSpec(name="actor 3", argv=["/no/such"], log_path=tmp_path / "log")
    with Supervisor() as supervisor:
        with pytest.raises(FileNotFoundError):
            supervisor.start(missing)
        assert supervisor.pids == {}


def test_failed_restart_counts_as_a_death(tmp_path):
    program = tmp_path / "role"
    program.write_text(f"#!{sys.executable}\nraise SystemExit(1)\n")
    program.chmod(0o700)
    one = ProcessSpec(name="r", argv=[str(program)], log_path=tmp_path / "log", restart=True)
    with Supervisor(policy=RestartPolicy(first_s=0.001, most_short_starts=2)) as supervisor:
        supervisor.start(one)
        until(supervisor, Died)
        program.unlink()
        died, gave_up = until(supervisor, GaveUp)
    assert died.how.startswith("cannot start: [Errno 2]")
    assert isinstance(gave_up, GaveUp)


def test_shutdown_kills_what_ignores_sigterm_within_the_deadline(tmp_path):
    obedient = spec(tmp_path, SETUP + READY + SLEEP, name="learner")
    ignoring = spec(tmp_path, SETUP + IGNORES_SIGTERM + READY + SLEEP, name="ignoring")
    failing = spec(
        tmp_path,
        SETUP
        + """
import signal, time
def stop(*_): raise OSError('no room for the checkpoint')
signal.signal(signal.SIGTERM, stop)
print('ready', flush=True)
time.sleep(60)
""",
        name="failing",
        restart=True,
    )
    with Supervisor() as supervisor:
        pids = [supervisor.start(one).pid for one in (obedient, ignoring, failing)]
        wait_for_ready(obedient, ignoring, failing)
        began = time.monotonic()
        events = supervisor.shutdown(grace_s=3.0)  # a busy machine takes 1 for a traceback
        assert 3.0 <= time.monotonic() - began < 6.0
        assert supervisor.shutdown(grace_s=3.0) == []
    by_name = {event.name: event for event in events}
    assert len(events) == 3
    assert isinstance(by_name["learner"], Exited)
    assert isinstance(by_name["ignoring"], IgnoredSigterm)
    assert str(by_name["ignoring"]).endswith("did not end after SIGTERM: killed after 3 s")
    assert by_name["failing"].traceback.endswith("OSError: no room for the checkpoint")
    assert not any(is_running(pid) for pid in pids)


def test_shutdown_reaches_a_stopped_child(tmp_path):
    one = spec(tmp_path, SETUP + READY + SLEEP)
    with Supervisor() as supervisor:
        supervisor.start(one)
        wait_for_ready(one)
        supervisor.send_signal("actor 3", signal.SIGSTOP)
        until(supervisor, Stopped)
        events = supervisor.shutdown(grace_s=10.0)
    assert isinstance(events[-1], Exited)


def test_exception_in_the_block_ends_the_children(tmp_path):
    one = spec(tmp_path, SETUP + READY + SLEEP)
    pids = []
    with contextlib.suppress(KeyError), Supervisor() as supervisor:
        pids.append(supervisor.start(one).pid)
        raise KeyError
    assert not is_running(pids[0])


def test_stop_and_continue_of_a_child_are_noticed_within_3_s(tmp_path):
    one = spec(tmp_path, SETUP + READY + SLEEP)
    with Supervisor() as supervisor:
        pid = supervisor.start(one).pid
        wait_for_ready(one)
        supervisor.send_signal("actor 3", signal.SIGSTOP)
        (stopped,) = until(supervisor, Stopped, deadline_s=3.0)
        assert stopped.why == f"stopped by SIGSTOP; to continue it: kill -CONT {pid}"
        assert supervisor.poll(timeout_s=1.5) == []  # said once
        supervisor.send_signal("actor 3", signal.SIGCONT)
        assert until(supervisor, Continued, deadline_s=3.0) == [Continued("actor 3", pid)]


PARENT = """
import os, signal, sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
from zapex.machine.supervisor import ProcessSpec, Supervisor
source, count, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
with Supervisor() as supervisor:
    supervisor.install_signal_handlers()
    for i in range(count):
        name = f"child {i}"
        argv = [sys.executable, "-c", source]
        spec = ProcessSpec(name=name, argv=argv, log_path=directory / f"{name}.log")
        print(supervisor.start(spec).pid, flush=True)
    while supervisor.stop_signal is None:
        for event in supervisor.poll(timeout_s=30):
            print(event, flush=True)
    print(supervisor.stop_signal.name, flush=True)
    for event in supervisor.shutdown(grace_s=30):
        print(event, flush=True)
"""


class Parent:
    """A supervising process of its own session, as a terminal would have it."""

    def __init__(self, source, directory, count=2):
        self.logs = [directory / f"child {i}.log" for i in range(count)]
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PARENT, source, str(count), str(directory)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pids = [int(self.popen.stdout.readline()) for _ in range(count)]

    def wait_until_ready(self):
        for log in self.logs:
            wait_for(lambda log=log: log.exists() and "ready" in log.read_text())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.popen.kill()
        self.popen.communicate(timeout=20)

    def finish(self):
        output, _ = self.popen.communicate(timeout=20)
        wait_for(lambda: not any(is_running(pid) for pid in self.pids))
        return output.splitlines()


def test_children_die_with_a_killed_parent(tmp_path):
    with Parent(SETUP + IGNORES_SIGTERM + READY + SLEEP, tmp_path) as parent:
        parent.wait_until_ready()
        parent.popen.kill()
        assert parent.finish() == []


def test_starting_children_die_with_a_killed_parent(tmp_path):
    go = tmp_path / "go"
    wait = f"import os, time\nwhile not os.path.exists('{go}'): time.sleep(0.01)\n"
    with Parent(wait + SETUP + IGNORES_SIGTERM + SLEEP, tmp_path) as parent:
        parent.popen.kill()
        parent.popen.wait()
        go.touch()
        assert parent.finish() == []
        assert all("is gone" in log.read_text() for log in parent.logs)


def test_killed_process_group_leaves_nothing(tmp_path):
    with Parent(SETUP + READY + SLEEP, tmp_path) as parent:
        parent.wait_until_ready()
        os.killpg(parent.popen.pid, signal.SIGKILL)
        assert parent.finish() == []


def test_children_ignore_ctrl_c_even_while_they_start(tmp_path):
    with Parent(READY + SLEEP, tmp_path) as parent:  # never comes to its child_setup
        parent.wait_until_ready()
        for pid in parent.pids:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.2)
        assert all(is_running(pid) for pid in parent.pids)
        os.killpg(parent.popen.pid, signal.SIGINT)
        assert sorted(parent.finish()) == ["SIGINT", "child 0 ended", "child 1 ended"]
        assert parent.popen.returncode == 0
        assert not any("KeyboardInterrupt" in log.read_text() for log in parent.logs)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_end_in_order(tmp_path, number):
    with Parent(SETUP + READY + SLEEP, tmp_path) as parent:
        parent.wait_until_ready()
        parent.popen.send_signal(number)
        assert sorted(parent.finish()) == sorted([number.name, "child 0 ended", "child 1 ended"])


def test_second_ctrl_c_kills_at_once(tmp_path):
    with Parent(SETUP + IGNORES_SIGTERM + READY + SLEEP, tmp_path) as parent:
        parent.wait_until_ready()
        os.killpg(parent.popen.pid, signal.SIGINT)
        assert parent.popen.stdout.readline() == "SIGINT\n"
        time.sleep(0.3)
        began = time.monotonic()
        os.killpg(parent.popen.pid, signal.SIGINT)
        parent.finish()
        assert time.monotonic() - began < 10  # the grace is 30 s
        assert parent.popen.returncode == -signal.SIGINT


def test_ignored_sighup_stays_ignored():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Supervisor() as supervisor:
            supervisor.install_signal_handlers()
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_run_that_outlives_its_terminal_notes_the_hangup():
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with Supervisor() as supervisor:
            supervisor.install_signal_handlers(outlives_terminal=True)
            signal.raise_signal(signal.SIGHUP)
            assert supervisor.hung_up
            assert supervisor.stop_signal is None
    finally:
        signal.signal(signal.SIGHUP, former)


def test_supervisor_imports_nothing_large():
    code = "import sys, zapex.machine.supervisor; print({*sys.modules} & {*sys.argv})"
    large = ["numpy", "numba", "torch"]
    command = [sys.executable, "-c", code, *large]
    printed = subprocess.check_output(command, text=True, timeout=30)
    assert printed == "set()\n"


STEADY = RestartPolicy(jitter=0.0)


def backoff(policy=STEADY):
    return Backoff(policy, random.Random(0))


def test_delay_doubles_up_to_the_longest():
    patient = RestartPolicy(jitter=0.0, most_short_starts=100, most_short_starts_killed=100)
    role = backoff(patient)
    delays = [role.after_death(now_s=float(i), worked_s=0.0) for i in range(12)]
    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]
    assert delays[9:] == [30.0, 30.0, 30.0]


def test_long_incarnation_resets_the_delay():
    role = backoff()
    for now_s in (0.0, 1.0, 2.0):
        role.after_death(now_s, worked_s=0.5)
    assert role.after_death(now_s=60.0, worked_s=58.0) == 0.1
    assert role.after_death(now_s=61.0, worked_s=0.5) == 0.1
    assert role.after_death(now_s=62.0, worked_s=0.5) == 0.2


def test_gives_up_after_too_many_short_starts():
    role = backoff()
    for now_s in range(4):
        assert isinstance(role.after_death(float(now_s), worked_s=1.0), float)
    assert role.after_death(5.0, worked_s=9.9) == (
        "it died 5 times in a row before it had worked for 10 s"
    )


def test_killed_role_gets_more_attempts():
    role = backoff()
    delays = [role.after_death(float(i), worked_s=1.0, killed=True) for i in range(9)]
    assert delays == [0.1 * 2**i for i in range(9)], "25.6 s is the last"
    verdict = role.after_death(9.0, worked_s=1.0, killed=True)
    assert verdict == "it died 10 times in a row before it had worked for 10 s"


def test_kills_do_not_hide_failures():
    role = backoff()
    for killed in (False, True, False, True, False, True, False):
        assert isinstance(role.after_death(0.0, worked_s=1.0, killed=killed), float)
    assert isinstance(role.after_death(0.0, worked_s=1.0), str)


def test_gives_up_after_too_many_deaths_in_the_window():
    policy = RestartPolicy(jitter=0.0, window_s=100.0, most_deaths=4)
    role = backoff(policy)
    for now_s in (0.0, 20.0, 40.0, 141.0, 142.0):
        assert isinstance(role.after_death(now_s, worked_s=20.0), float)
    assert role.after_death(143.0, worked_s=20.0) == 0.1
    assert role.after_death(143.5, worked_s=20.0) == "it died 4 times within 100 s"


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (1, "exit status 1"),
        (-signal.SIGSEGV, "killed by SIGSEGV (Segmentation fault)"),
        (-signal.SIGKILL, "killed by SIGKILL (Killed; the kernel does this when memory runs out)"),
        (-40, "killed by signal 40"),
    ],
)
def test_status_in_words(returncode, words):
    assert status_in_words(returncode) == words


PLAIN = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
ValueError: no
and its second line"""


def test_last_traceback_is_found():
    assert last_traceback(f"hello\n{PLAIN}\nwent on\n{PLAIN}\n\n") == PLAIN


def test_chained_exceptions_stay_together():
    middle = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    cause = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    chain = PLAIN + middle + PLAIN + cause + PLAIN
    assert last_traceback(f"{PLAIN}\nlater\n{chain}\n") == chain


def test_exception_group_is_a_traceback():
    try:
        raise ExceptionGroup("two", [ValueError("a"), KeyError("b")])
    except ExceptionGroup:
        import traceback

        text = traceback.format_exc().rstrip()
    assert "KeyError: 'b'" in last_traceback(f"before\n{text}\n")


def test_long_traceback_is_cut_in_the_middle():
    frames = "\n".join(f"  File a.py, line {i}" for i in range(500))
    cut = last_traceback(f"Traceback (most recent call last):\n{frames}\nValueError: end")
    assert len(cut.splitlines()) == 81
    assert cut.startswith("Traceback")
    assert cut.endswith("ValueError: end")
