"""What a run records: JSON in its directory, TensorBoard events, Weights & Biases, Visdom.

The files of a run's directory are metrics.jsonl, snapshot.json and result.json.
"""

import dataclasses
import io
import json
import math
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError, PeerError
from zapex.machine.disk import append_whole
from zapex.machine.reading import open_regular, read_json, read_json_lines, typed
from zapex.version import __version__
from zapex.watch.report import TOTALS, Evaluation, Snapshot

METRICS_FILE: Final = "metrics.jsonl"
SNAPSHOT_FILE: Final = "snapshot.json"
RESULT_FILE: Final = "result.json"
ACTORS: Final = "actors"
"""The group of tags with a score for each actor."""
PAPERS: Final = {
    "score of every actor": rf"{ACTORS}/episodic_return_\d+|charts/episodic_return_last100",
    "transitions in memory": r"replay/live",
    "Q loss": r"losses/td_loss",
}
"""The charts of the paper's dashboard: title -> a regular expression of tags."""
_FOR_WATCHERS_S: Final = 0.9  # snapshots are made twice a second
_POINTS: Final = 50  # episodes in one write; more are averaged with their neighbours
VISDOM_TIMEOUT_S: Final = 5.0
_LINE_POINTS: Final = 512  # of a line in Visdom; at twice as many, every second one is dropped
_MOST_ACTORS: Final = 64  # a page cannot show thousands of lines


def numbers(snapshot: Snapshot) -> dict[str, float]:
    """Tag -> value, the same in all recorders, without unknown values.

    The tags follow CleanRL. `comm/*` are shares of time by the paper's phases, `phases/*` by all.
    """
    totals, rates, returns = snapshot.totals, snapshot.rates, snapshot.returns
    learner = snapshot.learner
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
        values |= {f"{role}/{n}": x for n, x in counts.items() if not n.startswith("phase/")}
    if learner.get("batches"):
        values["losses/td_loss"], values["losses/q_values"] = learner["loss"], learner["q_mean"]
        for name in ("td_abs_mean", "grad_norm", "priority_mean", "priority_max"):
            values[f"losses/{name}"] = learner[name]
        values["learner/batches"] = totals["batches"]
        values["learner/batches_per_s"] = rates["batches"]
        values["learner/samples_per_s"] = rates["samples"]
        shards = ("shards_away", "shards_lost", "shards_back") if learner.get("shards") else ()
        for name in ("params_version", "staleness", "torn_rows", *shards):
            values[f"learner/{name}"] = learner[name]
    for view in snapshot.roles:
        values[f"system/{view.role}_cpu_cores"] = view.cpu_cores
        values |= {f"comm/{view.role}_{name}": share for name, share in view.shares.items()}
        values |= {f"phases/{view.role}_{name}": share for name, share in view.phases.items()}
    # TensorBoard stores float32; more digits would only lengthen metrics.jsonl.
    return {tag: float(f"{x:.7g}") for tag, x in values.items() if math.isfinite(x)}


