"""Saves that do not fit, that fail, or that are slow; snapshots in a replay of another size."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zapex.chunks.layout import COMMITTED, COUNT, STATE
from zapex.chunks.schema import Column, Schema
from zapex.errors import CheckpointError
from zapex.replay import snapshots
from zapex.replay.core import ReplayCore, ReplayLayout
from zapex.replay.snapshots import Saves, read_manifest, read_state, restore, save

SCHEMA = Schema({"obs": Column((2,), np.float32), "action": Column((), np.int64)}, n_step=1)
CHUNK = 4
Rows = dict[int, tuple[float, float]]
"""The twin of a memory: action (each is unique) -> reward and leaf of the transition."""


def core(capacity: int = 64, streams: int = 2) -> ReplayCore:
    return ReplayCore(ReplayLayout(SCHEMA, capacity, streams, CHUNK), seed=3)


def add(replay: ReplayCore, first: int, chunks: int, rows: int = CHUNK) -> None:
    """Commit chunks as an actor does; actions count on from `first`, priorities are uneven."""
    for number in range(chunks):
        replay.make_room()
        replay.ledger.release(0)
        (slot,) = replay.ledger.grant(1, 0, 1).tolist()
        store = replay.store
        actions = first + rows * number + np.arange(rows)
        store.column(slot, "action")[:rows] = actions
        store.column(slot, "reward")[:rows] = actions / 2
        store.column(slot, "priority")[:rows] = 1 + actions % 5
        for name in ("obs_frames", "next_obs_frames"):
            store.column(slot, name)[:rows] = 0
        store.header_rows[slot, [COUNT, STATE]] = rows, COMMITTED
        replay.accept(slot)
    replay.make_room()
    replay.ledger.release(0)


def twin(replay: ReplayCore) -> Rows:
    """What the memory holds, read slot by slot."""
    found: Rows = {}
    for slot in replay.ledger.live:
        for row in range(int(replay.store.header_rows[slot, COUNT])):
            action = int(replay.store.column(slot, "action")[row])
            reward = float(replay.store.column(slot, "reward")[row])
            found[action] = reward, float(replay.tree.leaves[slot * replay.layout.chunk + row])
    return found


def loaded(path: Path, replay: ReplayCore) -> Saves:
    facts = read_manifest(path)
    made_for = ReplayLayout(
        SCHEMA, *(facts["replay"][name] for name in ("capacity", "streams", "chunk"))
    )
    return restore(replay, path, facts, read_state(path, facts, made_for))


def test_every_transition_and_priority_is_there_after_a_load_in_the_same_sums(
    tmp_path: Path,
) -> None:
    replay, again = core(), core()
    add(replay, 0, 23)  # 7 of them are evicted
    add(replay, 100, 2, rows=3)
    keys = replay.draw(8).keys
    replay.reprioritise(keys, np.linspace(0.0, 9.0, 8))
    save(replay, Saves(), tmp_path)
    loaded(tmp_path, again)
    assert twin(again) == twin(replay)
    assert again.tree.total == replay.tree.total
    assert (again.tree.check_valid(), len(again)) == ((True, ""), len(replay))
    np.testing.assert_array_equal(again.draw(16).indices, replay.draw(16).indices)


@pytest.mark.parametrize(("capacity", "streams"), [(64, 9), (200, 2), (64, 1)])
def test_a_replay_of_another_size_takes_everything_that_fits(
    tmp_path: Path, capacity: int, streams: int
) -> None:
    replay, again = core(), core(capacity, streams)
    add(replay, 0, 20)
    save(replay, Saves(), tmp_path)
    loaded(tmp_path, again)
    assert twin(again) == twin(replay)
    assert again.tree.total == pytest.approx(replay.tree.total, rel=1e-12)
    assert list(twin(again)) == list(twin(replay))  # the oldest is still the first that goes
    add(again, 1000, 30)  # as a replay that goes on
    assert again.tree.check_valid() == (True, "")


def test_a_smaller_replay_takes_the_newest(tmp_path: Path) -> None:
    replay, again = core(), core(22)  # 5 whole chunks
    add(replay, 0, 16)
    save(replay, Saves(), tmp_path)
    saves = loaded(tmp_path, again)
    assert sorted(twin(again)) == list(range(44, 64))
    add(again, 1000, 1)
    files = set(tmp_path.iterdir())
    save(again, saves, tmp_path)  # what was loaded is not written again
    third = core(22)
    loaded(tmp_path, third)
    assert twin(third) == twin(again)
    new = [file for file in set(tmp_path.iterdir()) - files if "chunks" in file.name]
    assert [file.stat().st_size for file in new] == [again.store.layout.body_bytes]


def test_a_disk_with_too_little_room_is_one_line_and_the_former_save_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, saves = core(), Saves()
    add(replay, 0, 4)
    save(replay, saves, tmp_path)
    before, files = twin(replay), set(tmp_path.iterdir())
    add(replay, 100, 4)
    monkeypatch.setattr(snapshots, "free_bytes", lambda folder: 1_000_000)
    with pytest.raises(CheckpointError, match=r"needs 1\.1 MB and 1\.0 MB are free there: free"):
        save(replay, saves, tmp_path)
    assert set(tmp_path.iterdir()) == files
    again = core()
    loaded(tmp_path, again)
    assert twin(again) == before
    monkeypatch.undo()
    save(replay, saves, tmp_path)
    assert read_manifest(tmp_path)["replay"]["counters"]["inserted"] == 32


@pytest.mark.parametrize("step", ["chunks", "state", "manifest"])
def test_a_process_killed_in_a_save_leaves_the_former_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    replay, saves, again = core(), Saves(), core()
    add(replay, 0, 4)
    save(replay, saves, tmp_path)
    before = twin(replay)
    add(replay, 100, 4)
    write = snapshots.write_whole

    def die(path: Path, parts: Iterable[Any]) -> int:
        if path.name.startswith(step):
            write(path, list(parts)[:1])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, parts)

    child = os.fork()
    if not child:
        monkeypatch.setattr(snapshots, "write_whole", die)
        save(replay, saves, tmp_path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    loaded(tmp_path, again)
    assert twin(again) == before
    save(replay, saves, tmp_path)
    assert len(list(tmp_path.glob("state-*"))) == len(list(tmp_path.glob("manifest*"))) == 1


def test_files_of_a_save_that_was_killed_go_with_the_next_save(tmp_path: Path) -> None:
    replay, saves = core(), Saves()
    add(replay, 0, 4)
    save(replay, saves, tmp_path)
    left = tmp_path / "chunks-0123456789abcdef-0.bin"
    left.write_bytes(b"half")
    save(replay, saves, tmp_path)
    assert not left.exists()


def test_evicted_chunks_are_left_out_where_their_copies_would_take_too_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, again = core(), core()
    add(replay, 0, 16)
    held = twin(replay)
    monkeypatch.setattr(snapshots, "MOST_ASIDE_BYTES", 3 * replay.store.layout.body_bytes)
    write = snapshots.write_whole

    def write_late(path: Path, parts: Iterable[Any]) -> int:
        if path.name.startswith("chunks"):
            add(replay, 1000, 10)  # as if the disk were slow
        return write(path, parts)

    monkeypatch.setattr(snapshots, "write_whole", write_late)
    save(replay, Saves(), tmp_path)
    loaded(tmp_path, again)
    kept = {action: row for action, row in held.items() if action < 12 or action >= 40}
    assert twin(again) == kept
    assert again.tree.total == pytest.approx(sum(leaf for _, leaf in kept.values()), rel=1e-12)


def test_what_a_save_is_told_is_kept_and_its_progress_is_told(tmp_path: Path) -> None:
    replay, told = core(), list[tuple[int, int]]()
    add(replay, 0, 5)
    about = {"env": "x"}
    save(replay, Saves(), tmp_path, about, lambda done, total: told.append((done, total)))
    total = 5 * replay.store.layout.body_bytes
    assert told == [(0, total), (total, total)]
    assert read_manifest(tmp_path)["about"] == about
