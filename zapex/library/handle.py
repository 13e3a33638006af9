"""The protocol in shared memory between a replay's owner and its clients on the same host.

A client's link is a segment that the owner makes for it, with three rings:

    commits    client -> owner    slots that are full
    requests   client -> owner    one at a time; an update's rows are in the section `rows`
    answers    owner -> client    one per request; a draw is in `rows`, and text in `text`

When the head of `answers` moves, the client has released the answer. Until then the slots that it
may read are not filled again. All links share one bell: a word and an eventfd that wake the owner.
The socket of a link stays open. The link ends when the socket is closed or the process ends.
"""

import json
import sys
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.schema import Schema
from zapex.errors import ConfigError
from zapex.machine.memory import lay_out
from zapex.replay.core import ReplayLayout
from zapex.replay.draw import Draw
from zapex.shm_ring import ShmRing

MOST_ROWS = 1 << 15  # in one request; a larger update is split
TEXT_BYTES = 4096
BELL_BYTES = 128

REQUEST = np.dtype([("kind", np.int64), ("rows", np.int64), ("option", np.int64)])
"""kind: a Request. option: for SAMPLE, 2 * method + (by memory)."""
ANSWER = np.dtype([("error", np.int64), ("a", np.int64), ("b", np.int64)])
"""error: 0, or 1 + its index in TELLABLE. a, b: two counts; the request defines them."""

_COMMITS = 1024  # full slots; to ask for another slot lets the owner take them

DESCRIPTORS = ("memory", "link", "event", "bell", "bell_event")
"""The descriptors that an owner sends to a new client."""

_RINGS = {
    "requests": (2, REQUEST),
    "answers": (2, ANSWER),
    "commits": (_COMMITS, np.dtype(np.int64)),
}
_SECTIONS, LINK_BYTES = lay_out(
    [
        ("sleeping", (1,), np.int64),
        *[(n, (ShmRing.required_bytes(*ring),), np.uint8) for n, ring in _RINGS.items()],
        ("text", (TEXT_BYTES,), np.uint8),
        ("rows", (Draw.dtype(MOST_ROWS).itemsize,), np.uint8),
    ],
    boundary=128,
)


@lru_cache(maxsize=256)
def _update_dtype(rows: int) -> np.dtype[Any]:
    return np.dtype([("keys", np.int64, (rows,)), ("priorities", np.float64, (rows,))])


class DrawPlace(NamedTuple):
    """Arrays over a record of `Draw.dtype`: total (1,), smallest (1,), and (B,) each."""

    total: NDArray[np.float64]
    smallest: NDArray[np.float64]
    keys: NDArray[np.int64]
    indices: NDArray[np.int64]
    leaves: NDArray[np.float64]


class UpdatePlace(NamedTuple):
    """Arrays (B,) over a record of an UPDATE."""

    keys: NDArray[np.int64]
    priorities: NDArray[np.float64]


class LinkMemory:
    """A link's segment, laid out; the same at both ends."""

    def __init__(self, memory: NDArray[np.uint8], *, create: bool = False) -> None:
        places = {name: section.view(memory) for name, section in _SECTIONS.items()}
        self.sleeping: NDArray[np.int64] = places["sleeping"]
        self._text, self._rows = places["text"], places["rows"]
        rings = {n: ShmRing(places[n], *ring, create=create) for n, ring in _RINGS.items()}
        self.requests, self.answers = rings["requests"], rings["answers"]
        self.commits = rings["commits"]
        self._draw = DrawPlace(*self._views(Draw.dtype(0)))
        self._update = UpdatePlace(*self._views(_update_dtype(0)))

    def draw(self, rows: int) -> DrawPlace:
        """Where the answer to a SAMPLE is."""
        if len(self._draw.keys) != rows:
            self._draw = DrawPlace(*self._views(Draw.dtype(rows)))
        return self._draw

    def update(self, rows: int) -> UpdatePlace:
        """Where an UPDATE is."""
        if len(self._update.keys) != rows:
            self._update = UpdatePlace(*self._views(_update_dtype(rows)))
        return self._update

    def _views(self, dtype: np.dtype[Any]) -> list[NDArray[Any]]:
        """The fields of a record there, each an array (n,)."""
        return [
            self._rows[at : at + field.itemsize].view(field.base)
            for field, at, *_ in (dtype.fields or {}).values()
        ]

    @property
    def text(self) -> str:
        """The text of the last answer."""
        return bytes(self._text).partition(b"\0")[0].decode(errors="replace")

    @text.setter
    def text(self, words: str) -> None:
        encoded = words.encode()[: TEXT_BYTES - 1]
        self._text[: len(encoded) + 1] = np.frombuffer(encoded + b"\0", np.uint8)


@dataclass(frozen=True)
class Handle:
    """The address and layout of a replay that is served on this host while its owner lives.

    It has only text and numbers, so `multiprocessing` sends it under every start method.
    `zapex.connect` makes a client of it.

    address: an abstract Unix socket. schema: its description as JSON. timeout_s: how long the
    replay lets a call wait for samples per insert. limited: whether it has that limit.
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
    """Raise ConfigError if `spawn` or `forkserver` runs the user's script a second time."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    # multiprocessing itself reads this before it refuses to start a process.
    process: Any = multiprocessing.current_process() if multiprocessing is not None else None
    if getattr(process, "_inheriting", False):
        raise ConfigError(
            "replay.handle was asked for while a new process imports your script: it would make a "
            "replay and processes of its own. Put what starts processes under\n"
            '    if __name__ == "__main__":'
        )