def by_actor(episodes: NDArray[Any], snapshot: Snapshot) -> dict[int, NDArray[Any]]:
    """Actor number -> its episodes (dtype EPISODE), of those among `episodes`.

    Of more than 64 actors it is 64, evenly spread over their epsilons, with the greediest.
    """
    size = max(1, snapshot.facts.envs_per_actor)
    actors = max(1, snapshot.facts.streams // size)
    shown = np.unique(np.linspace(0, actors - 1, min(actors, _MOST_ACTORS)).astype(int))
    of = episodes["stream"] // size
    return {int(i): episodes[of == i] for i in shown[np.isin(shown, of)]}


def actor_scores(snapshot: Snapshot, episodes: NDArray[Any]) -> dict[str, float]:
    """Tag -> mean return of each actor's games among `episodes`."""
    return {
        f"{ACTORS}/episodic_return_{actor}": float(played["game_return"].mean())
        for actor, played in by_actor(episodes, snapshot).items()
    }


class JsonLines:
    """metrics.jsonl: a line every few seconds, one for each evaluation; and snapshot.json.

    A resumed run appends. Lines have a "kind": "metrics", "evaluation", or "final" for the last
    of a session, whose rates are the session's.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._path = run_dir, run_dir / METRICS_FILE
        self._unwritten = b""
        if self._path.exists():
            with open_regular(self._path) as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                if file.read() not in (b"", b"\n"):  # a killed run has left half a line
                    self._unwritten = b"\n"

    def write(
        self, snapshot: Snapshot, episodes: NDArray[Any], evaluations: Sequence[Evaluation]
    ) -> None:
        """Append the new lines, and replace snapshot.json."""
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
        self._unwritten += "".join(json.dumps(_plain(x)) + "\n" for x in lines).encode()
        self.close()
        _write_json(self._run_dir / SNAPSHOT_FILE, snapshot, indent=None)

    def close(self) -> None:
        """Write the lines that are not in the file yet."""
        append_whole(self._path, self._unwritten)
        self._unwritten = b""


class ForWatchers:
    """A view in other processes: snapshot.json about once a second, in 1 % of the time at most."""

    def __init__(self, run_dir: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock_s = run_dir / SNAPSHOT_FILE, clock_s
        self._due_s = -math.inf

    def show(self, snapshot: Snapshot) -> None:
        """Write `snapshot` if it is due."""
        began_s = self._clock_s()
        if began_s >= self._due_s:
            with suppress(OSError):  # the recorders report a full disk
                _write_json(self._path, snapshot, indent=None)
            self._due_s = began_s + max(_FOR_WATCHERS_S, 100 * (self._clock_s() - began_s))

    def close(self) -> None:
        """The recorders write the last snapshot."""


def origin() -> dict[str, Any]:
    """What made a run, for `write_result`: command line, commit of this directory, versions."""
    words = ["git", "rev-parse", "HEAD"]
    commit = None
    with suppress(OSError, subprocess.SubprocessError):  # no git, or no repository
        done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True)
        commit = done.stdout.strip()
    versions = {"python": platform.python_version(), "zapex": __version__}
    for package in ("numpy", "numba", "torch", "gymnasium", "ale-py"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"command": shlex.join(sys.argv), "commit": commit, "versions": versions}


def write_result(run_dir: Path, snapshot: Snapshot, reason: str, **more: Any) -> dict[str, Any]:
    """Write result.json, the run in one object, and return it.

    Args:
        run_dir: directory of the run.
        snapshot: the last one, of `Monitor.close()`.
        reason: why the run ended, in words.
        more: further facts, for example the seed; anything that JSON can express.
    """
    facts, evaluations = snapshot.facts, snapshot.evaluations
    best = snapshot.best_evaluation
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
        "first_crossings": {
            name: next((_evaluation_facts(e) for e in evaluations if e.mean >= value), None)
            for name, value in facts.references.items()
        },
        "evaluations": [_evaluation_facts(e) for e in evaluations],
        "memory": {
            "transitions": live,
            "bytes": snapshot.replay.get("bytes_used", 0.0),
            "plain_bytes": live * facts.plain_transition_bytes,
        },
        "shares_of_time": {view.role: view.phases_total for view in snapshot.roles},
        "cores": facts.cores,
        **more,
    }
    _write_json(run_dir / RESULT_FILE, result)
    return result


def read_metrics(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; skips one that a killed run left unfinished."""
    path = run_dir / METRICS_FILE
    return read_json_lines(path) if path.exists() else iter(())


def read_base(run_dir: Path) -> dict[str, float]:
    """The largest counters that a run has ever written; a resumed run must not fall below them."""
    base: dict[str, float] = {}
    for line in read_metrics(run_dir):
        if line.get("kind") in ("metrics", "final"):
            raise_to(base, line | {"params_version": line.get("learner/params_version")})
    return base


def raise_to(base: dict[str, float], found: Mapping[str, Any]) -> None:
    """Raise the counters of `base` to those in `found`; anything but a number is ignored."""
    for name in ("wall_s", "params_version", *TOTALS):
        value = found.get(name)
        if is_number(value):
            base[name] = max(base.get(name, 0.0), float(value))


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of metrics.jsonl is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """All evaluations of a run so far, in their order. Raises ConfigError."""
    lines = (line for line in read_metrics(run_dir) if line.get("kind") == "evaluation")
    return [typed(Evaluation, line, METRICS_FILE) for line in lines]


def read_snapshot(run_dir: Path) -> Snapshot:
    """The last snapshot that a run stored, to draw it again. Raises ConfigError.

    Its directory may have been moved, or be a stranger's: its command is one of zapex, and for it.
    """
    path = run_dir / SNAPSHOT_FILE
    found: Snapshot = typed(Snapshot, read_json(path), str(path))
    words = [""]
    with suppress(ValueError):  # a quote without an end
        words = shlex.split(found.facts.resume)
    resume = shlex.join([*words[:-1], str(run_dir)]) if words[:1] == ["zapex"] else ""
    facts = dataclasses.replace(found.facts, run_dir=run_dir, resume=resume)
    return dataclasses.replace(found, facts=facts)


def _evaluation_facts(evaluation: Evaluation) -> dict[str, Any]:
    facts = dataclasses.asdict(evaluation)
    return facts | {"mean": evaluation.mean, "std": evaluation.std}


def _write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write the file whole or not at all: readers never see half a file.

    indent: with None, Python encodes in C.
    """
    draft = path.with_suffix(".tmp")
    draft.unlink(missing_ok=True)
    try:
        with draft.open("x", encoding="utf-8") as file:  # a new file, and never a link's target
            file.write(json.dumps(_plain(value), indent=indent, allow_nan=False) + "\n")
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


class TensorBoard:
    """TensorBoard events, x axis in steps; in TensorBoard's own format, without its thread.

    Its tab "Custom Scalars" is the paper's dashboard. settings: name -> value, for the tabs "Text"
    and "HParams".
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._run_dir, self._settings = run_dir, settings
        self._records: Any = None
        self._before: tuple[int, float] | None = None  # time_ns and steps of the last write

    def write(
        self, snapshot: Snapshot, episodes: NDArray[Any], evaluations: Sequence[Evaluation]
    ) -> None:
        """Append the numbers, the evaluations, and the episodes at the time of their end."""
        if self._records is None:
            self._open()
        now_s, steps = time.time(), snapshot.totals["steps"]
        then_ns, then_steps = self._before or (snapshot.facts.started_ns, 0.0)
        self._before = (snapshot.time_ns, steps)
        self._add(now_s, steps, numbers(snapshot))
        for evaluation in evaluations:
            self._add(now_s, evaluation.steps, {"eval/episodic_return": evaluation.mean})
        greedy = episodes[episodes["stream"] == snapshot.facts.greedy_stream]
        of_all = {"game_return": "charts/episodic_return", "steps": "charts/episodic_length"}
        of_greedy = {"game_return": "charts/episodic_return_greedy"}
        parts = [(episodes, of_all, _POINTS), (greedy, of_greedy, _POINTS)]
        actors = by_actor(episodes, snapshot)
        for actor, played in actors.items():
            tag = {"game_return": f"{ACTORS}/episodic_return_{actor}"}
            parts.append((played, tag, max(1, _POINTS // len(actors))))
        for part, tags, points in parts:
            for few in np.array_split(part, min(len(part), points)) if len(part) else ():
                # Episodes have a time; the steps at that time are interpolated between two writes.
                time_ns = float(few["time_ns"][-1])
                at = np.interp(time_ns, (then_ns, snapshot.time_ns), (then_steps, steps))
                age_s = max(0.0, (snapshot.time_ns - time_ns) / 1e9)
                means = {tag: float(few[column].mean()) for column, tag in tags.items()}
                self._add(now_s - age_s, float(at), means)
        self.close()

    def close(self) -> None:
        """Write the events that are not in the file yet."""
        if self._records is not None:
            append_whole(self._path, self._unwritten.getvalue())
            self._unwritten.seek(0)
            self._unwritten.truncate()

    def _open(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._path, self._unwritten = self._run_dir / name, io.BytesIO()
        self._records = RecordWriter(self._unwritten)
        self._append(file_version="brain.Event:2")
        for summary in (self._papers_tab(), *self._settings_tabs()):
            self._append(summary=summary)

    def _add(self, wall_time_s: float, steps: float, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=tag, simple_value=x) for tag, x in values.items()]
        self._append(wall_time_s, step=int(steps), summary=self._summary(value=scalars))

    def _append(self, wall_time_s: float = 0.0, **fields: Any) -> None:
        event = self._event(wall_time=wall_time_s or time.time(), **fields)
        self._records.write(event.SerializeToString())

    def _papers_tab(self) -> Any:
        from tensorboard.plugins.custom_scalar import layout_pb2, metadata
        from tensorboard.util import tensor_util

        charts = [
            layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[tags]))
            for title, tags in PAPERS.items()
        ]
        layout = layout_pb2.Layout(category=[layout_pb2.Category(title="Ape-X", chart=charts)])
        value = self._summary.Value(
            tag=metadata.CONFIG_SUMMARY_TAG,
            metadata=metadata.create_summary_metadata(),
            tensor=tensor_util.make_tensor_proto(layout.SerializeToString(), dtype=np.object_),
        )
        return self._summary(value=[value])

    def _settings_tabs(self) -> Iterator[Any]:
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb

        rows = "".join(f"| {name} | {value} |\n" for name, value in self._settings.items())
        yield text_pb("settings", f"| setting | value |\n|---|---|\n{rows}")
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for name, value in self._settings.items():
            stored = start.hparams[name]
            if isinstance(value, bool):
                stored.bool_value = value
            elif isinstance(value, (int, float)):
                stored.number_value = value
            else:
                stored.string_value = str(value)
        data = plugin_data_pb2.HParamsPluginData(session_start_info=start)
        tag = metadata.SESSION_START_INFO_TAG
        value = self._summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data))
        yield self._summary(value=[value])


