"""Mutation testing: every change is Python, and another program than before."""

import ast

import pytest

from tests.mutants import MODULES, ROOT, changed, changes, interval, prefetches


@pytest.mark.parametrize("file", [file for files, _ in MODULES.values() for file in files])
def test_every_change_compiles_and_changes_the_program(file: str) -> None:
    source = (ROOT / file).read_text()
    tree = ast.parse(source)
    before = ast.dump(tree)
    places = list(changes(tree))
    assert len(places) > 10
    for node, other in places:
        assert ast.dump(ast.parse(changed(source, node, other))) != before


def test_the_interval_is_wilsons() -> None:
    low, high = interval(140, 150)
    assert (round(low, 3), round(high, 3)) == (0.882, 0.963)


def test_what_only_prefetches_is_left_out_and_nothing_else() -> None:
    source = """
def _prefetch(i, mem):
    \"\"\"Doc.\"\"\"
    for at in range(0, i, 64):
        prefetch(mem, at + i)

def gather(n, mem):
    for b in range(n):
        if b + 1 < n:
            at = 64 * b
            prefetch(mem, at)
        if b > 3:
            prefetch(mem, b)
            mem[b] = 0
        copy(mem, b)
"""
    tree = ast.parse(source)
    useless = prefetches(tree)
    lines = {node.lineno for node, _ in changes(tree) if node in useless}
    assert lines == {4, 5, 9, 10, 11}
    assert {node.lineno for node, _ in changes(tree)} - lines == {12, 13, 14, 15}
