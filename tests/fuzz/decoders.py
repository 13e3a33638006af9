"""Every decoder of foreign bytes: real inputs, their mutants, and what must hold.

    what must hold   the bytes are taken, or refused with an exception of zapex.errors;
                     what was taken says the same after encoding and decoding it again;
                     the memory for it stays below twice its declared limit (`fuzz.py` measures)

An engine calls `Decoder.run`; whatever exception it lets out is a finding.
"""

import contextlib
import json
import os
import random
import shutil
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from zmq.utils import z85

from tests.fuzz import mutation
from tests.fuzz.mutation import Blind
from tests.fuzz.sessions import LibrarySessions, RunSessions
from tests.fuzz.zmtp import CurveBytes, NullBytes
from tests.support import messages
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.layout import NO_FRAME, BatchLayout, ChunkLayout
from zapex.chunks.schema import Column, Schema
from zapex.errors import ZapexError
from zapex.library.prioritized import PrioritizedReplay
from zapex.net import keys as curve_keys
from zapex.replay import snapshots
from zapex.replay.draw import Draw
from zapex.run import checkpoints
from zapex.wire import messages as m
from zapex.wire.batches import BatchUnpacker
from zapex.wire.experience import batch_rows, batch_rows_bytes, row_columns
from zapex.wire.protocol import Form, Kind, as_buffer, decode_header

SCHEMA = Schema(
    {
        "obs/a": Column((3, 2), np.uint8, stack=2),
        "obs/b": Column((2,), np.float32),
        "action": Column((), np.int64),
        "mask": Column((2,), np.int8),
    },
    n_step=1,
    gamma=0.5,
)
LAYOUT = ChunkLayout(SCHEMA, 4)
FORM = Form(LAYOUT, batch_size=2, parameter_bytes=8, metrics_bytes=16, episode_bytes=4)


@dataclass(frozen=True)
class Decoder:
    """One decoder. limit_bytes: declared, of what it may hold for one input, the input apart.

    renew: an input that was kept, as the present version of the format would have it.
    """

    name: str
    seeds: Sequence[bytes]
    run: Callable[[bytes], bool]  # True: taken, False: refused
    mutate: Callable[[bytes, random.Random, Blind], bytes]
    limit_bytes: int
    renew: Callable[[bytes], bytes] = bytes


# Messages.


def _chunk() -> np.ndarray:
    memory = aligned_zeros(LAYOUT.body_bytes)
    LAYOUT.column("obs/a", memory, 0)[:3] = np.arange(18, dtype=np.uint8).reshape(3, 3, 2)
    LAYOUT.column("obs/b", memory, 0)[:3] = np.arange(6, dtype=np.float32).reshape(3, 2)
    LAYOUT.column("obs_frames", memory, 0)[:2] = [[NO_FRAME, 0], [0, 1]]
    LAYOUT.column("next_obs_frames", memory, 0)[:2] = [[0, 1], [1, 2]]
    for name in ("action", "reward", "discount", "priority"):
        LAYOUT.column(name, memory, 0)[:2] = [1, 0]
    return memory


def _batch() -> m.BatchMessage:
    rows = bytearray(batch_rows_bytes(SCHEMA, 2))
    dtype, none = Draw.dtype(2), np.zeros(2, np.int64)
    draw = Draw(none, none, np.array([0.5, 2.0]), 10.0, 1000, 0.5)
    draw.write(np.frombuffer(rows, dtype, 1)[0])
    columns = row_columns(batch_rows(SCHEMA), 2, memoryview(rows)[dtype.itemsize :])
    columns["obs_frames"][:] = [[NO_FRAME, 0], [0, 1]]
    columns["next_obs_frames"][:] = [[0, 1], [1, 2]]
    body = as_buffer(bytes(range(18))), as_buffer(bytes(range(24))), as_buffer(rows)
    return m.BatchMessage(SCHEMA.hash, 55, 5, 1000, 2, 3, 0, body)


def examples() -> dict[str, Any]:
    """One message of each kind, of this file's schema."""
    config = {"gamma": 0.5, "env": "x", "env_kwargs": {"a": [1, None, True]}}
    chunks = [(0, 9, 2), (0, 8, 1)]
    push = m.Push.of_chunks(LAYOUT, _chunk(), chunks, actor=3, incarnation=77, sequence=12)
    return messages.examples(push, _batch(), config, SCHEMA)


def _decode(data: bytes) -> Any | None:
    """The message in `data`, or None where it is refused."""
    try:
        message = m.decode(mutation.split(data), FORM)
    except ZapexError as error:
        str(error).encode()  # it goes to the peer and to the log
        return None
    assert messages.same(m.decode([bytes(p) for p in m.encode(message)], FORM), message)
    return message


