"""A mutant: a relay takes every fourth chunk for acknowledged and does not send it.

Python imports this before anything else where its directory comes first in PYTHONPATH, so it
reaches processes that others start. tests/stress/placed_kills.py must notice it.
"""

import importlib.abc
import importlib.util
import itertools
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "zapex.roles.relay"


class _Changed(importlib.abc.Loader):
    """Loads the module as always, and then changes it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        outbox: Any = module.Outbox
        accept, count = outbox.accept, itertools.count(1)

        def accepts(self: Any, slot: int) -> int:
            if next(count) % 4:
                return int(accept(self, slot))
            rows = int(self.store.header_rows[slot, module.COUNT])
            self.ledger.reclaim([slot])
            return rows

        outbox.accept = accepts


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        spec.loader = _Changed(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
