"""Snapshots: they resume bit for bit, write only new chunks, and a killed save loses nothing."""

import json
import os

import numpy as np
import pytest

from tests.chunks.test_packer import extend, new_replay, stream_of_rows
from zapex.errors import CheckpointError
from zapex.library.prioritized import PrioritizedReplay
from zapex.replay import snapshots


def filled(seed=0, rows=100, capacity=80, **options):
    rng = np.random.default_rng(seed)
    replay = new_replay(2, 1, capacity=capacity, chunk=4, alpha=0.7, **options)
    obs, next_obs = stream_of_rows(rng, 2, 1, rows)
    keys = extend(replay, obs, next_obs, priorities=rng.normal(size=rows))
    replay.sample(8)
    replay.update_priorities(keys[-20:], rng.normal(size=20))
    return replay


def go_on(replay, turns=6):
    """Draws, updates and inserts; everything that came out, but for the keys."""
    rng, out = np.random.default_rng(9), []
    for _ in range(turns):
        batch = replay.sample(16)
        out += [np.array(value) for name, value in batch.items() if name != "keys"]
        replay.update_priorities(batch.keys, rng.normal(size=16))
        extend(replay, *stream_of_rows(rng, 2, 1, 7))
        out.append(replay.core.tree.leaves.copy())
    return out


def files(path):
    return {file.name: file.stat().st_size for file in path.iterdir()}


