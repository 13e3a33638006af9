"""A run shown by another process than its own: on its host, or on any that sees its directory."""

import dataclasses
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from zapex.machine.disk import is_locked
from zapex.watch.recorders import SNAPSHOT_FILE, WATCHED_FILE
from zapex.watch.report import Note, Snapshot, View
from zapex.watch.runs import LOCK_FILE, stored_snapshot

_LOOK_S: Final = 0.25
_TOUCH_S: Final = 1.5
_HELD_S: Final = 1.0  # between two looks whether somebody trains
_OLD_S: Final = 15.0  # a run writes a snapshot every five seconds at least


class Attached:
    """Asks a run for its snapshots, and shows each in `view`.

    with Attached(run_dir, view) as attached:
        while attached.look():
            attached.wait()
    """

    def __init__(self, run_dir: Path, view: View) -> None:
        self._run_dir, self._view = run_dir, view
        self._touched_s = self._held_s = -_OLD_S
        self._stamp = (0, 0)
        self._news_s = self._told_s = time.monotonic()
        self._held = True
        self.snapshot: Snapshot | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.close()

    def wait(self) -> None:
        """Until it is worth looking again."""
        time.sleep(_LOOK_S)

    def look(self) -> bool:
        """Show what is new. Returns whether somebody trains in the run's directory."""
        now_s = time.monotonic()
        if now_s - self._touched_s >= _TOUCH_S:
            self._touched_s = now_s
            with suppress(OSError):  # another user's run: it writes a snapshot every five seconds
                (self._run_dir / WATCHED_FILE).touch()
        if now_s - self._held_s >= _HELD_S:
            self._held_s = now_s
            self._held = is_locked(self._run_dir / LOCK_FILE)
        if self._is_new():
            self.snapshot = stored_snapshot(self._run_dir) or self.snapshot
            self._news_s = now_s
            self._show(())
        elif self._held and min(now_s - self._news_s - _OLD_S, now_s - self._told_s - 1) > 0:
            self._told_s = now_s
            self._show((f"the run has written nothing for {now_s - self._news_s:.0f} s",))
        return self._held

    def _is_new(self) -> bool:
        try:
            found = (self._run_dir / SNAPSHOT_FILE).stat()
        except OSError:
            return False
        before, self._stamp = self._stamp, (found.st_mtime_ns, found.st_ino)
        return before != self._stamp

    def _show(self, texts: tuple[str, ...]) -> None:
        shot = self.snapshot
        if shot is None:
            return
        number = shot.messages[-1].number if shot.messages else 0
        notes = tuple(Note(number, shot.wall_s, text) for text in texts)
        facts = dataclasses.replace(shot.facts, watched=True)
        messages = (*shot.messages, *notes)
        self._view.show(dataclasses.replace(shot, facts=facts, messages=messages))
