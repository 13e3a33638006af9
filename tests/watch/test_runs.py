"""Runs from outside: which there are, what each does, and the view of another terminal."""

import fcntl
import io
import json
import os
from pathlib import Path

import pytest

from tests.support import fake_run
from zapex.errors import ConfigError
from zapex.machine.disk import is_locked
from zapex.watch import runs
from zapex.watch.attached import Attached
from zapex.watch.recorders import (
    SNAPSHOT_FILE,
    WATCHED_FILE,
    ForWatchers,
    JsonLines,
    read_snapshot,
    write_result,
)
from zapex.watch.terminal import PlainLines


class Shown:
    """A view that keeps what it was shown."""

    def __init__(self):
        self.snapshots, self.closed = [], False

    def show(self, snapshot):
        self.snapshots.append(snapshot)

    def close(self):
        self.closed = True


def a_run(path: Path, final: bool = True) -> Path:
    """A run of five minutes; unless it is `final`, broken off in the middle."""
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


def test_a_run_is_running_while_its_lock_is_held_and_broken_off_when_it_was_killed(
    tmp_path, trained
):
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


def test_a_run_that_goes_on_again_is_starting_until_it_has_numbers(tmp_path, trained):
    run = a_run(tmp_path / "run")
    trained(run)
    assert runs.look(run).state == "starting"


def test_a_lock_file_that_names_another_process_is_of_another_host(tmp_path, trained):
    run = a_run(tmp_path / "run", final=False)
    os.pwrite(trained(run), b"1 ", 0)
    assert runs.training_process(run) == 0


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"facts": 3}', '{"facts": {"x": 1}}'])
def test_a_damaged_snapshot_is_a_missing_one(tmp_path, damage):
    run = a_run(tmp_path / "run")
    (run / SNAPSHOT_FILE).write_text(damage)
    assert runs.look(run).snapshot is None
    assert runs.table([runs.look(run)], 80)[1].startswith("broken off")


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


def test_the_facts_of_runs_are_json_without_nan(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.toml").write_text("")
    known = [runs.look(a_run(tmp_path / "run")), runs.look(empty)]
    first, second = (json.loads(json.dumps(f, allow_nan=False)) for f in runs.described(known))
    assert first["frames"] == 1_980_000
    assert first["best"] > 0
    assert second["state"] == "broken off"
    assert second["frames"] is None


def test_a_run_is_found_by_directory_by_name_and_by_nothing(tmp_path, monkeypatch, trained):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is none in it; `zapex runs`"):
        runs.find("")
    first, second = a_run(Path("runs/first"), final=False), a_run(Path("runs/second"))
    for path, at in ((first, 1e9), (second, 2e9)):
        for file in path.iterdir():
            os.utime(file, (at, at))
    assert runs.find("first") == runs.find("runs/first") == first
    assert runs.find("") == second
    trained(first)
    assert runs.find("") == first  # it runs
    with pytest.raises(ConfigError, match="did you mean second"):
        runs.find("secnd")


def test_a_run_writes_its_snapshot_every_second_only_while_somebody_watches(tmp_path):
    now_s = 100.0
    snapshot = fake_run.record([], 5, tmp_path)
    view, path = ForWatchers(tmp_path, lambda: now_s), tmp_path / SNAPSHOT_FILE
    view.show(snapshot)
    assert not path.exists()
    (tmp_path / WATCHED_FILE).touch()
    view.show(snapshot)
    assert read_snapshot(tmp_path).totals == snapshot.totals
    path.unlink()
    now_s += 0.5
    view.show(snapshot)
    assert not path.exists()
    now_s += 0.5
    view.show(snapshot)
    assert path.exists()
    path.unlink()
    now_s += 10
    view.show(snapshot)  # nobody has touched the file for ten seconds
    assert not path.exists()
    os.utime(tmp_path / WATCHED_FILE, (1, 1))  # another clock
    view.show(snapshot)
    assert path.exists()


def test_a_watcher_asks_shows_what_is_new_and_sees_the_end(tmp_path, trained):
    run = a_run(tmp_path / "run", final=False)
    descriptor = trained(run)
    shown = Shown()
    with Attached(run, shown) as attached:
        assert attached.look()
        assert (run / WATCHED_FILE).exists()
        assert attached.look()
        assert len(shown.snapshots) == 1  # nothing is new
        assert shown.snapshots[0].facts.watched
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        attached._held_s -= 2
        assert not attached.look()
    assert shown.closed


def test_a_watcher_says_that_a_run_is_silent(tmp_path, trained):
    run = a_run(tmp_path / "run", final=False)
    trained(run)
    out = io.StringIO()
    attached = Attached(run, PlainLines(out))
    attached.look()
    attached._news_s -= 20
    attached._told_s -= 20
    attached.look()
    attached._view.close()
    assert attached.snapshot is not None
    assert "Ctrl-C" not in out.getvalue()


def test_a_directory_that_refuses_the_watchers_file_is_watched_all_the_same(
    tmp_path, trained, monkeypatch
):
    run = a_run(tmp_path / "run", final=False)
    trained(run)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refused)
    shown = Shown()
    assert Attached(run, shown).look()
    assert len(shown.snapshots) == 1
