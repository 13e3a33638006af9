"""Snapshots: a replay on disk, chunk by chunk, whole whenever the machine stops.

    path/manifest.json      what there is: settings, random state, and where each chunk lies
    path/state-<id>.bin     headers and leaves at the instant of the save
    path/chunks-<id>.bin    bodies of chunks; each up to SEGMENT_BYTES

A save copies headers, leaves and random state under the replay's lock. Then it writes the chunks
that are not on disk yet, those next to be evicted first, while transitions go on coming in: a chunk
is never changed once it is full, and one that is evicted before it is written is copied aside
(`SlotLedger.on_evict`). New files first, then the manifest by rename, then old files go: whenever
the process is killed, the manifest names files that are whole.
"""

import json
import os
import secrets
import threading
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunk_store import GENERATION_BITS
from zapex.errors import CheckpointError
from zapex.replay_core import ReplayCore, ReplayLayout
from zapex.schema import COUNT, FREE, GENERATION, HEADER_WORDS, LIVE, NO_FRAME, STATE

FORMAT = 1
MANIFEST = "manifest.json"
SEGMENT_BYTES = 64 << 20
# What code that reads a damaged or made-up file may come upon.
UNREADABLE = (
    OSError, KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError,
    RecursionError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True)
class StoredChunk:
    """Where a chunk lies on disk. `count` rows of it are whole."""

    generation: int
    count: int
    file: str
    position: int
    crc32: int


@dataclass
class SavedChunks:
    """What the last save of a replay, or the load it came from, left in `path`."""

    path: Path
    manifest_crc32: int
    chunks: dict[int, StoredChunk] = field(default_factory=dict)


