"""A shell completes zapex's commands and flags."""

import shutil
import subprocess

import pytest

from zapex.cli import main as cli

pytest.importorskip("shtab", reason="no shtab: make venv")


def completed(script: str, *words: str) -> list[str]:
    """Bash's completions of the last word of a line."""
    line = " ".join(f"'{word}'" for word in words)
    ask = (
        f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_zapex; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.split()


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_completes_commands_flags_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "zapex", "ev") == ["eval"]
    assert set(completed(script, "zapex", "")) >= cli.COMMANDS.keys()
    assert "--max-frames" in completed(script, "zapex", "train", "--max-")
    assert "--fstack-lib" in completed(script, "zapex", "replay", "--fs")
    assert "--no-dueling" in completed(script, "zapex", "train", "--no-d")
    assert completed(script, "zapex", "train", "--sampling", "strat") == ["stratified"]


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("zapex", "train", "max-frames", "checkpoint"))


def test_an_unknown_shell_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bsh"]) == 2
    assert "did you mean bash?" in capsys.readouterr().err
    assert cli.main(["completion"]) == 2
    assert cli.main(["completion", "--help"]) == 0
