"""What all demos share: their flags, and zapex commands as children that end with the demo."""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zapex.errors import ConfigError
from zapex.watch.recorders import RESULT_FILE
from zapex.watch.terminal import clock

ENV, TARGET = "CartPole-v1", 475.0
GRACE_S = 8.0  # for the children to save and end


@dataclass(frozen=True)
class DemoOptions:
    """How long, and where."""

    minutes: float = 3.0
    """The demo ends after this long, or when CartPole is solved."""
    run_dir: str = ""
    """Directory for all output; it must be new."""

    def new_run_dir(self, name: str) -> Path:
        """The directory of this run of the demo. Raises ConfigError for values that cannot work."""
        if not self.minutes > 0:
            raise ConfigError(f"--minutes must be more than 0, got {self.minutes:g}")
        run_dir = Path(self.run_dir or time.strftime(f"runs/demo-{name}__%Y%m%d-%H%M%S"))
        if run_dir.exists():
            raise ConfigError(f"--run-dir must be new, and {run_dir} exists: choose another")
        return run_dir.absolute()


class Log:
    """Prints what a demo does, with the time since its start."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def tell(self, text: str) -> None:
        """Print one line."""
        print(f"{clock(time.monotonic() - self._began_s)}  {text}", flush=True)


def outcome(run_dir: Path) -> str:
    """How the run of that directory has ended."""
    result = {}
    with contextlib.suppress(OSError, ValueError):
        result = json.loads((run_dir / RESULT_FILE).read_text(encoding="utf-8"))
    if not result:
        return "the run has left no result"
    last = result["last"]
    mean = f", mean return {last['mean']:g} over {len(last['returns'])} games" if last else ""
    return f"ended because {result['reason']}{mean}; the run is in {run_dir}"


def child_argv(title: str, directory: str, words: Sequence[str]) -> list[str]:
    """The command line of a child that runs `zapex WORDS` in `directory`."""
    return [sys.executable, "-m", "zapex.cli.as_child", title, directory, *words]
