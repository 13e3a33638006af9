"""Mutation testing: random small changes of a module, and whether its tests notice them.

    make mutants ARGS="[--module limiter ...] [--count 150] [--seed 1] [--json FILE]"

A change is made in a copy of the tree: a comparison, an arithmetic or a boolean operator becomes
its neighbour, a whole number one more, a condition its opposite, a statement nothing. What no test
notices is printed with its line, and the score with its 95 % interval (Wilson).
"""

import argparse
import ast
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODULES = {
    "sumtree": (
        ["zapex/sumtree_kernels.py", "zapex/sumtree_numba.py"],
        "tests/test_sumtree_numba.py",
    ),
    "chunks": (["zapex/chunks/ledger.py", "zapex/chunks/store.py"], "tests/chunks tests/replay"),
    "n-step": (["zapex/chunks/step_kernels.py"], "tests/chunks/test_builder.py"),
    "limiter": (["zapex/replay/limiter.py"], "tests/replay/test_limiter.py"),
    "intake": (
        ["zapex/roles/intake.py"],
        "tests/roles/test_intake.py tests/roles/test_replay_server.py",
    ),
    "messages": (
        [f"zapex/wire/{name}.py" for name in ("control", "experience", "header", "message")],
        "tests/wire",
    ),
}
"""Name -> its files, and the tests that have to notice."""

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


def run(name: str, count: int, seed: int, tree: Path, timeout_s: float) -> dict[str, Any]:
    """Random changes of a module, each tested."""
    files, tests = MODULES[name]
    sources = {file: (ROOT / file).read_text() for file in files}
    places = [(f, *c) for f, source in sources.items() for c in changes(ast.parse(source))]
    picked = random.Random(f"{seed} {name}").sample(places, min(count, len(places)))
    survivors = []
    for number, (file, node, other) in enumerate(picked):
        (tree / file).write_text(changed(sources[file], node, other))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *tests.split(),
        ]
        try:
            code = subprocess.run(
                command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
                capture_output=True, timeout=timeout_s, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = 1  # it hangs: noticed
        finally:
            (tree / file).write_text(sources[file])
        if code == 0:
            place: Any = node
            was = ast.get_source_segment(sources[file], node) or ""
            survivors.append(f"{file}:{place.lineno}: {was} -> {ast.unparse(other)}")
            print(f"{number}: survives: {survivors[-1]}", file=sys.stderr, flush=True)
    killed = len(picked) - len(survivors)
    return {"places": len(places), "mutants": len(picked), "killed": killed,
            "score": killed / len(picked), "interval": interval(killed, len(picked)),
            "survivors": survivors}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--module", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds of one mutant's tests"
    )
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    os.nice(10)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        ignored = shutil.ignore_patterns(
            ".git", ".venv*", ".peers*", "runs", "__pycache__", "build"
        )
        shutil.copytree(ROOT, tree, ignore=ignored)
        found = {name: run(name, chosen.count, chosen.seed, tree, chosen.timeout)
                 for name in chosen.module}  # fmt: skip
    print(json.dumps(found, indent=1))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
