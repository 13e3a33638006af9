"""The terminal's output: the picture, the plain lines, the closing lines."""

import dataclasses
import io
import math
import os
import pty
import re
import shlex
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.terminal_picture import svg
from tests.support import fake_run
from zapex.watch.terminal import (
    LivePicture,
    PlainLines,
    _percent,
    clock,
    count,
    draw,
    number,
    open_view,
    print_lines,
    print_table,
    size,
    sparkline,
    summary,
)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def running():
    """A monitor of a run that has learned for two minutes."""
    fake, monitor = fake_run.started(head_start_s=130)
    monitor.look()
    fake_run.go_on(fake, monitor, 1)
    return monitor


SNAPSHOT = running().look()
EMPTY = fake_run.FakeRun().monitor().look()


@pytest.fixture
def finished():
    return running().close()


def texts(lines):
    return ["".join(text for text, _ in line) for line in lines]


def with_roles(snapshot=SNAPSHOT, **changes):
    views = tuple(dataclasses.replace(view, **changes) for view in snapshot.roles)
    return dataclasses.replace(snapshot, roles=views)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(1, 250), st.integers(1, 90), st.sampled_from([SNAPSHOT, EMPTY]))
def test_the_picture_fits_any_size(width, height, shown):
    lines = texts(draw(shown, width, height))
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_everything_is_there_at_80_columns_and_23_rows():
    text = "\n".join(texts(draw(SNAPSHOT, 80, 23)))
    for wanted in (
        "ALE/Breakout-v5", "of 10:00", "left", "actors ×2", "evaluator", "compute", "frames/s",
        "batches/s", "plain buffer", "samples per insert", "stale", "greedy", "ε<.001", "ε≥.1",
        "human 30.5", "loss", "params v", "memory", "games",
    ):  # fmt: skip
        assert wanted in text, wanted


@pytest.mark.parametrize("width", range(20, 125))
def test_a_fact_is_shown_whole_or_not_at_all(width):
    evicted = {**SNAPSHOT.learner, "torn_rows": 222.0}
    whole = texts(draw(dataclasses.replace(SNAPSHOT, learner=evicted), 300, 30))
    shown = texts(draw(dataclasses.replace(SNAPSHOT, learner=evicted), width, 30))
    for label in ("speed", "evaluated", "learner", "machine"):
        *_, line = (line.rstrip() for line in shown if line.startswith(f" {label}"))
        *_, all_of_it = (line for line in whole if line.startswith(f" {label}"))
        assert all_of_it == line or all_of_it.startswith(f"{line}  "), line
    assert ("222 rows" in "".join(shown)) == (width >= 104)


@pytest.mark.parametrize("width", range(20, 125))
def test_a_number_is_never_under_another_name(width):
    """At 60 columns the last cell once read "wait 70%", of which 70 % were the cpu's."""
    views = [dataclasses.replace(view, cpu_cores=0.77) for view in SNAPSHOT.roles]
    head, *rows = texts(draw(dataclasses.replace(SNAPSHOT, roles=tuple(views)), width, 23))[3:8]
    named = set()
    for row, view in zip(rows, views, strict=True):
        assert row.split()[-1] == ("77%" if width < 100 else "MB")
        assert head.split()[-1] == ("cpu" if width < 100 else "memory")
        found = dict(
            re.findall(
                r"(?<= )(pull|push|compute|wait|sample|set|insert|update) +([\d.]+)(?=  )", row
            )
        )
        assert found.items() <= {n: _percent(share) for n, share in view.shares.items()}.items()
        named |= {len(found)} if view.role in ("actor", "learner", "replay") else set()
    assert len(named) == 1, "a column is there in all rows or in none"


def test_a_title_is_not_cut_at_80_columns():
    facts = dataclasses.replace(SNAPSHOT.facts, part="actors of the replay at tcp://10.0.0.1:7711")
    title = texts(draw(dataclasses.replace(SNAPSHOT, facts=facts), 80, 23))[0]
    assert " zapex  ALE/Breakout-v5 · laptop · 16 streams   " in title
    assert title.endswith(" of 10:00 ")