def _text_of(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_whole(path: Path, parts: Iterable[Any]) -> int:
    """Write the parts one behind another and sync them; their crc32."""
    crc = 0
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            crc = zlib.crc32(part, crc)
        file.flush()
        os.fsync(file.fileno())
    return crc


class _Instant:
    """A replay as it was when the lock was held; chunks evicted since are kept aside."""

    def __init__(self, replay: ReplayCore) -> None:
        ledger, store = replay.ledger, replay.store
        self.store = store
        self.headers = store.header_rows.copy()
        elsewhere = ledger.announced >= 0  # filled by other processes; the header may be ahead
        self.headers[elsewhere, COUNT] = ledger.announced[elsewhere]
        self.leaves = replay.tree.leaves.copy()
        # The oldest first; chunks that are still open are the youngest.
        live = ledger.live
        still_open = np.setdiff1d(np.flatnonzero(self.headers[:, STATE] == LIVE), live)
        still_open = still_open[self.headers[still_open, COUNT] > 0]
        self.slots: list[int] = live + still_open.tolist()
        self.aside: dict[int, bytes] = {}
        self.pending = set(self.slots)
        self.facts = {
            "replay": replay.facts(),
            "format": FORMAT,
            "free": ledger.free_slots,
            "random": replay.rng.bit_generator.state,
        }

    def keep(self, slot: int) -> None:
        """The ledger evicts a slot: its bytes are about to change."""
        if slot in self.pending and slot not in self.aside:
            self.aside[slot] = bytes(self._body(slot))

    def _body(self, slot: int) -> NDArray[np.uint8]:
        start = self.store.body(slot)
        return self.store.mem[start : start + self.store.layout.body_bytes]

    def take(self, slot: int, lock: threading.RLock) -> bytes:
        """The bytes of a chunk as they were."""
        with lock:  # an eviction waits for this copy, or has made its own
            self.pending.discard(slot)
            return self.aside.pop(slot, None) or bytes(self._body(slot))


def save(replay: ReplayCore, path: str | os.PathLike[str]) -> None:
    """Write a snapshot of `replay` into the directory `path`; one save at a time.

    Raises CheckpointError where it cannot be written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replay.saving:
            _save(replay, folder.resolve())
    except OSError as error:
        raise CheckpointError(f"no snapshot in {folder}: {error}") from error


def _save(replay: ReplayCore, folder: Path) -> None:
    known = replay.saved
    if known is None or known.path != folder or _manifest_crc32(folder) != known.manifest_crc32:
        known = SavedChunks(folder, 0)
    with replay.lock:
        instant = _Instant(replay)
        replay.ledger.on_evict = instant.keep
    try:
        name = secrets.token_hex(8)
        chunks = _write_chunks(replay, instant, known, folder, name)
    finally:
        with replay.lock:
            replay.ledger.on_evict = None
    state = f"state-{name}.bin"
    crc32 = _write_whole(folder / state, [instant.headers.data, instant.leaves.data])
    facts = {
        **instant.facts,
        "state": {"file": state, "crc32": crc32},
        "chunks": {
            str(slot): [c.generation, c.count, c.file, c.position, c.crc32]
            for slot, c in chunks.items()
        },
    }
    text = _text_of(facts)
    whole = b'{"crc32":%d,"snapshot":%s}\n' % (zlib.crc32(text), text)
    temporary = folder / f"{MANIFEST}.{name}"
    _write_whole(temporary, [whole])
    _sync_directory(folder)
    os.replace(temporary, folder / MANIFEST)
    _sync_directory(folder)
    replay.saved = SavedChunks(folder, zlib.crc32(text), chunks)
    _forget(folder, {MANIFEST, state, *(c.file for c in chunks.values())})


def _write_chunks(
    replay: ReplayCore, instant: _Instant, known: SavedChunks, folder: Path, name: str
) -> dict[int, StoredChunk]:
    """Chunks that are not on disk yet into new files; where all of them lie."""
    chunks: dict[int, StoredChunk] = {}
    missing = []
    for slot in instant.slots:
        generation, count = instant.headers[slot, [GENERATION, COUNT]].tolist()
        there = known.chunks.get(slot)
        if there is not None and (there.generation, there.count) == (generation, count):
            chunks[slot] = there
            with replay.lock:
                instant.pending.discard(slot)
        else:
            missing.append((slot, generation, count))
    body_bytes = replay.store.layout.body_bytes
    per_file = max(1, SEGMENT_BYTES // body_bytes)
    for number, first in enumerate(range(0, len(missing), per_file)):
        file = f"chunks-{name}-{number}.bin"

        def bodies(part: list[tuple[int, int, int]], file: str = file) -> Iterable[bytes]:
            for position, (slot, generation, count) in enumerate(part):
                body = instant.take(slot, replay.lock)
                chunks[slot] = StoredChunk(
                    generation, count, file, position * body_bytes, zlib.crc32(body)
                )
                yield body

        _write_whole(folder / file, bodies(missing[first : first + per_file]))
    return chunks


def _forget(folder: Path, wanted: set[str]) -> None:
    """Remove our files that no manifest names any more."""
    for file in folder.iterdir():
        ours = file.name.startswith(("chunks-", "state-", f"{MANIFEST}."))
        if ours and file.name not in wanted:
            with suppress(OSError):
                file.unlink()


def _manifest_crc32(folder: Path) -> int | None:
    try:
        return zlib.crc32(_text_of(read_manifest(folder)))
    except CheckpointError:
        return None


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts of a snapshot. Raises CheckpointError where there is none or it is damaged."""
    file = Path(path) / MANIFEST
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no snapshot in {Path(path)}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return parse_manifest(content, file)


def parse_manifest(content: bytes, name: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts in a manifest's bytes; `name` is for the message. Raises CheckpointError."""
    try:
        table = json.loads(content)
        facts = table["snapshot"]
        intact = zlib.crc32(_text_of(facts)) == table["crc32"] and facts["format"] == FORMAT
        found = dict(facts)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{name} is no manifest: {error}") from error
    if not intact:
        raise CheckpointError(f"{name} is damaged, or of another format than {FORMAT}")
    return found


def read_state(
    path: str | os.PathLike[str], facts: dict[str, Any], layout: ReplayLayout
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Headers (slots, HEADER_WORDS) and leaves of a snapshot of a replay of `layout`.

    They are as long as `layout` says, so nobody makes a memory that the files do not bear out.
    Raises CheckpointError where the file is missing or a checksum does not fit.
    """
    file = Path(path) / Path(facts["state"]["file"]).name
    headers_bytes = layout.slots * HEADER_WORDS * 8
    wanted = headers_bytes + layout.slots * layout.chunk * 8
    with file.open("rb") as stream:
        length = os.fstat(stream.fileno()).st_size
        state = stream.read(wanted) if length == wanted else b""
    if len(state) != wanted or zlib.crc32(state) != facts["state"]["crc32"]:
        raise CheckpointError(f"{file} is damaged")
    headers = np.frombuffer(state[:headers_bytes], np.int64).reshape(layout.slots, HEADER_WORDS)
    if headers.min() < 0 or headers.max() >= 1 << 62:
        raise CheckpointError(f"{file} has a header with a number out of range")
    return headers, np.frombuffer(state, np.float64, offset=headers_bytes)


def restore(
    replay: ReplayCore,
    path: str | os.PathLike[str],
    facts: dict[str, Any],
    state: tuple[NDArray[np.int64], NDArray[np.float64]],
) -> None:
    """Fill a new, empty `replay` of the same layout with the snapshot in `path`.

    facts: its manifest. state: of `read_state`.

    Every generation jumps by a random number: keys from before are stale (but for one in 2^28).
    Raises CheckpointError where a file is missing or a checksum does not fit, and what
    `UNREADABLE` names for facts that are none.
    """
    folder = Path(path).resolve()
    store, layout = replay.store, replay.store.layout
    headers, leaves = state
    chunks = {int(slot): StoredChunk(*where) for slot, where in facts["chunks"].items()}
    if not all(0 <= slot < store.slots for slot in chunks):
        raise CheckpointError(f"the snapshot in {folder} names a slot that there is not")
    drawable = np.zeros((store.slots, layout.chunk), np.bool_)
    for slot, chunk in chunks.items():
        _read_chunk(folder, chunk, store.mem[store.body(slot) :][: layout.body_bytes])
        _check_chunk(store.column, slot, chunk, layout.chunk, layout.frames, headers)
        drawable[slot, : chunk.count] = True
    if leaves[~drawable.reshape(-1)].any():
        raise CheckpointError(f"the snapshot in {folder} can draw what it does not hold")
    jump = 1 + secrets.randbelow((1 << GENERATION_BITS) - 1)
    rows = store.header_rows
    rows[:] = headers
    rows[:, GENERATION] = (rows[:, GENERATION] + jump) % (1 << GENERATION_BITS)
    gone = np.ones(store.slots, np.bool_)
    gone[list(chunks)] = False
    rows[gone, STATE] = FREE
    replay.take_over(leaves, facts["replay"])
    replay.ledger.free_in_order(facts["free"])
    replay.rng.bit_generator.state = facts["random"]
    replay.saved = SavedChunks(
        folder,
        zlib.crc32(_text_of(facts)),
        {
            slot: StoredChunk(int(rows[slot, GENERATION]), c.count, c.file, c.position, c.crc32)
            for slot, c in chunks.items()
        },
    )


def _read_chunk(folder: Path, chunk: StoredChunk, body: NDArray[np.uint8]) -> None:
    with (folder / Path(chunk.file).name).open("rb") as file:
        file.seek(chunk.position)
        got = file.readinto(body.data)
    if got != body.nbytes or zlib.crc32(body.data) != chunk.crc32:
        raise CheckpointError(f"{folder / chunk.file} is damaged at byte {chunk.position}")


def _check_chunk(column: Any, slot: int, chunk: StoredChunk, most: int, frames: int,
                 headers: NDArray[np.int64]) -> None:  # fmt: skip
    """Kernels follow these numbers without a check."""
    count = int(headers[slot, COUNT])
    if not (1 <= count <= most and count == chunk.count and headers[slot, STATE] == LIVE):
        raise CheckpointError(f"slot {slot} of the snapshot has no {chunk.count} transitions")
    for name in ("obs_frames", "next_obs_frames"):
        places = column(slot, name)[:count]
        if ((places >= frames) & (places != NO_FRAME)).any():
            raise CheckpointError(f"slot {slot} of the snapshot names frames that it has not")
