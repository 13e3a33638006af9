"""The picture: a pure function of a snapshot and a size."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import fake_run
from zapex.watch.screen import clock, count, draw, number, size, sparkline


def snapshot(seconds=130):
    fake, monitor = fake_run.started(head_start_s=seconds)
    monitor.look()
    fake_run.go_on(fake, monitor, 1)
    return monitor.look()


SNAPSHOT = snapshot()
EMPTY = fake_run.FakeRun().monitor().look()


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
        "params v",
        "memory",
        "games",
    ):
        assert wanted in text, wanted
    assert not any(line.endswith("…") for line in text.splitlines())


@pytest.mark.parametrize("width", range(80, 125))
def test_a_fact_is_shown_whole_or_not_at_all(width):
    evicted = {**SNAPSHOT.learner, "torn_rows": 222.0}
    whole = texts(draw(dataclasses.replace(SNAPSHOT, learner=evicted), 300, 30))
    shown = texts(draw(dataclasses.replace(SNAPSHOT, learner=evicted), width, 30))
    for label in ("speed", "evaluated", "learner", "machine"):
        *_, line = (line for line in shown if line.startswith(f" {label}"))
        *_, all_of_it = (line for line in whole if line.startswith(f" {label}"))
        assert all_of_it == line or all_of_it.startswith(f"{line}   "), line
    assert ("222 rows evicted while read" in "".join(shown)) == (width >= 104)


def test_a_role_that_uses_little_of_a_core_shows_how_little():
    views = [dataclasses.replace(view, cpu_cores=0.004) for view in SNAPSHOT.roles]
    lines = texts(draw(dataclasses.replace(SNAPSHOT, roles=tuple(views)), 80, 23))
    assert sum(line.rstrip().endswith(" 0.4%") for line in lines) == len(views)


def test_a_run_that_has_not_begun_says_so_in_words():
    fake = fake_run.FakeRun(begun=False)
    text = "\n".join(texts(draw(fake.monitor().look(), 80, 24)))
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
    resting = [
        dataclasses.replace(view, phases=dict.fromkeys(view.phases, 0.0)) for view in SNAPSHOT.roles
    ]
    lines = texts(draw(dataclasses.replace(SNAPSHOT, roles=tuple(resting)), 80, 40))
    first = next(i for i, line in enumerate(lines) if line.startswith(" actor"))
    assert all(line.strip() for line in lines[first : first + len(resting)]), "no empty row between"


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