def test_a_restored_replay_goes_on_bit_for_bit(tmp_path):
    replay = filled()
    replay.save(tmp_path / "snapshot")
    restored = PrioritizedReplay.load(tmp_path / "snapshot")
    assert restored.core.tree.check_valid() == (True, "")
    assert restored.core.facts() == replay.core.facts()
    assert len(restored) == len(replay)
    for mine, theirs in zip(go_on(replay), go_on(restored), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("other", ["empty", "another_schema", "the_same_schema"])
def test_the_snapshot_of_another_replay_is_replaced_only_if_asked(tmp_path, other):
    first = filled()
    first.save(tmp_path)
    before = files(tmp_path)
    stack = 3 if other == "another_schema" else 2
    replay = new_replay(stack, 1, chunk=4) if other != "the_same_schema" else filled(1)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        replay.save(tmp_path)
    assert files(tmp_path) == before
    assert len(PrioritizedReplay.load(tmp_path)) == len(first)
    replay.save(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").rename(tmp_path.parent / f"{tmp_path.name}-elsewhere")
    replay.save(tmp_path, overwrite=True)
    assert len(PrioritizedReplay.load(tmp_path)) == len(replay)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        first.save(tmp_path)


def test_a_replay_and_those_loaded_from_it_save_where_they_saved_before(tmp_path):
    replay = filled()
    for name in ("a", "b", "a"):
        replay.save(tmp_path / name)
    loaded = PrioritizedReplay.load(tmp_path / "a")
    loaded.save(tmp_path / "b")
    replay.save(tmp_path / "b")


def test_keys_from_before_the_restore_are_stale(tmp_path):
    replay = filled()
    keys = replay.sample(16).keys.copy()
    replay.save(tmp_path)
    restored = PrioritizedReplay.load(tmp_path)
    before = restored.core.tree.leaves.copy()
    assert restored.update_priorities(keys, np.full(16, 9.0)) == (0, 16)
    np.testing.assert_array_equal(restored.core.tree.leaves, before)
    again = PrioritizedReplay.load(tmp_path)
    assert again.update_priorities(restored.sample(16).keys, np.ones(16)) == (0, 16)


def test_rows_of_a_chunk_that_is_still_open_are_in_it(tmp_path):
    replay = new_replay(2, 1, chunk=8)
    obs, next_obs = stream_of_rows(np.random.default_rng(0), 2, 1, 11)
    extend(replay, obs, next_obs)
    replay.save(tmp_path)
    extend(replay, obs, next_obs)
    restored = PrioritizedReplay.load(tmp_path)
    batch = restored.sample(11, method="without_replacement")
    np.testing.assert_array_equal(batch.obs, obs[batch.action])
    np.testing.assert_array_equal(batch.next_obs, next_obs[batch.action])


def test_a_second_save_writes_only_chunks_that_are_new(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "SEGMENT_BYTES", 3 * 500)
    replay = filled(rows=60)
    replay.save(tmp_path)
    first = files(tmp_path)
    extend(replay, *stream_of_rows(np.random.default_rng(1), 2, 1, 9))
    replay.save(tmp_path)
    new = {name: size for name, size in files(tmp_path).items() if name not in first}
    body = replay.core.store.layout.body_bytes
    assert 2 * body <= sum(size for name, size in new.items() if "chunks" in name) <= 4 * body
    assert len(PrioritizedReplay.load(tmp_path)) == len(replay)
    for _ in range(4):  # files whose chunks are all evicted go
        extend(replay, *stream_of_rows(np.random.default_rng(1), 2, 1, 60))
        replay.save(tmp_path)
        used = sum(size for name, size in files(tmp_path).items() if "chunks" in name)
        assert used <= 2 * replay.core.store.slots * body
    assert not files(tmp_path).keys() & {name for name in first if "chunks" in name}


def test_a_restored_replay_saves_on_into_the_same_directory(tmp_path):
    filled().save(tmp_path)
    restored = PrioritizedReplay.load(tmp_path)
    before = files(tmp_path)
    restored.save(tmp_path)
    assert {n for n in before if "chunks" in n} == {n for n in files(tmp_path) if "chunks" in n}
    again = PrioritizedReplay.load(tmp_path)
    for mine, theirs in zip(go_on(restored), go_on(again), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_what_is_evicted_during_a_save_is_in_it(tmp_path, monkeypatch):
    replay = filled()
    leaves, rows = replay.core.tree.leaves.copy(), len(replay)
    before = {int(k): v for k, v in zip(*observations_of(replay), strict=True)}
    write = snapshots.write_whole
    flood = stream_of_rows(np.random.default_rng(2), 2, 1, 200)

    def write_late(path, parts):
        extend(replay, *flood)
        return write(path, parts)

    monkeypatch.setattr(snapshots, "write_whole", write_late)
    replay.save(tmp_path)
    monkeypatch.undo()
    restored = PrioritizedReplay.load(tmp_path)
    np.testing.assert_array_equal(restored.core.tree.leaves, leaves)
    assert len(restored) == rows
    after = {int(k): v for k, v in zip(*observations_of(restored), strict=True)}
    assert after.keys() == before.keys()
    for index, obs in after.items():
        np.testing.assert_array_equal(obs, before[index])
    assert replay.core.ledger.on_evict is None


def observations_of(replay):
    indices = np.flatnonzero(replay.core.tree.leaves)
    batch = replay.empty_batch(len(indices))
    replay.core.store.gather(
        replay.core.store.keys_of(indices), batch.layout, batch.memory, batch.keys
    )
    return indices, batch.obs.copy()


@pytest.mark.parametrize("stop", ["write_whole", "sync_directory"])
def test_a_save_that_stops_anywhere_leaves_the_last_one_loadable(tmp_path, monkeypatch, stop):
    replay = filled()
    replay.save(tmp_path)
    leaves = replay.core.tree.leaves.copy()
    whole = getattr(snapshots, stop)
    for calls_before in range(3):
        extend(replay, *stream_of_rows(np.random.default_rng(1), 2, 1, 9))
        calls = []

        def stops(*arguments, left=calls_before, calls=calls):
            calls.append(1)
            if len(calls) > left:
                raise OSError("the disk is full")
            return whole(*arguments)

        monkeypatch.setattr(snapshots, stop, stops)
        before = files(tmp_path)
        with pytest.raises(CheckpointError, match="the disk is full"):
            replay.save(tmp_path)
        monkeypatch.undo()
        found = PrioritizedReplay.load(tmp_path).core.tree.leaves
        done = stop == "sync_directory" and calls_before == 2  # only the last sync failed
        np.testing.assert_array_equal(found, replay.core.tree.leaves if done else leaves)
        if done:
            break
        assert files(tmp_path) == before, "a save that fails leaves nothing"
    replay.save(tmp_path)
    restored = PrioritizedReplay.load(tmp_path).core.tree.leaves
    np.testing.assert_array_equal(restored, replay.core.tree.leaves)
    assert sum(name.startswith("state") for name in files(tmp_path)) == 1


def damage(file, position=0):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("which", ["manifest", "state", "chunks"])
def test_a_flipped_bit_is_found_and_said(tmp_path, which):
    filled().save(tmp_path)
    (file,) = (tmp_path / name for name in files(tmp_path) if name.startswith(which))
    damage(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"damaged|not a manifest"):
        PrioritizedReplay.load(tmp_path)


@pytest.mark.parametrize("which", ["manifest", "state", "chunks"])
def test_a_missing_file_is_said(tmp_path, which):
    filled().save(tmp_path)
    (file,) = (tmp_path / name for name in files(tmp_path) if name.startswith(which))
    file.unlink()
    with pytest.raises(CheckpointError):
        PrioritizedReplay.load(tmp_path)


def rewrite(path, change):
    facts = snapshots.read_manifest(path)
    change(facts)
    text = snapshots.text_of(facts)
    content = {"crc32": snapshots.zlib.crc32(text), "snapshot": facts}
    (path / snapshots.MANIFEST).write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f["replay"].pop("alpha"),
        lambda f: f["replay"].update(capacity=1000),
        lambda f: f["replay"].update(capacity=-1),
        lambda f: f["replay"].update(largest_leaf="many"),
        lambda f: f["replay"]["schema"].update(n_step=0),
        lambda f: f["chunks"].update({"9999": next(iter(f["chunks"].values()))}),
        lambda f: f["chunks"].update({"0": ["x"]}),
        lambda f: next(iter(f["chunks"].values())).__setitem__(1, 3),
        lambda f: next(iter(f["chunks"].values())).__setitem__(3, 10**9),
        lambda f: next(iter(f["chunks"].values())).__setitem__(2, "../elsewhere"),
        lambda f: f["random"].update(bit_generator="MT19937"),
        lambda f: f.update(format=3),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path, change):
    filled().save(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError):
        PrioritizedReplay.load(tmp_path)


def test_a_directory_without_a_snapshot_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="there is no snapshot in"):
        PrioritizedReplay.load(tmp_path)


def test_a_snapshot_where_no_directory_can_be_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="no snapshot in"):
        filled().save(tmp_path / "file" / "deeper")


