"""The model of a cluster beside measured points that it has not seen.

    python -m benchmarks.transport.bench_simulate [--windows 5] [--quick] [--json F] [--figure F]

Paced roles (real replay servers, real links, chunks of Breakout, no torch) work at a given pace:
an actor sleeps where it would play, pushes 800 transitions and waits until they are acknowledged;
the learner has two batches under way and sleeps where it would learn. 1 to 16 actors, 1 to 4
shards, without and with shaped links (long_link.py: one for all actors, one for the learner).

The model gets the paces, the links and the times that `zapex simulate` measures here
(studies/calibration.py), and nothing of these points: none of them was used to fit anything. For
each point: steps a second, batches a second, and the time of a push, measured and predicted.
Measured are medians of windows of 8 s, one after the other; `spreads` has their p10 and p90. A
point whose cores were more than 80 % busy is marked and does not count.
"""

import math
import mmap
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper import ends
from benchmarks.paper.accounts import Account
from benchmarks.paper.bench_paper import recorded_bodies
from benchmarks.paper.experience import setting_of
from benchmarks.paper.points import LOAD_LIMIT, Child, cycles_of, serve, wait_until
from benchmarks.paper.roles import OVER, READY, actor, learner
from benchmarks.support.harness import arguments, goal, joined, median, p10_p90, write_json
from benchmarks.transport.long_link import Line, LongLink, wait_until_it_listens
from benchmarks.transport.server import PARAMETER_BYTES, PREFETCH, Setting, warm
from zapex.config.settings import Config
from zapex.envs import environments
from zapex.run.run import Run
from zapex.studies import calibration
from zapex.studies.cluster import Cluster, Link, Times
from zapex.studies.simulation import Simulation

GOAL = 0.10
_START_S = 120.0
_PORTS = count(7600)
_PUBLISH_S = 2.0
_BESIDE_S = 8.0  # of a point: start and warm-up
DIRECT = Line()


@dataclass(frozen=True)
class Point:
    """actors: paced by `actor_s` for each push, in turn to `shards` replays. learner_s: of a step.
    site, far: the actors' link and the learner's."""

    actors: int
    actor_s: float
    learner_s: float
    site: Line = DIRECT
    far: Line = DIRECT
    shards: int = 1

    def __str__(self) -> str:
        text = f"{self.actors} actors each {self.actor_s:g} s, learner {1e3 * self.learner_s:g} ms"
        text += f", {self.shards} shards" if self.shards > 1 else ""
        for name, line in (("actors", self.site), ("learner", self.far)):
            text += f", {name}' link {line}" if line != DIRECT else ""
        return text


