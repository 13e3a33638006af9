"""Named steps cost nothing: they are comments, and only a process that asks makes calls of them."""

import ast
import re
import subprocess
import sys

import pytest

from tests.stress import steps

DOCUMENT = steps.PACKAGE.parent / "docs" / "ring_protocol.md"


def test_to_python_a_step_is_a_comment() -> None:
    for module, names in steps.markers().items():
        path = steps.PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
        source = path.read_text()
        without, count = steps.MARKER.subn(lambda m: m["indent"], source)
        assert count == len(names)
        assert compile(source, "x", "exec") == compile(without, "x", "exec"), module
        assert ast.dump(ast.parse(source)) == ast.dump(ast.parse(without)), module


def test_whatever_looks_like_a_step_is_one() -> None:
    for path in steps.PACKAGE.rglob("*.py"):
        source = path.read_text()
        assert len(re.findall(r"# STEP [a-z]", source)) == len(steps.MARKER.findall(source)), path
        assert not re.search(r"(?<![\w.])_step\(", source), path


def test_the_document_says_what_a_death_at_each_step_means() -> None:
    table = re.findall(r"^\| `([a-z-]+)` \|", DOCUMENT.read_text(), re.M)
    assert sorted(table) == steps.STEPS


LOOK = """
import sys
from tests.stress import steps
if sys.argv[1] == "with":
    steps.install()
import numpy as np
from zapex import shm_ring
from zapex.chunks.batch import aligned_zeros
ring = shm_ring.ShmRing(aligned_zeros(4096), 4, np.int64, create=True)
producer = ring.producer()
words = memoryview(bytearray(8 * steps.WORDS)).cast("q")
steps.obey(words)
import signal
signal.signal(signal.SIGUSR1, lambda *_: print("passed", ring.tail, words[steps.LAST]))
steps.order(words, "ring-committed", 2, signal.SIGUSR1)
for _ in range(3):
    producer.try_offer(np.zeros(1, np.int64))
(signature,) = shm_ring.offer_kernel.signatures
import numba
kernel = numba.njit(shm_ring._commit_kernel.py_func)  # from the cache it could not be looked at
kernel.compile((signature[0], signature[1], numba.int64))
signature = kernel.signatures[0]
print("zapex_step" in kernel.inspect_asm(signature), "_step" in vars(shm_ring))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "printed"),
    [
        ("without", "False False"),
        ("with", f"passed 2 {1 + steps.STEPS.index('ring-committed')}\nTrue True"),
    ],
)
def test_a_kernel_has_calls_only_where_they_were_asked_for(how: str, printed: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LOOK, how],
        cwd=steps.PACKAGE.parent, stdout=subprocess.PIPE, text=True, check=True, timeout=280,
    )  # fmt: skip
    assert result.stdout.strip() == printed