NOT_OURS = ("chunks-of-wood.txt", "state-of-the-art.pdf", "manifest.json.backup", "notes.md",
            "chunks-0123456789abcdef-0.bin.old")  # fmt: skip


@pytest.mark.parametrize("name", NOT_OURS)
def test_a_directory_that_holds_other_files_is_refused_and_keeps_them(tmp_path, name):
    (tmp_path / name).write_text("mine")
    replay = filled()
    with pytest.raises(CheckpointError, match=f"holds other files.*{name}"):
        replay.save(tmp_path)
    assert files(tmp_path) == {name: 4}
    (tmp_path / name).unlink()
    replay.save(tmp_path)
    (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match="directory that is new"):
        replay.save(tmp_path)
    assert len(PrioritizedReplay.load(tmp_path)) == len(replay)


def test_a_manifest_that_is_no_snapshots_is_not_replaced(tmp_path):
    file = tmp_path / "manifest.json"
    file.write_text('{"name": "my web page"}')
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        filled().save(tmp_path)
    assert file.read_text() == '{"name": "my web page"}'


@pytest.mark.parametrize("which", ["manifest", "state", "chunks"])
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "directory"])
def test_what_is_no_file_in_place_of_a_snapshots_is_said_at_once(tmp_path, which, kind):
    filled().save(tmp_path)
    (file,) = (tmp_path / name for name in files(tmp_path) if name.startswith(which))
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to(kind)
    with pytest.raises(CheckpointError, match=r"not a regular file|Is a directory"):
        PrioritizedReplay.load(tmp_path)


def test_a_manifest_without_an_end_is_refused_in_little_memory(tmp_path, monkeypatch):
    filled().save(tmp_path)
    monkeypatch.setattr(snapshots, "MOST_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointError, match="more than 100 bytes"):
        PrioritizedReplay.load(tmp_path)


def test_what_was_open_at_the_save_is_evicted_after_what_was_closed_then(tmp_path):
    replay = new_replay(1, 1, capacity=64, chunk=4, streams=2)
    obs = np.ones((1, 3, 2), np.uint8)
    step = {"reward": np.ones(1), "next_obs": obs}
    ends = {"terminated": np.zeros(1, bool), "truncated": np.zeros(1, bool)}
    writers = [replay.writer(1), replay.writer(1)]
    for writer in writers:
        writer.reset(obs)
    writers[0].add(action=[0], **step, **ends)  # its chunk was opened first, and stays open
    for action in range(1, 5):
        writers[1].add(action=[action], **step, **ends)
    replay.save(tmp_path)
    loaded = PrioritizedReplay.load(tmp_path)
    for memory in (replay, loaded):
        memory.core.evict_oldest()
        assert memory.sample(1).action.tolist() == [0]
