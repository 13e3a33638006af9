"""Frames as an mp4 file that every player can open."""

import os
import subprocess
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError, ZapexError

_MIN_WIDTH = 480


class Mp4Writer:
    """Writes RGB frames; a context manager that completes the file on exit.

    Small screens are enlarged by a whole number, without blurring, to at least 480 pixels across.
    The file replaces an older one once it is whole.

    Raises:
        ConfigError: the encoder is not installed, or the path cannot be written.
        ZapexError: the encoder failed, on a full disk for example.
    """

    def __init__(self, path: Path | str, frames_per_s: float) -> None:
        try:
            import imageio_ffmpeg

            self._ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f'videos are encoded by imageio-ffmpeg: pip install "zapex[video]" ({error})'
            ) from None
        self._path = Path(path)
        if self._path.suffix != ".mp4":
            raise ConfigError(f"a video's name must end in .mp4, got {path}")
        if not self._path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no {self._path.parent}")
        self._draft = self._path.with_name(f".{self._path.stem}.tmp-{os.getpid()}.mp4")
        self._frames_per_s = frames_per_s
        self._encoder: subprocess.Popen[bytes] | None = None

    def add(self, frame: NDArray[np.uint8]) -> None:
        """One more frame, (H, W, 3); all of one size."""
        if self._encoder is None:
            self._encoder = self._start(*frame.shape[:2])
        assert self._encoder.stdin is not None
        try:
            self._encoder.stdin.write(np.ascontiguousarray(frame).data)
        except BrokenPipeError:
            self._finish()

    def _start(self, height: int, width: int) -> "subprocess.Popen[bytes]":
        scale = -(-_MIN_WIDTH // width)
        if scale % 2 and (width % 2 or height % 2):
            scale += 1  # the encoder needs even sizes
        raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}"]
        enlarge = ["-vf", f"scale=iw*{scale}:ih*{scale}:flags=neighbor"]
        quality = ["-pix_fmt", "yuv420p", "-crf", "25"]
        source = [*raw, "-r", f"{self._frames_per_s:g}", "-i", "-"]
        return subprocess.Popen(
            [self._ffmpeg, "-y", "-v", "error", *source, *enlarge, *quality, str(self._draft)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which then completes the file
        )

    def _finish(self) -> None:
        encoder, self._encoder = self._encoder, None
        if encoder is None:
            return
        try:
            _, said = encoder.communicate()
            if encoder.returncode:
                why = said.decode(errors="replace").strip().splitlines()
                last = why[-1] if why else f"ffmpeg ended with status {encoder.returncode}"
                raise ZapexError(f"{self._path} cannot be written: {last}")
            self._draft.replace(self._path)
        finally:
            self._draft.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()
