"""The stand-in answers as F-Stack does, call by call; with a real library, that is asked too."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.fstack.calls import CASES, LAST
from tests.support import fstack
from zapex.fstack import Setup

ENDED = "the process was ended by a signal"
ANSWERS: dict[str, Any] = {  # of F-Stack 1.25
    "descriptors_begin_above_the_kernels": [True, True, True],
    "a_descriptor_of_the_kernel_is_none": ["EBADF", "EBADF"],
    "nothing_to_accept_or_receive": ["EAGAIN", "EAGAIN", "ENOTCONN", "ENOTCONN"],
    "blocking_calls_fail": ["EPERM", "EPERM", "EPERM"],
    "addresses_are_linux_s": [True, 16, True, 16],
    "no_port_is_chosen": "EINVAL",
    "addresses_that_cannot_be_bound": [True, "EADDRINUSE", "EADDRNOTAVAIL"],
    "options_that_are_refused": ["EINVAL"] * 5,
    "vectors_are_changed": [7, 0, 0, "abcdefg"],
    "a_large_write_is_taken_in_part": [True, "EAGAIN"],
    "flags_are_freebsd_s": ["ab", "ab", "EAGAIN"],
    "the_peer_s_end_and_its_reset": [4, 0, "last", "", True, 54, "ECONNRESET", "EPIPE"],
    "a_queue_tells_reading_and_writing_apart": [
        [[True, -2, 9]], [[-2, 9], [-1, 7]], [[-1, 3]], 1, "ENOENT",
    ],
    "a_queue_forgets_a_closed_socket": [1, 0, "EBADF"],
    "a_listener_is_readable": [0, 1, 0, 0],
    "errors_of_changes_come_as_events": [1, 9, 5, "EBADF"],
    "time_outs_are_ignored": [0, True],
    "another_thread_ends_the_process": ENDED,
    "a_second_run_ends_the_process": ENDED,
    "what_was_sent_before_the_end_arrives": ["last words", ""],
}  # fmt: skip


@cache
def answers(setup: Setup, names: tuple[str, ...]) -> dict[str, Any]:
    """What a library answers, in a process of its own: F-Stack starts once in each."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fstack.calls", setup.library, setup.config, setup.arguments,
         *names],
        capture_output=True, text=True, check=False, timeout=100, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("answer:")]
    said = dict(json.loads(line.removeprefix("answer:")) for line in lines)
    rest = ENDED if done.returncode < 0 else (done.stdout + done.stderr)[-3000:]
    return {name: said.get(name, rest) for name in names}


def answer(setup: Setup, name: str) -> Any:
    together = (name,) if name in LAST else tuple(each for each in CASES if each not in LAST)
    return answers(setup, together)[name]


def test_every_case_has_an_answer() -> None:
    assert ANSWERS.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_standin_answers_as_f_stack(name: str) -> None:
    assert answer(fstack.standin(), name) == ANSWERS[name]


@pytest.mark.skipif(not fstack.is_real(), reason="ZAPEX_FSTACK_LIB and _CONF name no library")
@pytest.mark.parametrize("name", CASES)
def test_the_real_library_answers_so(name: str) -> None:
    assert answer(fstack.setup(), name) == ANSWERS[name]
