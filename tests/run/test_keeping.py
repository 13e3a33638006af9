"""A run's memory on disk: what was saved is there again, and what cannot be used is told."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.replay.test_saving import add, twin
from zapex.chunks.batch import aligned_zeros
from zapex.config.settings import Config
from zapex.envs import environments
from zapex.errors import CheckpointError, Refused
from zapex.host.roster import SaveWords
from zapex.machine import disk
from zapex.replay import snapshots
from zapex.replay.core import ReplayCore
from zapex.run import keeping, topologies
from zapex.run.keeping import FOLDER, Keeper, SaveDeadline, is_saved
from zapex.run.run import Run
from zapex.shm_transport import HostMemory


class Life:
    """The process that keeps a run's memory, once started; its parent's memory may be given."""

    def __init__(self, run_dir: Path, host: HostMemory | None = None, **settings: Any) -> None:
        values: dict[str, Any] = {
            "actors": 1, "envs_per_actor": 2, "capacity": 128, "learning_starts": 16,
            "batch_size": 8, "hidden": 16, "save_replay": "stop", "resume": str(run_dir),
        }  # fmt: skip
        config = Config().replace(env="CartPole-v1", run_dir=str(run_dir), **values | settings)
        run = Run(config, environments.check("CartPole-v1"), run_dir)
        self.now_s, self.said = 0.0, list[str]()
        plan = run.plan
        self.eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in plan.roles]
        self.host = host or HostMemory(
            plan, aligned_zeros(plan.nbytes), aligned_zeros(plan.experience_bytes), self.eventfds,
            create=True,
        )  # fmt: skip
        self.make = lambda: topologies.make_core(run, self.host)
        self.keeper = Keeper(run, self.host, self.said.append, lambda: self.now_s)
        self.words: SaveWords = self.keeper.words

    def start(self) -> ReplayCore:
        return self.keeper.memory(self.make)

    def close(self) -> None:
        for fd in self.eventfds:
            os.close(fd)


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Any]:
    made: list[Life] = []

    def live(host: HostMemory | None = None, **settings: Any) -> Life:
        made.append(Life(tmp_path, host, **settings))
        return made[-1]

    yield live
    for life in made:
        life.close()


def saved(lives: Any, chunks: int = 12, **settings: Any) -> ReplayCore:
    """A run that ended in order, with its memory saved."""
    life = lives(resume="", **settings)
    memory: ReplayCore = life.start()
    add(memory, 0, chunks)
    memory.reprioritise(memory.draw(8).keys, np.linspace(0.0, 9.0, 8))
    life.keeper.close()
    assert f"memory: {len(memory)} transitions saved in" in life.said[-1]
    assert (life.words.last_is_over, life.words.unsaved) == (True, 0)
    return memory


def test_resume_restores_transitions_and_priorities(lives: Any, tmp_path: Path) -> None:
    before = saved(lives, chunks=40)
    life = lives()
    memory = life.start()
    assert twin(memory) == twin(before)
    assert memory.tree.total == before.tree.total
    assert life.said == [
        f"memory: 128 transitions loaded from {tmp_path / FOLDER} in {life.said[0].split()[-2]} s"
    ]
    # It is counted by the run already.
    assert (memory.inserted, memory.updates_applied) == (0, 0)
    np.testing.assert_array_equal(memory.draw(8).indices, before.draw(8).indices)


def test_never_saves_but_still_loads(lives: Any, tmp_path: Path) -> None:
    life = lives(save_replay="never", resume="")
    add(life.start(), 0, 3)
    life.keeper.close()
    assert not is_saved(tmp_path)
    saved(lives)
    life = lives(save_replay="never")
    assert len(life.start()) == 48
    life.keeper.close()
    assert len(life.said) == 1


def test_new_run_starts_empty(lives: Any) -> None:
    saved(lives)
    assert len(lives(resume="").start()) == 0


def test_restarted_process_keeps_the_memory(lives: Any) -> None:
    saved(lives)
    life = lives()
    add(life.start(), 1000, 1)
    again = lives(host=life.host)
    assert 1000 in twin(again.start())
    assert again.said == []


def test_killed_load_is_repeated(lives: Any) -> None:
    before = saved(lives)
    life = lives()
    life.words.load(over=False)
    half = life.make()
    add(half, 5000, 2)  # whatever was there
    again = lives(host=life.host)
    memory = again.start()
    assert twin(memory) == twin(before)
    assert memory.tree.check_valid() == (True, "")


@pytest.mark.parametrize("which", ["manifest", "state", "chunks"])
def test_damaged_memory_is_renamed_and_reported(lives: Any, tmp_path: Path, which: str) -> None:
    saved(lives)
    (file,) = (f for f in (tmp_path / FOLDER).iterdir() if f.name.startswith(which))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    life = lives()
    memory = life.start()
    (said,) = life.said
    assert said.startswith("the saved memory is not used: ")
    assert said.endswith(f"It is {tmp_path}/replay.1 now, and the run begins with an empty memory")
    assert (len(memory), memory.tree.total) == (0, 0.0)
    assert (tmp_path / "replay.1" / file.name).read_bytes() == content
    add(memory, 0, 3)
    life.keeper.close()
    assert len(lives().start()) == 12


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"n_step": 2}, "n_step was 3 and is 2"),
        ({"gamma": 0.5}, "gamma was 0.99 and is 0.5"),
        ({"alpha": 0.7}, "alpha was 0.6 and is 0.7"),
        ({"capacity": 256}, "transitions of a chunk was 4 and is 8"),
        ({"reward_clip": False}, "reward_clip was True and is False"),
    ],
)
def test_memory_of_other_settings_is_not_used(
    lives: Any, tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    saved(lives)
    life = lives(**settings)
    assert len(life.start()) == 0
    assert f"it is of other settings: {why}. It is" in life.said[0]
    assert is_saved(tmp_path) is False
    assert (tmp_path / "replay.1/manifest.json").exists()


@pytest.mark.parametrize("settings", [{"capacity": 9000}, {"actors": 3}, {"save_replay": "always"}])
def test_unrelated_settings_may_change(lives: Any, settings: dict[str, Any]) -> None:
    before = saved(lives, capacity=8000)
    memory = lives(**{"capacity": 8000} | settings).start()
    assert twin(memory) == twin(before)


def test_unreadable_memory_ends_the_run_unchanged(
    lives: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved(lives)
    whole = disk.os.open

    def refuse(path: Any, *arguments: Any, **more: Any) -> int:
        if "chunks" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(path, *arguments, **more)

    monkeypatch.setattr(disk.os, "open", refuse)
    with pytest.raises(Refused, match="Input/output error"):
        lives().start()
    monkeypatch.undo()
    assert twin(lives().start()) == twin(before)


def test_full_disk_is_reported_and_keeps_the_last_save(
    lives: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved(lives)
    monkeypatch.setattr(snapshots, "free_bytes", lambda folder: 1000)
    monkeypatch.setattr(keeping, "free_bytes", lambda folder: 1000)
    life = lives()
    add(life.start(), 1000, 1)
    assert f"for a full memory, and the disk of {tmp_path} has room for " in life.said[-1]
    life.keeper.close()
    assert "the memory is not saved: a save into" in life.said[-1]
    assert life.said[-1].endswith("what was saved before is as it was")
    assert (life.words.last_is_over, life.words.unsaved) == (True, errno.ENOSPC)
    monkeypatch.undo()
    assert twin(lives().start()) == twin(before)


def test_always_saves_in_the_background(lives: Any, tmp_path: Path) -> None:
    life = lives(save_replay="always", checkpoint_minutes=1.0, resume="")
    memory = life.start()
    add(memory, 0, 4)
    life.keeper.do_work()
    assert not is_saved(tmp_path)
    life.now_s = 60.0
    life.keeper.do_work()
    life.keeper._thread.join(60)
    assert is_saved(tmp_path)
    assert len(lives().start()) == 16
    first = set((tmp_path / FOLDER).glob("chunks*"))
    add(memory, 100, 2)
    life.now_s = 90.0
    life.keeper.do_work()
    assert life.keeper._thread is None
    life.now_s = 120.0
    life.keeper.do_work()
    life.keeper._thread.join(60)
    assert first < set((tmp_path / FOLDER).glob("chunks*"))  # only what is new was written
    assert twin(lives().start()) == twin(memory)
    life.keeper.do_work()
    assert life.said == []  # nothing went wrong


def test_failed_background_save_is_reported_until_one_works(
    lives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = lives(save_replay="always", checkpoint_minutes=1.0, resume="")
    add(life.start(), 0, 4)
    monkeypatch.setattr(snapshots, "free_bytes", lambda folder: 1000)
    for at_s in (60.0, 120.0):
        life.now_s = at_s
        life.keeper.do_work()
        life.keeper._thread.join(60)
        life.keeper.do_work()
        monkeypatch.undo()
    assert [line.partition(":")[0] for line in life.said] == ["the memory is not saved", "memory"]
    assert life.words.unsaved == 0


def test_empty_memory_does_not_replace_a_save(lives: Any, tmp_path: Path) -> None:
    life = lives(resume="")
    life.start()
    life.keeper.close()
    assert life.said == ["memory: it is empty, and nothing is saved"]
    assert not is_saved(tmp_path)


class Clock:
    def __init__(self) -> None:
        self.now_s, self.said = 100.0, list[str]()
        self.words = SaveWords(np.zeros(64, np.uint8))
        self.deadline = SaveDeadline(self.words, self.said.append, "Ctrl-C", lambda: self.now_s)

    def waits_until(self, most_s: float = 1e6) -> float:
        """How long it waits if nothing more happens."""
        began_s = self.now_s
        while self.deadline.keep_waiting() and self.now_s < began_s + most_s:
            self.now_s += 1.0
        return self.now_s - began_s


def test_save_deadline_expires_if_the_save_does_not_begin() -> None:
    clock = Clock()
    assert clock.waits_until() == 31.0
    assert "too slow" in clock.said[-1]


def test_save_deadline_follows_the_disks_speed() -> None:
    clock = Clock()
    clock.words.last(over=False)
    clock.words.set_progress(0, 10**9)
    assert clock.deadline.keep_waiting()
    assert "saving the memory: 0.0 MB of 1.0 GB; Ctrl-C ends at once" in clock.said[0]
    for tenth in range(1, 10):
        clock.now_s += 20.0  # 5 MB/s: all of it takes 200 s
        clock.words.set_progress(tenth * 10**8, 10**9)
        assert clock.deadline.keep_waiting()
    # 20 s are left at that speed.
    assert clock.waits_until() == 30 + 4 * 20 + 1
    assert "too slow" in clock.said[-1]


def test_save_deadline_expires_after_the_save() -> None:
    clock = Clock()
    clock.words.set_progress(5, 5)
    clock.words.last(over=True)
    assert clock.waits_until(1e3) < 100
    assert clock.said == []


def test_settings_hash_ignores_save_replay() -> None:
    both = [Config().replace(save_replay=mode).shared(replays=True) for mode in ("never", "stop")]
    assert both[0] == both[1]
    assert "save_replay" not in both[0]


def test_library_snapshot_is_not_used(lives: Any, tmp_path: Path) -> None:
    life = lives(resume="")
    memory = life.start()
    add(memory, 0, 4)
    snapshots.save(memory, snapshots.Saves(), tmp_path / FOLDER)
    again = lives()
    assert len(again.start()) == 0
    assert "it is of other settings: env was None and is CartPole-v1" in again.said[0]
    with pytest.raises(CheckpointError):
        snapshots.read_manifest(tmp_path / FOLDER)
