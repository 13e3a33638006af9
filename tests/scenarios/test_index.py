"""What goes to a package index: built, checked, and installed from an index on every Python here.

`make release` runs these tests with ZAPEX_RELEASE=1: the distributions stay in dist/, and zapex is
installed with all that it needs, which is some 100 MB a Python; otherwise with NumPy and Numba.
The oldest versions that pyproject.toml allows are tested on the oldest Python.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

import zapex

ROOT = Path(__file__).parents[2]
FULL = bool(os.environ.get("ZAPEX_RELEASE"))
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800 if FULL else 600),
    pytest.mark.skipif(
        find_spec("build") is None or find_spec("twine") is None,
        reason="no build and twine: pip install build twine",
    ),
]


def run(
    *command: object, cwd: Path, timeout_s: float = 500, environment: dict[str, str] | None = None
) -> str:
    """What a command says; it must succeed. environment: all of it, in place of this process's."""
    if environment is None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_the_source(to: Path) -> Path:
    """What a build needs, in another place: it leaves things beside its sources."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    without_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "zapex", to / "zapex", ignore=without_caches)
    return to


def interpreter(version: str) -> str | None:
    """A Python of this version: on the path, in pyenv's directory, or the one that runs this."""
    names = [
        f"python{version}",
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ]
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        names.insert(0, sys.executable)
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for name in filter(None, map(shutil.which, names)):
        done = subprocess.run([name, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return name
    return None


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel that was built from it."""
    source = copy_of_the_source(tmp_path_factory.mktemp("source"))
    out = ROOT / "dist" if FULL else source / "dist"
    for old in out.glob("zapex-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=source)
    return out


@pytest.fixture(scope="module")
def index(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a package index that has zapex and nothing else."""
    root = tmp_path_factory.mktemp("index")
    (root / "zapex").mkdir()
    names = [path.name for path in dist.glob("zapex-*")]
    links = "".join(f'<a href="{name}">{name}</a>' for name in names)
    (root / "zapex/index.html").write_text(f"<!DOCTYPE html>{links}")
    for name in names:
        shutil.copy(dist / name, root / "zapex")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_the_version_stands_in_one_place_and_is_cited_so() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited is not None
    assert cited[1] == zapex.__version__
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


def test_twine_finds_nothing_wrong_with_what_was_built(dist: Path) -> None:
    files = sorted(dist.glob("zapex-*"))
    assert [path.name for path in files] == [
        f"zapex-{zapex.__version__}-py3-none-any.whl", f"zapex-{zapex.__version__}.tar.gz",
    ]  # fmt: skip
    said = run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=dist)
    assert said.count("PASSED") == 2


_LIBRARY = """
import numpy as np, zapex
schema = zapex.Schema({"obs": zapex.Column((4,), "f4"), "action": zapex.Column((), "i8")}, n_step=1)
replay = zapex.PrioritizedReplay(1000, schema, seed=1)
rows = np.zeros((64, 4), np.float32)
replay.extend(obs=rows, action=np.zeros(64, int), reward=np.ones(64), next_obs=rows,
              terminated=np.zeros(64, bool))
batch = replay.sample(32, beta=0.4)
print(replay.update_priorities(batch.keys, np.ones(32)), zapex.__file__)
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_zapex_is_installed_from_an_index_and_works(
    version: str, index: str, tmp_path: Path
) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    home = tmp_path / "venv"
    run(python, "-m", "venv", home, cwd=tmp_path)
    python = home / "bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    if not FULL:
        run(*pip, "numpy", "numba", cwd=tmp_path)
    # From this index, by its name, and not from the machine's.
    deps = ["--extra-index-url", index] if FULL else ["--no-deps", "--index-url", index]
    run(*pip, *deps, f"zapex=={zapex.__version__}", cwd=tmp_path, timeout_s=1500)
    command = home / "bin/zapex"
    assert run(command, "--version", cwd=tmp_path) == f"zapex {zapex.__version__}\n"
    assert f"(32, 0) {home}" in run(python, "-c", _LIBRARY, cwd=tmp_path)
    if FULL:
        short = ["--preset", "smoke", "--max-frames", "2k", "--run-dir", "run", "--plain"]
        run(command, "train", "CartPole-v1", *short, cwd=tmp_path)
        assert "mean " in run(command, "eval", "run", "--episodes", "2", cwd=tmp_path)
    else:
        done = subprocess.run(
            [command, "train", "CartPole-v1"], cwd=tmp_path, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert re.fullmatch(r"zapex: this command needs \w+: pip install zapex\n", done.stderr)


# torch's own bound is not: old versions have no CPU build in an index, and CUDA's take several GB.
_NOT_OLD = {"torch"}
_FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis", "psutil")


def oldest_allowed(full: bool) -> list[str]:
    """What pip installs for zapex with the oldest versions; not full: for the library alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ("curve", "compress", "fstack", "sb3", "minari", "onnx", "video") if full else ()
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for extra in extras for one in optional[extra])]
    names = {one: re.split(r"[\[>]", one)[0] for one in wanted}
    kept = [one for one in wanted if full or names[one] in ("numpy", "numba")]
    return [one if names[one] in _NOT_OLD else one.replace(">=", "==") for one in kept]


def test_zapex_works_with_the_oldest_versions_that_it_allows(tmp_path: Path) -> None:
    python = interpreter(VERSIONS[0])
    if python is None:
        pytest.skip(f"no Python {VERSIONS[0]} here")
    home = tmp_path / "venv"
    run(python, "-m", "venv", home, cwd=tmp_path)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (tmp_path / "pins.txt").write_text("\n".join(p for p in pins if p.startswith("torch==")))
    install = [home / "bin/python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    constraint = ["--constraint", tmp_path / "pins.txt"]
    run(*install, *constraint, *oldest_allowed(FULL), *_FOR_TESTS, cwd=tmp_path, timeout_s=1500)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    python = [home / "bin/python", "-m"]
    tests = [
        "tests/test_sumtree_numba.py",
        "tests/library" if FULL else "tests/library/test_twin.py",
    ]
    quiet = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    run(*python, "pytest", *quiet, *tests, cwd=ROOT, timeout_s=1500, environment=environment)
    if FULL:
        short = ["--preset", "smoke", "--max-frames", "2k", "--run-dir", "run", "--plain"]
        run(*python, "zapex", "train", "CartPole-v1", *short, cwd=tmp_path, environment=environment)
        export = ["zapex", "export", "run", "--onnx", "policy.onnx"]
        run(*python, *export, cwd=tmp_path, environment=environment)
