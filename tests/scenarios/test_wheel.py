"""The wheel: pure Python, complete, and it trains without the source tree."""

import email
import re
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


def environment(home: Path, wheel: Path) -> Path:
    """The Python of a new environment with zapex, which borrows the dependencies from ours."""
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=home)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home)
    # Of a directory named in a .pth file the .pth files are not read: ours may install zapex.
    (Path(site.strip()) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.scenario
@pytest.mark.timeout(400)  # nothing is compiled yet where it is installed
def test_the_installed_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    python = environment(home, wheel)
    where = run(python, "-c", "import zapex; print(zapex.__file__)", cwd=tmp_path)
    assert str(home) in where
    zapex = home / "bin" / "zapex"
    command = [zapex, "train", "--env", "CartPole-v1", "--preset", "smoke", "--run-dir", "run"]
    run(*command, "--max-frames", "2k", "--plain", cwd=tmp_path)
    assert (tmp_path / "run" / "config.toml").is_file()
    assert run(zapex, "eval", "run", "--episodes", "2", cwd=tmp_path).count("mean ") == 1


USER = """
from pathlib import Path
from typing import assert_type

import numpy as np

import zapex


def loss(errors: object) -> object:
    return errors


def report(now: zapex.Report) -> bool:
    return now.mean_return < 400.0


config = zapex.TrainConfig(
    env="CartPole-v1", lr=1e-3, max_frames=1e5, resume=Path("run"), loss=loss, preset="laptop"
)
assert_type((config.lr, config.max_frames, config.env), tuple[float, int, str])
result = zapex.train(config.replace(seed=2), on_report=report, capacity="20k")
action = zapex.load_policy(result.run_dir)([0.0, 0.0, 0.0, 0.0])
schema = zapex.Schema({"obs": zapex.Column((4,), np.float32), "action": zapex.Column((), np.int64)})
replay = zapex.PrioritizedReplay(10_000, schema, seed=1)
obs, flags = np.zeros((8, 4), np.float32), np.zeros(8, np.bool_)
with replay.writer(8) as writer:
    writer.reset(obs)
    writer.add(action=flags, reward=flags, next_obs=obs, terminated=flags, truncated=flags)
try:
    batch = zapex.connect(replay.handle).sample(32)
except zapex.errors.NotEnoughData:
    batch = replay.empty_batch(32)
rows, width = batch.obs.shape
applied, stale = replay.update_priorities(batch.keys, abs(batch.reward))
zapex.TrainConfig(lrr=1)  # type: ignore[call-arg]
zapex.TrainConfig(lr="x")  # type: ignore[arg-type]
config.lrr  # type: ignore[attr-defined]
batch.dones  # type: ignore[attr-defined]
zapex.trian  # type: ignore[attr-defined]
"""


@pytest.mark.scenario
@pytest.mark.timeout(600)
def test_a_users_script_passes_the_type_checker_with_the_wheel_and_in_a_clone(
    wheel: Path, tmp_path: Path
) -> None:
    """Wrong lines must be errors: --strict refuses an ignore without one."""
    (tmp_path / "user.py").write_text(USER)
    # What pip does for `make venv`, with the setuptools that is here.
    (mode,) = re.findall(
        r"^EDITABLE := .*editable_mode=(\w+)", (ROOT / "Makefile").read_text(), re.M
    )
    build = "import sys; from setuptools.build_meta import build_editable as build; "
    build += "build('.', {'editable_mode': sys.argv[1]})"
    source = wheel.parents[1]
    run(sys.executable, "-c", build, mode, cwd=source)
    wheels = {"wheel": wheel, "clone": next(source.glob("*.whl"))}
    for name, built in wheels.items():
        python = environment(tmp_path / name, built)
        mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache"]
        run(*mypy, "--python-executable", python, "user.py", cwd=tmp_path)
