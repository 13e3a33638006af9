"""F-Stack 1.25's C interface: structs, constants, a table of signatures, and its loader.

A call that returns -1 raises OSError with Linux's error number.
"""

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_ssize_t, c_uint32, c_void_p
from types import SimpleNamespace
from typing import Any

from zapex.errors import ConfigError

# Values of Linux, which F-Stack translates. Flags of recv and send are FreeBSD's: zapex passes 0.
EVFILT_READ, EVFILT_WRITE = -1, -2
EV_ADD, EV_DELETE, EV_RECEIPT = 0x1, 0x2, 0x40
EV_ERROR, EV_EOF = 0x4000, 0x8000
MOST_IOVECS = 1024
MOST_BYTES = 1 << 30  # in one call: sizes are added up in a C int
ADDRESS_BYTES = 128  # at least; accept ignores the length that it is given


class Kevent(Structure):
    """struct kevent of FreeBSD 13."""

    _fields_ = (
        ("ident", ctypes.c_uint64),
        ("filter", ctypes.c_int16),
        ("flags", ctypes.c_uint16),
        ("fflags", ctypes.c_uint32),
        ("data", ctypes.c_int64),
        ("udata", ctypes.c_uint64),
        ("ext", ctypes.c_uint64 * 4),
    )


class Iovec(Structure):
    """struct iovec. ff_writev and ff_readv change the caller's array."""

    _fields_ = (("base", c_void_p), ("len", c_size_t))


SIZES: dict[type[Structure], int] = {Kevent: 64, Iovec: 16}
LOOP = ctypes.CFUNCTYPE(c_int, c_void_p)

_BYTES, _LENGTH = c_void_p, POINTER(c_uint32)
_NAME = (c_int, c_void_p, _LENGTH)
_DATA = (c_int, c_void_p, c_size_t)
_VECTOR = (c_int, POINTER(Iovec), c_int)
_EVENTS = POINTER(Kevent)
_STRINGS = (c_int, POINTER(c_char_p))

# Name -> the result's type, or None, and the arguments' types.
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ff_load_config": (c_int, _STRINGS),
    "ff_dpdk_init": (c_int, _STRINGS),
    "ff_freebsd_init": (c_int, ()),
    "ff_dpdk_if_up": (c_int, ()),
    "ff_run": (None, (LOOP, c_void_p)),
    "ff_stop_run": (None, ()),
    "ff_socket": (c_int, (c_int, c_int, c_int)),
    "ff_bind": (c_int, (c_int, _BYTES, c_uint32)),
    "ff_listen": (c_int, (c_int, c_int)),
    "ff_accept": (c_int, _NAME),
    "ff_getsockname": (c_int, _NAME),
    "ff_close": (c_int, (c_int,)),
    "ff_recv": (c_ssize_t, (*_DATA, c_int)),
    "ff_writev": (c_ssize_t, _VECTOR),
    "ff_setsockopt": (c_int, (c_int, c_int, c_int, c_void_p, c_uint32)),
    "ff_kqueue": (c_int, ()),
    "ff_kevent": (c_int, (c_int, _EVENTS, c_int, _EVENTS, c_int, c_void_p)),
}
WAITING = {"ff_run"}  # these release the GIL
STARTING = {"ff_load_config", "ff_dpdk_init", "ff_freebsd_init", "ff_dpdk_if_up"}
ARGUMENTS = ("dpdk_argc", "dpdk_argv")  # variables: what ff_load_config made for ff_dpdk_init
MOST_ARGUMENTS = 16  # of dpdk_argv


def _checked(result: int, function: Any, arguments: tuple[Any, ...]) -> int:
    """The result of a call on a socket. Raises OSError; BlockingIOError: nothing now."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), function.__name__)
    return result


def _started(result: int, function: Any, arguments: tuple[Any, ...]) -> int:
    """The result of a step of the start. Most of them end the process instead of failing."""
    if result < 0:
        raise OSError(0, "failed", function.__name__)
    return result


_NAMED = 3  # missing symbols in the error's text


def load(path: str) -> Any:
    """The library's functions (SIGNATURES) by name, and its variables (ARGUMENTS).

    Raises ConfigError if it cannot be loaded or lacks some of them.
    """
    for kind, nbytes in SIZES.items():
        if ctypes.sizeof(kind) != nbytes:
            raise ConfigError(
                f"struct {kind.__name__.lower()} has {ctypes.sizeof(kind)} bytes on this "
                f"machine, F-Stack's has {nbytes}: zapex serves fstack:// on 64-bit Linux only"
            )
    try:
        # Short calls keep the GIL: releasing it for so little would cost more than it gives.
        short = ctypes.PyDLL(path, use_errno=True)
        waiting = ctypes.CDLL(path, use_errno=True)
    except OSError as error:
        raise ConfigError(f"--fstack-lib {path} cannot be loaded: {error}") from None
    missing = [name for name in (*SIGNATURES, *ARGUMENTS) if not hasattr(short, name)]
    if missing:
        named = ", ".join(missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise ConfigError(
            f"--fstack-lib {path} lacks {named}{more}: it must be F-Stack "
            "(1.25 is known to work) with its DPDK, in one shared library"
        )
    calls = SimpleNamespace(
        dpdk_argc=ctypes.c_int.in_dll(short, "dpdk_argc"),
        dpdk_argv=ctypes.c_char_p.in_dll(short, "dpdk_argv"),
    )
    for name, (result, arguments) in SIGNATURES.items():
        call = getattr(waiting if name in WAITING else short, name)
        call.restype, call.argtypes = result, arguments
        if result is not None:
            call.errcheck = _started if name in STARTING else _checked
        setattr(calls, name, call)
    return calls
