"""Spectators (zapex.roles.evaluator) that show a game: on the terminal, or in a window."""

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, TextIO

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError
from zapex.watch.terminal import count, number, shows_pictures

_PANEL: Final = 30  # columns of the Q values
_LEAST: Final = 56  # columns with which the panel is there
_RANGE_STEPS: Final = 200  # the bars' ends are the least and the largest Q value of so many steps
_BLOCKS: Final = " ▏▎▍▌▋▊▉█"
_BOLD, _QUIET, _ACCENT, _PLAIN = "\x1b[1m", "\x1b[90m", "\x1b[36m", "\x1b[0m"
_BEGIN, _END = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[0m\x1b[?25h\x1b[?1049l"
_CATCH_UP_S: Final = 0.25
_WINDOW_WIDTH: Final = 640


class Pace:
    """Holds the speed of a game; after a longer delay it does not catch up."""

    def __init__(self) -> None:
        self._due_s = 0.0

    def wait(self, seconds: float) -> None:
        """Sleep until `seconds` after the end of the last wait."""
        now_s = time.monotonic()
        if now_s - self._due_s > _CATCH_UP_S:
            self._due_s = now_s
        self._due_s += seconds
        time.sleep(max(0.0, self._due_s - now_s))


def colours(pixels: NDArray[np.uint8], all_colours: bool) -> NDArray[np.int32]:
    """One number for each RGB pixel (..., 3): 24 bits, or the nearest of xterm's 256 colours."""
    wide = pixels.astype(np.int32)
    if all_colours:
        return wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2]
    # Six levels, 0 95 135 175 215 255, and 24 greys.
    levels = np.where(wide < 48, 0, np.where(wide < 115, 1, (wide - 35) // 40))
    cube = 16 + 36 * levels[..., 0] + 6 * levels[..., 1] + levels[..., 2]
    grey = 232 + np.clip((wide.mean(-1).astype(np.int32) - 3) // 10, 0, 23)
    flat = (np.ptp(wide, -1) < 10) & (wide.max(-1) > 4) & (wide.min(-1) < 246)
    found: NDArray[np.int32] = np.where(flat, grey, cube)
    return found


def fitted(frame: NDArray[np.uint8], columns: int, rows: int, aspect: float) -> NDArray[np.uint8]:
    """The frame (H, W, 3) in at most `columns` x `rows` cells of two pixels each, one above the
    other: (2 * rows, columns, 3). aspect: width by height, as a player sees it."""
    height = 2 * min(rows, int(columns / aspect / 2))
    width = min(columns, round(height * aspect))
    down, across = _averaging(len(frame), max(2, height)), _averaging(frame.shape[1], max(1, width))
    planes = np.ascontiguousarray(np.moveaxis(frame, -1, 0), np.float32)
    means = down @ planes @ across.T
    return np.ascontiguousarray(np.moveaxis(np.rint(means).astype(np.uint8), 0, -1))


def _averaging(pixels: int, cells: int) -> NDArray[np.float32]:
    """The share (cells, pixels) that each pixel has in each cell's mean."""
    edges = np.linspace(0, pixels, cells + 1)[:, None]
    first = np.arange(pixels)
    shares = np.minimum(edges[1:], first + 1) - np.maximum(edges[:-1], first)
    shares = np.clip(shares, 0.0, None)
    found: NDArray[np.float32] = (shares / shares.sum(1, keepdims=True)).astype(np.float32)
    return found


def bar(share: float, cells: int) -> str:
    """`share` of `cells`, to an eighth of a cell."""
    eighths = round(min(1.0, max(0.0, share)) * cells * 8)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (_BLOCKS[part] if part else "")).ljust(cells)


class TerminalGame:
    """The screen in half blocks, and a bar for the Q value of each action; a context manager.

    Only cells that have changed are written, which is fast enough over ssh.

    Args:
        title: what is played.
        aspect: width by height of the screen; 0: that of its pixels.
        stream: the terminal; None: standard output.
        hint: the line below the game.

    Raises:
        ConfigError: the stream is not a terminal that can show it.
    """

    def __init__(
        self, title: str, aspect: float = 0.0, stream: TextIO | None = None, hint: str = ""
    ) -> None:
        self._stream = stream or sys.stdout
        if not shows_pictures(self._stream):
            raise ConfigError(
                "a game is drawn only on a terminal that shows UTF-8 and colours: use "
                "--video FILE.mp4"
            )
        self.title, self._aspect, self._hint = title, aspect, hint or "Ctrl-C stops"
        self._all_colours = os.environ.get("COLORTERM", "") in ("truecolor", "24bit")
        self._pace = Pace()
        self._seconds = 1 / 60
        self._names: Sequence[str] = ()
        self._lows: deque[float] = deque(maxlen=_RANGE_STEPS)
        self._highs: deque[float] = deque(maxlen=_RANGE_STEPS)
        self._size = (0, 0)
        self._cells: NDArray[np.int32] | None = None

    def __enter__(self) -> Self:
        self._write(_BEGIN)
        return self

    def __exit__(self, *_: object) -> None:
        self._write(_END)

    def begin(self, screens_per_s: float, action_names: Sequence[str]) -> None:
        """Before the first moment: the speed, and the names of the actions."""
        self._seconds, self._names = 1 / screens_per_s, action_names

    def see(self, moment: Any) -> bool:
        """Draw the last screen of a step, for as long as all of its screens last."""
        size = shutil.get_terminal_size()
        out = []
        if size != self._size:
            self._size, self._cells = size, None
            out.append(f"{_PLAIN}\x1b[2J")
        columns, rows = size
        beside = _PANEL if columns >= _LEAST else 0
        if len(moment.screens):
            frame = moment.screens[-1]
            aspect = self._aspect or frame.shape[1] / frame.shape[0]
            room = max(2, columns - beside - 2), max(1, rows - 3)
            out.append(self._picture(fitted(frame, *room, aspect)))
        head = f" {self.title}  game {moment.game}  score {number(moment.score)}"
        head += f"  step {count(moment.steps)}"
        out.append(_text(1, 1, f"{_BOLD}{head[:columns]}"))
        out.append(_text(rows, 1, f"{_QUIET} {self._hint}"[: columns + len(_QUIET)]))
        if beside and moment.q is not None:
            left = 1 + (self._cells.shape[1] if self._cells is not None else 0) + 2
            out += self._panel(moment.q, moment.action, left, columns - left, rows - 3)
        self._write("".join(out))
        self._pace.wait(self._seconds * max(1, len(moment.screens)))
        return True

    def _picture(self, pixels: NDArray[np.uint8]) -> str:
        """The escapes that turn the terminal's present picture into this one."""
        codes = colours(pixels, self._all_colours)
        cells = np.stack([codes[0::2], codes[1::2]], -1)  # (rows, columns, upper and lower)
        before = self._cells
        self._cells = cells
        if before is None or before.shape != cells.shape:
            changed = np.ones(cells.shape[:2], np.bool_)
        else:
            changed = (before != cells).any(-1)
        out: list[str] = []
        colour, place = (-1, -1), (-1, -1)
        for row, column in np.argwhere(changed).tolist():
            if (row, column) != place:
                out.append(f"\x1b[{row + 2};{column + 2}H")
            found = tuple(cells[row, column].tolist())
            if found != colour:
                out.append(f"\x1b[{self._code(38, found[0])};{self._code(48, found[1])}m")
                colour = found
            out.append("▀")
            place = row, column + 1
        return "".join([*out, _PLAIN]) if out else ""

    def _code(self, ground: int, colour: int) -> str:
        if not self._all_colours:
            return f"{ground};5;{colour}"
        return f"{ground};2;{colour >> 16};{colour >> 8 & 255};{colour & 255}"

    def _panel(self, q: NDArray[Any], action: int, left: int, columns: int, rows: int) -> list[str]:
        self._lows.append(float(q.min()))
        self._highs.append(float(q.max()))
        low, high = min(self._lows), max(self._highs)
        scale = high - low or 1.0
        names = [str(name)[:10] for name in self._names]
        widest = max(map(len, names), default=1)
        cells = max(1, min(24, columns - widest - 12))
        shown = len(q) if len(q) <= rows else rows - 1
        best = int(q.argmax())
        out = []
        for i in range(shown):
            mark, style = ("▶", _BOLD + _ACCENT) if i == action else (" ", "")
            filled = bar((float(q[i]) - low) / scale, cells)
            tone = style or (_ACCENT if i == best else _QUIET)
            text = f"{style}{mark} {names[i]:<{widest}} {_PLAIN}{tone}{filled}{_PLAIN} "
            out.append(_text(i + 2, left, f"{text}{number(float(q[i])):>7}"))
        if shown < len(q):
            out.append(_text(shown + 2, left, f"{_QUIET}  and {len(q) - shown} more"))
        return out

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _text(row: int, column: int, text: str) -> str:
    """The escapes that write a text and clear the rest of its line."""
    return f"\x1b[{row};{column}H{text}{_PLAIN}\x1b[K"


class Window:
    """A window of the desktop, whose closing ends the games; a context manager.

    Args:
        title: of the window.
        aspect: width by height of the screen; 0: that of its pixels.
        environment: variables that name the display.

    Raises:
        ConfigError: there is no display, or pygame is missing.
    """

    def __init__(
        self, title: str, aspect: float = 0.0, environment: Mapping[str, str] = os.environ
    ) -> None:
        driver = environment.get("SDL_VIDEODRIVER", "")
        if not (environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY") or driver):
            raise ConfigError(
                "--render needs a display, and DISPLAY is not set: use --terminal, or "
                "--video FILE.mp4"
            )
        os.environ["PYGAME_HIDE_SUPPORT_PROMPT"] = "1"
        try:
            import pygame
        except ImportError:
            raise ConfigError('--render needs pygame: pip install "zapex[video]"') from None
        self._pygame, self._title, self._aspect = pygame, title, aspect
        self._surface: Any = None
        self._pace, self._seconds = Pace(), 1 / 60

    def __enter__(self) -> Self:
        try:
            self._pygame.display.init()
        except self._pygame.error as error:
            raise ConfigError(
                f"--render cannot open a window: {error}; use --terminal, or --video FILE.mp4"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._pygame.display.quit()

    def begin(self, screens_per_s: float, action_names: Sequence[str]) -> None:
        """Before the first moment: the speed."""
        self._seconds = 1 / screens_per_s

    def see(self, moment: Any) -> bool:
        """Show each screen of a step for its time. Returns whether the window is still open."""
        pygame = self._pygame
        for frame in moment.screens:
            height, width = frame.shape[:2]
            if self._surface is None:
                aspect = self._aspect or width / height
                size = max(_WINDOW_WIDTH, width), round(max(_WINDOW_WIDTH, width) / aspect)
                self._surface = pygame.display.set_mode(size, pygame.RESIZABLE)
            picture = pygame.image.frombuffer(frame.tobytes(), (width, height), "RGB")
            size = self._surface.get_size()
            self._surface.blit(pygame.transform.scale(picture, size), (0, 0))
            pygame.display.set_caption(f"{self._title}  score {moment.score:g}")
            pygame.display.flip()
            if any(event.type == pygame.QUIT for event in pygame.event.get()):
                return False
            self._pace.wait(self._seconds)
        return True
