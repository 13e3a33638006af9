"""What a run shows in a browser: TensorBoard, and Weights & Biases."""

import io
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zapex.machine.disk import append_whole
from zapex.watch.recorders import numbers
from zapex.watch.report import Evaluation, Snapshot

_POINTS: Final = 50  # episodes in one write; more are averaged with their neighbours
ACTORS: Final = "actors"  # the group of tags with a score for each actor
PAPERS: Final = {
    "score of every actor": rf"{ACTORS}/episodic_return_\d+",
    "transitions in memory": r"replay/live",
    "Q loss": r"losses/td_loss",
}
"""Title -> tags (a regular expression) of the charts of the paper's dashboard."""
_MOST_ACTORS: Final = 64  # of more, so many have a line: a page cannot show thousands


def by_actor(episodes: NDArray[Any], snapshot: Snapshot) -> dict[int, NDArray[Any]]:
    """Actor number -> its episodes (dtype EPISODE), of those among `episodes`.

    Of more than 64 actors it is 64, evenly spread over their epsilons, with the greediest.
    """
    size = max(1, snapshot.facts.envs_per_actor)
    actors = max(1, snapshot.facts.streams // size)
    shown = np.unique(np.linspace(0, actors - 1, min(actors, _MOST_ACTORS)).astype(int))
    of = episodes["stream"] // size
    return {int(i): episodes[of == i] for i in shown[np.isin(shown, of)]}


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
        every = by_actor(episodes, snapshot)
        for actor, played in every.items():
            tag = {"game_return": f"{ACTORS}/episodic_return_{actor}"}
            parts.append((played, tag, max(1, _POINTS // len(every))))
        for part, tags, points in parts:
            for few in np.array_split(part, min(len(part), points)) if len(part) else ():
                time_ns = float(few["time_ns"][-1])
                # Episodes have a time; the run's steps at that time are interpolated between two
                # writes.
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
        first = self._event(wall_time=time.time(), file_version="brain.Event:2")
        self._records.write(first.SerializeToString())
        for summary in (self._papers_tab(), *self._settings_tabs()):
            event = self._event(wall_time=time.time(), summary=summary)
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

    def _settings_tabs(self) -> "Iterator[Any]":
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

    def _add(self, wall_time_s: float, steps: float, values: dict[str, float]) -> None:
        scalars = [self._summary.Value(tag=tag, simple_value=x) for tag, x in values.items()]
        summary = self._summary(value=scalars)
        event = self._event(wall_time=wall_time_s, step=int(steps), summary=summary)
        self._records.write(event.SerializeToString())


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
            project=self._project, entity=self._entity or None, name=self._run_dir.name,
            dir=str(self._run_dir), config=dict(self._settings),
        )  # fmt: skip

    def write(
        self, snapshot: Snapshot, episodes: NDArray[Any], evaluations: Sequence[Evaluation]
    ) -> None:
        if self._run is None:
            self._open()
        values = numbers(snapshot)
        if len(episodes):
            values["charts/episodic_return"] = float(episodes["game_return"].mean())
        for actor, played in by_actor(episodes, snapshot).items():
            values[f"{ACTORS}/episodic_return_{actor}"] = float(played["game_return"].mean())
        if evaluations:
            values["eval/episodic_return"] = evaluations[-1].mean
        self._run.log(values, step=int(snapshot.totals["steps"]))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