POINTS = (
    *(Point(n, 0.2 * max(1, n // 2), 0.1) for n in (1, 2, 4, 8, 16)),
    Point(4, 1.0, 0.05),
    *(Point(n, 0.4 * n, 0.2, site=Line(20.0, 400.0)) for n in (1, 4, 8)),
    Point(8, 0.5, 0.3, site=Line(10.0, 600.0)),
    *(Point(2, 1.0, 0.15, far=line) for line in (
        Line(30.0, 1200.0), Line(500.0, 800.0), Line(5.0, 1000.0), Line(40.0, 600.0))),
    Point(4, 1.0, 0.2, site=Line(40.0, 400.0), far=Line(40.0, 800.0)),
    *(Point(n, 0.2 * max(1, n // 2), 0.1, shards=shards) for n, shards in (
        (2, 2), (8, 2), (3, 3), (4, 4), (16, 4))),
    Point(4, 1.2, 0.2, site=Line(20.0, 400.0), shards=2),
    Point(4, 1.0, 0.1, far=Line(40.0, 600.0), shards=4),
    Point(8, 2.0, 0.2, site=Line(40.0, 400.0), far=Line(40.0, 800.0), shards=2),
)  # fmt: skip
QUICK_POINTS = (Point(1, 0.3, 0.2), Point(2, 0.5, 0.2, far=Line(60.0, 400.0), shards=2))


def measured(
    point: Point, bodies: np.ndarray, quick: bool, windows: int, seconds: float
) -> dict[str, Any]:
    """Rates of a point, and how busy the cores were."""
    setting = setting_of(point.actors + 1, quick)
    words = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
    running: dict[str, Child] = {}
    with ExitStack() as stack:

        def begin(role: str, work: Any) -> None:
            running[role] = Child(work)
            stack.callback(running[role].kill)

        ports = [next(_PORTS) for _ in range(point.shards)]
        for shard, port in enumerate(ports):
            begin(f"server {shard}", partial(serve, setting, _url([port]), None, None))
        for port in ports:
            wait_until_it_listens(port)
        links = [stack.enter_context(LongLink(*ports)) if line != DIRECT else None
                 for line in (point.site, point.far)]  # fmt: skip
        site, far = (_url(link.ports if link else ports) for link in links)
        every = max(1, round(_PUBLISH_S / point.learner_s))
        places = list(range(2, 2 + point.actors))
        begin("learner", lambda: learner(lambda: _Learner(setting, far), words, places, 1,
                                         point.learner_s, every))  # fmt: skip
        for i in range(point.actors):
            begin(f"actor {i}", partial(_play, setting, bodies, site, i, words, point.actor_s))
        wait_until(running, lambda: all(words[1 : 2 + point.actors] == READY))
        for link, line in zip(links, (point.site, point.far), strict=True):
            if link:
                link.set(line)
        time.sleep(1.0 if quick else 4.0)
        loads = []
        for window in range(1, 1 + windows):
            words[0] = window
            account = Account({role: child.pid for role, child in running.items()})
            time.sleep(seconds)
            loads.append(account.close()["load"])
        words[0] = OVER
        found = {r: c.result(_START_S) for r, c in running.items() if not r.startswith("server")}
    rows = [_rates(cycles_of(found, window), load, sum(setting.rows))
            for window, load in enumerate(loads, 1)]  # fmt: skip
    medians = joined(rows, median)
    return {**medians, "spreads": joined(rows, p10_p90)}


class _Learner(ends.LinkLearner):
    """It asks for one more batch once it has learned from one, and publishes without waiting.

    A real one does so, too, and the model. A learner that asks before it learns has another rate
    where round trips limit it.
    """

    def sample(self) -> None:
        """The batch that was asked for longest ago."""
        self.take(self._client.take)
        self.pulled += len(self._priorities)

    def update(self) -> None:
        """New priorities, on their way, and a request."""
        super().update()
        self._client.samples.request()

    def set(self) -> None:
        """New parameters, on their way."""
        self._client.begin_publish()


def _play(
    setting: Setting, bodies: np.ndarray, url: str, number: int, words: Any, actor_s: float
) -> dict[str, Any]:  # fmt: skip
    """A paced actor. It begins at a time of its own, as the model's do, not with all others."""
    time.sleep(random.Random(number).random() * actor_s)
    return actor(lambda: ends.LinkActor(setting, bodies, url, number), words, 2 + number, actor_s)


def _url(ports: Sequence[int]) -> str:
    return ",".join(f"tcp://127.0.0.1:{port}" for port in ports)


def _rates(found: dict[str, Any], load: float, rows: int) -> dict[str, Any]:
    """Of the time that whole cycles took, not of the window.

    A paced actor stops for new parameters; one beside a relay does not, and the model neither: that
    time is left out.
    """
    actors = [one for role, one in found.items() if role.startswith("actor")]
    spent = [one["seconds"]["compute"] + one["seconds"]["push"] for one in actors]
    cycles = [max(1, one["pushes"]) for one in actors]
    learns = found["learner"]
    return {
        "steps_per_s": sum(rows * n / s for n, s in zip(cycles, spent, strict=True)),
        "batches_per_s": learns["steps"] / sum(learns["seconds"].values()),
        "push_ms": float(np.median([one["ms"]["push"]["median"] for one in actors])),
        "load": load,
        "push_bytes": float(np.mean([one["bytes"]["push"] for one in actors])),
        "batch_bytes": learns["bytes"]["sample"],
    }


def predicted(point: Point, times: Times, found: dict[str, Any], quick: bool) -> dict[str, float]:
    """The same from the model. found: of it, only the sizes of the messages are used."""
    setting = setting_of(point.actors + 1, quick)
    burst = len(setting.rows)
    cluster = Cluster(
        actors=point.actors, per_host=1, rows=sum(setting.rows), play_s=point.actor_s,
        chunk_bytes=round(found["push_bytes"] / burst), batch=setting.batch,
        batch_bytes=round(found["batch_bytes"]), parameter_bytes=PARAMETER_BYTES,
        learn_s=point.learner_s, times=times, burst=burst, ahead=0, prefetch=PREFETCH,
        publish_s=_PUBLISH_S, shards=point.shards,
        site=Link(point.site.mbit / 1e3, point.site.rtt_ms),
        learner=Link(point.far.mbit / 1e3, point.far.rtt_ms),
    )  # fmt: skip
    outcome = Simulation(cluster).run()
    return {"steps_per_s": outcome.steps_per_s, "batches_per_s": outcome.batches_per_s,
            "push_ms": 1e3 * outcome.push_s, "limit": outcome.limit,
            "learner_limit": outcome.learner_limit}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The model of a cluster beside measured points."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--windows", type=int, help="of each point: 5; --quick: 1")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the results here")
    options = parser.parse_args(argv)
    windows, seconds, points = (1, 3.0, QUICK_POINTS) if options.quick else (5, 8.0, POINTS)
    windows = options.windows or windows
    minutes = len(points) * (windows * seconds + _BESIDE_S) / 60
    print(f"{len(points)} points, about {minutes:.0f} minutes")
    config = Config().replace(env="ALE/Breakout-v5")
    spec = environments.check(config.env.env, {})
    with tempfile.TemporaryDirectory(prefix="zapex-bench-") as place:
        times, _ = calibration.measure(Run(config, spec, Path(place)), 3 if options.quick else 10)
    warm()
    bodies = recorded_bodies(options.quick)
    rows: list[dict[str, Any]] = []
    began_s = time.monotonic()
    for done, point in enumerate(points):
        if done:
            left_s = (time.monotonic() - began_s) / done * (len(points) - done)
            print(f"  [{done} of {len(points)} points, about {left_s / 60:.1f} min left]",
                  flush=True)  # fmt: skip
        try:
            found = measured(point, bodies, options.quick, windows, seconds)
        except (RuntimeError, TimeoutError, AssertionError) as error:
            print(f"  {point}: not measured: {error}", flush=True)
            continue
        said = predicted(point, times, found, options.quick)
        errors = {k: said[k] / found[k] - 1 for k in ("steps_per_s", "batches_per_s", "push_ms")}
        counts = found["load"] <= LOAD_LIMIT
        doubt = "" if counts else f"; load {found['load']:.0%}: does not count"
        rows.append({"point": asdict(point), "measured": found, "predicted": said,
                     "errors": errors, "counts": counts})  # fmt: skip
        print(f"  {point}: steps/s {found['steps_per_s']:,.0f} ({errors['steps_per_s']:+.1%}), "
              f"batches/s {found['batches_per_s']:.2f} ({errors['batches_per_s']:+.1%}), push "
              f"{found['push_ms']:.0f} ms ({errors['push_ms']:+.0%}){doubt}",
              flush=True)  # fmt: skip
    if not rows:
        print("no point was measured", file=sys.stderr)
        return 1
    worst = max((abs(row["errors"][k]) for row in rows if row["counts"]
                 for k in ("steps_per_s", "batches_per_s")), default=math.nan)  # fmt: skip
    print(goal("worst error of a rate at points below 80 % load", 100 * worst, 100 * GOAL, " %"))
    results = {"times": asdict(times), "points": rows, "worst_error": worst}
    write_json(options, "simulate", results, rounds=windows, seconds=seconds)
    if options.figure:
        draw(rows, options.figure, options.quick)
    return 0


def draw(rows: Sequence[dict[str, Any]], path: Path, quick: bool) -> None:
    """Predicted against measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), dpi=150, layout="constrained")
    for axes, (key, label) in zip(
        figure.subplots(1, 3),
        (("steps_per_s", "steps a second"), ("batches_per_s", "batches a second"),
         ("push_ms", "a push, ms")),
        strict=True,
    ):  # fmt: skip
        for counts, style, text in (
            (True, "o", "measured below 80 % load"), (False, "x", "above: does not count"),
        ):  # fmt: skip
            some = [row for row in rows if row["counts"] == counts]
            axes.plot([r["measured"][key] for r in some], [r["predicted"][key] for r in some],
                      style, ms=5, label=text)  # fmt: skip
        values = [row[side][key] for row in rows for side in ("measured", "predicted")]
        ends_ = np.array([0.8 * min(values), 1.25 * max(values)])
        axes.fill_between(ends_, 0.9 * ends_, 1.1 * ends_, alpha=0.15, label="within 10 %")
        axes.set(xscale="log", yscale="log", xlabel=f"{label}: measured", ylabel="predicted")
        for axis in (axes.xaxis, axes.yaxis):  # the labels between the powers of ten overlap
            axis.set_major_formatter("{x:,g}")
            axis.set_minor_formatter("{x:,g}" if axis is axes.yaxis else "")
        axes.legend(fontsize=7)
    note = "; quick form: not to be relied on" if quick else ""
    figure.suptitle(f"The model of a cluster at points that it was not fitted to{note}")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