class WeightsAndBiases:
    """The numbers of metrics.jsonl in Weights & Biases; x axis in steps.

    entity: the user or team; "": the one that is logged in.
    """

    def __init__(
        self, run_dir: Path, settings: Mapping[str, Any], project: str = "zapex", entity: str = ""
    ) -> None:
        self._run_dir, self._settings = run_dir, settings
        self._project, self._entity = project, entity
        self._run: Any = None
        with suppress(OSError):  # a full disk: `write` tries again, and its error is reported
            self._open()

    def _open(self) -> None:
        import wandb

        self._run = wandb.init(
            project=self._project,
            entity=self._entity or None,
            name=self._run_dir.name,
            dir=str(self._run_dir),
            config=dict(self._settings),
        )

    def write(
        self, snapshot: Snapshot, episodes: NDArray[Any], evaluations: Sequence[Evaluation]
    ) -> None:
        """Log the numbers, and the newest evaluation."""
        if self._run is None:
            self._open()
        values = numbers(snapshot)
        if len(episodes):
            values["charts/episodic_return"] = float(episodes["game_return"].mean())
        values |= actor_scores(snapshot, episodes)
        if evaluations:
            values["eval/episodic_return"] = evaluations[-1].mean
        self._run.log(values, step=int(snapshot.totals["steps"]))

    def close(self) -> None:
        """Finish the run there."""
        if self._run is not None:
            self._run.finish()