def test_a_large_terminal_shows_a_chart_of_the_return():
    history = tuple(float(i) for i in range(100))
    returns = dataclasses.replace(SNAPSHOT.returns, greedy_history=history)
    shown = dataclasses.replace(SNAPSHOT, returns=returns)
    lines = texts(draw(shown, 200, 49))
    at = next(i for i, line in enumerate(lines) if "over the whole run" in line) + 1
    rows = [line for line in lines[at:] if "█" in line]
    assert len(rows) >= 8
    assert rows[0].split()[0] == "99.0"
    assert rows[-1].split()[0] == "0.00"
    assert [row.count("█") for row in rows] == sorted(row.count("█") for row in rows)
    assert not any("█████" in line for line in texts(draw(shown, 80, 23)))


def test_an_ascii_stream_gets_the_closing_lines(finished):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_lines(summary(finished, "over"), stream=out)
    PlainLines(out).show(finished)
    assert b" ? " in out.buffer.getvalue()


def test_stored_text_cannot_move_the_cursor(finished):
    facts = dataclasses.replace(finished.facts, environment="x\x1b[2J", resume="y\x1b[2J")
    hostile = dataclasses.replace(finished, facts=facts, waiting=("\x1b[2J",))
    out = Terminal()
    print_lines(summary(hostile, "\x1b[2J"), stream=out)
    PlainLines(out).show(hostile)
    shown = out.getvalue() + "".join(texts(draw(hostile, 80, 40)))
    assert "\x1b[2J" not in shown


def test_a_run_that_has_not_begun_has_no_numbers():
    fake = fake_run.FakeRun(begun=False)
    text = "\n".join(texts(draw(fake.monitor().look(), 80, 24)))
    for wanted in ("starting", "no game", "not yet", "first batch", "until stopped"):
        assert wanted in text
    assert "nan" not in text


def test_phase_bars_are_as_long_as_their_shares():
    line = next(x for x in draw(SNAPSHOT, 140, 40) if x and x[0][0].startswith(" actors"))
    cells = [len(text) for text, _ in line if set(text) <= set("━─") and text]
    assert sum(cells) == sum(map(len, (t for t, _ in line[1:6])))
    shares = list(SNAPSHOT.role("actor").shares.values())
    drawn = [len(text) / sum(cells) for text, _ in line[1:5]]
    assert drawn == pytest.approx(shares, abs=1 / sum(cells))


def test_a_silent_process_is_named():
    lines = texts(draw(with_roles(silent=(7.4, "actor 1")), 80, 23))
    assert any("actor 1" in line and "silent for 7 s" in line for line in lines)


def test_the_reason_for_waiting_is_shown_in_every_view():
    reason = "62% of the time, actors wait for the learner: it is 512 samples behind its share"
    shown = dataclasses.replace(SNAPSHOT, waiting=(reason,))
    lines = texts(draw(shown, 80, 23))
    at = next(i for i, line in enumerate(lines) if line.startswith(" waiting"))
    text = " ".join(line.removeprefix(" waiting").strip() for line in lines[at : at + 2])
    assert text == reason
    out = io.StringIO()
    PlainLines(out).show(shown)
    assert out.getvalue().splitlines()[-1] == reason


def test_more_rows_show_the_phases_inside_compute():
    assert any("compute: environment" in line for line in texts(draw(SNAPSHOT, 80, 40)))
    assert not any("compute: environment" in line for line in texts(draw(SNAPSHOT, 80, 23)))
    resting = with_roles(phases=dict.fromkeys(SNAPSHOT.role("actor").phases, 0.0))
    resting = dataclasses.replace(
        resting, roles=tuple(view for view in resting.roles if view.role == "actor")
    )
    lines = texts(draw(resting, 80, 40))
    first = next(i for i, line in enumerate(lines) if line.startswith(" actors"))
    assert not lines[first + 1].strip().startswith("compute")
    assert not lines[first + 1].strip()  # the blank line before the speed, and only that one
    assert lines[first + 2].startswith(" speed")


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (clock, 0, "0:00"),
        (clock, 59.9, "0:59"),
        (clock, 7325, "2:02:05"),
        (count, 0, "0"),
        (count, 9999, "9,999"),
        (count, 12345, "12.3k"),
        (count, 412331, "412k"),
        (count, 1.234e6, "1.23M"),
        (number, 0, "0.00"),
        (number, 0.0123, "0.0123"),
        (number, -20.7, "-20.7"),
        (number, 4123, "4,123"),
        (number, 1e-7, "1.00e-07"),
        (number, math.nan, "-"),
        (size, 0, "0 kB"),
        (size, 31.5e6, "31.5 MB"),
        (size, 67e9, "67.0 GB"),
    ],
)
def test_numbers_have_three_or_four_digits(form, value, text):
    assert form(value) == text


