"""What the pages say is so: messages are zapex's own, and pictures are of the newest text."""

import ast
import dataclasses
import json
import re
from pathlib import Path

from tests.support import fake_run
from tests.test_layers import TREES
from zapex.host.metrics import TABLES
from zapex.watch.recorders import JsonLines, numbers, read_metrics

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


def test_the_page_of_settings_is_what_the_settings_are() -> None:
    from docs.site.settings import PAGE, page

    assert page() == PAGE.read_text(), "python -m docs.site.settings writes it"


def test_the_page_of_metrics_names_every_metric_and_no_other(tmp_path: Path) -> None:
    named = set(re.findall(r"`([a-z]+/.+?)`", (DOCS / "metrics.md").read_text()))
    patterns = [re.sub(r"\\{\w+\\}", ".+", re.escape(name)) for name in named]
    snapshot = fake_run.record([JsonLines(tmp_path)], 300, tmp_path)
    shards = dataclasses.replace(snapshot, learner=snapshot.learner | {"shards": 2.0})
    tags = numbers(shards).keys() | {tag for line in read_metrics(tmp_path) for tag in line}
    metrics = {tag for tag in tags if "/" in tag}
    assert not [tag for tag in metrics if not any(re.fullmatch(p, tag) for p in patterns)]
    # Of counts that the fake run lacks, the role's table has the names.
    table = {f"{role}/{n}" for role, t in TABLES.items() for n in t.counters + t.gauges}
    literal = {name for name in named if "{" not in name}
    assert literal <= metrics | table | {"eval/episodic_return"}


def test_where_extend_is_used_the_schema_names_its_n_step() -> None:
    """Rows of one step in a schema of the default's three would get the discount of three."""
    examples = [path.read_text() for path in ROOT.glob("examples/*.py")]
    sections = [part for page in DOCS.glob("*.md") for part in page.read_text().split("\n## ")]
    using = [
        text for text in examples + sections if re.search(r"(replay|offline|rb)\.extend\(", text)
    ]
    assert len(using) > 4
    for text in using:
        assert re.search(r"n_step=", text), text[:60]


def test_every_diagram_is_drawn_as_it_is_written() -> None:
    from docs.site.diagrams import blocks, picture

    assert {picture(block) for block in blocks()} == set(DOCS.glob("images/diagram-*.svg"))


def test_the_curve_to_expect_is_that_of_the_stored_runs() -> None:
    runs = json.loads((ROOT / "benchmarks/results/learning.json").read_text())["results"].values()
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", (DOCS / "atari.md").read_text(), re.M)
    assert len(rows) > 4
    for minutes, *cells in rows:
        for game, cell in zip(("Breakout", "Pong"), cells, strict=True):
            ours = sorted(
                [mean for at_s, _, mean in run["curve"] if at_s <= 60 * int(minutes)][-1]
                for run in runs
                if run["variant"] == "zapex" and game in run["env"]
            )
            assert cell == f"{ours[2]:.1f} ({ours[0]:.1f} to {ours[-1]:.1f})"


def test_each_row_of_the_page_of_numbers_has_its_figures_from_the_page_that_it_names() -> None:
    rows = re.findall(r"^\| (.+)\| \[.+\]\((\w+\.md)#", (DOCS / "numbers.md").read_text(), re.M)
    assert len(rows) == 10
    for row, page in rows:
        for number in re.findall(r"\d[\d.,]*\d", row):
            assert number in (DOCS / page).read_text(), number
