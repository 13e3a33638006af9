"""Draw a stored run's terminal view: `python -m docs.terminal_picture RUN [OUT.svg]`."""

import sys
from pathlib import Path

from zapex.recorders import read_snapshot
from zapex.terminal import svg

run, out = Path(sys.argv[1]), Path([*sys.argv, "docs/images/terminal.svg"][2])
out.parent.mkdir(parents=True, exist_ok=True)
out.write_text(svg(read_snapshot(run)), encoding="utf-8")
