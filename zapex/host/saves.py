"""What is loaded and saved of the experience, in words that remain when its process dies."""

import numpy as np
from numpy.typing import NDArray

_LOAD, _END, _DONE, _TOTAL, _UNSAVED, _WORDS = range(6)
_UNDER_WAY, _OVER = 1, 2


class SaveWords:
    """The words in a buffer. One process loads and saves; the parent reads.

    buffer: uint8 (8-byte aligned) of `required_bytes()`; zero when new.
    """

    def __init__(self, buffer: NDArray[np.uint8]) -> None:
        self._words = buffer[: self.required_bytes()].view(np.int64)

    @staticmethod
    def required_bytes() -> int:
        """Bytes of the words."""
        return 8 * _WORDS

    @property
    def loaded(self) -> bool:
        """Whether the memory is as it should be: what was saved is in it, or nothing was."""
        return bool(self._words[_LOAD] == _OVER)

    @property
    def half_loaded(self) -> bool:
        """Whether a process died while it loaded."""
        return bool(self._words[_LOAD] == _UNDER_WAY)

    def load(self, over: bool) -> None:
        """A load begins, or is over."""
        self._words[_LOAD] = _OVER if over else _UNDER_WAY

    @property
    def last_is_over(self) -> bool:
        """Whether the save at the end of the run is over, written or not."""
        return bool(self._words[_END] == _OVER)

    def last(self, over: bool) -> None:
        """The save at the end of the run begins, or is over."""
        self._words[_END] = _OVER if over else _UNDER_WAY

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of chunks that are on the disk, and of all that the present save writes."""
        return int(self._words[_DONE]), int(self._words[_TOTAL])

    def tell_progress(self, done_bytes: int, total_bytes: int) -> None:
        """Set both."""
        self._words[_DONE], self._words[_TOTAL] = done_bytes, total_bytes

    @property
    def unsaved(self) -> int:
        """The error number if the newest save failed; 0: it was written."""
        return int(self._words[_UNSAVED])

    @unsaved.setter
    def unsaved(self, code: int) -> None:
        self._words[_UNSAVED] = code
