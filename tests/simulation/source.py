"""zapex with its named steps as calls, and with a planted fault where one is asked for.

A planted fault is a file in faults/: the module, what is there, a line of three dashes, and what is
in its place. It is applied to the text of the module that is compiled, never to the file.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

from tests.stress import steps

FAULTS = Path(__file__).parent / "faults"
"""One file for each."""


def fault(name: str) -> tuple[str, str, str]:
    """The module of a planted fault, what is in it, and what is there instead."""
    module, _, change = (FAULTS / f"{name}.txt").read_text().partition("\n")
    before, after = change.rstrip("\n").split("\n---\n")
    return module, before, after


def faults() -> list[str]:
    """The names of all planted faults."""
    return sorted(path.stem for path in FAULTS.glob("*.txt"))


def install(planted: str | None = None) -> None:
    """As steps.install: before the first import of zapex."""
    if planted is not None:
        _plant(planted)
    steps.install()
    if planted is not None:
        from zapex.machine import jit

        if jit.CACHE_DIRECTORY is not None:
            text = (FAULTS / f"{planted}.txt").read_bytes()
            digest = hashlib.sha256(text).hexdigest()[:8]
            if b"_kernel" in text or b"headers" in text:
                jit.CACHE_DIRECTORY = jit.CACHE_DIRECTORY.with_name(f"planted-{digest}")


def _plant(name: str) -> None:
    module, before, after = fault(name)
    get_code = steps._Loader.get_code

    class Planted(steps._Loader):
        def get_code(self, fullname: str) -> Any:
            text = Path(self.path).read_text(encoding="utf-8")
            if fullname != module:
                return get_code(self, fullname)
            assert text.count(before) == 1, f"{name}: not one place in {module}"
            text = steps.with_calls(text.replace(before, after))
            return compile(text, self.path, "exec", dont_inherit=True)

    steps._Loader = Planted  # type: ignore[misc]
    found = steps.markers
    steps.markers = lambda: {**found(), module: found().get(module, [])}
    assert module not in sys.modules
