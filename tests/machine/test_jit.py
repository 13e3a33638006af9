"""The cache of kernels: an edit of a source in any package is seen, whoever calls the kernel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "zapex"

# The outer kernel is in zapex.replay, the inner one, which says what a key's transition is, in
# zapex.chunks.
SCRIPT = """
import numpy as np
from zapex.chunks.keys import LEAST_KEY
from zapex.chunks.layout import COUNT, GENERATION, HEADER_WORDS, LIVE, STATE
from zapex.machine.jit import CACHE_DIRECTORY
from zapex.replay.priorities import reprioritise_kernel
from zapex.sumtree_numba import SumTree
headers = np.zeros(HEADER_WORDS, np.int64)
headers[STATE], headers[COUNT], headers[GENERATION] = LIVE, 1, 1
slots, tree = (headers, 8, 0), SumTree(8).arrays
keys, settings = np.array([LEAST_KEY]), (1.0, 0.0, 0.0, False)
applied, stale, _ = reprioritise_kernel(keys, np.ones(1), *settings, slots, tree)
hits = sum(reprioritise_kernel.stats.cache_hits.values())
print(applied, stale, hits, CACHE_DIRECTORY)
"""


def run_in(root: Path, cache: Path, says: bool = True) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=root, env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True, text=True, check=True, timeout=280,
    )  # fmt: skip
    assert ("compiling kernels" in result.stderr) == says
    return result.stdout.split()


@pytest.mark.timeout(600)
def test_edited_kernel_runs_in_kernels_that_inline_it(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "zapex", ignore=shutil.ignore_patterns("__pycache__"))
    cache = tmp_path / "cache"
    applied, stale, hits, first = run_in(tmp_path, cache)
    assert (applied, stale, hits) == ("1", "0", "0")
    assert run_in(tmp_path, cache, says=False) == ["1", "0", "1", first]
    source = tmp_path / "zapex" / "chunks" / "keys.py"
    text = source.read_text()
    rule = "and offset < headers[header + COUNT]"
    assert text.count(rule) == 1
    source.write_text(text.replace(rule, "and offset < 0"))
    applied, stale, hits, second = run_in(tmp_path, cache)
    assert (applied, stale, hits) == ("0", "1", "0")
    assert second != first


FORKED = """
import os, signal, threading, time
import numba
from numba.core.compiler_lock import global_compiler_lock
import zapex.sumtree_numba

twice = numba.njit(lambda x: 2 * x)
held = threading.Event()

def hold():
    with global_compiler_lock:
        held.set()
        time.sleep(0.3)

threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(twice(3.0) != 6.0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), twice(2.0))
"""


def test_a_fork_while_a_thread_compiles_gives_a_child_that_can_compile():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], cwd=PACKAGE.parent, capture_output=True, text=True,
        timeout=90, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["0", "4.0"]
