"""What a call's result means: -1 raises OSError with Linux's number of the error."""

import ctypes
import os
from typing import Any


def checked(result: int, function: Any, arguments: tuple[Any, ...]) -> int:
    """For calls on sockets. BlockingIOError: there is nothing now."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), function.__name__)
    return result


def started(result: int, function: Any, arguments: tuple[Any, ...]) -> int:
    """For the steps of the start. Most of them end the process instead of returning -1."""
    if result < 0:
        raise OSError(0, "failed", function.__name__)
    return result
