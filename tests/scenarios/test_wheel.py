"""The wheel: pure Python, complete, and it trains without the source tree."""

import email
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.scenarios.test_index import ROOT, copy_of_the_source, run
from tests.test_layers import TREES, imports

_OTHER_NAMES = {"pynvml": "nvidia-ml-py"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because a build leaves things beside its sources."""
    source = copy_of_the_source(tmp_path_factory.mktemp("source"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"]
    run(*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", ".", cwd=source)
    return next((source / "dist").glob("*.whl"))


def test_the_wheel_is_pure_python_and_complete(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "zapex").rglob("*.py")}
    packaged = {name for name in names if name.startswith("zapex/")}
    assert packaged == sources | {"zapex/py.typed"}
    assert any(name.endswith("LICENSE") for name in names)


def test_the_wheel_asks_for_everything_that_zapex_imports(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    asked = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    declared = {Requirement(text).name.lower().replace("_", "-") for text in asked}
    distributions = metadata.packages_distributions()
    for name, tree in TREES.items():
        for module in {full.partition(".")[0] for full, when in imports(tree) if when != "never"}:
            if module not in sys.stdlib_module_names and module != "zapex":
                # An extra that is not installed here has its module's name, but for one.
                found = distributions.get(module, [_OTHER_NAMES.get(module, module)])
                needed = {dist.lower().replace("_", "-") for dist in found}
                # Numba says itself which llvmlite it takes.
                assert needed & declared or module == "llvmlite", f"{name} imports {module}"


@pytest.mark.scenario
@pytest.mark.timeout(400)  # nothing is compiled yet where it is installed
def test_the_installed_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    """In an empty environment that borrows the dependencies, and only those, from ours."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
    # Of a directory named in a .pth file the .pth files are not read: ours may install zapex.
    (Path(site.strip()) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import zapex; print(zapex.__file__)", cwd=tmp_path)
    assert str(home) in where
    zapex = home / "bin" / "zapex"
    command = [zapex, "train", "--env", "CartPole-v1", "--preset", "smoke", "--run-dir", "run"]
    run(*command, "--max-frames", "2k", "--plain", cwd=tmp_path)
    assert (tmp_path / "run" / "config.toml").is_file()
    assert run(zapex, "eval", "run", "--episodes", "2", cwd=tmp_path).count("mean ") == 1
