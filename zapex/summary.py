"""What a run says when it ends: what came out, what it took, and how to look at it."""

from pathlib import Path
from typing import Final

from zapex.report import Evaluation, Snapshot
from zapex.screen import Line, clock, count, number, size

_LABEL: Final = 11
_QUIET, _STRONG = "bright_black", "bold"


def summary(
    snapshot: Snapshot, reason: str, curve: Path | None = None, saved: bool = True
) -> list[Line]:
    """The closing lines, styled like the picture's.

    Args:
        snapshot: the last one, of `Monitor.close()`: its rates and shares are the session's.
        reason: why the run ended, for example "ten minutes are over".
        curve: where the learning curve was drawn.
        saved: there is a checkpoint to play and to go on with.
    """
    facts, totals = snapshot.facts, snapshot.totals
    lines: list[Line] = [
        [(f" {facts.environment}", _STRONG), (f"  {reason}", "")],
        _line(
            "played",
            f"{count(totals['frames'])} frames, {count(totals['episodes'])} games "
            f"in {clock(snapshot.wall_s)}; {count(snapshot.rates['frames'])} frames/s",
        ),
        _line(
            "learned",
            f"{count(totals['batches'])} batches, {snapshot.samples_per_insert:.1f} samples per "
            f"insert, {snapshot.stale_share:.1%} of the priorities came too late",
        ),
    ]
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
        run = facts.run_dir
        lines.append(_line("run", str(run)))
        if curve is not None:
            lines.append(_line("curve", str(curve)))
        if saved:
            lines.append(_command("watch", f"zapex eval {run} --episodes 5 --video game.mp4"))
            on = f"learner --replay {facts.replay_url}" if facts.replay_url else "train"
            lines.append(_command("go on", f"zapex {on} --resume {run}"))
        else:
            lines.append(_line("", "it ended before there was anything to save"))
        lines.append(_command("inspect", f"tensorboard --logdir {run}"))
    return lines


def summary_of_part(snapshot: Snapshot, reason: str) -> list[Line]:
    """The closing lines of an actor host or of the replay's: what this host did."""
    facts, totals = snapshot.facts, snapshot.totals
    lines: list[Line] = [
        [(f" {facts.environment}, {facts.part}", _STRONG), (f"  {reason}", "")],
        _line(
            "played",
            f"{count(totals['frames'])} frames, {count(totals['episodes'])} games "
            f"in {clock(snapshot.wall_s)}; {count(snapshot.rates['frames'])} frames/s",
        ),
    ]
    relay = snapshot.relay
    if relay:
        lost = int(relay["unacknowledged"])
        lines.append(
            _line(
                "sent",
                f"{count(relay['transitions'])} transitions in {count(relay['acknowledged'])} "
                f"chunks, {size(relay['bytes'])}; {count(relay['again'])} sent again, "
                f"{lost} given up unsent",
            )
        )
    if snapshot.replay:
        lines.append(
            _line(
                "replay",
                f"{count(snapshot.replay['inserted'])} transitions taken in, "
                f"{count(snapshot.replay['batches'])} batches sampled, "
                f"{snapshot.stale_share:.1%} of the priorities came too late",
            )
        )
        lines.append(_line("memory", _memory(snapshot)))
    lines.append(_line("run", str(facts.run_dir)))
    return lines


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
    """Who waited for whom: the role to speed up is the one that others wait for."""
    actor, learner = snapshot.role("actor"), snapshot.role("learner")
    parts = []
    if learner is not None:
        share = learner.shares_total["wait"]
        parts.append(f"the learner waited {share:.1%} of its time for batches")
    if actor is not None:
        share = actor.shares_total["wait"]
        parts.append(f"actors waited {share:.1%} of theirs for room in the replay")
    return ", ".join(parts)


def _line(label: str, text: str) -> Line:
    return [(" " + label.ljust(_LABEL), _QUIET), (text, "")]


def _command(label: str, text: str) -> Line:
    return [(" " + label.ljust(_LABEL), _QUIET), (text, "cyan")]