def _message_run(data: bytes) -> bool:
    return _decode(data) is not None


class _PushRun:
    """Each chunk of a push is written into a slot, and no byte outside of it changes."""

    def __init__(self) -> None:
        self._margin = 64
        self._memory = aligned_zeros(LAYOUT.body_bytes + 2 * self._margin)

    def __call__(self, data: bytes) -> bool:
        push = _decode(data)
        if isinstance(push, m.Push):
            for number in range(len(push.chunks)):
                push.write(number, LAYOUT, self._memory, self._margin)
            assert not self._memory[: self._margin].any()
            assert not self._memory[-self._margin :].any()
        return push is not None


class _BatchRun:
    """A batch is unpacked as a naive reader of the message would: no row from elsewhere."""

    def __init__(self, *, unpack: bool) -> None:
        self._layouts = [BatchLayout(SCHEMA, 2), BatchLayout(SCHEMA, 2, channels_last=True)]
        self._unpackers = [BatchUnpacker(layout, LAYOUT) for layout in self._layouts]
        self._unpack = unpack

    def __call__(self, data: bytes) -> bool:
        message = _decode(data)
        if not (self._unpack and isinstance(message, m.BatchMessage)):
            return message is not None
        columns = message.columns(SCHEMA)
        for layout, unpacker in zip(self._layouts, self._unpackers, strict=True):
            batch = Batch.empty(layout)
            unpacker.unpack(message, batch)
            for i, (name, column) in enumerate(SCHEMA.obs_columns.items()):
                frames = np.frombuffer(message.body[i], column.dtype)
                frames = frames.reshape(message.frames, *column.shape)
                padded = np.concatenate([frames, np.zeros((1, *column.shape), column.dtype)])
                for side in ("obs", "next_obs"):
                    # The last one is the zero frame.
                    table = columns[f"{side}_frames"][:, -column.stack :].astype(int)
                    naive = padded[np.where(table == NO_FRAME, message.frames, table)]
                    if column.stack > 1 and layout.channels_last:
                        naive = np.moveaxis(naive, 1, -1)
                    got = layout.sections[side + name.removeprefix("obs")].view(batch.memory)
                    assert naive.tobytes() == got.tobytes()
        return True


def _renewed(data: bytes) -> bytes:
    return mutation.joined(mutation.renewed(mutation.split(data)))


def _message_decoders() -> dict[str, Decoder]:
    encoded = {name: m.encode(message) for name, message in examples().items()}
    seeds = {name: mutation.joined(parts) for name, parts in encoded.items()}
    others = list(seeds.values())
    runs: dict[str, Callable[[bytes], bool]] = dict.fromkeys(seeds, _message_run)
    runs |= {"push": _PushRun(), "batch": _BatchRun(unpack=False)}
    kinds = {name: int(decode_header(parts).kind) for name, parts in encoded.items()}
    # Between header and reader: whatever the kind.
    runs["unpack"], seeds["unpack"], kinds["unpack"] = _BatchRun(unpack=True), seeds["batch"], 6

    def decoder(name: str) -> Decoder:
        kind = kinds[name]

        def mutate(data: bytes, draw: random.Random, blind: Blind) -> bytes:
            return mutation.mutate_message(data, draw, blind, kind, others)

        limit = max(FORM.largest_request_bytes, FORM.largest_answer_bytes)
        again = [m.encode(examples()[name], compressed=True)] if name in ("push", "batch") else []
        return Decoder(
            name, [seeds[name], *map(mutation.joined, again)], runs[name], mutate, limit, _renewed
        )

    assert set(kinds.values()) == set(Kind)
    return {name: decoder(name) for name in seeds}


# Files.


