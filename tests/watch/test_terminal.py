"""The terminal's output: the picture, the plain lines, the closing lines."""

import dataclasses
import io
import os
import pty
import re
import shlex
import subprocess
import sys

import pytest

from docs.terminal_picture import svg
from tests.support import fake_run
from zapex.watch.summary import summary
from zapex.watch.terminal import LivePicture, PlainLines, open_view, print_lines, print_table


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def finished():
    fake, monitor = fake_run.started(head_start_s=130)
    monitor.look()
    fake_run.go_on(fake, monitor, 1)
    return monitor.close()


def test_a_pipe_gets_plain_lines_and_a_terminal_the_picture(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_view(stream=io.StringIO()), PlainLines)
    assert isinstance(open_view(stream=Terminal()), LivePicture)
    assert isinstance(open_view(plain=True, stream=Terminal()), PlainLines)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_view(stream=Terminal()), PlainLines)


def test_a_terminal_that_cannot_show_utf8_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    terminal.encoding = "ascii"
    assert isinstance(open_view(stream=terminal), PlainLines)


def test_plain_lines_come_every_period_and_messages_at_once():
    out = io.StringIO()
    _, monitor = fake_run.started()
    view = PlainLines(out, period_s=1000)
    view.show(monitor.look())
    monitor.message("actor 1 was restarted")
    view.show(monitor.look())
    view.show(monitor.look())
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[1] for line in lines] == [
        "learning starts at 20,000 transitions",
        "0 frames (0/s)",
        "actor 1 was restarted",
    ]


def test_plain_lines_are_ascii_and_hold_the_headline_numbers(finished):
    out = io.StringIO()
    view = PlainLines(out)
    view.show(finished)
    line = out.getvalue().splitlines()[-1]
    assert line.isascii()
    for wanted in ("frames", "steps/s", "replay", "return", "greedy", "evaluated", "loss", "left"):
        assert wanted in line


def test_the_picture_is_drawn_over_itself_and_stays(finished, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    out = Terminal()
    view = LivePicture(out)
    view.show(finished)
    once = out.getvalue()
    view.show(finished)
    view.close()
    assert once.count("ALE/Breakout-v5") == 1
    assert "\x1b[1A" in out.getvalue()[len(once) :]  # up again, over the old one
    assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_picture_that_never_began_can_be_closed():
    LivePicture(Terminal()).close()


def test_the_svg_holds_the_picture_and_no_outside_font(finished):
    image = svg(finished)
    assert image.startswith("<svg")
    assert "Breakout" in image
    assert "@font-face" not in image
    assert "url(http" not in image


def test_the_view_runs_on_a_real_terminal_and_gives_it_back():
    parent, child = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "tests.support.fake_run",
        "--seconds",
        "1",
        "--head-start",
        "70",
    ]
    environment = os.environ | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(command, stdout=child, env=environment)
    os.close(child)
    text = b""
    while True:
        try:
            text += os.read(parent, 65536)
        except OSError:  # the last writer is gone
            break
    os.close(parent)
    assert process.wait(timeout=30) == 0
    assert text.count(b"role       ") >= 2
    assert b"\x1b[?25l" in text
    assert text.rindex(b"\x1b[?25h") > text.rindex(b"\x1b[?25l")


def test_the_closing_lines_say_what_came_out_and_how_to_look_at_it(finished, tmp_path):
    curve = tmp_path / "learning_curve.png"
    facts = fake_run.facts(run_dir=tmp_path)
    finished = type(finished)(**vars(finished) | {"facts": facts})
    out = io.StringIO()
    print_lines(summary(finished, "ten minutes are over", curve), stream=out)
    text = out.getvalue()
    for wanted in (
        "ten minutes are over",
        "over 10 greedy games",
        "human 30.5: not reached",
        "random 1.7: first reached at 1:00",
        "transitions in 1.71 GB; a plain buffer takes 12.2 GB",
        "the learner waited 3.0% of its time for batches",
        f"zapex eval {tmp_path} --episodes 5 --video game.mp4",
        f"zapex train --resume {tmp_path}",
        str(curve),
    ):
        assert wanted in text, wanted


def test_commands_of_the_closing_lines_can_be_pasted_into_a_shell(finished, tmp_path):
    run_dir = tmp_path / "my first run"
    facts = fake_run.facts(run_dir=run_dir)
    finished = dataclasses.replace(finished, facts=facts)
    lines = ["".join(text for text, _ in line) for line in summary(finished, "stopped")]
    commands = {line.split()[0]: shlex.split(line)[1:] for line in lines if "my first run'" in line}
    assert commands["watch"][:3] == ["zapex", "eval", str(run_dir)]
    assert shlex.split(next(line for line in lines if line.startswith(" go on")))[2:] == [
        "zapex", "train", "--resume", str(run_dir),
    ]  # fmt: skip
    assert commands["inspect"] == ["tensorboard", "--logdir_spec", f"my first run:{run_dir}"]


def test_closing_lines_on_a_terminal_are_styled_and_commands_stay_whole(finished, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    print_lines([[(" watch ", "bright_black"), ("zapex eval " + "x" * 60, "cyan")]], stream=out)
    assert "x" * 60 in out.getvalue()
    assert "\x1b[" in out.getvalue()


def test_texts_are_broken_between_words_where_the_terminal_ends(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    text = "the learner waited 12% of its time for batches"
    print_lines([[(" waiting    ", "bright_black"), (text, "")]], stream=out)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert plain.splitlines() == [
        " waiting    the learner waited 12% of",
        "            its time for batches",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_tables_last_column_is_broken_only_on_a_terminal(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "44")
    out = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    table = (
        "  --lr       0.5  you gave it\n  --threads    1  two of them beside busy actors are slow"
    )
    print_table(f"{table}\nRuns until 1 minute is over; Ctrl-C ends it and saves.")
    assert out.getvalue().splitlines() == (
        [
            "  --lr       0.5  you gave it",
            "  --threads    1  two of them beside busy",
            "                  actors are slow",
            "Runs until 1 minute is over; Ctrl-C ends it",
            "and saves.",
        ]
        if terminal
        else [*table.splitlines(), "Runs until 1 minute is over; Ctrl-C ends it and saves."]
    )


def test_a_run_without_evaluations_has_a_summary_too():
    lines = summary(fake_run.FakeRun().monitor().close(), "stopped")
    text = "\n".join("".join(part for part, _ in line) for line in lines)
    assert "stopped" in text
    assert "nan" not in text
