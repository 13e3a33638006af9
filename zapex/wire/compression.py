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


def decompress(body: Sequence[memoryview], most: Sequence[int]) -> tuple[memoryview, ...]:
    """The buffers that `compress` got, of at most `most` bytes each. Raises BadMessage.

    All lengths are checked before the first buffer is decompressed, and then little more memory is
    allocated than they say.
    """
    zstd = _zstd()
    if len(body) != len(most):
        raise BadMessage(f"a compressed body has {len(most)} parts, got {len(body)}")
    try:
        sizes = [zstd.frame_content_size(buffer) for buffer in body]
    except zstd.ZstdError as error:
        raise BadMessage(f"a compressed buffer is broken: {error}") from None
    if not all(0 <= nbytes <= limit for nbytes, limit in zip(sizes, most, strict=True)):
        raise BadMessage(f"compressed buffers have at most {list(most)} bytes, got {sizes}")
    return tuple(map(_decompressed, body, sizes))


def _decompressed(buffer: memoryview, nbytes: int) -> memoryview:
    zstd, got = _zstd(), 0
    memory = np.empty(nbytes + 1, np.uint8).data  # one more: the frame must end before it
    decompressor = zstd.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    try:
        with decompressor.stream_reader(buffer) as frames:
            while count := frames.readinto(memory[got:]):
                got += count
    except zstd.ZstdError as error:
        raise BadMessage(f"a compressed buffer is broken: {error}") from None
    if got != nbytes:
        raise BadMessage(f"a compressed buffer says {nbytes} bytes, and has {got}")
    return memory[:nbytes]
