"""The runs of a directory: which there are, what each does, and a live view of one."""

import fcntl
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support import fake_run
from zapex.errors import ConfigError
from zapex.machine.disk import is_locked
from zapex.watch import runs
from zapex.watch.recorders import (
    SNAPSHOT_FILE,
    ForWatchers,
    JsonLines,
    write_result,
)


class Shown:
    """A view that keeps all snapshots."""

    def __init__(self):
        self.snapshots, self.closed = [], False

    def show(self, snapshot):
        self.snapshots.append(snapshot)

    def close(self):
        self.closed = True


def a_run(path: Path, final: bool = True) -> Path:
    """A run of five minutes; unless it is `final`, it broke off."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text("")
    snapshot = fake_run.record([JsonLines(path)], 300 if final else 301, path)
    if final:
        write_result(path, snapshot, "ten minutes are over")
    return path


@pytest.fixture
def trained(tmp_path):
    """Holds a run's lock, as the process that trains it does."""
    held = []

    def hold(run_dir):
        descriptor = os.open(run_dir / runs.LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        held.append(descriptor)
        return descriptor

    yield hold
    for descriptor in held:
        os.close(descriptor)


def test_a_run_is_running_while_its_lock_is_held(tmp_path, trained):
    broken = a_run(tmp_path / "broken", final=False)
    assert runs.look(broken).state == "broken off"
    descriptor = trained(broken)
    assert is_locked(broken / runs.LOCK_FILE)
    assert runs.look(broken).state == "running"
    assert runs.training_process(broken) == os.getpid()
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    assert runs.training_process(broken) == 0
    ended = runs.look(a_run(tmp_path / "ended"))
    assert (ended.state, ended.reason) == ("ended", "ten minutes are over")
    trained(ended.path)
    assert runs.look(ended.path).state == "starting"  # it was resumed, and has no new numbers


def test_a_lock_of_another_host_has_no_process_here(tmp_path, trained):
    run = a_run(tmp_path / "run", final=False)
    os.pwrite(trained(run), b"1 ", 0)
    assert runs.training_process(run) == 0


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"facts": 3}', '{"facts": {"x": 1}}'])
def test_a_run_with_a_damaged_snapshot_is_listed(tmp_path, damage):
    run = a_run(tmp_path / "run")
    (run / SNAPSHOT_FILE).write_text(damage)
    known = runs.look(run)
    assert known.snapshot is None
    assert SNAPSHOT_FILE in known.damage
    assert runs.table([known], 80)[1].startswith("broken off")


def test_the_table_has_the_newest_run_first_and_never_cuts_a_name(tmp_path):
    names = ["a-name-that-is-longer-than-the-terminal-is-wide" * 2, "b"]
    for age, name in enumerate(names):
        run = a_run(tmp_path / name)
        for file in run.iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    lines = runs.table([runs.look(path) for path in runs.runs_in(tmp_path)], 80)
    assert [line.rsplit("/", 1)[-1] for line in lines[1:]] == names
    assert "environment" not in lines[0]
    assert lines[1].split()[:3] == ["ended", "1.98M", "5:00"]
    assert "ALE/Breakout-v5" in runs.table([runs.look(run)], 120)[1]


def test_runs_of_several_seeds_are_listed_too(tmp_path):
    for name in ("base/seed-1", "base/seed-2", "base/logs", "other"):
        a_run(tmp_path / name)
    found = {str(path.relative_to(tmp_path)) for path in runs.runs_in(tmp_path)}
    assert found == {"base/seed-1", "base/seed-2", "other"}


def test_runs_are_described_as_json_without_nan(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.toml").write_text("")
    known = [runs.look(a_run(tmp_path / "run")), runs.look(empty)]
    first, second = (json.loads(json.dumps(f, allow_nan=False)) for f in runs.described(known))
    assert first["frames"] == 1_980_000
    assert first["best"] > 0
    assert second["state"] == "broken off"
    assert second["frames"] is None


def test_a_run_is_found_by_directory_by_name_or_as_the_latest(tmp_path, monkeypatch, trained):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="zapex train"):
        runs.find("")
    first, second = a_run(Path("runs/first"), final=False), a_run(Path("runs/second"))
    for path, at in ((first, 1e9), (second, 2e9)):
        for file in path.iterdir():
            os.utime(file, (at, at))
    assert runs.find("first") == runs.find("runs/first") == first
    assert runs.find("") == second
    trained(first)
    assert runs.find("") == first  # it runs
    with pytest.raises(ConfigError, match="second"):
        runs.find("secnd")


def test_a_run_writes_its_snapshot_every_second_but_in_a_hundredth_of_the_time(tmp_path):
    now_s, write_s = 100.0, 0.0

    def clock_s():
        nonlocal now_s
        now_s += write_s
        return now_s

    snapshot = fake_run.record([], 5, tmp_path)
    view, path, written = ForWatchers(tmp_path, clock_s), tmp_path / SNAPSHOT_FILE, []
    for _ in range(60):
        view.show(snapshot)
        if path.exists():
            written.append(now_s)
            path.unlink()
            write_s = 0.02 if now_s > 110 else 0.0
        now_s += 0.5
    assert np.diff(written)[:10] == pytest.approx(1)
    assert np.diff(written)[-5:].min() >= 2


def test_a_watcher_shows_what_is_new_and_sees_the_end(tmp_path, trained):
    run = a_run(tmp_path / "run", final=False)
    descriptor, shown, now_s = trained(run), Shown(), 100.0
    with runs.Attached(run, shown, lambda: now_s) as attached:
        assert attached.look()
        assert attached.look()
        assert len(shown.snapshots) == 1  # nothing is new
        assert shown.snapshots[0].facts.watched
        now_s += 20
        assert attached.look()
        assert "20 s" in shown.snapshots[1].messages[-1].text  # it has written nothing
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        now_s += 2
        assert not attached.look()
    assert shown.closed
