"""The paper's dashboard in Visdom: scores of actors, transitions in memory, Q loss."""

import json
import threading
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future, wait
from http.client import HTTPException
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from zapex.errors import ConfigError, PeerError
from zapex.watch.recorders import PAPERS, by_actor, numbers, read_metrics
from zapex.watch.report import Snapshot

_TIMEOUT_S = 5.0
_POINTS = 512  # of a line; at twice as many, every second one is dropped
_SCORES, _MEMORY, _LOSS = PAPERS
_LINES = {
    "charts/episodic_return_last100": (_SCORES, "mean of all"),
    "replay/live": (_MEMORY, "transitions"),
    "losses/td_loss": (_LOSS, "TD loss"),
}
_LAYOUT = {"xaxis": {"title": "steps"}, "legend": {"orientation": "h", "y": -0.25}}


class Visdom:
    """A recorder. A thread sends all points of the run, so a restarted server shows all of it."""

    def __init__(self, run_dir: Path, url: str) -> None:
        self._url, self._name = url.rstrip("/"), run_dir.name
        self._windows: dict[str, dict[str, dict[str, Any]]] = {}
        for line in read_metrics(run_dir):  # of a run that is resumed
            self._add(line.get("steps", 0.0), {_LINES[t]: line[t] for t in line.keys() & _LINES})
        self._sent = Future[str]()
        self._sent.set_result("")

    def _add(self, steps: float, values: Mapping[tuple[str, str], float]) -> None:
        for (window, name), value in values.items():
            new = {"name": name, "type": "scatter", "mode": "lines", "x": [], "y": []}
            line = self._windows.setdefault(window, {}).setdefault(name, new)
            for points, point in ((line["x"], steps), (line["y"], value)):
                points.append(point)
                if len(points) == 2 * _POINTS:
                    del points[1::2]

    def write(self, snapshot: Snapshot, episodes: NDArray[Any], evaluations: object) -> None:
        """Send, unless a message is under way. Raises PeerError if the one before failed."""
        found, actors = numbers(snapshot), by_actor(episodes, snapshot).items()
        scores = {(_SCORES, f"actor {i}"): float(x["game_return"].mean()) for i, x in actors}
        values = {_LINES[tag]: found[tag] for tag in found.keys() & _LINES}
        self._add(snapshot.totals["steps"], values | scores)
        if self._sent.done():
            before, self._sent = self._sent, self._send()
            before.result()

    def _send(self) -> Future[str]:
        sent, messages = Future[str](), list[tuple[str, str]]()
        for title, lines in self._windows.items():
            window = {"eid": self._name, "win": title, "layout": _LAYOUT, "opts": {"title": title}}
            messages.append(("events", json.dumps({**window, "data": list(lines.values())})))

        def send() -> None:
            try:
                sent.set_result(_post(self._url, *messages))
            except Exception as error:
                sent.set_exception(error)

        # A daemon, because a server that sends byte by byte can hold it for longer than a timeout.
        threading.Thread(target=send, name="visdom", daemon=True).start()
        return sent

    def close(self) -> None:
        """Send the last points; a server that hangs takes at most two timeouts."""
        if wait([self._sent], _TIMEOUT_S).done:
            wait([self._send()], _TIMEOUT_S)


def _post(url: str, *messages: tuple[str, str]) -> str:
    """Send JSON to endpoints; returns the last answer. Raises PeerError within seconds."""
    answer = b""
    try:
        for endpoint, text in messages:
            with urllib.request.urlopen(f"{url}/{endpoint}", text.encode(), _TIMEOUT_S) as response:
                answer = response.read(1 << 20)
    except (OSError, HTTPException) as error:
        why = getattr(error, "reason", error)
        raise PeerError(f"no answer from Visdom at {url}: {why}") from None
    return answer.decode(errors="replace")


def check(url: str) -> None:
    """Raises ConfigError if no Visdom answers at this address."""
    hint = "start one with `python -m visdom.server`, or leave --visdom out"
    try:
        found = json.loads(_post(url.rstrip("/"), ("env_state", "{}")))
    except PeerError as error:
        raise ConfigError(f"--visdom: {error}; {hint}") from None
    except ValueError as error:  # no URL, or no JSON
        raise ConfigError(f"--visdom {url}: {error}; {hint}") from None
    if not isinstance(found, list):
        raise ConfigError(f"--visdom {url}: this is not a Visdom server; {hint}")
