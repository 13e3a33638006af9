"""The blocks of code of the documentation: Python runs, shell has commands and flags that exist.

test_shell.py runs the shell blocks.
"""

import importlib
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from zapex.cli import main as cli

pytest.importorskip("sybil", reason="no sybil: pip install sybil")
from sybil import Sybil
from sybil.parsers.abstract import AbstractCodeBlockParser
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

ROOT = Path(__file__).parents[2]
PAGES = [
    str(path.relative_to(ROOT))
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
        *sorted(ROOT.glob("docs/*.md")),
    )
]
# Pages whose Python trains, or takes seconds for other reasons.
SLOW = {"docs/python.md", "docs/own_network.md", "docs/comparing.md"}
# First words of lines that are no command of zapex, and why no test runs them.
NOT_RUN = {
    "sudo apt": "installs Debian packages",
    "git clone": "has no address yet",
    "make": "takes minutes to hours; .ci/run calls the README's",
    ". .venv/bin/activate": "the tests have their environment",
    "pip install": "the tests have their environment",
    "uv ": "not a dependency; as above",
    "pipx install": "not a dependency; as above",
    "python shared.py": "test_shell.py",
    "tensorboard": "serves until it is stopped; tests/watch/test_dashboards.py",
    "export ZAPEX_FSTACK": "needs F-Stack's library",
}  # fmt: skip


class Blocks(AbstractCodeBlockParser):
    """The fenced blocks of a page, in their order: `arguments` is what stands after the fence."""

    def __init__(self) -> None:
        info = re.compile(r"(?P<arguments>[^\n`]+)$\n", re.M)
        super().__init__([RawFencedCodeBlockLexer(info)], language="any")

    def __call__(self, document):
        """Every block, whatever its language."""
        for lexer in self.lexers:
            for region in lexer(document):
                region.parsed = SimpleNamespace(
                    info=region.lexemes["arguments"], text=str(region.lexemes["source"])
                )
                region.evaluator = lambda example: None
                yield region


def blocks(page: str, language: str) -> list[SimpleNamespace]:
    """The page's blocks of a language."""
    document = Sybil([Blocks()]).parse(ROOT / page)
    found = [example.parsed for example in document.examples()]
    return [block for block in found if block.info.split()[0] == language]


def lines_of(text: str) -> list[str]:
    """The commands of a block: without comments, continued lines in one, `&&` apart."""
    whole = text.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in whole.splitlines())
    return [part.strip() for line in lines for part in line.split("&&") if part.strip(" &")]


def shell_lines(page: str) -> list[str]:
    """All commands of a page's shell blocks."""
    return lines_of("\n".join(block.text for block in blocks(page, "sh")))


def kept_from(line: str) -> str | None:
    """Why a line is not run; None: it is."""
    line = " ".join(line.split())
    line = line.partition("|")[2].strip() or line  # what is fed to a command
    return next((why for start, why in NOT_RUN.items() if line.startswith(start)), None)


def run_python(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, in one namespace; a block with a title is a file, imported there."""
    notebook = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.syspath_prepend(Path.cwd())
    for number, block in enumerate(blocks(page, "python")):
        if title := re.search(r'title="(.+?)"', block.info):
            Path(title[1]).write_text(block.text)
            monkeypatch.delitem(sys.modules, Path(title[1]).stem, raising=False)
            importlib.import_module(Path(title[1]).stem)
            continue
        # Our own documentation: not bytes from elsewhere.
        exec(compile(block.text, f"{page}, block {number}", "exec"), vars(notebook))


def python_pages() -> list[object]:
    return [
        pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else [])
        for page in PAGES if blocks(page, "python")
    ]  # fmt: skip


@pytest.mark.parametrize("page", python_pages())
def test_the_python_of_a_page_runs_as_it_is_written(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(page, monkeypatch)


def test_every_block_has_a_language_that_the_tests_know() -> None:
    known = {"python", "sh", "toml", "diff", "mermaid", "text"}
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert set(re.findall(r"^ *```(\w+)", text, re.M)) <= known, page
        assert len(re.findall(r"^ *```", text, re.M)) % 2 == 0, page


def test_no_line_is_kept_from_running_that_the_pages_no_longer_have() -> None:
    lines = [" ".join(line.split()) for page in PAGES for line in shell_lines(page)]
    for start in NOT_RUN:
        assert any(start in line for line in lines), start


@pytest.fixture
def at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with what commands of the pages name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("mine", None)
    (tmp_path / "run.toml").write_text('[env]\nenv = "CartPole-v1"\n')
    (tmp_path / "runs/RUN/checkpoints").mkdir(parents=True)
    mine = [(ROOT / "examples" / name).read_text() for name in ("own_env.py", "own_network.py")]
    (tmp_path / "mine.py").write_text("\n".join([*mine, "Env = Grid"]))
    (tmp_path / "runs/RUN/config.toml").write_text('[env]\nenv = "CartPole-v1"\n')
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")])
def test_every_command_of_a_page_is_one_with_flags_that_it_has(
    page: str, at_work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for block in blocks(page, "python"):
        if title := re.search(r'title="(.+?)"', block.info):
            Path(title[1]).write_text(block.text)
    for run in re.findall(r"--run-dir (runs/\S+)", (ROOT / page).read_text()):
        shutil.copytree("runs/RUN", run, dirs_exist_ok=True)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for line in shell_lines(page):
        words = shlex.split(re.split(r"\s[>|&]", line)[0], comments=True)
        if words[0] == "make":
            asked = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
            assert set(asked) <= set(targets), line
        elif words[0] == "zapex" and words[1:] != ["--version"]:
            given = shlex.join(words).replace("--actors auto", "")  # it looks for a measurement
            try:
                code = cli.main([*shlex.split(given)[1:], "--help"])
            except SystemExit as ended:
                code = ended.code
            assert code == 0, f"{line}: {capsys.readouterr().err}"
        else:
            assert kept_from(line) or words[0] in ("printf", "cd", "eval"), line


def test_a_flag_that_is_not_there_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--no-such-flag", "1", "--help"]) == 2
    assert cli.main(["replay", "--listen", "fstack://10.0.0.2:7711", "--fstack-lob", "x"]) == 2


@pytest.mark.parametrize(
    "table", [block.text for block in blocks("docs/clusters.md", "toml")],
    ids=lambda text: next(iter(tomllib.loads(text))),
)  # fmt: skip
def test_a_table_for_a_scheduler_is_taken(
    table: str, at_work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (at_work / "run.toml").write_text('[env]\nenv = "CartPole-v1"\n\n' + table)
    assert cli.main(["launch", "run.toml", "--dry-run"]) == 0, capsys.readouterr().err
    assert "actor" in capsys.readouterr().out
