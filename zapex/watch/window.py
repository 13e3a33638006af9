"""A game in a window of the desktop, at the speed at which a player sees it."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from zapex.errors import ConfigError
from zapex.watch.game import Pace

_WIDTH: Final = 640


class Window:
    """A spectator (zapex.roles.evaluator); closing the window ends the games.

    title: of the window. aspect: as of TerminalGame.

    Raises:
        ConfigError: there is no display, or pygame is missing.
    """

    def __init__(
        self, title: str, aspect: float = 0.0, environment: Mapping[str, str] = os.environ
    ) -> None:
        driver = environment.get("SDL_VIDEODRIVER", "")
        if not (environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY") or driver):
            raise ConfigError(
                "--render opens a window, and there is no display here (DISPLAY is not set): use "
                "--terminal, or --video FILE.mp4"
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
        """What is known before the first moment."""
        self._seconds = 1 / screens_per_s

    def see(self, moment: Any) -> bool:
        """Show each screen of a step in its time. Returns whether the window is still open."""
        pygame = self._pygame
        for frame in moment.screens:
            height, width = frame.shape[:2]
            if self._surface is None:
                aspect = self._aspect or width / height
                size = max(_WIDTH, width), round(max(_WIDTH, width) / aspect)
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
