"""Draw a stored run's terminal view: `python -m docs.terminal_picture RUN [OUT.svg]`."""

import io
import re
import sys
from functools import partial
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from zapex.watch.recorders import read_snapshot
from zapex.watch.report import Snapshot
from zapex.watch.terminal import Picture, draw


def svg(snapshot: Snapshot, width: int = 100, height: int = 32) -> str:
    """The picture as an SVG, for a README, without external fonts."""
    console = Console(
        record=True, width=width, height=height, file=io.StringIO(), force_terminal=True
    )
    console.print(Picture(partial(draw, snapshot)), end="")
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(
        title=f"zapex train --env {snapshot.facts.environment}", code_format=form
    )


if __name__ == "__main__":
    run, out = Path(sys.argv[1]), Path([*sys.argv, "docs/images/terminal.svg"][2])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(svg(read_snapshot(run)), encoding="utf-8")
