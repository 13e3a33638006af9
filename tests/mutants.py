"""Mutation testing: random small changes of a module, and whether its tests notice them.

    make mutants ARGS="[--module limiter ...] [--count 150] [--minutes M] [--seed 1] [--json FILE]"

A change is made in a copy of the tree: a comparison, an arithmetic or a boolean operator becomes
its neighbour, a whole number one more, a condition its opposite, a statement nothing. What only
prefetches is left out: no result depends on it. What no test notices is printed with its line, and
the score with its 95 % interval (Wilson).
"""

import argparse
import ast
import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import hypothesis  # noqa: F401  # for the forks
import numba
import pytest

from benchmarks.support.harness import add_json, evidence
from benchmarks.support.machine import Watch

_HANGS_S = 300.0
_STANDS_STILL_S = 10.0
ROOT = Path(__file__).parents[1]
MODULES = {
    "sumtree": (
        ["zapex/sumtree_kernels.py", "zapex/sumtree_numba.py"],
        "tests/test_sumtree_numba.py",
    ),
    "chunks": (
        ["zapex/chunks/ledger.py", "zapex/chunks/store.py"],
        "tests/chunks/test_store.py tests/chunks tests/machine/test_barriers.py",
    ),
    "n-step": (["zapex/chunks/step_kernels.py"], "tests/chunks/test_builder.py"),
    "limiter": (["zapex/replay/limiter.py"], "tests/replay/test_limiter.py"),
    "intake": (
        ["zapex/roles/intake.py"],
        "tests/roles/test_intake.py tests/roles/test_replay_server.py",
    ),
    "messages": (
        [f"zapex/wire/{name}.py" for name in ("control", "experience", "header", "message")],
        "tests/wire/test_bounds.py tests/wire"
        " --deselect=tests/wire/test_messages.py::test_any_bytes_are_a_message_or_refused"
        " --deselect="
        "tests/wire/test_messages.py::test_mutants_of_real_messages_are_messages_or_refused",
    ),
}
"""Name -> its files, and the tests that have to notice: not those that feed random bytes."""

_COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
            ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
            ast.NotIn: ast.In}  # fmt: skip
_ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
               ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
               ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Div: ast.Mult}  # fmt: skip


def changes(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Nodes of functions, and what may stand in the place of each."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body[ast.get_docstring(function) is not None :]:
            for node in ast.walk(statement):
                yield from _changes_of(node)


def _changes_of(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARE:
        ops = [_COMPARE[type(node.ops[0])](), *node.ops[1:]]
        yield node, ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield node, ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, ast.Constant(node.value + 1)
    elif isinstance(node, (ast.If, ast.While)):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)):
        doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not doc:
            yield node, ast.Pass()


def prefetches(tree: ast.AST) -> set[ast.AST]:
    """Nodes of functions and of conditions that do nothing but prefetch."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.If)) and _only_prefetches(node):
            found.update(ast.walk(node))
    return found


def _only_prefetches(node: ast.AST) -> bool:
    """Whether it stores nothing, returns nothing, and calls nothing but what prefetches."""
    inner = list(ast.walk(node))
    stores = [n for n in inner if isinstance(getattr(n, "ctx", None), ast.Store)]
    if not all(isinstance(n, ast.Name) for n in stores):
        return False
    if any(isinstance(n, ast.Return) for n in inner):
        return False
    calls = [ast.unparse(n) for n in inner if isinstance(n, ast.Expr)]
    calls = [call for call in calls if not call.startswith(("'", '"'))]  # docstrings
    return bool(calls) and all(call.lstrip("_").startswith("prefetch(") for call in calls)


def changed(source: str, node: Any, other: ast.AST) -> str:
    """The source with one node replaced."""
    lines = source.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    text = ast.unparse(ast.fix_missing_locations(other))
    whole = b"".join(lines)
    plain = text if isinstance(other, (ast.Pass, ast.Constant)) else f"({text})"
    return (whole[:start] + plain.encode() + whole[end:]).decode()


def interval(killed: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.96, killed / count
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)


class Tests:
    """Runs pytest in forks of this process, which has imported what no change touches.

    Where this process stood still meanwhile (a suspended machine), the run is made again: its
    deadlines mean nothing.
    """

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.limit_cpu_s = 600.0
        os.environ.update(
            XDG_CACHE_HOME=str(tree.parent), PYTHONPATH=str(tree), OMP_NUM_THREADS="1"
        )
        numba.njit(lambda x: x + 1)(1)  # its compiler is loaded here and not in each fork

    def fail(self, tests: str) -> str:
        """Why they fail, or an empty string: pytest's line, or that a limit was passed."""
        while True:
            child = os.fork()
            if not child:
                self._child(tests)
            ended, stood_still = self._wait(child)
            if not stood_still:
                break
        if ended is None:
            return "hangs"
        if os.WIFSIGNALED(ended):
            return signal.Signals(os.WTERMSIG(ended)).name
        if not ended:
            return ""
        lines = (self.tree.parent / "output").read_text(errors="replace").splitlines()
        told = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))]
        return " | ".join(told[-2:]) or f"exit code {os.WEXITSTATUS(ended)}"

    def _child(self, tests: str) -> NoReturn:
        os.setsid()
        output = os.open(self.tree.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(self.limit_cpu_s) + 1,) * 2)
        os.chdir(self.tree)
        sys.path[:] = [str(self.tree), *(p for p in sys.path if p not in ("", str(ROOT)))]
        for name in [n for n in sys.modules if n.partition(".")[0] == "tests"]:
            del sys.modules[name]
        code = 1
        try:
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests.split()]))
        finally:
            os._exit(code)

    def _wait(self, child: int) -> tuple[int | None, bool]:
        """How it ended, None if it had to be ended; whether this process stood still meanwhile."""
        awake_s, last_s, stood_still = 0.0, time.monotonic(), False
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            time.sleep(0.1)
            now_s = time.monotonic()
            stood_still |= now_s - last_s > _STANDS_STILL_S
            awake_s += min(now_s - last_s, _STANDS_STILL_S)
            last_s = now_s
            if awake_s > _HANGS_S:
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the tests left behind, too
        if done[0]:
            return done[1], stood_still
        os.waitpid(child, 0)
        return None, stood_still


