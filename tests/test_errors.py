"""The exceptions: the drawing in the module is the tree itself."""

import inspect
import re

from zapex import errors


def drawn() -> dict[str, str]:
    """Name -> name of its parent, as the docstring draws them."""
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in str(errors.__doc__).splitlines()[1:]:
        if found := re.match(r"([│ ]*(?:[├└]── )?)([A-Z]\w+)", line):
            depth = len(found[1]) // 4
            above[depth:] = [found[2]]
            parents[found[2]] = above[depth - 1] if depth else "Exception"
    return parents


def test_the_drawing_names_every_exception_under_its_parent() -> None:
    found = {
        name: error.__bases__[0].__name__
        for name, error in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error, errors.ZapexError)
    }
    assert drawn() == found