def memory_folder() -> str | None:
    """Where files cost no disk; None: the usual place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass
class _Folder:
    """A folder in memory that is gone with the process, or with fuzz.py's, which sets TMPDIR.

    A fuzzer ends its process without Python's own end.
    """

    path: Path = field(init=False)
    _files: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        base = None if "TMPDIR" in os.environ else memory_folder()
        self.path = Path(tempfile.mkdtemp(prefix="zapex-fuzz-", dir=base))
        import atexit

        atexit.register(shutil.rmtree, self.path, ignore_errors=True)

    def put(self, name: str, content: bytes) -> None:
        """A file of this content. It is kept open: the next execution mostly writes it again."""
        descriptor, there = self._files.get(name, (-1, b""))
        if descriptor < 0:
            descriptor = os.open(f"{self.path}/{name}", os.O_WRONLY | os.O_CREAT, 0o600)
        if there != content:
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))
        self._files[name] = descriptor, content


def _sealed(text: bytes) -> bytes:
    """A manifest of the facts in `text`, its checksum right where that is as zapex writes it."""
    return b'{"crc32":%d,"snapshot":%s}\n' % (zlib.crc32(text), text)


class _SnapshotRun:
    """A snapshot's files as a peer or a disk may have left them; the first part is the manifest."""

    FILES = ("state.bin", "chunks.bin")

    def __init__(self, *, whole: bool) -> None:
        self._folder, self._whole = _Folder(), whole
        schema = Schema(SCHEMA.columns, n_step=1, gamma=0.5)
        replay = PrioritizedReplay(8, schema, streams=1, chunk=4, seed=1)
        rng = np.random.default_rng(1)
        obs = {
            name.removeprefix("obs/"): rng.integers(0, 9, (3, *c.value_shape)).astype(c.dtype)
            for name, c in schema.obs_columns.items()
        }
        replay.extend(
            obs=obs, next_obs=obs,
            action=np.arange(3), mask=np.zeros((3, 2), np.int8), reward=np.ones(3, np.float32),
            terminated=np.zeros(3, bool), truncated=np.zeros(3, bool),
        )  # fmt: skip
        self._memory = aligned_zeros(2 * replay.core.layout.nbytes)
        replay.save(self._folder.path)
        facts = snapshots.read_manifest(self._folder.path)
        state = (self._folder.path / facts["state"]["file"]).read_bytes()
        facts["state"]["file"] = self.FILES[0]
        (first,) = {where[2] for where in facts["chunks"].values()}
        chunks = (self._folder.path / first).read_bytes()
        for where in facts["chunks"].values():
            where[2] = self.FILES[1]
        self.seed = mutation.joined([_sealed(snapshots.text_of(facts)), state, chunks])

    def __call__(self, data: bytes) -> bool:
        manifest, *files = [*mutation.split(data, 3), b"", b"", b""][:3]
        try:
            return self._load(manifest, files) if self._whole else self._parse(manifest)
        except ZapexError:
            return False

    def _parse(self, manifest: bytes) -> bool:
        facts = snapshots.parse_manifest(manifest, "manifest")
        text = snapshots.text_of(facts)
        again = _sealed(text)
        if again != manifest:
            assert snapshots.text_of(snapshots.parse_manifest(again, "manifest")) == text
        return True

    def _load(self, manifest: bytes, files: list[bytes]) -> bool:
        self._folder.put(snapshots.MANIFEST, manifest)
        for name, content in zip(self.FILES, files, strict=True):
            self._folder.put(name, content)
        # In a memory of a given size: without, a snapshot says itself how much it needs.
        self._memory[:] = 0
        replay = PrioritizedReplay.load(self._folder.path, self._memory)
        # What was taken can be used: no kernel follows a number out of the memory.
        if replay.can_sample(2):
            replay.sample(2)
        replay.core.make_room()
        assert replay.core.tree.check_valid()[0]
        return True

    def mutate(self, data: bytes, draw: random.Random, blind: Blind) -> bytes:
        parts = [*mutation.split(data, 3), b"", b"", b""][:3]
        choice = draw.random()
        if choice < 0.1:  # the checksum stays as it was
            parts[0] = blind(parts[0])
            return mutation.joined(parts)
        try:
            facts = json.loads(parts[0])["snapshot"]
        except (ValueError, TypeError, KeyError, RecursionError):
            parts[0] = _sealed(blind(parts[0]))
            return mutation.joined(parts)
        if choice < 0.6 or not self._whole:
            facts = mutation.mutate_value(facts, draw)
        else:
            i = draw.choice((1, 2))
            body = [b"", parts[i]]
            mutation.change_body(body, draw, blind)
            parts[i] = body[1] if len(body) > 1 else b""
        if self._whole and draw.random() < 0.9:
            with contextlib.suppress(TypeError, KeyError, IndexError, AttributeError):
                facts["state"]["crc32"] = zlib.crc32(parts[1])
                for where in facts["chunks"].values():
                    chunk = parts[2][where[3] : where[3] + LAYOUT.body_bytes]
                    where[4] = zlib.crc32(chunk)
        with contextlib.suppress(RecursionError):
            parts[0] = _sealed(snapshots.text_of(facts))
        return mutation.joined(parts)


