"""The picture: a pure function of a snapshot and a size."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import fake_run
from zapex.monitor import Monitor
from zapex.report import RunFacts
from zapex.screen import clock, count, draw, number, size, sparkline


def snapshot(seconds=130):
    fake, monitor = fake_run.started(head_start_s=seconds)
    monitor.look()
    fake_run.go_on(fake, monitor, 1)
    return monitor.look()


SNAPSHOT = snapshot()
EMPTY = Monitor(RunFacts("CartPole-v1"), fake_run.FakeRun().roles).look()


def texts(lines):
    return ["".join(text for text, _ in line) for line in lines]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(1, 250), st.integers(1, 90), st.sampled_from([SNAPSHOT, EMPTY]))
def test_the_picture_fits_any_size(width, height, shown):
    lines = texts(draw(shown, width, height))
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_everything_is_there_at_80_columns_and_23_rows():
    text = "\n".join(texts(draw(SNAPSHOT, 80, 23)))
    for wanted in (
        "ALE/Breakout-v5",
        "of 10:00",
        "left",
        "actors ×2",
        "evaluator",
        "compute",
        "frames/s",
        "batches/s",
        "a plain buffer",
        "samples per insert",
        "stale",
        "actors wait",
        "greedy",
        "ε<.001",
        "ε≥.1",
        "human 30.5",
        "loss",
        "parameters v",
        "memory",
        "games",
    ):
        assert wanted in text, wanted
    assert not any(line.endswith("…") for line in text.splitlines())


def test_a_run_that_has_not_begun_says_so_in_words():
    fake = fake_run.FakeRun()
    for _, block in fake.roles:
        block.leave()
        for word in block._phases.values():
            block._words[word] = 0
    text = "\n".join(texts(draw(Monitor(RunFacts("CartPole-v1"), fake.roles).look(), 80, 24)))
    for wanted in ("starting", "no game has ended yet", "not yet", "waits for the first batch"):
        assert wanted in text
    assert "until stopped" in text
    assert "nan" not in text


def test_phase_bars_are_as_long_as_their_shares():
    line = next(
        line for line in draw(SNAPSHOT, 140, 40) if line and line[0][0].startswith(" actors")
    )
    cells = [len(text) for text, _ in line if set(text) <= set("━─") and text]
    assert sum(cells) == sum(map(len, (t for t, _ in line[1:6])))
    shares = list(SNAPSHOT.role("actor").shares.values())
    drawn = [len(text) / sum(cells) for text, _ in line[1:5]]
    assert drawn == pytest.approx(shares, abs=1 / sum(cells))


def test_a_silent_role_is_named_in_its_row():
    views = tuple(
        dataclasses.replace(view, silent=(7.4, "actor 1")) if view.role == "actor" else view
        for view in SNAPSHOT.roles
    )
    lines = texts(draw(dataclasses.replace(SNAPSHOT, roles=views), 80, 23))
    assert any("actor 1 has been silent for 7 s" in line for line in lines)


def test_more_rows_show_the_phases_inside_compute():
    assert any("compute: environment" in line for line in texts(draw(SNAPSHOT, 80, 40)))
    assert not any("compute: environment" in line for line in texts(draw(SNAPSHOT, 80, 23)))


def test_messages_cannot_move_the_cursor():
    _, monitor = fake_run.started()
    monitor.message("Traceback\n\x1b[2J\tboom")
    lines = texts(draw(monitor.look(), 80, 40))
    assert any("Traceback  [2J boom" in line for line in lines)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (252, "4:12"), (7325, "2:02:05")]
)
def test_clocks_read_like_clocks(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (412, "412"),
        (9999, "9,999"),
        (12345, "12.3k"),
        (412331, "412k"),
        (1.234e6, "1.23M"),
    ],
)
def test_counts_have_three_digits(value, text):
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (0.0123, "0.0123"), (1.234, "1.23"), (-20.7, "-20.7"), (4123, "4,123"),
     (1e-7, "1.00e-07"), (math.nan, "-")],
)  # fmt: skip
def test_numbers_have_as_many_digits_as_they_need(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 kB"), (31.5e6, "31.5 MB"), (8.6e9, "8.60 GB"), (67e9, "67.0 GB")]
)
def test_sizes_are_in_powers_of_ten(value, text):
    assert size(value) == text


def test_sparklines_thin_to_the_width_and_span_all_heights():
    assert sparkline([0, 1], 10) == "▁█"
    assert sparkline(range(1000), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0] * 5, 10) == "▁▁▁▁▁"
    assert sparkline([3.0], 10) == ""
    assert sparkline([1, 2, 3], -4) == ""
