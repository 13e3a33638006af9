"""Named steps: comments in zapex's source that become calls in a process that asks for it.

A line `# STEP name` marks a point of a protocol between two stores that matter. To Python and to
Numba it is a comment: no byte of code comes of it. A process that calls `install()` before it
imports zapex compiles these lines as calls instead, in kernels too (which are cached apart). It may
order that something be done at the n-th passage of a step.
"""

import ctypes
import hashlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

PACKAGE = Path(__file__).parents[2] / "zapex"
MARKER = re.compile(r"^(?P<indent> *)# STEP (?P<name>[a-z-]+)$", re.M)


def markers() -> dict[str, list[str]]:
    """The names of the steps in each module of zapex that has some, in the order of the source."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        names = [match["name"] for match in MARKER.finditer(path.read_text())]
        if names:
            relative = path.relative_to(PACKAGE.parent).with_suffix("")
            found[".".join(relative.parts)] = names
    return found


STEPS: list[str] = sorted({name for names in markers().values() for name in names})
"""A step's number is its place here."""


class _Order:
    """Of this process. step: its number, 0: there is no order; left: passages until it is met."""

    step = left = 0
    act: Callable[[], object]


_order = _Order()


def order(step: str, count: int, act: Callable[[], object]) -> None:
    """Call `act` at the `count`-th passage of `step` from now on."""
    _order.step, _order.left, _order.act = 1 + STEPS.index(step), count, act


def withdraw() -> int:
    """No order any more. Returns how many passages were left."""
    _order.step = 0
    return _order.left


@ctypes.CFUNCTYPE(None, ctypes.c_int64)
def _passed(step: int) -> None:
    if step == _order.step:
        _order.left -= 1
        if _order.left <= 0:
            _order.step = 0
            _order.act()


def _make_step() -> Any:
    """`step(number)`, for Python and for kernels: a call of the symbol zapex_step."""
    import numba
    from llvmlite import binding, ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    binding.add_symbol("zapex_step", ctypes.cast(_passed, ctypes.c_void_p).value)

    @intrinsic
    def call(_context: Any, number: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
            function = cgutils.get_or_insert_function(builder.module, kind, "zapex_step")
            builder.call(function, values)
            return context.get_dummy_value()

        return types.none(types.int64), emit

    @numba.njit(nogil=True)
    def step(number: int) -> None:
        call(number)

    return step


def with_calls(source: str) -> str:
    """A module's source with its steps as calls."""
    return MARKER.sub(lambda m: f"{m['indent']}_step({1 + STEPS.index(m['name'])})", source)


class _Loader(SourceFileLoader):
    """Compiles markers as calls."""

    settings: ClassVar[dict[str, Any]] = {}

    def get_code(self, fullname: str) -> Any:
        source = with_calls(Path(self.path).read_text(encoding="utf-8"))
        return compile(source, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_step"] = self.settings["step"]
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, wanted: set[str]) -> None:
        self._wanted = wanted

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._wanted:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _Loader(fullname, str(spec.origin))
        return spec


def install() -> None:
    """Steps are calls in every module of zapex that is imported from here on."""
    loaded = {name for name in sys.modules if name.startswith("zapex.")} - {"zapex.version"}
    assert not loaded, f"too late: {sorted(loaded)} are imported already"
    from zapex.machine import jit

    _use_cache(jit)
    _Loader.settings.update(step=_make_step())
    sys.meta_path.insert(0, _Finder(set(markers())))


def _use_cache(jit: Any) -> None:
    """Kernels with calls in them are cached apart."""
    if jit.CACHE_DIRECTORY is None:
        return
    root = jit.CACHE_DIRECTORY.parent
    kernels = jit.CACHE_DIRECTORY.name.removeprefix("kernels-")
    digest = hashlib.sha256(repr((STEPS, Path(__file__).read_text())).encode()).hexdigest()[:8]
    plain = root / f"steps-{kernels}-{digest}"
    plain.mkdir(mode=0o700, exist_ok=True)
    _forget_old(root, plain)
    jit.CACHE_DIRECTORY = plain


def _forget_old(root: Path, wanted: Path) -> None:
    for old in root.glob("steps-*"):
        if not old.name.startswith(wanted.name) and time.time() - old.stat().st_mtime > 24 * 3600:
            shutil.rmtree(old, ignore_errors=True)