class _CheckpointRun:
    """A checkpoint: the JSON of its state, or the file's own bytes."""

    def __init__(self) -> None:
        self._folder = _Folder()
        tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((), np.int64)}
        state = {"schema": {"env_id": "x"}, "counters": {"updates": 3}, "params_version": 7}
        path = checkpoints.save(self._folder.path, checkpoints.step_name(1), tensors, state)
        self.seed = path.read_bytes()
        self._tensors = tensors
        self._path = self._folder.path / "step-000000000002.safetensors"

    def __call__(self, data: bytes) -> bool:
        self._folder.put(self._path.name, data)
        try:
            loaded = checkpoints.load(self._path)
            checkpoints.check_schema(loaded, {"env_id": "x"})
            again = checkpoints.save(
                self._folder.path / "again", checkpoints.BEST, loaded.tensors, loaded.state
            )
            read = checkpoints.load(again)
        except ZapexError:
            return False
        assert json.dumps(read.state) == json.dumps(loaded.state)
        assert {k: v.tobytes() for k, v in read.tensors.items()} == {
            k: v.tobytes() for k, v in loaded.tensors.items()
        }
        return True

    def mutate(self, data: bytes, draw: random.Random, blind: Blind) -> bytes:
        """The header's length, its JSON, the tensors' bytes; checksums made right again."""
        size = int.from_bytes(data[:8], "little")
        head, body = data[8 : 8 + size], data[8 + size :]
        choice = draw.random()
        if choice < 0.3:
            head = mutation.mutate_json(head, draw, blind)
        elif choice < 0.4:
            body = blind(body)
        elif choice < 0.5:
            return (size + draw.choice((-1, 1, 8, 2**31, 2**62))).to_bytes(
                9, "little", signed=True
            )[:8] + data[8:]
        else:  # a state whose checksum is right
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError,
                                     AttributeError):  # fmt: skip
                facts = json.loads(head)
                text = mutation.mutate_json(
                    str(facts["__metadata__"]["state"]).encode("utf-8", "replace"), draw, blind
                ).decode("utf-8", "replace")
                facts["__metadata__"]["state"] = text
                facts["__metadata__"]["sha256"] = checkpoints._checksum(
                    self._tensors, text, facts["__metadata__"].get("number", "")
                )
                head = json.dumps(facts).encode()
        head = head.ljust(-(-len(head) // 8) * 8)
        return len(head).to_bytes(8, "little") + head + body


class _KeysRun:
    """Key files of a role: own, then everybody's public ones."""

    def __init__(self) -> None:
        self._folder = _Folder()
        made = self._folder.path / "made"
        curve_keys.make(made)
        self.seed = mutation.joined(
            [(made / "relay.key").read_bytes(), (made / "public.json").read_bytes()]
        )

    def __call__(self, data: bytes) -> bool:
        own, publics = [*mutation.split(data, 2), b"", b""][:2]
        self._folder.put("relay.key", own)
        self._folder.put("public.json", publics)
        try:
            keys = curve_keys.load(self._folder.path, "relay")
        except ZapexError:
            return False
        for key in (keys.public, keys.secret, *keys.publics.values()):
            assert len(z85.decode(key)) == 32  # libzmq takes them: nothing is found out later
        return True

    def mutate(self, data: bytes, draw: random.Random, blind: Blind) -> bytes:
        parts = [*mutation.split(data, 2), b"", b""][:2]
        i = draw.randrange(2)
        if draw.random() < 0.3:
            text = parts[i].decode("utf-8", "replace")
            at = draw.randrange(len(text) + 1)
            parts[i] = (text[:at] + draw.choice("\0~ é\"'\\x") + text[at + 1 :]).encode()
        else:
            parts[i] = mutation.mutate_json(parts[i], draw, blind)
        return mutation.joined(parts)


def _file_decoders() -> dict[str, Decoder]:
    manifest, whole = _SnapshotRun(whole=False), _SnapshotRun(whole=True)
    state, keys = _CheckpointRun(), _KeysRun()
    limit = 1 << 18
    return {
        "manifest": Decoder("manifest", [manifest.seed], manifest, manifest.mutate, limit),
        "snapshot": Decoder("snapshot", [whole.seed], whole, whole.mutate, 1 << 20),
        "checkpoint": Decoder("checkpoint", [state.seed], state, state.mutate, limit),
        "keys": Decoder("keys", [keys.seed], keys, keys.mutate, limit),
    }


def decoders() -> dict[str, Decoder]:
    """All of them, by name."""
    run, library = RunSessions(FORM, examples()), LibrarySessions(FORM, examples())
    sessions = {
        name: Decoder(name, [one.seed], one.run, one.mutate, 1 << 18, one.renew)
        for name, one in (("server", run), ("library", library))
    }
    zmtp = {
        name: Decoder(name, [one.seed], one.run, one.mutate, 1 << 16)
        for name, one in (("zmtp_null", NullBytes()), ("zmtp_curve", CurveBytes()))
    }
    return {**_message_decoders(), **sessions, **_file_decoders(), **zmtp}
