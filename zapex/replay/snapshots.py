"""Snapshots: a replay on disk, chunk by chunk, whole even if the machine stops during a save.

    path/manifest.json      settings, random state, and the place of each chunk
    path/state-<id>.bin     headers and leaves at the time of the save
    path/chunks-<id>.bin    bodies of chunks; each up to SEGMENT_BYTES

A save copies headers, leaves and random state under the replay's lock. Then it writes the chunks
that are not on disk yet, in the order of eviction. Other threads may add transitions during this: a
full chunk never changes, and a chunk that is evicted before it is written is copied to other memory
(`SlotLedger.on_evict`), or left out once that takes MOST_ASIDE_BYTES. A save writes new files
first, then renames the manifest, then removes old files. So if the process is killed at any time,
the manifest names files that are whole.
"""

import json
import os
import re
import secrets
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.keys import GENERATION_MASK
from zapex.chunks.layout import (
    COMMIT_SEQUENCE,
    COUNT,
    FREE,
    GENERATION,
    HEADER_WORDS,
    HOST,
    LIVE,
    NO_FRAME,
    STATE,
)
from zapex.errors import CheckpointError
from zapex.machine.disk import (
    free_bytes,
    sync_directory,
    write_whole,
)
from zapex.machine.reading import open_regular, read_regular
from zapex.replay.core import ReplayCore, ReplayLayout

FORMAT = 2
UNORDERED_FORMAT = 1  # columns lay in the order of the user's schema, which was not written down
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 64 << 20  # a line for each of the most slots takes less
# Errors that a damaged or forged file can cause.
UNREADABLE = (
    OSError,
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
    MemoryError,
)
# A save removes files with these names, and no others.
_OURS = re.compile(
    r"manifest\.json(\.[0-9a-f]{16})?|state-[0-9a-f]{16}\.bin|chunks-[0-9a-f]{16}-\d+\.bin"
)
_START = b'{"crc32":'  # of a manifest
SEGMENT_BYTES = 64 << 20
MOST_ASIDE_BYTES = 256 << 20  # of chunks that were evicted before they were written
_SLACK_BYTES = 1 << 20  # the manifest, and what a file system needs besides
Progress = Callable[[int, int], object]
"""Takes the bytes of chunks that are on the disk, of how many that this save writes."""


class StoredChunk(NamedTuple):
    """The place of a chunk on disk. `rows` of its rows are whole."""

    generation: int
    rows: int
    file: str
    position: int
    crc32: int


@dataclass
class Saves:
    """The chunks in `path` since the last save of one replay, or its load. One save at a time.

    line: a name that a replay, the snapshots of it and the replays loaded from them share.
    """

    path: Path | None = None
    manifest_crc32: int = 0
    chunks: dict[int, StoredChunk] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    line: str = field(default_factory=lambda: secrets.token_hex(8))


