"""What the pages say is so: messages are zapex's own, and pictures are of the newest text."""

import ast
import re
from pathlib import Path

from tests.test_layers import TREES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def texts() -> str:
    """Every text in zapex's sources; what is filled in later is left out."""
    found = []
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_every_message_of_the_page_about_failures_is_one_of_zapex() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `(.+?)` \|", page, re.M)
    assert len(messages) > 30
    known = texts()
    for message in messages:
        for part in message.split("..."):
            assert part.strip(" :") in known, message


def test_every_diagram_is_drawn_as_it_is_written() -> None:
    from docs.site.diagrams import blocks, picture

    assert {picture(block) for block in blocks()} == set(DOCS.glob("images/diagram-*.svg"))
