"""Draw the mermaid blocks of docs/ into docs/images: `python -m docs.site.diagrams MERMAID.min.js`.

A page of the site then loads a picture, not 3 MB of program. A picture's name has its block's hash,
so a block that was changed has none, and the site is not built before it is drawn. MERMAID.min.js
is `dist/mermaid.min.js` of npm's package mermaid (`npm pack mermaid`).
"""

import hashlib
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]
BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)
_DRAW = """async text => {
  mermaid.initialize({startOnLoad: false, htmlLabels: false, flowchart: {htmlLabels: false},
                      fontFamily: "sans-serif", themeVariables: {fontSize: "15px"}});
  return (await mermaid.render("diagram", text)).svg;
}"""


def picture(block: str) -> Path:
    """The picture of a block's text."""
    return DOCS / "images" / f"diagram-{hashlib.sha256(block.encode()).hexdigest()[:12]}.svg"


def blocks() -> list[str]:
    """The texts of all mermaid blocks."""
    return [text for path in sorted(DOCS.rglob("*.md")) for text in BLOCK.findall(path.read_text())]


def main(program: str) -> None:
    """Draw what is missing, and remove what no block names."""
    from tests.support.browser import browser_page

    wanted = {picture(block): block for block in blocks()}
    for old in set((DOCS / "images").glob("diagram-*.svg")) - wanted.keys():
        old.unlink()
    with browser_page() as page:
        page.add_script_tag(path=program)
        for path, block in wanted.items():
            svg = page.evaluate(_DRAW, block)
            # Its own width: a page may scroll it, and does not shrink it until nobody can read it.
            width, height = re.search(r'viewBox="\S+ \S+ (\S+) (\S+)"', svg).groups()
            size = f'width="{float(width):.0f}" height="{float(height):.0f}"'
            path.write_text(svg.replace('width="100%"', size, 1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
