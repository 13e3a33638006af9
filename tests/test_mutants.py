"""Mutation testing: every change is Python, and another program than before."""

import ast

import pytest

from tests.mutants import MODULES, ROOT, changed, changes, interval


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
