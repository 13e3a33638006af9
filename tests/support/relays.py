"""Relays over ZeroMQ whose chunks say who made them, and the account of what arrived."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.transport_rigs import Memory, NetworkReplay, make_link
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.layout import (
    ACTOR,
    COMMITTED,
    COUNT,
    INCARNATION,
    NO_FRAME,
    SEQUENCE,
    STATE,
    STREAM,
    ChunkLayout,
)
from zapex.chunks.store import ChunkStore
from zapex.replay.core import ReplayCore
from zapex.zmq_transport import ChunkSender

Who = tuple[int, int, int]  # actor, incarnation, sequence


@lru_cache(maxsize=1024)
def contents(who: Who, frames: int, chunk: int) -> dict[str, NDArray[Any]]:
    """The columns of a chunk of random rows, drawn from who made it."""
    rng = np.random.default_rng(who)
    columns: dict[str, NDArray[Any]] = {
        "obs": rng.integers(0, 256, (frames, 3, 2), np.uint8),
        "obs_frames": rng.integers(0, 5, (chunk, 4)),
        "next_obs_frames": rng.integers(0, 5, (chunk, 4)),
        "mask": np.tile(np.float32(who[:2]), (chunk, 1)),
        "action": np.full(chunk, who[2]),
        "reward": np.arange(chunk),
        "discount": np.float32(0.9) * rng.random(chunk, np.float32),  # of 0.9, at most
        "priority": np.abs(rng.normal(size=chunk)).astype(np.float32),
    }
    columns["obs_frames"][0, 0] = NO_FRAME
    return columns


def fill(store: ChunkStore, slot: int, who: Who, stream: int, rng: np.random.Generator) -> None:
    """A chunk of `contents`, with a random number of rows."""
    chunk, header = store.layout.chunk, store.header_rows[slot]
    for name, column in contents(who, store.layout.frames, chunk).items():
        store.column(slot, name)[:] = column
    header[ACTOR], header[INCARNATION], header[SEQUENCE] = who
    header[COUNT], header[STREAM] = int(rng.integers(1, chunk + 1)), stream


def is_whole(store: ChunkStore, slot: int, maker: int | None = None) -> bool:
    """Each row, and each frame that it needs, is of whom the header says.

    maker: the actor's number on its own host; None: there is one host, so that the number is the
    header's, and its priorities are not scaled.
    """
    header, layout = store.header_rows[slot], store.layout
    rows = int(header[COUNT])
    actor, incarnation, sequence = header[[ACTOR, INCARNATION, SEQUENCE]].tolist()
    who = actor if maker is None else maker, incarnation, sequence
    columns = dict(contents(who, layout.frames, layout.chunk))
    frames = columns.pop("obs")
    if maker is not None:
        del columns["priority"]
    needed = np.stack([columns[name][:rows] for name in ("obs_frames", "next_obs_frames")])
    needed = np.unique(needed[needed != NO_FRAME])
    return bool((store.column(slot, "obs")[needed] == frames[needed]).all()) and all(
        (store.column(slot, name)[:rows] == column[:rows]).all() for name, column in columns.items()
    )


def wrong_rows(batch: Batch, layout: ChunkLayout) -> int:
    """Rows of a batch that are not, in every column, what their maker wrote."""
    wrong = 0
    for b in np.flatnonzero(batch.keys >= 0):
        who = (*batch["mask"][b].astype(int).tolist(), int(batch["action"][b]))
        row = int(batch["reward"][b])
        columns = contents(who, layout.frames, layout.chunk)
        wanted = {"discount": columns["discount"][row]}
        for name in ("obs", "next_obs"):
            which = columns[f"{name}_frames"][row]
            frames = columns["obs"][np.where(which == NO_FRAME, 0, which)].copy()
            frames[which == NO_FRAME] = 0
            wanted[name] = frames
        wrong += any((batch[name][b] != values).any() for name, values in wanted.items())
    return wrong


class Relay:
    """A relay's memory and sender."""

    def __init__(self, layout: Any, url: str, host: int = 1, actors: int = 1, **more: Any) -> None:
        self.layout, self.host, self.actors, self._more = layout, host, actors, more
        chunk, slots = layout.chunk_layout, 64
        self.store = ChunkStore(
            aligned_zeros(ChunkStore.required_bytes(chunk, slots)), chunk, slots
        )
        self.free = list(range(slots))
        self.next = dict.fromkeys(range(actors), 0)
        self.incarnation = dict.fromkeys(range(actors), 5)
        self.life = 0
        self.offered: set[tuple[int, int, int]] = set()
        self.rng = np.random.default_rng(host)
        self.connect(url)

    def connect(self, url: str) -> None:
        """A life of the relay: what a former one saw no acknowledgement of is in the slots."""
        self.life += 1
        self.link = make_link(
            url, "relay", self.host, self.layout, actors=self.actors, incarnation=self.life,
            **self._more,
        )  # fmt: skip
        self.sender = ChunkSender(self.link, self.store)
        rows = self.store.header_rows
        self.sender.offer(np.flatnonzero(rows[:, STATE] == COMMITTED))

    def make(self, actor: int = 0) -> bool:
        """One more chunk of an actor; False when all slots are taken."""
        if not self.free:
            return False
        slot = self.free.pop()
        who = actor, self.incarnation[actor], self.next[actor]
        self.next[actor] += 1
        fill(self.store, slot, who, 3, self.rng)
        self.store.header_rows[slot, STATE] = COMMITTED
        self.offered.add(who)
        self.sender.offer([slot])
        return True

    def turn(self) -> None:
        self.link.do_work()
        self.sender.do_work()
        for slot in self.sender.take_freed():
            self.store.header_rows[slot, STATE] = 0
            self.free.append(slot)

    @property
    def acknowledged(self) -> int:
        return len(self.offered) - self.sender.unacknowledged

    def kill(self) -> None:
        self.link.close()


class Accounts:
    """What the replay took over, by who made it; every row is checked against what it says."""

    def __init__(self) -> None:
        self.taken: Counter[tuple[int, int, int]] = Counter()

    def watch(self, server: NetworkReplay) -> NetworkReplay:
        accept = server.replay.accept

        def accepted(slot: int) -> int:
            self.check(server.replay, slot)
            return accept(slot)

        server.replay.accept = accepted  # type: ignore[method-assign]
        return server

    def check(self, replay: ReplayCore, slot: int) -> None:
        # Hosts count their own actors from 0.
        assert is_whole(replay.store, slot, int(replay.store.column(slot, "mask")[0, 0]))
        actor, incarnation, sequence = replay.store.header_rows[
            slot, [ACTOR, INCARNATION, SEQUENCE]
        ]
        self.taken[int(actor), int(incarnation), int(sequence)] += 1

    def settle(self, relays: list[Relay]) -> None:
        """Everything offered is there, once."""
        offered = set().union(*(r.offered for r in relays))
        assert self.taken.keys() == offered
        assert set(self.taken.values()) <= {1}


@contextlib.contextmanager
def serving(memory: Memory, accounts: Accounts, url: str, **kwargs: Any) -> Iterator[NetworkReplay]:
    server = accounts.watch(NetworkReplay(memory, url, **kwargs))
    try:
        yield server
    finally:
        server.close()
