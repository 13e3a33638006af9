"""Every command that zapex prints, in messages, errors and help, is one that runs.

The commands of its pages are in test_blocks.py and test_shell.py.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_shell import ROOT, place, run  # noqa: F401
from tests.test_layers import TREES
from zapex.cli import main as cli

# What a message fills in, or leaves to its reader; options that a shell would run are left out.
FILLED = {
    "RUN": "runs/a", "NAME": "n", "FILE": "schema.json", "ROLE": "learner", "DIRECTORY": "runs",
    "DIR": "keys", "ENV": "CartPole-v1", "SHELL": "", "OPTIONS": "", "{name}": "n",
    "{role}": "actor", "{quoted}": "runs/a", "{shlex.quote(str(run_dir))}": "runs/a",
    "--actors auto": "--actors 3", "bench n": "bench",
}  # fmt: skip
COMMAND = re.compile(
    rf"(?:^|`|: |, |  )(zapex (?:{'|'.join(cli.COMMANDS)})\b.*?)(?=$|`|,|;|  |\. )"
)


def texts(tree: ast.Module) -> Iterator[str]:
    """All texts of a module, with what is filled in in braces."""
    filled = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
              for part in node.values}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value)
                if isinstance(part, ast.Constant)
                else f"{{{ast.unparse(part.value)}}}"
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in filled:
            yield str(node.value)


def printed() -> set[str]:
    """The commands in all texts of zapex."""
    lines = {line.strip() for tree in TREES.values() for text in texts(tree)
             for line in text.splitlines()}  # fmt: skip
    return {found for line in lines for found in COMMAND.findall(line)}


def test_every_command_that_zapex_prints_is_one_with_flags_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.toml").write_text('[env]\nenv = "CartPole-v1"\n')
    commands = printed()
    assert len(commands) > 30
    for command in commands:
        text = re.sub(r"\[(\w+)\]|\|.*|\.\.\.|{'.*|--(?:schema|listen|minari)$", r"\1", command)
        for placeholder, value in FILLED.items():
            text = text.replace(placeholder, value)
        try:
            code = cli.main([*shlex.split(text)[1:], "--help"])
        except SystemExit as ended:
            code = ended.code or 0
        assert code == 0, f"{command}: {capsys.readouterr().err}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_run_prints_runs_in_a_directory_with_a_space(place: Path) -> None:  # noqa: F811
    """The custom environment cannot be filmed, and its module is named by the run alone."""
    directory = place / "my code"
    directory.mkdir()
    (directory / "mine.py").write_text((ROOT / "examples/own_env.py").read_text())
    log = place / "said.txt"
    here = f"cd {shlex.quote(str(directory))}"
    run(f"{here}; zapex train mine:Grid --preset smoke --plain --seeds 1,2", log)
    lines = re.findall(
        r"^ (?:watch|resume|inspect) +(\S.*)|^compare them: (.*)", log.read_text(), re.M
    )
    commands = [first or second for first, second in lines]
    assert len(commands) == 7, log.read_text()
    for command in commands[3:]:  # of one of the two runs
        end = " --inspect" if command.startswith("tensorboard") else ""
        run(f"{here}; {command}{end}", place / "ran.txt")
    run(f"{here}; zapex eval $(ls runs | head -1) --episodes 1", place / "ran.txt")
