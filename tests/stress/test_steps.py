"""The named steps of zapex's source: each is known, documented, and somebody may die there."""

import re

from tests.simulation.run import STEPS
from tests.stress import steps


def test_every_step_of_the_source_is_one_of_a_simulated_role() -> None:
    assert set(steps.STEPS) == set().union(*STEPS.values())


def test_whatever_looks_like_a_step_is_one() -> None:
    for path in steps.PACKAGE.rglob("*.py"):
        source = path.read_text()
        assert len(re.findall(r"# STEP [a-z]", source)) == len(steps.MARKER.findall(source)), path


def test_the_document_says_what_a_death_at_each_step_means() -> None:
    document = (steps.PACKAGE.parent / "docs" / "ring_protocol.md").read_text()
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", document, re.M)) == steps.STEPS
