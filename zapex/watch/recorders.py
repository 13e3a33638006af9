"""What a run leaves behind in its directory as JSON: metrics.jsonl, snapshot.json, result.json."""

import dataclasses
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from zapex.machine.disk import append_whole
from zapex.version import __version__
from zapex.watch.report import TOTALS, Evaluation, Note, Returns, RoleView, RunFacts, Snapshot

METRICS_FILE: Final = "metrics.jsonl"
SNAPSHOT_FILE: Final = "snapshot.json"
WATCHED_FILE: Final = ".watched"
"""Whoever watches a run from elsewhere touches it every second or two."""
RESULT_FILE: Final = "result.json"


_ASKED_S: Final = 10.0  # after the last touch
_FOR_WATCHERS_S: Final = 0.9  # snapshots are made twice a second


def numbers(snapshot: Snapshot) -> dict[str, float]:
    """Tag -> value, the same in TensorBoard and metrics.jsonl, without unknown values.

    The tags follow CleanRL. `comm/*` are shares of time by the paper's phases, `phases/*` by all.
    """
    totals, rates, returns = snapshot.totals, snapshot.rates, snapshot.returns
    values = {
        "charts/SPS": rates["steps"],
        "charts/FPS": rates["frames"],
        "charts/frames": totals["frames"],
        "charts/episodes": totals["episodes"],
        "charts/episodic_return_last100": returns.all_mean,
        "charts/episodic_return_greedy_last10": returns.greedy_mean,
        "replay/samples_per_insert": snapshot.samples_per_insert,
        "replay/stale_share": snapshot.stale_share,
        "replay/inserts_per_s": rates["inserted"],
        "system/cpu_cores": snapshot.cpu_cores,
        "system/monitor_cpu_cores": snapshot.parent_cpu_cores,
        "system/host_cpu_share": snapshot.host_cpu_share,
        "system/memory_bytes": snapshot.memory_bytes,
    }
    for label, mean in returns.bands.items():
        name = label.replace("ε<", "below_0").replace("ε≥", "from_0")
        values[f"charts/episodic_return_epsilon/{name}"] = mean
    kept = {"replay": snapshot.replay, "relay": snapshot.relay, "inference": snapshot.inference}
    for role, counts in kept.items():
        phases = ("phase/", "cpu/")
        values |= {f"{role}/{n}": x for n, x in counts.items() if not n.startswith(phases)}
    if snapshot.learner.get("batches"):
        names = {"loss": "losses/td_loss", "q_mean": "losses/q_values"}
        for name in ("loss", "q_mean", "td_abs_mean", "grad_norm", "priority_mean", "priority_max"):
            values[names.get(name, f"losses/{name}")] = snapshot.learner[name]
        values["learner/batches"] = totals["batches"]
        values["learner/batches_per_s"] = rates["batches"]
        values["learner/samples_per_s"] = rates["samples"]
        kept_names = ["params_version", "staleness", "torn_rows"]
        if snapshot.learner.get("shards"):
            kept_names += ["shards_away", "shards_lost", "shards_back"]
        values |= {f"learner/{name}": snapshot.learner[name] for name in kept_names}
    for view in snapshot.roles:
        values[f"system/{view.role}_cpu_cores"] = view.cpu_cores
        values |= {f"comm/{view.role}_{name}": share for name, share in view.shares.items()}
        values |= {f"phases/{view.role}_{name}": share for name, share in view.phases.items()}
    # TensorBoard stores float32; more digits would only lengthen metrics.jsonl.
    return {tag: float(f"{x:.7g}") for tag, x in values.items() if math.isfinite(x)}


