"""Bodies of messages, compressed with zstd: frames of games are mostly background."""

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from zapex.errors import BadMessage, ConfigError, OtherVersion

_LEVEL = 1  # the fastest; higher ones save little of frames and take several times as long
# Memory that decompressing a frame may take besides its contents; ours take 512 KiB.
_WINDOW_BYTES = 1 << 20
_INSTALL = "pip install 'zapex[compress]'"


def check_installed(flag: str) -> None:
    """Raise ConfigError if this end cannot compress."""
    if importlib.util.find_spec("zstandard") is None:
        raise ConfigError(f"{flag} needs the package zstandard: {_INSTALL}")


def check_compresses() -> None:
    """Raise OtherVersion, which the server sends to the peer, if this end cannot compress."""
    _zstd()


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError:
        raise OtherVersion(f"compressed messages need zstandard at both ends: {_INSTALL}") from None
    return zstandard


def compress(body: Sequence[memoryview]) -> list[memoryview]:
    """Each buffer as one zstd frame that says its length. Raises OtherVersion without zstandard."""
    compressor = _zstd().ZstdCompressor(level=_LEVEL)
    return [memoryview(compressor.compress(buffer)) for buffer in body]


def decompress(body: Sequence[memoryview], most: int) -> tuple[memoryview, ...]:
    """The buffers that `compress` got, of at most `most` bytes each. Raises BadMessage.

    No memory is allocated before a length is checked, and little more than the length.
    """
    zstd, found = _zstd(), list[memoryview]()
    decompressor = zstd.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    for buffer in body:
        try:
            nbytes = zstd.frame_content_size(buffer)
            if not 0 <= nbytes <= most:
                raise BadMessage(f"a compressed buffer has at most {most} bytes, got {nbytes}")
            memory = np.empty(nbytes + 1, np.uint8).data  # one more: the frame must end before it
            with decompressor.stream_reader(buffer) as frames:
                got = 0
                while count := frames.readinto(memory[got:]):
                    got += count
        except zstd.ZstdError as error:
            raise BadMessage(f"a compressed buffer is broken: {error}") from None
        if got != nbytes:
            raise BadMessage(f"a compressed buffer says {nbytes} bytes, and has {got}")
        found.append(memory[:nbytes])
    return tuple(found)
