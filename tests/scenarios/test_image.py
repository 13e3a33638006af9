"""The container image's lines, executed without a container: in a directory and a new environment.

With ZAPEX_RELEASE=1 all that zapex needs is installed as the image's build does it; otherwise zapex
alone, beside the packages of this environment.
"""

import json
import os
import re
import sys
import sysconfig
from functools import partial
from pathlib import Path

import pytest

import zapex
from tests.scenarios import test_index
from tests.scenarios.test_index import FULL, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800 if FULL else 300)]


def instructions() -> list[tuple[str, str]]:
    """Name and words of each line of the Containerfile."""
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def test_the_lines_of_the_image_install_a_zapex_that_trains(tmp_path: Path) -> None:
    python, source, nowhere = tmp_path / "venv/bin/python", tmp_path / "src", tmp_path / "index"
    nowhere.mkdir()
    test_index.run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    environment = {
        "PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1",
        **{name: word for name, word in os.environ.items() if name.startswith("PIP_")},
    }  # fmt: skip
    if not FULL:
        environment |= {
            "TORCH_INDEX": nowhere.as_uri(), "PIP_NO_DEPS": "1",
            "PYTHONPATH": sysconfig.get_paths()["purelib"],
        }  # fmt: skip
    seen = []
    run = partial(test_index.run, cwd=tmp_path, timeout_s=1500, environment=environment)

    for name, words in instructions():
        seen.append(name)
        if name == "COPY":
            *files, target = words.split()
            source.mkdir(exist_ok=True)
            run("cp", "-r", *(ROOT / file for file in files), f"{tmp_path}{target}")
        elif name == "ARG":
            variable, _, default = words.partition("=")
            environment.setdefault(variable, os.environ.get(variable, default))
        elif name == "RUN":
            run("sh", "-ec", re.sub(r"/src\b", str(source), words))
        elif name == "USER":
            assert int(words.partition(":")[0]) > 0  # Kubernetes must see that it is not root
        elif name == "ENTRYPOINT":
            entry = json.loads(words)
    assert seen == ["FROM", "COPY", "COPY", "ARG", "RUN", "USER", "WORKDIR", "ENTRYPOINT"]
    assert not source.exists()
    where = run(python, "-P", "-c", "import zapex.clusters.host as h; print(h.__file__)")
    assert where.startswith(str(tmp_path / "venv"))
    assert run(*entry, "--version") == f"zapex {zapex.__version__}\n"
    short = ["--preset", "smoke", "--max-frames", "2k", "--run-dir", "run", "--plain"]
    run(*entry, "train", "CartPole-v1", *short)
    assert "mean " in run(*entry, "eval", "run", "--episodes", "2")
