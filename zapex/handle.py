"""What the owner of a replay and its clients on the same host say to each other, in shared memory.

A client's link is a segment that the owner makes for it, with three rings:

    commits    client -> owner    rows that are whole, and slots that are full
    requests   client -> owner    one at a time; what it needs is in `keys` and `numbers`
    answers    owner -> client    one for each; rows in `keys` and `numbers`, words in `text`

The head of `answers` is the client's release: until then no slot that it may gather from is filled
again. All links look at one bell: the word and the eventfd by which the owner is woken. The socket
over which a link came stays open; its end, or that of the process, is the end of the link.
"""

import json
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError
from zapex.replay_core import ReplayLayout
from zapex.schema import Schema, align
from zapex.shm_ring import ShmRing

MOST_ROWS = 1 << 15  # in one request; larger updates go in pieces
TEXT_BYTES = 4096
# Kinds of requests.
(RESERVE, RELEASE, SLOT, GIVE_BACK, ADMIT, SAMPLE, CAN_SAMPLE, UPDATE, STATS) = range(9)

REQUEST = np.dtype([("kind", np.int64), ("rows", np.int64), ("option", np.int64)])
"""rows: a number of rows or streams, or a slot. option: of SAMPLE, 2 * method + (by memory)."""
ANSWER = np.dtype([("error", np.int64), ("a", np.int64), ("b", np.int64), ("x", np.float64)])
"""error: 0, or 1 + its place in TELLABLE; a, b, x: what the request says."""
COMMIT = np.dtype([("index", np.int64), ("magnitude", np.float64)])
"""A row (slot * chunk + offset) and its |priority|, -1 for none; or a full slot as -1 - slot."""

_RINGS = {"requests": (2, REQUEST), "answers": (2, ANSWER), "commits": (4096, COMMIT)}
MANY_COMMITS = 1024  # wake the owner


def _places() -> tuple[dict[str, tuple[int, int]], int]:
    places, at = {}, 0
    sizes = {
        "sleeping": 8,
        **{name: ShmRing.required_bytes(*ring) for name, ring in _RINGS.items()},
        "text": TEXT_BYTES,
        "keys": 8 * MOST_ROWS,
        "numbers": 8 * MOST_ROWS,
    }
    for name, nbytes in sizes.items():
        places[name] = at, nbytes
        at = align(at + nbytes, 128)
    return places, at


_PLACES, LINK_BYTES = _places()
BELL_BYTES = 128


class LinkMemory:
    """A link's segment, laid out; the same at both ends."""

    def __init__(self, memory: NDArray[np.uint8], *, create: bool = False) -> None:
        def place(name: str) -> NDArray[np.uint8]:
            start, nbytes = _PLACES[name]
            return memory[start : start + nbytes]

        self.sleeping = place("sleeping").view(np.int64)
        self.keys: NDArray[np.int64] = place("keys").view(np.int64)
        self.numbers: NDArray[np.float64] = place("numbers").view(np.float64)
        self._text = place("text")
        rings = {n: ShmRing(place(n), *ring, create=create) for n, ring in _RINGS.items()}
        self.requests, self.answers = rings["requests"], rings["answers"]
        self.commits = rings["commits"]

    @property
    def text(self) -> str:
        """Words of the last answer."""
        return bytes(self._text).partition(b"\0")[0].decode(errors="replace")

    @text.setter
    def text(self, words: str) -> None:
        encoded = words.encode()[: TEXT_BYTES - 1]
        self._text[: len(encoded) + 1] = np.frombuffer(encoded + b"\0", np.uint8)


@dataclass(frozen=True)
class Handle:
    """Where a replay is served to processes of this host, for as long as its owner lives.

    Only text and numbers: `multiprocessing` sends it under every start method. `zapex.connect`
    makes a client of it.

    address: an abstract Unix socket. schema: its description as JSON. timeout_s: how long the
    replay itself lets a call wait for samples per insert; limited: whether it does.
    """

    address: str
    schema: str
    capacity: int
    streams: int
    chunk: int
    shard: int
    limited: bool
    timeout_s: float

    @cached_property
    def layout(self) -> ReplayLayout:
        """The memory's layout."""
        schema = Schema.from_description(json.loads(self.schema))
        return ReplayLayout(schema, self.capacity, self.streams, self.chunk)


def check_main_guard() -> None:
    """Raise ConfigError where `spawn` or `forkserver` runs the user's script a second time."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    # What multiprocessing itself looks at before it refuses to start a process.
    process: Any = multiprocessing.current_process() if multiprocessing is not None else None
    if getattr(process, "_inheriting", False):
        raise ConfigError(
            "replay.handle was asked for while a new process imports your script: it would make a "
            "replay and processes of its own. Put what starts processes under\n"
            '    if __name__ == "__main__":'
        )
