"""The shared library that the user named: loaded, and checked for all that zapex calls."""

import ctypes
from types import SimpleNamespace
from typing import Any

from zapex.errors import ConfigError
from zapex.fstack import _errcheck
from zapex.fstack._abi import (
    ARGUMENTS,
    SIGNATURES,
    SIZES,
    STARTING,
    WAITING,
)

_NAMED = 3  # missing symbols that the error names


def load(path: str) -> Any:
    """The functions of SIGNATURES by their names, and the variables of ARGUMENTS.

    Raises ConfigError if it cannot be loaded, or names what it lacks.
    """
    for kind, nbytes in SIZES.items():
        if ctypes.sizeof(kind) != nbytes:
            raise ConfigError(
                f"struct {kind.__name__.lower()} has {ctypes.sizeof(kind)} bytes on this "
                f"machine, F-Stack's has {nbytes}: zapex serves fstack:// on 64-bit Linux only"
            )
    try:
        # While a short call runs, no other thread could use the interpreter's lock well.
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
            call.errcheck = _errcheck.started if name in STARTING else _errcheck.checked
        setattr(calls, name, call)
    return calls
