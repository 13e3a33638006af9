"""Planted faults: what is changed in zapex to see whether the simulation finds it.

A planted fault is a file in faults/: the module, what is there, a line of three dashes, and what is
in its place. The function that it is in gets the changed code, in this process alone.
"""

import ast
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType
from typing import Any

from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

from tests.simulation.mutants import mutant
from tests.stress import steps

FAULTS = Path(__file__).parent / "faults"
"""One file for each."""


def fault(name: str) -> tuple[str, str, str]:
    """The module of a planted fault, what is in it, and what is there instead.

    name: of its file, or a number: of a mutant.
    """
    if name.isdigit():
        return mutant(int(name))
    module, _, change = (FAULTS / f"{name}.txt").read_text().partition("\n")
    before, after = change.removesuffix("\n").split("\n---\n")
    return module, before, after


def faults() -> list[str]:
    """The names of all planted faults."""
    return sorted(path.stem for path in FAULTS.glob("*.txt"))


def plant(name: str) -> None:
    """From now on this process runs the changed code."""
    module, before, after = fault(name)
    path = Path(str(import_module(module).__file__))
    text = path.read_text()
    assert text.count(before) == 1, f"{name}: not one place in {module}"
    line = text[: text.index(before)].count("\n") + 1
    function = _function_at(ast.parse(text), line)
    changed = compile(steps.with_calls(text.replace(before, after)), str(path), "exec")
    found: Any = resolve_name(f"{module}:{function}")
    found = getattr(found, "fget", found)
    if isinstance(found, Dispatcher):
        found._cache = NullCache()  # other processes use the real one
        found.py_func.__code__ = _code_of(changed, function)
        found.recompile()
    else:
        found.__code__ = _code_of(changed, function)


def _function_at(tree: ast.Module, line: int) -> str:
    """The function or method of a line; a function within one belongs to that one."""
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        for one in inside:
            if isinstance(one, ast.FunctionDef) and one.lineno <= line <= (one.end_lineno or 0):
                return f"{node.name}.{one.name}" if isinstance(node, ast.ClassDef) else one.name
    raise AssertionError(f"line {line} is in no function")


def _code_of(code: CodeType, function: str) -> CodeType:
    for name in function.split("."):
        (code,) = (c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return code
