"""`make numbers`: figures go from the results into claims.toml, and from there into the texts.

    python -m benchmarks.claims.numbers [--check]

In a text a figure is followed by the id of its claim: `1.59<!--replay-pair-->`, or, for an end of
its p10..p90, `1.42<!--replay-pair:p10-->`. --check: change nothing, exit code 1 if any differs.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.claims import claims as book
from benchmarks.claims.claims import Claim
from benchmarks.support.machine import ROOT

TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"(-?[\d.,]*\d)<!--([\w-]+)(?::(p10|p90))?-->")
_ENDS = ("p10", None, "p90")


def published(text: str, claims: Sequence[Claim], results: Path = book.RESULTS) -> str:
    """claims.toml with the figures of the results that are there."""
    for claim in claims:
        report = book.read(results / claim.measurement.file)
        try:
            seen = claim.seen(report)
        except (KeyError, StopIteration):
            continue  # not measured in this way yet: what was entered by hand stays
        figures = ", ".join(f"{float(f'{figure:.6g}'):.10g}" for figure in seen)
        entry = rf'(id = "{re.escape(claim.id)}"\n(?:(?!\[\[).*\n)*?published = \[)[^\]]*\]'
        text = re.sub(entry, rf"\g<1>{figures}]", text)
    return text


def numbered(text: str, claims: Mapping[str, Claim]) -> str:
    """A text with the figures of its claims. Raises KeyError where it has an unknown id."""

    def figure(match: re.Match[str]) -> str:
        claim = claims[match[2]]
        value = claim.text(claim.published[_ENDS.index(match[3])])
        return value + match[0].removeprefix(match[1])

    return MARKED.sub(figure, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the figures, or say which files would change."""
    parser = argparse.ArgumentParser(description="Write the figures of claims.toml and the texts.")
    parser.add_argument("--check", action="store_true", help="only say what differs")
    options = parser.parse_args(argv)
    changed = []

    def put(path: Path, text: str) -> None:
        if path.read_text() != text:
            changed.append(path)
            if not options.check:
                path.write_text(text)

    put(book.CLAIMS, published(book.CLAIMS.read_text(), book.load()[0]))
    claims = {claim.id: claim for claim in book.load()[0]}
    for path in TEXTS:
        put(path, numbered(path.read_text(), claims))
    for path in changed:
        print(f"{path.relative_to(ROOT)} {'differs: make numbers' if options.check else 'written'}")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
