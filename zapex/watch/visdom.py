"""The paper's dashboard in Visdom, by its HTTP interface: scores of actors, memory, Q loss.

A thread sends, so that a server that hangs delays nobody. Each message has all points of a window,
so that a server that was started anew has the whole picture again.
"""

import http.client
import json
import math
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from numpy.typing import NDArray

from zapex.errors import ConfigError, PeerError
from zapex.watch.dashboards import by_actor
from zapex.watch.recorders import numbers, read_metrics
from zapex.watch.report import Evaluation, Snapshot

_DEADLINE_S: Final = 5.0
_POINTS: Final = 512  # of a line; beyond that, neighbours are averaged
_ANSWER_BYTES: Final = 1 << 20
_LINES: Final = {
    "transitions in memory": {"replay/live": "transitions"},
    "Q loss": {"losses/td_loss": "TD loss"},
}
_SCORES: Final = "score of every actor"
_MEAN: Final = "mean of all"


class _Line:
    """Points of a line, evenly thinned: x in steps."""

    def __init__(self) -> None:
        self.x: list[float] = []
        self.y: list[float] = []
        self._each = 1  # how many values make one point
        self._waiting: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        self._waiting.append((x, y))
        if len(self._waiting) < self._each:
            return
        xs, ys = zip(*self._waiting, strict=True)
        self._waiting.clear()
        self.x.append(sum(xs) / len(xs))
        self.y.append(sum(ys) / len(ys))
        if len(self.x) == 2 * _POINTS:
            self.x = [(a + b) / 2 for a, b in zip(self.x[::2], self.x[1::2], strict=True)]
            self.y = [(a + b) / 2 for a, b in zip(self.y[::2], self.y[1::2], strict=True)]
            self._each *= 2


class Visdom:
    """A recorder. The environment in Visdom is named as the run's directory.

    url: of the server, for example http://localhost:8097. A resumed run goes on with what
    metrics.jsonl has; the scores of single actors begin anew.
    """

    def __init__(self, run_dir: Path, url: str) -> None:
        self._url, self._name = url.rstrip("/"), run_dir.name
        self._windows: dict[str, dict[str, _Line]] = {}
        for line in read_metrics(run_dir):
            if line.get("kind") in ("metrics", "final"):
                self._take(line.get("steps", 0.0), line)
        self._newest: queue.Queue[list[dict[str, Any]] | None] = queue.Queue(1)
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._send_all, name="visdom", daemon=True)
        self._thread.start()

    def write(
        self, snapshot: Snapshot, episodes: NDArray[Any], evaluations: Sequence[Evaluation]
    ) -> None:
        """Hand the windows to the thread. Raises PeerError for the last message's failure."""
        steps = snapshot.totals["steps"]
        self._take(steps, numbers(snapshot))
        for actor, played in by_actor(episodes, snapshot).items():
            self._line(_SCORES, f"actor {actor}").add(steps, float(played["game_return"].mean()))
        titles = [title for title in (_SCORES, *_LINES) if title in self._windows]
        self._hand_over([self._message(title) for title in titles])
        if self._problem is not None:
            raise self._problem

    def close(self) -> None:
        """Wait until the last message is sent, for at most two deadlines."""
        with suppress(queue.Full):  # the server hangs
            self._newest.put(None, timeout=_DEADLINE_S)
            self._thread.join(_DEADLINE_S)

    def _take(self, steps: float, values: Mapping[str, Any]) -> None:
        wanted = {**_LINES, _SCORES: {"charts/episodic_return_last100": _MEAN}}
        for title, lines in wanted.items():
            for tag, name in lines.items():
                value = values.get(tag)
                if isinstance(value, float) and math.isfinite(value):
                    self._line(title, name).add(steps, value)

    def _line(self, title: str, name: str) -> _Line:
        return self._windows.setdefault(title, {}).setdefault(name, _Line())

    def _message(self, title: str) -> dict[str, Any]:
        data = [
            {"x": line.x[:], "y": line.y[:], "name": name, "type": "scatter", "mode": "lines"}
            for name, line in self._windows[title].items()
        ]
        # The window has the title, and beside the lines there is no room for names.
        layout = {
            "xaxis": {"title": "steps"},
            "margin": {"l": 50, "r": 15, "t": 25, "b": 40},
            "showlegend": len(data) > 1,
            "legend": {"orientation": "h", "y": -0.25},
        }
        message = {"eid": self._name, "win": title, "data": data, "layout": layout}
        return {**message, "opts": {"title": title}}

    def _hand_over(self, messages: list[dict[str, Any]]) -> None:
        """In the place of older ones that still wait: these have all of their points."""
        with suppress(queue.Empty):
            self._newest.get_nowait()
        self._newest.put_nowait(messages)

    def _send_all(self) -> None:
        while (messages := self._newest.get()) is not None:
            try:
                for message in messages:
                    post(self._url, "events", message)
            except PeerError as error:
                self._problem = error
            else:
                self._problem = None


def post(url: str, endpoint: str, message: Mapping[str, Any]) -> str:
    """Send JSON, and return the answer. Raises PeerError within seconds."""
    body = json.dumps(message, allow_nan=False).encode()
    request = urllib.request.Request(f"{url}/{endpoint}", body)
    try:
        with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
            return str(answer.read(_ANSWER_BYTES).decode(errors="replace"))
    except (OSError, http.client.HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise PeerError(f"no answer from Visdom at {url}: {why}") from None


def check(url: str) -> None:
    """Raises ConfigError if no Visdom answers at this address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--visdom must be like http://localhost:8097, got {url!r}")
    mend = "start one with `python -m visdom.server`, or leave --visdom out"
    try:
        answer = post(url.rstrip("/"), "env_state", {})
        environments = json.loads(answer)
    except PeerError as error:
        raise ConfigError(f"--visdom: {error}; {mend}") from None
    except ValueError:
        environments = None
    if not isinstance(environments, list):
        raise ConfigError(f"--visdom: what answers at {url} is no Visdom server; {mend}")