def test_sparklines_thin_to_the_width_and_span_all_heights():
    assert sparkline([0, 1], 10) == "▁█"
    assert sparkline(range(1000), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0] * 5, 10) == "▁▁▁▁▁"
    assert sparkline([3.0], 10) == ""
    assert sparkline([1, 2, 3], -4) == ""


def test_only_a_terminal_with_utf8_gets_the_picture(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    ascii_terminal = Terminal()
    ascii_terminal.encoding = "ascii"
    assert isinstance(open_view(stream=Terminal()), LivePicture)
    assert isinstance(open_view(stream=io.StringIO()), PlainLines)
    assert isinstance(open_view(stream=ascii_terminal), PlainLines)
    assert isinstance(open_view(plain=True, stream=Terminal()), PlainLines)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_view(stream=Terminal()), PlainLines)


def test_plain_lines_come_every_period_and_messages_at_once():
    out = io.StringIO()
    _, monitor = fake_run.started()
    view = PlainLines(out, period_s=1000)
    view.show(monitor.look())
    monitor.message("actor 1 was restarted")
    view.show(monitor.look())
    view.show(monitor.look())
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert "0 frames (0/s)" in lines[1]
    assert lines[2].endswith("actor 1 was restarted")


def test_plain_lines_are_ascii_and_hold_the_headline_numbers(finished):
    out = io.StringIO()
    PlainLines(out).show(finished)
    line = out.getvalue().splitlines()[-1]
    assert line.isascii()
    for wanted in ("frames", "steps/s", "replay", "return", "greedy", "evaluated", "loss", "left"):
        assert wanted in line


def test_the_svg_holds_the_picture_and_no_outside_font(finished):
    image = svg(finished)
    assert image.startswith("<svg")
    assert "Breakout" in image
    assert "@font-face" not in image
    assert "url(http" not in image


SHOWN = """
import time
from tests.support import fake_run
from zapex.watch.terminal import open_view
fake, monitor = fake_run.started(open_view(False), head_start_s=70)
for _ in range(10):
    fake_run.go_on(fake, monitor, 0.1)
    monitor.tick()
    time.sleep(0.1)
monitor.close()
"""


def test_the_view_runs_on_a_real_terminal_and_gives_it_back():
    parent, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen([sys.executable, "-c", SHOWN], stdout=child, env=environment)
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


def test_the_closing_lines_have_results_and_commands_that_a_shell_understands(finished, tmp_path):
    run_dir = tmp_path / "my first run"
    finished = dataclasses.replace(finished, facts=fake_run.facts(run_dir=run_dir))
    curve = run_dir / "learning_curve.png"
    lines = texts(summary(finished, "ten minutes are over", curve))
    text = "\n".join(lines)
    for wanted in (
        "ten minutes are over", "over 10 greedy games", "human 30.5: not reached", "at 1:00",
        "1.71 GB", "12.2 GB", "waited 3.0%", str(curve),
    ):  # fmt: skip
        assert wanted in text, wanted
    commands = {line.split()[0]: shlex.split(line)[1:] for line in lines if "my first run'" in line}
    assert commands == {
        "watch": ["zapex", "eval", str(run_dir), "--episodes", "5", "--video", "game.mp4"],
        "resume": ["zapex", "train", "--resume", str(run_dir)],
        "inspect": ["tensorboard", "--logdir", str(run_dir)],
    }
    blind = dataclasses.replace(
        finished, facts=dataclasses.replace(fake_run.facts(run_dir=run_dir), films=False)
    )
    assert "--video" not in "\n".join(texts(summary(blind, "ten minutes are over", curve)))


def test_closing_lines_are_wrapped_on_a_terminal_and_commands_stay_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    text = "the learner waited 12% of its time for batches"
    command = "zapex eval " + "x" * 60
    print_lines(
        [[(" waiting    ", ""), (text, "")], [(" watch ", ""), (command, "cyan")]], stream=out
    )
    assert command in out.getvalue()
    assert "\x1b[" in out.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert plain.splitlines()[:2] == [
        " waiting    the learner waited 12% of",
        "            its time for batches",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_tables_last_column_is_wrapped_only_on_a_terminal(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "44")
    out = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    row = "  --threads    1  two of them beside busy actors are slow"
    print_table(row)
    wrapped = ["  --threads    1  two of them beside busy", "                  actors are slow"]
    assert out.getvalue().splitlines() == (wrapped if terminal else [row])
