"""The last lines of a run: its results, its cost, and how to look at it."""

import shlex
from pathlib import Path
from typing import Final

from zapex.watch.report import Evaluation, Snapshot
from zapex.watch.screen import COMMAND, Line, clock, count, number, size

_LABEL: Final = 11
_QUIET, _STRONG = "bright_black", "bold"


def summary(
    snapshot: Snapshot,
    reason: str,
    curve: Path | None = None,
    saved: bool = True,
    unsaved: str = "",
) -> list[Line]:
    """The closing lines, styled like the picture's.

    Args:
        snapshot: the last one, of `Monitor.close()`: its rates and shares are the session's.
        reason: why the run ended, for example "ten minutes are over".
        curve: where the learning curve was drawn.
        saved: there is a checkpoint to play and to resume from.
        unsaved: what is not on the disk, and why; "": nothing.
    """
    facts = snapshot.facts
    lines = _head(snapshot, reason)
    lines.append(
        _line(
            "learned",
            f"{count(snapshot.totals['batches'])} batches, {snapshot.samples_per_insert:.1f} "
            f"samples per insert, {_stale(snapshot)}",
        )
    )
    best = snapshot.best_evaluation
    if best is not None:
        last = snapshot.evaluations[-1]
        lines.append(_line("best", _evaluation(best)))
        if last is not best:
            lines.append(_line("last", _evaluation(last)))
        for name, value in facts.references.items():
            lines.append(_line("", f"{name} {value:g}: {_crossing(snapshot, value)}"))
    lines.append(_line("memory", _memory(snapshot)))
    lines.append(_line("waiting", _waiting(snapshot)))
    if facts.run_dir is not None:
        run, quoted = facts.run_dir, shlex.quote(str(facts.run_dir))
        lines.append(_line("run", str(run)))
        if curve is not None:
            lines.append(_line("curve", str(curve)))
        if saved:
            # A module that only the stored run names would not be run without a question.
            name = facts.environment
            env = f" --env {shlex.quote(name)}" if ":" in name else ""
            env = " --trust" if facts.own_code else env
            lines.append(
                _line("watch", f"zapex eval {quoted} --episodes 5 --video game.mp4{env}", COMMAND)
            )
            lines.append(_line("go on", facts.resume + env, COMMAND))
        elif not unsaved:
            lines.append(_line("", "it ended before there was anything to save"))
        if unsaved:
            lines.append(_line("not saved", unsaved, "bold red"))
        # With a name; TensorBoard calls the run of a plain --logdir ".".
        named = shlex.quote(f"{run.absolute().name}:{run}")
        lines.append(_line("inspect", f"tensorboard --logdir_spec {named}", COMMAND))
    return lines


def summary_of_part(snapshot: Snapshot, reason: str) -> list[Line]:
    """The closing lines of an actor host or of the replay's host: what it did."""
    lines = _head(snapshot, reason)
    relay = snapshot.relay
    if relay:
        sent = f"{count(relay['transitions'])} transitions in {count(relay['acknowledged'])} chunks"
        again = (
            f"{count(relay['again'])} sent again, {int(relay['unacknowledged'])} given up unsent"
        )
        lines.append(_line("sent", f"{sent}, {size(relay['bytes'])}; {again}"))
    if snapshot.replay:
        lines.append(
            _line(
                "replay",
                f"{count(snapshot.replay['inserted'])} transitions taken in, "
                f"{count(snapshot.replay['batches'])} batches sampled, {_stale(snapshot)}",
            )
        )
        lines.append(_line("memory", _memory(snapshot)))
    lines.append(_line("run", str(snapshot.facts.run_dir)))
    return lines


def _head(snapshot: Snapshot, reason: str) -> list[Line]:
    facts, totals = snapshot.facts, snapshot.totals
    title = facts.environment + (f", {facts.part}" if facts.part else "")
    return [
        [(f" {title}", _STRONG), (f"  {reason}", "")],
        _line(
            "played",
            f"{count(totals['frames'])} frames, {count(totals['episodes'])} games "
            f"in {clock(snapshot.wall_s)}; {count(snapshot.rates['frames'])} frames/s",
        ),
    ]


def _stale(snapshot: Snapshot) -> str:
    return f"{snapshot.stale_share:.1%} of the priorities came too late"


def _evaluation(evaluation: Evaluation) -> str:
    mean = f"{number(evaluation.mean)} ± {evaluation.std:.1f}"
    return f"{mean} over {len(evaluation.returns)} greedy games, at {clock(evaluation.wall_s)}"


def _crossing(snapshot: Snapshot, value: float) -> str:
    first = next((e for e in snapshot.evaluations if e.mean >= value), None)
    if first is None:
        return "not reached"
    return f"first reached at {clock(first.wall_s)}, {count(first.frames)} frames"


def _memory(snapshot: Snapshot) -> str:
    live = snapshot.replay.get("live", 0.0)
    text = f"{count(live)} transitions in {size(snapshot.replay.get('bytes_used', 0.0))}"
    plain = live * snapshot.facts.plain_transition_bytes
    return f"{text}; a plain buffer takes {size(plain)}" if plain else text


def _waiting(snapshot: Snapshot) -> str:
    """Which role waited. The role that others wait for is the one to speed up."""
    actor, learner = snapshot.role("actor"), snapshot.role("learner")
    parts = []
    if learner is not None:
        share = learner.shares_total["wait"]
        parts.append(f"the learner waited {share:.1%} of its time for batches")
    if actor is not None:
        share = actor.phases_total["wait"]
        parts.append(f"actors waited {share:.1%} of theirs for room in the replay")
        if share := actor.phases_total["inference"]:
            parts.append(f"and {share:.1%} for their values")
    return ", ".join(parts)


def _line(label: str, text: str, style: str = "") -> Line:
    return [(" " + label.ljust(_LABEL), _QUIET), (text, style)]
