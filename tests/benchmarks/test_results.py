"""README's headline numbers and the tables of docs/ agree with benchmarks/results."""

import re

import pytest

from benchmarks import report, reproduce
from benchmarks.support.machine import RESULTS, ROOT

HEADLINES = [
    (one.name, headline) for one in reproduce.MEASUREMENTS for headline in one.headlines
]  # fmt: skip


@pytest.mark.parametrize(("name", "headline"), HEADLINES, ids=[h.text for _, h in HEADLINES])
def test_headline_in_the_readme_is_that_of_the_result(
    name: str, headline: reproduce.Headline
) -> None:
    text = headline.text.format(headline.figure(report.load(name)))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert text in readme or not headline.in_readme


def test_tables_of_the_documentation_are_those_of_the_results() -> None:
    assert report.main(["--check"]) == 0, "run `make results`"


def test_every_result_has_a_command_and_every_table_a_place() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} == set(report.COMMANDS)
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert sorted(re.findall(r"<!-- table: (\w+) -->", pages)) == sorted(report.TABLES)