def run(
    name: str, tests: Tests, chosen: argparse.Namespace, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Random changes of a module, each tested. before: only what survived there, tests since."""
    files, wanted = MODULES[name]
    tests.limit_cpu_s, before_s = 600.0, _children_cpu_s()
    if why := tests.fail(wanted):
        raise SystemExit(f"{name}: the tests fail without any change: {why}")
    # The first run compiles all kernels, as one whose kernels are changed does.
    tests.limit_cpu_s = 5 * (_children_cpu_s() - before_s) + 10
    sources = {file: (ROOT / file).read_text() for file in files}
    places: list[Any] = []
    useless: set[ast.AST] = set()
    for file, source in sources.items():
        parsed = ast.parse(source)
        places += [(file, *change) for change in changes(parsed)]
        useless |= prefetches(parsed)
    sampled = random.Random(f"{chosen.seed} {name}").sample(places, min(chosen.count, len(places)))
    picked = {_told(f, sources[f], *c): (f, *c) for f, *c in sampled if c[0] not in useless}
    end_s, tried = time.monotonic() + 60 * chosen.minutes, 0
    survivors: list[str] = []
    again = set(before["survivors"] if before else picked)
    if before and before["mutants"] < len(picked):
        raise SystemExit(f"{name}: not all its changes were tried: try them again without --again")
    if not again <= {_told(f, sources[f], *c) for f, *c in sampled}:
        raise SystemExit(f"{name}: it has changed since: try all its changes again")
    for change, (file, node, other) in picked.items():
        if time.monotonic() > end_s:
            break
        tried += 1
        if change not in again:
            continue
        (tests.tree / file).write_text(changed(sources[file], node, other))
        why = tests.fail(wanted)
        (tests.tree / file).write_text(sources[file])
        print(f"{name}: {change}: {why or 'SURVIVES'}", file=sys.stderr, flush=True)
        if not why:
            survivors.append(change)
    killed = tried - len(survivors)
    return {"seed": chosen.seed, "places": len(places), "mutants": tried, "killed": killed,
            "prefetches": len(sampled) - len(picked), "tried_again": len(again) if before else 0,
            "score": killed / tried, "interval": interval(killed, tried),
            "survivors": survivors}  # fmt: skip


def _told(file: str, source: str, node: Any, other: ast.AST) -> str:
    was = ast.get_source_segment(source, node) or ""
    return f"{file}:{node.lineno}:{node.col_offset}: {was} -> {ast.unparse(other)}"


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--module", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--minutes", type=float, default=math.inf, help="at most, of each module")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="modules that it has and this run has not stay")
    parser.add_argument("--again", action="store_true", help="only the survivors in --json's file")
    chosen = parser.parse_args()
    if chosen.again and not (chosen.json and chosen.json.exists()):
        parser.error("--again needs --json with a file that is there")
    os.nice(10)
    found: dict[str, Any] = {}
    if chosen.again:
        found = json.loads(chosen.json.read_text())["results"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        ignored = shutil.ignore_patterns(
            ".git", ".venv*", ".peers*", ".cache", "runs", "__pycache__", "build"
        )
        shutil.copytree(ROOT, tree, ignore=ignored)
        tests = Tests(tree)
        for name in chosen.module:
            watch = Watch()
            facts = run(name, tests, chosen, found.get(name))
            print(json.dumps({name: facts}, indent=1), flush=True)
            if chosen.json:
                add_json(chosen.json, "mutants", name, facts, evidence(watch, None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
