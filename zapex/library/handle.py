"""The link between a replay's owner and a client on the same host.

The owner makes a segment for the client. Its rings are those of a run (shm_transport.py):

    commits    client -> owner    slots that are full
    requests   client -> owner    one at a time
    answers    owner -> client    one per request; a text is in `text`
    updates    client -> owner    keys and priorities; then it asks what came of them

When the head of `answers` moves, the client has released the answer. Until then the slots that it
may read are not filled again. All links share one bell: a word and an eventfd that wake the owner.
The socket of a link stays open. The link ends when the socket is closed or the process ends.
"""

import json
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.schema import Schema
from zapex.errors import ConfigError
from zapex.machine.memory import lay_out
from zapex.replay.core import ReplayLayout
from zapex.replay.draw import REQUEST, answer_dtype, update_dtype
from zapex.shm_ring import ShmRing

MOST_ROWS = 1 << 15  # in one request; a larger update is split
TEXT_BYTES = 4096
BELL_BYTES = 128
DESCRIPTORS = ("memory", "link", "event", "bell", "bell_event")
"""The descriptors that an owner sends to a new client."""

_RINGS = {
    "requests": (2, REQUEST),
    "answers": (1, answer_dtype(MOST_ROWS)),
    "updates": (1, update_dtype(MOST_ROWS, np.float64)),
    "commits": (1024, np.dtype(np.int64)),
}
_SECTIONS, LINK_BYTES = lay_out(
    [
        ("sleeping", (1,), np.int64),
        *[(n, (ShmRing.required_bytes(*ring),), np.uint8) for n, ring in _RINGS.items()],
        ("text", (TEXT_BYTES,), np.uint8),
    ],
    boundary=128,
)


class LinkMemory:
    """A link's segment, laid out; the same at both ends."""

    def __init__(self, memory: NDArray[np.uint8], *, create: bool = False) -> None:
        places = {name: section.view(memory) for name, section in _SECTIONS.items()}
        self.sleeping: NDArray[np.int64] = places["sleeping"]
        self._text = places["text"]
        rings = {n: ShmRing(places[n], *ring, create=create) for n, ring in _RINGS.items()}
        self.commits = rings.pop("commits")
        self.calls = rings["requests"], rings["answers"], rings["updates"]

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