class Visdom:
    """The paper's dashboard in Visdom.

    A thread sends all points of the run, so a restarted server shows all of it.
    """

    def __init__(self, run_dir: Path, url: str) -> None:
        self._url, self._error, self._lines = url.rstrip("/"), "", dict[str, dict[str, Any]]()
        about = {"eid": run_dir.name, "layout": {"xaxis": {"title": "steps"}}}
        self._windows: dict[str, dict[str, Any]] = {
            title: {**about, "win": title, "opts": {"title": title}, "data": []} for title in PAPERS
        }
        for line in read_metrics(run_dir):  # of a run that is resumed
            self._add(line.get("steps"), line)
        self._send()

    def _add(self, steps: Any, values: Mapping[str, Any]) -> None:
        for title, tags in PAPERS.items():
            for tag in filter(re.compile(tags).fullmatch, values):
                if tag not in self._lines:
                    new = {"name": tag, "type": "scatter", "mode": "lines", "x": [], "y": []}
                    self._windows[title]["data"].append(self._lines.setdefault(tag, new))
                for axis, value in (("x", steps), ("y", values[tag])):
                    self._lines[tag][axis].append(value)
                    if len(self._lines[tag][axis]) == 2 * _LINE_POINTS:
                        del self._lines[tag][axis][1::2]

    def write(self, snapshot: Snapshot, episodes: NDArray[Any], evaluations: object) -> None:
        """Send, unless a message is under way. Raises PeerError if the one before failed."""
        self._add(snapshot.totals["steps"], numbers(snapshot) | actor_scores(snapshot, episodes))
        if not self._sender.is_alive():
            error = self._error
            self._send()
            if error:
                raise PeerError(error)

    def _send(self) -> None:
        texts = [json.dumps(window) for window in self._windows.values()]
        # A daemon, because a server that sends byte by byte can hold it for longer than a timeout.
        self._sender = threading.Thread(target=self._post, args=(texts,), daemon=True)
        self._sender.start()

    def _post(self, texts: list[str]) -> None:
        try:
            for text in texts:
                post(self._url, "events", text)
            self._error = ""
        except PeerError as error:
            self._error = str(error)

    def close(self) -> None:
        """Send the last points; a server that hangs takes at most two timeouts."""
        self._sender.join(VISDOM_TIMEOUT_S)
        if not self._sender.is_alive():
            self._send()
            self._sender.join(VISDOM_TIMEOUT_S)


def post(url: str, endpoint: str, text: str) -> bytes:
    """Send JSON; returns the answer. Raises PeerError within seconds."""
    import urllib.request
    from http.client import HTTPException

    try:
        with urllib.request.urlopen(
            f"{url}/{endpoint}", text.encode(), VISDOM_TIMEOUT_S
        ) as response:
            return bytes(response.read(1 << 20))
    except (OSError, HTTPException) as error:
        raise PeerError(f"no answer from {url}: {getattr(error, 'reason', error)}") from None


def check_visdom(url: str) -> None:
    """Raises ConfigError if no Visdom answers at this address."""
    try:
        if not isinstance(json.loads(post(url.rstrip("/"), "env_state", "{}")), list):
            raise ValueError("it is not a Visdom server")
    except (PeerError, ValueError) as error:  # no answer, no URL, or no JSON
        raise ConfigError(f"--visdom {url}: {error}; start `python -m visdom.server`") from None
