"""How several runs at once are shown; tests/scenarios/test_seeds.py trains them."""

import sys
from pathlib import Path

import pytest

from tests.watch.test_runs import a_run
from tests.watch.test_terminal import Terminal
from zapex.cli import seeds
from zapex.machine.supervisor import Died, Exited

DEATH = Died("seed 2", 7, 1, "exit status 1", "Traceback (most recent call last):\nOSError: why", 3)


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Two runs in the working directory."""
    monkeypatch.chdir(tmp_path)
    return [seeds._Run(n, a_run(Path(f"seed-{n}")), began_s=2e12) for n in (1, 2)]


def test_a_terminal_shows_a_row_for_each_run_and_then_what_failed(begun, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    progress = seeds._Progress(plain=False, quiet=False)
    progress.show(begun, waiting=3)
    seeds._note_end(begun[1], DEATH)
    progress.note(begun[1], DEATH)
    progress.show(begun, waiting=0)
    progress.close()
    shown = terminal.getvalue()
    assert all(word in shown for word in ("seed-1", "seed-2", "3 more", "starting", "failed"))
    assert "OSError: why" in capsys.readouterr().err
    assert begun[1].outcome == "seed 2 failed: OSError: why"


def test_lines_name_the_seed_and_say_how_it_ended(begun, capsys):
    progress = seeds._Progress(plain=True, quiet=False)
    progress.show(begun, waiting=0)
    seeds._note_end(begun[0], Exited("seed 1", 7, 1))
    progress.note(begun[0], Exited("seed 1", 7, 1))
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines[:2]] == ["seed 1", "seed 2"]
    assert lines[2].startswith("seed 1 ended: ")


@pytest.mark.parametrize("failed", [True, False])
def test_quiet_says_only_what_failed(begun, capsys, failed):
    progress = seeds._Progress(plain=False, quiet=True)
    progress.show(begun, waiting=0)
    progress.note(begun[1], DEATH if failed else Exited("seed 2", 7, 1))
    progress.close()
    said = capsys.readouterr()
    assert said.out == ""
    assert bool(said.err) == failed
