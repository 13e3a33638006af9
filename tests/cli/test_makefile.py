"""`make`: its help, and where it takes torch's CPU build from; indexes are directories here."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = re.findall(r"^torch==(.+)", (ROOT / "constraints.txt").read_text(), re.M)[0]


def an_index(directory: Path, *versions: str) -> str:
    """A package index with these versions of a torch that holds nothing; its URL."""
    project = directory / "torch"
    project.mkdir(parents=True)
    names = [f"torch-{version}-py3-none-any.whl" for version in versions]
    (project / "index.html").write_text("".join(f'<a href="{name}">{name}</a>' for name in names))
    for version, name in zip(versions, names, strict=True):
        with zipfile.ZipFile(project / name, "w") as wheel:
            about = f"torch-{version}.dist-info"
            wheel.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
            )
            wheel.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{about}/RECORD", "")
    return directory.as_uri()


@pytest.mark.parametrize("has", ["pip's index", "PyTorch's index", "none"])
def test_the_cpu_build_comes_from_pips_index_or_else_from_pytorchs(
    has: str, tmp_path: Path
) -> None:
    cpu = f"{VERSION}+cpu"
    pips = an_index(tmp_path / "pips", cpu if has == "pip's index" else VERSION)
    pytorchs = an_index(tmp_path / "pytorchs", *[cpu] * (has == "PyTorch's index"))
    (tmp_path / "venv").mkdir()
    pip = f"{sys.executable} -m pip install --target {tmp_path / 'installed'}"
    done = subprocess.run(
        ["make", "install-torch-cpu", f"VENV={tmp_path / 'venv'}", f"PIP={pip}",
         f"CPU_INDEX={pytorchs}", "TORCH_INDEX="],
        env={"PATH": os.environ["PATH"], "PIP_INDEX_URL": pips, "PIP_CONFIG_FILE": os.devnull},
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    installed = [path.name for path in tmp_path.glob("installed/*.dist-info")]
    if has == "none":
        assert done.returncode
        assert "make TORCH=cuda" in done.stderr
        assert not installed
    else:
        assert done.returncode == 0, done.stderr
        assert installed == [f"torch-{cpu}.dist-info"]
    assert (f"trying {pytorchs}" in done.stdout) == (has != "pip's index")


@pytest.mark.parametrize("words", [["help"], []])
def test_make_help_names_every_target_that_users_call_and_no_other(words: list[str]) -> None:
    done = subprocess.run(
        ["make", "-C", str(ROOT), *words, f"PYTHON={sys.executable}"],
        env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    named = set(re.findall(r"(?:^  |  )make ([a-z0-9-]+)", done.stdout, re.M))
    phony = re.findall(r"^\.PHONY: (.+)", (ROOT / "Makefile").read_text(), re.M)[0].split()
    assert named == set(phony) - {"help", "check-python"}


def said_by_make(tmp_path: Path, *words: str, gpu: bool, answer: str | None = None) -> str:
    """What `make -n venv` would do for a new environment. answer: typed at a terminal."""
    (tmp_path / "dev").mkdir()
    if gpu:
        (tmp_path / "dev/nvidia0").touch()
    command = ["make", "-n", "venv", f"VENV={tmp_path / 'venv'}", f"DEVICES={tmp_path / 'dev'}"]
    terminal, ours = os.openpty()
    try:
        if answer is not None:
            os.write(terminal, answer.encode() + b"\n")
        done = subprocess.run(
            [*command, f"PYTHON={sys.executable}", *words],
            stdin=subprocess.DEVNULL if answer is None else ours,
            env={"PATH": os.environ["PATH"]}, cwd=ROOT, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
    finally:
        os.close(terminal)
        os.close(ours)
    assert done.returncode == 0, done.stderr
    return done.stdout


CPU, CUDA = 'constraints.txt)+cpu"', "--constraint constraints.txt torch"


@pytest.mark.parametrize(
    ("gpu", "answer", "build"),
    [(False, None, CPU), (True, None, CUDA), (True, "", CUDA), (True, "y", CUDA), (True, "n", CPU)],
)
def test_a_gpu_makes_torch_the_cuda_build_unless_the_user_says_no(
    gpu: bool, answer: str | None, build: str, tmp_path: Path
) -> None:
    said = said_by_make(tmp_path, gpu=gpu, answer=answer)
    assert build in said
    assert ({CPU, CUDA} - {build}).pop() not in said
    asked = [line for line in said.splitlines() if line.startswith("There is an NVIDIA GPU")]
    assert bool(asked) == gpu


def test_a_choice_that_was_made_is_not_asked_again(tmp_path: Path) -> None:
    said = said_by_make(tmp_path, "TORCH=cpu", gpu=True, answer="y")
    assert CPU in said
    assert not said.startswith("There is")
    assert "\nThere is" not in said
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/.installed-cpu").touch()
    os.utime(tmp_path / "venv/.installed-cpu", (0, 0))  # older than the constraints
    (tmp_path / "again").mkdir()
    (tmp_path / "again/venv").symlink_to(tmp_path / "venv")
    again = said_by_make(tmp_path / "again", gpu=True, answer="y")
    assert CPU in again
