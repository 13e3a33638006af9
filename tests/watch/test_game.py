"""A game on the terminal, whose escapes a naive terminal interprets; and in a window."""

import io
import re

import numpy as np
import pytest

from zapex.errors import ConfigError
from zapex.roles.evaluator import Moment
from zapex.watch import game
from zapex.watch.game import TerminalGame, Window, bar, colours, fitted


class Screen(io.StringIO):
    """A naive terminal: text and colours by cell."""

    encoding = "utf-8"

    def __init__(self, columns=80, rows=24):
        super().__init__()
        self.cells = {}
        self.size = columns, rows

    def isatty(self):
        return True

    def write(self, text):
        row = column = 1
        colour = ""
        for escape, arguments, letter, glyph in re.findall(
            r"(\x1b\[([?\d;]*)([A-Za-z]))|([^\x1b])", text
        ):
            if glyph:
                assert column <= self.size[0], f"row {row} is too long"
                assert row <= self.size[1]
                self.cells[row, column] = (glyph, colour)
                column += 1
            elif letter == "H":
                row, column = map(int, arguments.split(";"))
            elif letter == "m":
                colour = arguments
            elif letter == "J":
                self.cells.clear()
            elif letter == "K":
                for c in range(column, self.size[0] + 1):
                    self.cells.pop((row, c), None)
            assert escape or glyph
        return super().write(text)

    def line(self, row):
        last = max([c for r, c in self.cells if r == row], default=0)
        return "".join(self.cells.get((row, c), " ")[0] for c in range(1, last + 1))


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.delenv("COLORTERM", raising=False)
    monkeypatch.setattr(game.time, "sleep", lambda _: None)
    return Screen()


def moment(frame, q=(0.0, 1.0), action=1, score=3.0):
    return Moment([frame], np.array(q), action, score, 7, 1)


def a_frame(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (210, 160, 3), np.uint8)


def test_writing_only_changes_gives_the_same_picture(screen):
    frames = [a_frame(0), a_frame(0), a_frame(1)]
    frames[1][50:60, 50:60] = 255
    view = TerminalGame("Pong", 4 / 3, screen)
    view.begin(60.0, ["NOOP", "FIRE"])
    sizes = []
    for frame in frames:
        before = len(screen.getvalue())
        view.see(moment(frame))
        sizes.append(len(screen.getvalue()) - before)
    fresh = Screen()
    other = TerminalGame("Pong", 4 / 3, fresh)
    other.begin(60.0, ["NOOP", "FIRE"])
    other.see(moment(frames[2]))
    assert screen.cells == fresh.cells
    assert sizes[1] < sizes[0] / 10, "only what changed is written"


def test_the_cells_have_the_colours_of_the_frame(screen, monkeypatch):
    monkeypatch.setenv("COLORTERM", "truecolor")
    frame = np.zeros((40, 40, 3), np.uint8)
    frame[:20] = (255, 0, 0)
    frame[20:] = (0, 0, 255)
    view = TerminalGame("x", 0.0, screen)
    view.begin(60.0, ["NOOP", "FIRE"])
    view.see(moment(frame))
    assert screen.cells[2, 2] == ("▀", "38;2;255;0;0;48;2;255;0;0")
    last = max(row for (row, column), (glyph, _) in screen.cells.items() if glyph == "▀")
    assert screen.cells[last, 2][1] == "38;2;0;0;255;48;2;0;0;255"


def test_q_values_have_bars_and_the_action_has_a_mark(screen):
    view = TerminalGame("Pong", 4 / 3, screen)
    view.begin(60.0, ["NOOP", "RIGHTFIRE"])
    view.see(moment(a_frame(), q=(1.0, 3.0), action=0))
    first, second = screen.line(2), screen.line(3)
    assert "▶ NOOP" in first
    assert first.endswith("1.00")
    assert "█" not in first.partition("NOOP")[2]
    assert "RIGHTFIRE ████" in second
    assert "▶" not in second
    assert "score 3.00" in screen.line(1)


def test_eighteen_actions_fit_into_few_rows(screen, monkeypatch):
    monkeypatch.setenv("LINES", "16")
    screen.size = 80, 16
    view = TerminalGame("Pong", 4 / 3, screen)
    view.begin(60.0, [f"A{i}" for i in range(18)])
    view.see(moment(a_frame(), q=np.arange(18.0), action=17))
    assert any("and 6 more" in screen.line(row) for row in range(1, 17))


def test_a_resized_terminal_is_redrawn_in_any_width(screen, monkeypatch):
    view = TerminalGame("Pong", 4 / 3, screen)
    view.begin(60.0, ["NOOP", "FIRE"])
    for columns in (200, 80, 70, 40, 20):
        monkeypatch.setenv("COLUMNS", str(columns))
        screen.size = columns, 24
        view.see(moment(a_frame()))
        assert max(column for _, column in screen.cells) <= columns
        assert any(glyph == "▀" for glyph, _ in screen.cells.values())


def test_the_terminal_is_restored(screen):
    with pytest.raises(KeyboardInterrupt), TerminalGame("Pong", 0.0, screen):
        raise KeyboardInterrupt
    assert screen.getvalue().endswith("\x1b[?25h\x1b[?1049l")


def test_without_a_terminal_or_a_display_another_way_is_named(monkeypatch):
    with pytest.raises(ConfigError, match="--video"):
        TerminalGame("Pong", 0.0, io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    with pytest.raises(ConfigError, match="--video"):
        TerminalGame("Pong", 0.0, Screen())
    with pytest.raises(ConfigError, match=r"DISPLAY .* --terminal"):
        Window("Pong", environment={})


def test_the_nearest_of_256_colours_is_near():
    every = np.array([[0, 0, 0], [255, 255, 255], [142, 142, 142], [200, 72, 72], [0, 95, 135]])
    codes = colours(every.astype(np.uint8), False)
    assert codes.tolist() == [16, 231, 245, 167, 24]
    assert colours(every.astype(np.uint8), True).tolist()[3] == 0xC84848


@pytest.mark.parametrize(("columns", "rows"), [(50, 21), (10, 40), (200, 60), (1, 1)])
def test_a_frame_fits_its_cells(columns, rows):
    pixels = fitted(a_frame(), columns, rows, 4 / 3)
    assert pixels.shape[0] % 2 == 0
    assert pixels.shape[0] <= 2 * rows
    assert pixels.shape[1] <= columns


def test_a_bar_has_eighths():
    assert bar(0.5, 4) == "██  "
    assert bar(1.0, 4) == "████"
    assert bar(1 / 32, 4) == "▏   "
    assert bar(-1.0, 2) == "  "
    assert bar(9.0, 2) == "██"


def test_closing_the_window_ends_the_games(monkeypatch):
    pygame = pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(game.time, "sleep", lambda _: None)
    with Window("Pong", 4 / 3) as window:
        window.begin(60.0, ["NOOP"])
        frame = np.full((210, 160, 3), (10, 200, 30), np.uint8)
        assert window.see(moment(frame))
        assert pygame.display.get_surface().get_size() == (640, 480)
        assert pygame.display.get_surface().get_at((320, 240))[:3] == (10, 200, 30)
        pygame.event.post(pygame.event.Event(pygame.QUIT))
        assert not window.see(moment(frame))