class JsonLines:
    """metrics.jsonl: a line every few seconds, one for each evaluation; and snapshot.json.

    A resumed run appends. Lines have a "kind": "metrics", "evaluation", or "final" for the last
    of a session, whose rates are the session's.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._path = run_dir, run_dir / METRICS_FILE
        # A killed run may have left half a line.
        whole = not self._path.exists() or self._path.read_bytes()[-1:] in (b"", b"\n")
        self._unwritten = b"" if whole else b"\n"

    def write(
        self, snapshot: Snapshot, episodes: NDArray[Any], evaluations: Sequence[Evaluation]
    ) -> None:
        now = time.time()
        lines: list[dict[str, Any]] = [
            {"kind": "evaluation", "time": now, **_evaluation_facts(e)} for e in evaluations
        ]
        line = {
            "kind": "final" if snapshot.final else "metrics",
            "time": now,
            "wall_s": snapshot.wall_s,
            **snapshot.totals,
            **numbers(snapshot),
        }
        greedy = episodes[episodes["stream"] == snapshot.facts.greedy_stream]
        if len(episodes):
            line["charts/episodic_return"] = float(episodes["game_return"].mean())
            line["charts/episodic_length"] = float(episodes["steps"].mean())
        if len(greedy):
            line["charts/episodic_return_greedy"] = float(greedy["game_return"].mean())
        lines.append(line)
        self._unwritten += "".join(json.dumps(x, allow_nan=False) + "\n" for x in lines).encode()
        self.close()
        _write_json(self._run_dir / SNAPSHOT_FILE, snapshot, indent=None)

    def close(self) -> None:
        """Write the lines that are not in the file yet."""
        append_whole(self._path, self._unwritten)
        self._unwritten = b""


class ForWatchers:
    """A view: snapshot.json once a second while somebody watches the run from elsewhere.

    Without a watcher it costs one look at the time of a file.
    """

    def __init__(self, run_dir: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._run_dir, self._clock_s = run_dir, clock_s
        self._touched_ns = self._touch()
        self._asked_s = self._written_s = -math.inf

    def show(self, snapshot: Snapshot) -> None:
        """Write `snapshot` if it is due."""
        touched_ns, now_s = self._touch(), self._clock_s()
        if touched_ns != self._touched_ns:  # by whose clock does not matter
            self._touched_ns, self._asked_s = touched_ns, now_s
        if now_s - self._asked_s < _ASKED_S and now_s - self._written_s >= _FOR_WATCHERS_S:
            self._written_s = now_s
            _write_json(self._run_dir / SNAPSHOT_FILE, snapshot, indent=None)

    def close(self) -> None:
        """The recorders write the last snapshot."""

    def _touch(self) -> int:
        try:
            return (self._run_dir / WATCHED_FILE).stat().st_mtime_ns
        except OSError:
            return 0


def write_result(run_dir: Path, snapshot: Snapshot, reason: str, **more: Any) -> dict[str, Any]:
    """Write result.json, the run in one object, and return it.

    Args:
        snapshot: the last one, of `Monitor.close()`.
        reason: why the run ended, in words.
        more: further facts, for example the seed; anything that JSON can express.
    """
    facts, evaluations = snapshot.facts, snapshot.evaluations
    best = snapshot.best_evaluation
    crossings = {
        name: next((_evaluation_facts(e) for e in evaluations if e.mean >= value), None)
        for name, value in facts.references.items()
    }
    live = snapshot.replay.get("live", 0.0)
    result = {
        "environment": facts.environment,
        "preset": facts.preset,
        "reason": reason,
        "wall_s": snapshot.wall_s,
        **snapshot.totals,
        "mean_rates_per_s": snapshot.rates,
        "samples_per_insert": snapshot.samples_per_insert,
        "stale_share": snapshot.stale_share,
        "returns": {k: v for k, v in vars(snapshot.returns).items() if k != "greedy_history"},
        "best": _evaluation_facts(best) if best else None,
        "last": _evaluation_facts(evaluations[-1]) if evaluations else None,
        "references": dict(facts.references),
        "first_crossings": crossings,
        "evaluations": [_evaluation_facts(e) for e in evaluations],
        "memory": {
            "transitions": live,
            "bytes": snapshot.replay.get("bytes_used", 0.0),
            "plain_bytes": live * facts.plain_transition_bytes,
        },
        "shares_of_time": {view.role: view.phases_total for view in snapshot.roles},
        "cores": facts.cores,
        "python": platform.python_version(),
        "zapex": __version__,
        **more,
    }
    _write_json(run_dir / RESULT_FILE, result)
    return result


def read_metrics(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; skips one that a killed run left unfinished."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def read_base(run_dir: Path) -> dict[str, float]:
    """The largest counters that a run has ever written; a resumed run must not fall below them."""
    base: dict[str, float] = {}
    for line in read_metrics(run_dir):
        if line.get("kind") in ("metrics", "final"):
            raise_to(base, line | {"params_version": line.get("learner/params_version")})
    return base


def raise_to(base: dict[str, float], found: Mapping[str, Any]) -> None:
    """Raise the counters of `base` to those that are found; what is no number is ignored."""
    for name in ("wall_s", "params_version", *TOTALS):
        value = found.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value):
            base[name] = max(base.get(name, 0.0), float(value))


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """All evaluations of a run so far, in their order."""
    lines = read_metrics(run_dir)
    return [_evaluation(line) for line in lines if line.get("kind") == "evaluation"]


def read_snapshot(run_dir: Path) -> Snapshot:
    """The last snapshot that a run stored, to draw it again."""
    stored = json.loads((run_dir / SNAPSHOT_FILE).read_text(encoding="utf-8"))
    facts = stored["facts"]
    facts["run_dir"] = facts["run_dir"] and Path(facts["run_dir"])
    returns: dict[str, Any] = {
        name: math.nan if value is None else value for name, value in stored["returns"].items()
    }
    returns["greedy_history"] = tuple(returns["greedy_history"])
    return Snapshot(
        **stored
        | {
            "facts": RunFacts(**facts),
            "returns": Returns(**returns),
            "roles": tuple(RoleView(**v | {"silent": tuple(v["silent"])}) for v in stored["roles"]),
            "evaluations": tuple(map(_evaluation, stored["evaluations"])),
            "messages": tuple(Note(**m) for m in stored["messages"]),
        }
    )


def _evaluation(stored: Mapping[str, Any]) -> Evaluation:
    facts = {field.name: stored[field.name] for field in dataclasses.fields(Evaluation)}
    return Evaluation(**facts | {"returns": tuple(facts["returns"])})


def _evaluation_facts(evaluation: Evaluation) -> dict[str, Any]:
    facts = dataclasses.asdict(evaluation)
    return facts | {"mean": evaluation.mean, "std": evaluation.std}


def _write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write the file whole or not at all: readers never see half a file.

    indent: with None, Python encodes in C.
    """
    draft = path.with_suffix(".tmp")
    text = json.dumps(_plain(value), indent=indent, allow_nan=False) + "\n"
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """Replace NaN, paths and dataclasses, which JSON cannot express."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
