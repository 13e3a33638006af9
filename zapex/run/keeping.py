"""The experience of a run on disk: loaded when the run is resumed, saved as --save-replay says."""

import errno
import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zapex.chunks.schema import Schema
from zapex.chunks.store import ChunkStore
from zapex.errors import CheckpointError, Refused
from zapex.host.roster import SaveWords
from zapex.machine.disk import free_bytes
from zapex.replay.core import ReplayCore, ReplayLayout
from zapex.replay.snapshots import (
    MANIFEST,
    UNREADABLE,
    Saves,
    read_manifest,
    read_state,
    restore,
    save,
    size_of,
)
from zapex.run.run import Run
from zapex.shm_transport import HostMemory

FOLDER = "replay"  # in the run's directory
_TEMPORARY = {
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
}
"""Errors that keep this process from reading files that may be whole."""
_BEGIN_S = 30.0  # until the process that keeps the memory begins its last save
_FIRST_S = 60.0  # for the first file of a save
_SPARE_S, _SPARE = 30.0, 4.0  # added to, and times, the time that the speed so far suggests
_TELL_S = 5.0


def is_saved(run_dir: Path) -> bool:
    """Whether a run's directory has saved experience."""
    return (run_dir / FOLDER / MANIFEST).exists()


class Keeper:
    """Loads a run's saved experience, and saves it.

    Args:
        run: the run.
        host: this host's memory.
        report: takes a line for the user; called by the thread that calls a Keeper.
        clock_s: seconds from any origin, for the period of saves.
    """

    def __init__(
        self,
        run: Run,
        host: HostMemory,
        report: Callable[[str], object],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._host, self._report, self._clock_s = run, host, report, clock_s
        self._folder = run.run_dir / FOLDER
        self.words = SaveWords(host.part_of("saves"))
        self._saves = Saves()
        mode = run.config.replay.save_replay
        self._wanted = mode != "never"
        self._period_s = 60 * run.config.run.checkpoint_minutes if mode == "always" else 0.0
        self._saved_s = clock_s()
        self._thread: threading.Thread | None = None
        self._outcome, self._failed = "", False

    def memory(self, make: Callable[[], ReplayCore]) -> ReplayCore:
        """The run's memory: with what was saved if the run is resumed, or as a process left it.

        Saved experience that is damaged, or of other settings, is renamed, and the run begins with
        an empty memory: what the learner knows is worth more than the wait.

        Args:
            make: makes a ReplayCore over the host's block of experience.

        Raises:
            Refused: files may be whole but cannot be read now: an empty memory would lose them.
        """
        if self.words.half_loaded:
            self._empty()
        replay = make()
        if not self.words.loaded:
            if self._run.config.run.resume and is_saved(self._run.run_dir):
                self.words.load(over=False)
                replay = self._load(replay, make)
            self.words.load(over=True)
            if self._wanted:
                self._warn_of_room(replay.layout.nbytes)
        self._replay = replay
        return replay

    def _warn_of_room(self, full_bytes: int) -> None:
        run_dir = self._run.run_dir
        saved = sum(file.stat().st_size for file in self._folder.glob("*"))
        if (room := free_bytes(run_dir) + saved) < full_bytes:
            self._report(
                f"--save-replay needs {size_of(full_bytes)} for a full memory, and the disk of "
                f"{run_dir} has room for {size_of(room)}"
            )

    def _load(self, replay: ReplayCore, make: Callable[[], ReplayCore]) -> ReplayCore:
        began_s = time.monotonic()
        try:
            self._saves = _restored(replay, self._folder, _about(self._run))
        except (*UNREADABLE, CheckpointError) as error:
            self._empty()
            cause = error if isinstance(error, OSError) else error.__cause__
            if isinstance(cause, OSError) and cause.errno in _TEMPORARY:
                raise Refused(
                    f"the saved memory in {self._folder} cannot be read now ({cause.strerror}) and "
                    "is unchanged: fix that, or rename it to start with an empty memory"
                ) from error
            aside = self._set_aside()
            why = error if isinstance(error, CheckpointError) else f"it is damaged ({error!r})"
            self._report(
                f"the saved memory is not used: {why}. It is {aside} now, and the run begins "
                "with an empty memory"
            )
            return make()
        spent_s = time.monotonic() - began_s
        self._report(
            f"memory: {len(replay):,} transitions loaded from {self._folder} in {spent_s:.1f} s"
        )
        return replay

    def _empty(self) -> None:
        """Make the block of experience new again."""
        layout, memory = self._host.plan.replay, self._host.experience
        ChunkStore(memory, layout.chunk_layout, layout.slots).header_rows[:] = 0
        memory[layout.tree_offset : layout.nbytes] = 0

    def _set_aside(self) -> Path:
        names = (self._folder.with_name(f"{FOLDER}.{n}") for n in itertools.count(1))
        aside = next(path for path in names if not path.exists())
        try:
            return self._folder.rename(aside)
        except OSError as error:
            raise Refused(f"{self._folder} cannot be renamed: {error.strerror}") from error

    def do_work(self) -> None:
        """With `always`: begin a save in a thread if one is due."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            if self.words.unsaved or self._failed:
                self._report(self._outcome)
            self._failed = bool(self.words.unsaved)
        due = self._period_s and self._clock_s() - self._saved_s >= self._period_s
        if due and self._thread is None:
            self._saved_s = self._clock_s()
            self._thread = threading.Thread(target=self._save, name="saves the memory", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Save what the memory holds at the end, if the run does that."""
        if not self._wanted:
            return
        self.words.last(over=False)
        if self._thread is not None:
            self._thread.join()
        self.words.set_progress(0, 0)
        self._save()
        self._report(self._outcome)
        self.words.last(over=True)

    def _save(self) -> None:
        began_s, count = time.monotonic(), len(self._replay)
        if not count:
            self._outcome = "memory: it is empty, and nothing is saved"
            return
        try:
            save(
                self._replay, self._saves, self._folder, _about(self._run), self.words.set_progress
            )
        except CheckpointError as error:
            self.words.unsaved = getattr(error.__cause__, "errno", None) or errno.ENOSPC
            had = "; what was saved before is as it was" if is_saved(self._run.run_dir) else ""
            self._outcome = f"the memory is not saved: {error}{had}"
            return
        self.words.unsaved = 0
        written, spent_s = self.words.progress[1], time.monotonic() - began_s
        self._outcome = (
            f"memory: {count:,} transitions saved in {self._folder} "
            f"({size_of(written)} written in {spent_s:.1f} s)"
        )


def _about(run: Run) -> dict[str, Any]:
    """Settings that must match for saved transitions to be reusable."""
    env = run.config.env
    values = {name: getattr(env, name) for name in ("env", "env_kwargs", "wrapper", "reward_clip")}
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found


def _restored(replay: ReplayCore, folder: Path, about: dict[str, Any]) -> Saves:
    """Fill `replay` from `folder`. Raises CheckpointError and the errors in UNREADABLE."""
    manifest = read_manifest(folder)
    facts = dict(manifest["replay"])
    theirs = {**_settings(facts), **manifest.get("about", {})}
    ours = {**_settings(replay.facts()), **about}
    changed = [
        f"{name} was {theirs.get(name)} and is {value}" if name != "columns" else "other columns"
        for name, value in json.loads(json.dumps(ours)).items()
        if theirs.get(name) != value
    ]
    if changed:
        raise CheckpointError("it is of other settings: " + ", ".join(changed))
    sizes = [int(facts[name]) for name in ("capacity", "streams", "chunk")]
    layout = ReplayLayout(Schema.from_description(facts["schema"]), *sizes)
    saves = restore(replay, folder, manifest, read_state(folder, manifest, layout))
    replay.count_anew()  # what was counted before is in the run's own counters
    return saves


def _settings(facts: dict[str, Any]) -> dict[str, Any]:
    """What a replay says of itself, by the names of the run's settings."""
    named = {"alpha": "alpha", "priority_eps": "eps", "transitions of a chunk": "chunk"}
    newer = {"priority_floor": "floor", "recency": "recency"}  # 0 before there were any
    return {
        **facts["schema"],
        **{ours: facts[theirs] for ours, theirs in named.items()},
        **{ours: facts.get(theirs, 0.0) for ours, theirs in newer.items()},
    }


class SaveDeadline:
    """How long the end of a run waits for the save of its memory.

    The save must begin, and each of its files must be written within a time that follows from its
    size and the disk's speed so far.

    Args:
        words: what the process that saves reports.
        report: takes a line about the progress.
        interrupt: how the user ends the save at once.
        clock_s: seconds from any origin.
    """

    def __init__(
        self,
        words: SaveWords,
        report: Callable[[str], object],
        interrupt: str,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._words, self._report, self._clock_s = words, report, clock_s
        self._interrupt = interrupt
        self._total = self._done = -1
        self._due_s = clock_s() + _BEGIN_S
        self._began_s = self._report_s = clock_s()

    def keep_waiting(self) -> bool:
        """Whether the parent should wait on; to be called about once a second."""
        (done, total), now_s = self._words.progress, self._clock_s()
        if total != self._total or done < self._done:
            self._began_s, self._total, self._done = now_s, total, done
            self._due_s = now_s + (_FIRST_S if total else _BEGIN_S)
        elif done > self._done:
            left_s = (total - done) * (now_s - self._began_s) / done
            self._done, self._due_s = done, now_s + _SPARE_S + _SPARE * left_s
        over = self._words.last_is_over  # it has only to end
        if now_s > self._due_s:
            if not over:
                self._report("the memory is not saved: the disk is too slow")
            return False
        if total and not over and now_s >= self._report_s:
            self._report_s = now_s + _TELL_S
            self._report(
                f"saving the memory: {size_of(done)} of {size_of(total)}; {self._interrupt} "
                "ends at once, with what was saved before"
            )
        return True
