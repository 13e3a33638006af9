"""Random mutants of the protocol's modules: one small change each, drawn from a number.

What only says or counts something is left as it is: errors, messages, metrics.
"""

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "zapex/chunks/ledger.py", "zapex/host/roster.py", "zapex/library/handle_client.py",
    "zapex/library/handle_server.py", "zapex/library/url_client.py", "zapex/library/url_server.py",
    "zapex/net/link.py", "zapex/net/replay_ends.py", "zapex/net/sample_source.py",
    "zapex/net/sessions.py", "zapex/net/shard_samples.py", "zapex/replay/limiter.py",
    "zapex/roles/intake.py", "zapex/roles/learner.py", "zapex/roles/relay.py",
    "zapex/shm_transport.py", "zapex/zmq_transport.py",
)  # fmt: skip
ROOT = Path(__file__).parents[2]
_OPPOSITE = {
    "<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "==", "is": "is not",
    "is not": "is", "in": "not in", "not in": "in", "+": "-", "-": "+", "and": "or", "or": "and",
}  # fmt: skip


def mutant(number: int) -> tuple[str, str, str]:
    """As source.fault: the module, what is in it, and what is there instead."""
    rng = random.Random(f"mutant {number}")
    path = ROOT / rng.choice(MODULES)
    text = path.read_text()
    first, end, instead = rng.choice(list(_changes(text)))
    while text.count(text[first:end]) > 1:  # with its surroundings there is one such place
        first, end, instead = first - 1, end + 1, text[first - 1] + instead + text[end]
    module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return module, text[first:end], instead


def _working(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is in it, without what only says or counts something."""
    match node:
        case ast.Raise() | ast.JoinedStr():
            return
        case ast.Expr(value=ast.Call(func=place)) | ast.AugAssign(target=place):
            if re.search(r"(tell|warn|print|metrics\.\w+|counts\[.*\])$", ast.unparse(place)):
                return
    yield node
    for part in ast.iter_child_nodes(node):
        yield from _working(part)


def _changes(text: str) -> Iterator[tuple[int, int, str]]:
    """All small changes in functions: where they begin and end, and the new text."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    assert text.isascii()

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    def between(left: ast.expr, right: ast.expr) -> Iterator[tuple[int, int, str]]:
        first, end = span(left)[1], span(right)[0]
        for word in sorted(_OPPOSITE, key=len, reverse=True):
            if text[first:end].strip(" ()\n") == word:
                place = first + text[first:end].index(word)
                yield place, place + len(word), _OPPOSITE[word]
                return

    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef) or function.name == "__repr__":
            continue
        for node in (inner for one in function.body for inner in _working(one)):
            match node:
                case ast.Compare(left=left, comparators=[right]):
                    yield from between(left, right)
                case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                    yield from between(left, right)
                case ast.BoolOp(values=[left, right]):
                    yield from between(left, right)
                case ast.UnaryOp(op=ast.Not()):
                    first = span(node)[0]
                    yield first, first + len("not "), ""
                case ast.Constant(value=int(value)) if not isinstance(value, bool):
                    yield *span(node), str(value + 1)
                case ast.Assign() | ast.AugAssign() | ast.Expr(value=ast.Call()):
                    yield *span(node), "pass"