def text_of(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts of a snapshot. Raises CheckpointError if it is missing or damaged."""
    file = Path(path) / MANIFEST
    try:
        content = read_regular(file, MOST_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no snapshot in {Path(path)}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return parse_manifest(content, file)


def parse_manifest(content: bytes, name: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts in a manifest's bytes; `name` names it in errors. Raises CheckpointError."""
    try:
        table = json.loads(content)
        facts = table["snapshot"]
        intact = zlib.crc32(text_of(facts)) == table["crc32"]
        known = facts["format"] in (UNORDERED_FORMAT, FORMAT)
        found = dict(facts)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{name} is not a manifest: {error}") from error
    if not (intact and known):
        raise CheckpointError(f"{name} is damaged, or of another format than {FORMAT}")
    return found


def read_state(
    path: str | os.PathLike[str], facts: dict[str, Any], layout: ReplayLayout
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Headers (slots, HEADER_WORDS) and leaves of a snapshot of a replay of `layout`.

    Their length must agree with `layout`, so no memory is allocated that the files do not need.
    Raises CheckpointError if the file is missing or a checksum is wrong.
    """
    file = Path(path) / Path(facts["state"]["file"]).name
    rows = np.dtype((np.float64, layout.chunk))
    record = np.dtype(
        [("headers", np.int64, (layout.slots, HEADER_WORDS)), ("leaves", rows, layout.slots)]
    )
    with open_regular(file) as stream:
        length = os.fstat(stream.fileno()).st_size
        state = stream.read(length) if length == record.itemsize else b""
    if len(state) != record.itemsize or zlib.crc32(state) != facts["state"]["crc32"]:
        raise CheckpointError(f"{file} is damaged")
    (found,) = np.frombuffer(state, record)
    headers: NDArray[np.int64] = found["headers"]
    if headers.min() < 0 or headers.max() >= 1 << 62:
        raise CheckpointError(f"{file} has a header with a number out of range")
    return headers, found["leaves"].reshape(-1)


def restore(
    replay: ReplayCore,
    path: str | os.PathLike[str],
    facts: dict[str, Any],
    state: tuple[NDArray[np.int64], NDArray[np.float64]],
) -> Saves:
    """Fill a new, empty `replay` with the snapshot in `path`; its chunks have the same layout.

    facts: its manifest. state: from `read_state`, with the layout of the saved replay.

    In a replay of the same size everything is in its place, and draws continue bit for bit. In one
    of another size chunks have other slots, and if it is smaller the oldest are left out. A random
    number is added to every generation, so older keys are stale (except one in 2^28).
    Raises CheckpointError if a file is missing or a checksum is wrong, and the errors in
    `UNREADABLE` for invalid facts.
    """
    folder = Path(path).resolve()
    store, layout = replay.store, replay.store.layout
    headers, leaves = state[0], state[1].reshape(len(state[0]), -1)
    chunks = {int(slot): StoredChunk(*where) for slot, where in facts["chunks"].items()}
    if not all(0 <= slot < len(headers) for slot in chunks):
        raise CheckpointError(f"the snapshot in {folder} names a slot that does not exist")
    drawable = np.zeros(leaves.shape, np.bool_)
    for slot, chunk in chunks.items():
        drawable[slot, : chunk.rows] = True
    if leaves[~drawable].any():
        raise CheckpointError(
            f"the snapshot in {folder} gives priorities to transitions that it lacks"
        )
    saved_size = tuple(facts["replay"][name] for name in ("capacity", "streams"))
    same = saved_size == (replay.layout.capacity, replay.layout.streams)
    places = {slot: slot for slot in chunks} if same else _places(replay.layout, headers, chunks)
    for slot, place in places.items():
        _read_chunk(folder, chunks[slot], store.mem[store.body(place) :][: layout.body_bytes])
        _check_chunk(store.column, place, chunks[slot], layout.chunk, layout.frames, headers[slot])
    old, new = (np.array(list(slots), np.int64) for slots in (places, places.values()))
    rows, taken = store.header_rows, np.zeros((store.slots, layout.chunk))
    taken[new] = leaves[old]
    if same:
        rows[:] = headers
    rows[:, STATE] = FREE
    rows[new] = headers[old]
    rows[:, HOST] = 0  # it no longer plays: host numbers start again
    jump = secrets.randbelow(GENERATION_MASK - 1)
    rows[:, GENERATION] = (rows[:, GENERATION] + jump) % GENERATION_MASK + 1
    replay.take_over(taken.reshape(-1), facts["replay"])
    if same:
        replay.ledger.free_in_order(facts["free"])
    replay.rng.bit_generator.state = facts["random"]
    there = {
        place: chunks[slot]._replace(generation=int(rows[place, GENERATION]))
        for slot, place in places.items()
    }
    return Saves(folder, zlib.crc32(text_of(facts)), there, line=str(facts.get("line", "")))


def _places(
    layout: ReplayLayout, headers: NDArray[np.int64], chunks: dict[int, StoredChunk]
) -> dict[int, int]:
    """Slots of a replay of another size for saved chunks, the oldest first; the newest that fit."""
    newest_first = sorted(chunks, key=lambda slot: -int(headers[slot, COMMIT_SEQUENCE]))
    held = np.cumsum([chunks[slot].rows for slot in newest_first])
    fitting = int(np.searchsorted(held, layout.capacity, side="right"))
    kept = newest_first[: min(fitting, layout.live_slots)]
    return {slot: place for place, slot in enumerate(reversed(kept))}


def _read_chunk(folder: Path, chunk: StoredChunk, body: NDArray[np.uint8]) -> None:
    with open_regular(folder / Path(chunk.file).name) as file:
        file.seek(chunk.position)
        got = file.readinto(body.data)
    if got != body.nbytes or zlib.crc32(body.data) != chunk.crc32:
        raise CheckpointError(f"{folder / chunk.file} is damaged at byte {chunk.position}")


def _check_chunk(
    column: Any, place: int, chunk: StoredChunk, most: int, frames: int, header: NDArray[np.int64]
) -> None:
    """Check numbers that kernels use without a check. Raises CheckpointError."""
    count = int(header[COUNT])
    if not (1 <= count <= most and count == chunk.rows and header[STATE] == LIVE):
        raise CheckpointError(f"a chunk of the snapshot lacks its {chunk.rows} transitions")
    for name in ("obs_frames", "next_obs_frames"):
        places = column(place, name)[:count]
        if ((places >= frames) & (places != NO_FRAME)).any():
            raise CheckpointError("a chunk of the snapshot names frames that it lacks")


class _Instant:
    """A replay's state while the lock was held. It keeps copies of chunks evicted since.

    Where these copies would take too much memory, chunks are left out of the save.
    """

    def __init__(self, replay: ReplayCore, line: str) -> None:
        ledger, store = replay.ledger, replay.store
        self.store = store
        self.headers = store.header_rows.copy()
        # Filled by other processes: the header's count may be ahead.
        elsewhere = ledger.taken >= 0
        self.headers[elsewhere, COUNT] = ledger.taken[elsewhere]
        self.leaves = replay.tree.leaves.copy()
        # The oldest first; open chunks are the newest.
        live = ledger.live
        still_open = np.setdiff1d(np.flatnonzero(self.headers[:, STATE] == LIVE), live)
        still_open = still_open[self.headers[still_open, COUNT] > 0]
        still_open = still_open[np.argsort(self.headers[still_open, COMMIT_SEQUENCE])]
        # Their stamps are of their opening: a load would take them for older than closed ones.
        self.headers[still_open, COMMIT_SEQUENCE] = ledger.next_commit + np.arange(len(still_open))
        self.slots: list[int] = live + still_open.tolist()
        self.aside: dict[int, bytes] = {}
        self.pending = set(self.slots)
        self._most_aside = MOST_ASIDE_BYTES // store.layout.body_bytes
        self.facts = {
            "replay": replay.facts(),
            "format": FORMAT,
            "free": ledger.free_slots,
            "line": line,
            "random": replay.rng.bit_generator.state,
        }

    def keep(self, slot: int) -> None:
        """Copy the bytes of a slot that the ledger evicts, before they change."""
        if slot not in self.pending or slot in self.aside:
            return
        if len(self.aside) < self._most_aside:
            self.aside[slot] = bytes(self._body(slot))
        else:  # the disk is slower than the actors
            self.pending.discard(slot)
            self.headers[slot, STATE] = FREE
            self.leaves.reshape(len(self.headers), -1)[slot] = 0.0

    def _body(self, slot: int) -> NDArray[np.uint8]:
        start = self.store.body(slot)
        return self.store.mem[start : start + self.store.layout.body_bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of the state's file."""
        return int(self.headers.nbytes + self.leaves.nbytes)

    def skip(self, slot: int) -> None:
        """The chunk is on the disk already. The caller holds the lock."""
        self.pending.discard(slot)
        self.aside.pop(slot, None)

    def take(self, slot: int, lock: threading.RLock) -> bytes | None:
        """The bytes of a chunk at the time of the save; None: it is left out."""
        with lock:  # an eviction waits for this copy, or has made its own
            if slot not in self.pending:
                return None
            self.pending.discard(slot)
            return self.aside.pop(slot, None) or bytes(self._body(slot))


def _ignore(done_bytes: int, total_bytes: int) -> None:
    pass


def save(
    replay: ReplayCore,
    saves: Saves,
    path: str | os.PathLike[str],
    about: Mapping[str, Any] | None = None,
    progress: Progress = _ignore,
    *,
    overwrite: bool = True,
) -> None:
    """Write a snapshot of `replay` into the directory `path`; one save at a time.

    about: JSON values to keep in the manifest under "about". overwrite: also in place of a snapshot
    of another replay. Raises CheckpointError if it cannot be
    written, and at once if the disk has too little room; then the former snapshot is as it was.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with saves.lock:
            if not overwrite:
                _demand_own_line(folder, saves.line)
            _save(replay, saves, folder.resolve(), dict(about or {}), progress)
    except OSError as error:
        raise CheckpointError(f"no snapshot in {folder}: {error}") from error


def _save(
    replay: ReplayCore, saves: Saves, folder: Path, about: dict[str, Any], progress: Progress
) -> None:
    _demand_own_directory(folder)
    former = _manifest(folder)
    # A save that was killed has left files. If it had renamed its manifest, the disk must know
    # before the files of the one before it go.
    sync_directory(folder)
    _forget_unnamed(folder, former)
    same = saves.path == folder and _crc32(former) == saves.manifest_crc32
    known = saves.chunks if same else {}
    with replay.lock:
        instant = _Instant(replay, saves.line)
        replay.ledger.on_evict = instant.keep
    name = secrets.token_hex(8)
    try:
        try:
            chunks = _write_chunks(replay, instant, known, folder, name, progress)
        finally:
            with replay.lock:
                replay.ledger.on_evict = None
        text = _write_manifest(instant, chunks, folder, name, about)
    except BaseException:
        _forget_unnamed(folder, former)
        raise
    os.replace(folder / f"{MANIFEST}.{name}", folder / MANIFEST)
    sync_directory(folder)
    _forget_unnamed(folder, _manifest(folder))
    saves.path, saves.manifest_crc32, saves.chunks = folder, zlib.crc32(text), chunks


def _demand_own_line(folder: Path, line: str) -> None:
    """Raise CheckpointError if the snapshot there is of a replay that this one doesn't continue."""
    if not (folder / MANIFEST).exists():
        return
    facts = read_manifest(folder)
    if facts.get("line", "") != line:
        raise CheckpointError(
            f"{folder} has a snapshot of another replay, which the save would replace: load it to "
            "continue with its transitions, save elsewhere, or pass overwrite=True"
        )


def _demand_own_directory(folder: Path) -> None:
    """Raise CheckpointError if there are files of others: a save removes and replaces files."""
    others = [file.name for file in folder.iterdir() if not _OURS.fullmatch(file.name)]
    with suppress(FileNotFoundError), open_regular(folder / MANIFEST) as file:
        if file.read(len(_START)) != _START:
            others.append(MANIFEST)
    if others:
        raise CheckpointError(
            f"{folder} holds other files ({', '.join(sorted(others)[:3])}): save into a directory "
            "that is new, or holds only a snapshot"
        )


def _write_chunks(
    replay: ReplayCore,
    instant: _Instant,
    known: dict[int, StoredChunk],
    folder: Path,
    name: str,
    progress: Progress,
) -> dict[int, StoredChunk]:
    """Write chunks that are not on disk yet to new files. Returns the places of all chunks."""
    chunks: dict[int, StoredChunk] = {}
    missing = []
    for slot in instant.slots:
        generation, count = instant.headers[slot, [GENERATION, COUNT]].tolist()
        there = known.get(slot)
        if there is not None and (there.generation, there.rows) == (generation, count):
            chunks[slot] = there
            with replay.lock:
                instant.skip(slot)
        else:
            missing.append((slot, generation, count))
    body_bytes = replay.store.layout.body_bytes
    total = len(missing) * body_bytes
    _demand_room(folder, total + instant.nbytes)
    per_file = max(1, SEGMENT_BYTES // body_bytes)
    for number, first in enumerate(range(0, len(missing), per_file)):
        file = f"chunks-{name}-{number}.bin"
        progress(first * body_bytes, total)

        def bodies(part: list[tuple[int, int, int]], file: str = file) -> Iterable[bytes]:
            position = 0
            for slot, generation, count in part:
                body = instant.take(slot, replay.lock)
                if body is not None:
                    chunks[slot] = StoredChunk(generation, count, file, position, zlib.crc32(body))
                    position += body_bytes
                    yield body

        write_whole(folder / file, bodies(missing[first : first + per_file]))
    progress(total, total)
    return chunks


def _demand_room(folder: Path, needed_bytes: int) -> None:
    """Raise CheckpointError if the disk has too little room for this save's new files."""
    free = free_bytes(folder)
    if needed_bytes + _SLACK_BYTES > free:
        raise CheckpointError(
            f"a save into {folder} needs {size_of(needed_bytes + _SLACK_BYTES)} and "
            f"{size_of(free)} are free there: free space on that disk"
        )


def size_of(nbytes: int) -> str:
    """Bytes as a text."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"


def _write_manifest(
    instant: _Instant,
    chunks: dict[int, StoredChunk],
    folder: Path,
    name: str,
    about: dict[str, Any],
) -> bytes:
    """Write the state, and the manifest under another name. Returns its facts as text."""
    state = f"state-{name}.bin"
    crc32 = write_whole(folder / state, [instant.headers.data, instant.leaves.data])
    facts = {
        **instant.facts,
        **({"about": about} if about else {}),
        "state": {"file": state, "crc32": crc32},
        "chunks": {str(slot): chunk for slot, chunk in chunks.items()},
    }
    text = text_of(facts)
    whole = b'%s%d,"snapshot":%s}\n' % (_START, zlib.crc32(text), text)
    write_whole(folder / f"{MANIFEST}.{name}", [whole])
    sync_directory(folder)
    return text


def _forget_unnamed(folder: Path, manifest: dict[str, Any] | None) -> None:
    """Remove files of snapshots that the manifest does not name. An unreadable one names all."""
    wanted = {MANIFEST}
    if manifest is not None:
        wanted |= {manifest["state"]["file"], *(chunk[2] for chunk in manifest["chunks"].values())}
    elif (folder / MANIFEST).exists():
        return
    for file in folder.iterdir():
        if _OURS.fullmatch(file.name) and file.name not in wanted:
            with suppress(OSError):
                file.unlink()


def _manifest(folder: Path) -> dict[str, Any] | None:
    """The facts of the snapshot that is there; None: there is none, or it cannot be read."""
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None


def _crc32(manifest: dict[str, Any] | None) -> int | None:
    return None if manifest is None else zlib.crc32(text_of(manifest))
