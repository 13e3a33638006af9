"""Frames as an mp4 file that every player can open."""

from collections.abc import Generator
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError

_MIN_WIDTH = 480


class Mp4Writer:
    """Writes RGB frames; a context manager that completes the file on exit.

    Small screens are enlarged by a whole number, without blurring, to at least 480 pixels across.

    Raises:
        ConfigError: the encoder is not installed, or the path cannot be written.
    """

    def __init__(self, path: Path | str, frames_per_s: float) -> None:
        try:
            import imageio_ffmpeg

            imageio_ffmpeg.get_ffmpeg_exe()
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f'videos are encoded by imageio-ffmpeg: pip install "zapex[video]" ({error})'
            ) from None
        self._write_frames = imageio_ffmpeg.write_frames
        self._path = Path(path)
        if self._path.suffix != ".mp4":
            raise ConfigError(f"a video's name must end in .mp4, got {path}")
        if not self._path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no {self._path.parent}")
        self._frames_per_s = frames_per_s
        self._encoder: Generator[None, Any, None] | None = None

    def add(self, frame: NDArray[np.uint8]) -> None:
        """One more frame, (H, W, 3); all of one size."""
        if self._encoder is None:
            height, width = frame.shape[:2]
            scale = -(-_MIN_WIDTH // width)
            if scale % 2 and (width % 2 or height % 2):
                scale += 1  # the encoder needs even sizes
            enlarge = ["-vf", f"scale=iw*{scale}:ih*{scale}:flags=neighbor"]
            self._encoder = self._write_frames(
                str(self._path),
                (width, height),
                fps=self._frames_per_s,
                macro_block_size=1,
                output_params=enlarge,
            )
            self._encoder.send(None)
        self._encoder.send(np.ascontiguousarray(frame))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._encoder is not None:
            self._encoder.close()
