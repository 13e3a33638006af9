"""Imports run down (docs/architecture.md), and nothing makes code out of bytes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "zapex"
# zapex/__init__.py draws the map: a package, or a module of zapex itself, lies on one level.
LEVEL_OF = {
    name: int(level)
    for level, names in re.findall(
        r"^# +(\d+)  ([a-z0-9_]+(?:, [a-z0-9_]+)*)", (PACKAGE / "__init__.py").read_text(), re.M
    )
    for name in names.split(", ")
}
PACKAGES = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
# A role runs over any transport: it may name none, nor what is built on one.
KNOW_A_TRANSPORT = {
    "shm_ring", "shm_transport", "zmq_transport", "net", "library", "run", "cli",
}  # fmt: skip
# Names, also as text, of what makes code, or objects of any type, out of bytes.
FORBIDDEN = {
    "pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "yaml",
    "copyreg", "torch.load", "__import__", "allow_pickle", "recv_pyobj", "send_pyobj",
    "read_pickle",
}  # fmt: skip


def modules() -> dict[str, ast.Module]:
    """Dotted name, without the leading zapex, -> syntax tree; the package itself is ""."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(), str(path))
    return trees


TREES = modules()


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Every import in a tree: (dotted name, "at once" or, inside a function, "later").

    Those under `if TYPE_CHECKING` are "never".
    """
    when = dict.fromkeys(ast.walk(tree), "at once")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            when |= dict.fromkeys(ast.walk(node), "later")
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            when |= dict.fromkeys(ast.walk(node), "never")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, when[node]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                inner = full.removeprefix("zapex.") in TREES and full.startswith("zapex.")
                yield (full if inner else str(node.module)), when[node]


def zapex_imports(name: str, *times: str) -> set[str]:
    """Modules of zapex that module `name` imports (at these times), without the leading zapex."""
    found = {
        full.removeprefix("zapex").removeprefix(".")
        for full, when in imports(TREES[name])
        if full.partition(".")[0] == "zapex" and (not times or when in times)
    }
    return found - {"", name}


def package_of(name: str) -> str:
    return name.partition(".")[0]


def imports_of_package(package: str) -> set[str]:
    """Packages and modules of zapex itself that the files of `package` import."""
    files = [name for name in TREES if name and package_of(name) == package]
    return {package_of(other) for name in files for other in zapex_imports(name)} - {package}


def test_the_map_names_every_package_and_module_and_no_other() -> None:
    assert LEVEL_OF.keys() == {package_of(name) for name in TREES if name}


def test_the_map_has_at_most_thirteen_levels_and_few_modules_beside_packages() -> None:
    assert max(LEVEL_OF.values()) <= 13
    assert len(list(PACKAGE.glob("*.py"))) <= 12


@pytest.mark.parametrize("package", sorted(LEVEL_OF))
def test_imports_run_down_the_map(package: str) -> None:
    for other in sorted(imports_of_package(package)):
        assert LEVEL_OF[other] < LEVEL_OF[package], f"{package} imports {other}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_more_than_one_module(package: str) -> None:
    assert len([name for name in TREES if package_of(name) == package]) > 2


def test_imports_make_no_cycle() -> None:
    graph = {name: zapex_imports(name, "at once") & TREES.keys() for name in TREES if name}
    while graph:
        free = {name for name, needs in graph.items() if not needs & graph.keys()}
        assert free, f"these import each other in a circle: {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in free}


def test_the_package_itself_imports_only_its_version_when_it_is_imported() -> None:
    at_once = {
        node.module
        for node in TREES[""].body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("zapex.")
    }
    assert at_once <= {"zapex.version"}


def test_roles_import_nothing_that_knows_a_transport() -> None:
    assert not imports_of_package("roles") & KNOW_A_TRANSPORT
    everything = [full for name in TREES if package_of(name) == "roles"
                  for full, _ in imports(TREES[name])]  # fmt: skip
    assert not [full for full in everything if full.partition(".")[0] == "zmq"]


def test_only_the_agent_and_what_builds_it_import_torch() -> None:
    found = {
        package_of(name)
        for name, tree in TREES.items()
        if any(full.partition(".")[0] == "torch" for full, when in imports(tree) if when != "never")
    }
    assert found == {"agent", "chunks", "machine", "run", "sb3"}  # chunks: Batch.torch


def code_from_bytes(tree: ast.Module) -> set[str]:
    """What in a tree could make code, or objects of any type, out of bytes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {part for alias in names for part in alias.name.split(".")}
            case ast.ImportFrom(module=module, names=names):
                found |= {*str(module).split("."), *(f"{module}.{alias.name}" for alias in names)}
            case ast.Name(id="eval" | "exec" | "compile" as name):
                return {name}
            case ast.Attribute(attr=name):  # "torch.jit.load" is torch.load, too
                found |= {name, re.sub(r"^torch\b.*\.load$", "torch.load", ast.unparse(node))}
            case ast.Name(id=name) | ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                found.add(name)
    return found & FORBIDDEN


@pytest.mark.parametrize("name", TREES)
def test_bytes_never_become_code(name: str) -> None:
    assert not code_from_bytes(TREES[name])


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads as f", "eval(x)", "torch.jit.load(f)",
        "from torch import load", "np.load(f, **{'allow_pickle': True})", "socket.recv_pyobj()",
        "getattr(s, 'recv_pyobj')()", "importlib.import_module('pickle')",
    ],
)  # fmt: skip
def test_what_makes_code_of_bytes_is_found(code: str) -> None:
    assert code_from_bytes(ast.parse(code))
