"""Restarts of a child as data: backoff by a given clock, and the description of a death."""

import random
import signal

import pytest

from zapex.processes.restarts import (
    Backoff,
    Continued,
    Deaf,
    Died,
    Exited,
    GaveUp,
    Restarting,
    RestartPolicy,
    Started,
    Stopped,
    last_traceback,
    status_in_words,
)

STEADY = RestartPolicy(jitter=0.0)


def backoff(policy=STEADY):
    return Backoff(policy, random.Random(0))


def test_the_delay_doubles_with_each_short_life_up_to_the_longest():
    patient = RestartPolicy(jitter=0.0, most_short_starts=100, most_short_starts_killed=100)
    role = backoff(patient)
    delays = [role.after_death(now_s=float(i), worked_s=0.0) for i in range(12)]
    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]
    assert delays[9:] == [30.0, 30.0, 30.0]


def test_a_long_life_starts_the_delays_anew():
    role = backoff()
    for now_s in (0.0, 1.0, 2.0):
        role.after_death(now_s, worked_s=0.5)
    assert role.after_death(now_s=60.0, worked_s=58.0) == 0.1
    assert role.after_death(now_s=61.0, worked_s=0.5) == 0.1
    assert role.after_death(now_s=62.0, worked_s=0.5) == 0.2


def test_it_gives_up_after_too_many_short_lives_in_a_row_and_says_so():
    role = backoff()
    for now_s in range(4):
        assert isinstance(role.after_death(float(now_s), worked_s=1.0), float)
    assert role.after_death(5.0, worked_s=9.9) == (
        "it died 5 times in a row before it had worked for 10 s"
    )


def test_one_that_is_killed_has_more_lives_with_delays_up_to_half_a_minute():
    role = backoff()
    delays = [role.after_death(float(i), worked_s=1.0, killed=True) for i in range(9)]
    assert delays == [0.1 * 2**i for i in range(9)], "25.6 s is the last"
    verdict = role.after_death(9.0, worked_s=1.0, killed=True)
    assert verdict == "it died 10 times in a row before it had worked for 10 s"


def test_kills_in_between_do_not_hide_that_it_fails_by_itself():
    role = backoff()
    for killed in (False, True, False, True, False, True, False):
        assert isinstance(role.after_death(0.0, worked_s=1.0, killed=killed), float)
    assert isinstance(role.after_death(0.0, worked_s=1.0), str)


def test_it_gives_up_after_too_many_deaths_in_the_window_but_forgets_older_ones():
    policy = RestartPolicy(jitter=0.0, window_s=100.0, most_deaths=4)
    role = backoff(policy)
    for now_s in (0.0, 20.0, 40.0, 141.0, 142.0):
        assert isinstance(role.after_death(now_s, worked_s=20.0), float)
    assert role.after_death(143.0, worked_s=20.0) == 0.1
    assert role.after_death(143.5, worked_s=20.0) == "it died 4 times within 100 s"


def test_jitter_spreads_the_delays_within_its_share():
    policy = RestartPolicy(jitter=0.25, most_deaths=10_000)
    role = backoff(policy)
    delays = [role.after_death(float(i), worked_s=11.0) for i in range(200)]
    assert 0.075 <= min(delays) < 0.08
    assert 0.12 < max(delays) <= 0.125


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (1, "exit status 1"),
        (-signal.SIGSEGV, "killed by SIGSEGV (Segmentation fault)"),
        (-signal.SIGKILL, "killed by SIGKILL (Killed; the kernel does this when memory runs out)"),
        (-40, "killed by signal 40"),
    ],
)
def test_a_status_is_said_in_words(returncode, words):
    assert status_in_words(returncode) == words


PLAIN = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
ValueError: no
and its second line"""


def test_the_last_traceback_is_found_behind_other_output_and_older_ones():
    assert last_traceback(f"hello\n{PLAIN}\nwent on\n{PLAIN}\n\n") == PLAIN


def test_a_chain_of_exceptions_is_kept_whole():
    middle = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    cause = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    chain = PLAIN + middle + PLAIN + cause + PLAIN
    assert last_traceback(f"{PLAIN}\nlater\n{chain}\n") == chain


def test_an_exception_group_is_a_traceback():
    try:
        raise ExceptionGroup("two", [ValueError("a"), KeyError("b")])
    except ExceptionGroup:
        import traceback

        text = traceback.format_exc().rstrip()
    assert "KeyError: 'b'" in last_traceback(f"before\n{text}\n")


def test_a_crash_in_native_code_is_a_traceback():
    text = "Fatal Python error: Bus error\n\nCurrent thread 0x1 (most recent call first):\n  File x"
    assert last_traceback(f"noise\n{text}\n") == text


def test_a_log_without_a_traceback_has_none():
    assert last_traceback("") == ""
    assert last_traceback("all is\nwell\n") == ""


def test_an_endless_traceback_is_cut_in_the_middle():
    frames = "\n".join(f"  File a.py, line {i}" for i in range(500))
    cut = last_traceback(f"Traceback (most recent call last):\n{frames}\nValueError: end")
    assert len(cut.splitlines()) == 81
    assert cut.startswith("Traceback")
    assert cut.endswith("ValueError: end")


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Started("actor 3", 17, 1), "actor 3 started (pid 17)"),
        (Exited("actor 3", 17, 1), "actor 3 ended"),
        (
            Died("actor 3", 17, 1, "exit status 1", "Traceback", 2.04),
            "actor 3 died after 2.0 s: exit status 1\nTraceback",
        ),
        (Restarting("actor 3", 0.25), "actor 3 is started again in 0.2 s"),
        (GaveUp("actor 3", "it died"), "actor 3 is not started again: it died"),
        (Stopped("actor 3", 17, "stopped by SIGSTOP"), "actor 3 does not run: stopped by SIGSTOP"),
        (Continued("actor 3", 17), "actor 3 runs again"),
        (
            Deaf("actor 3", 17, "killed after 5 s"),
            "actor 3 (pid 17) did not end after SIGTERM: killed after 5 s",
        ),
    ],
)
def test_an_event_says_itself_in_words(event, words):
    assert str(event) == words
