"""How well a policy plays: the mean return of whole games, nearly greedy.

Every stream plays a share of the episodes fixed beforehand, its first ones. To take the first that
end anywhere would count short games more often than long ones.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zapex.agent.policy import Policy
from zapex.environments import EnvironmentSpec
from zapex.errors import ConfigError
from zapex.metrics import RoleMetrics
from zapex.report import Games
from zapex.streams import Episode, Streams, make
from zapex.transport import ParameterSource
from zapex.video import Mp4Writer

QValues = Callable[[NDArray[Any]], ArrayLike]
"""Observations (S, *observation_shape) -> Q values (S, num_actions)."""

EPSILON = 0.001
MAX_STREAMS = 100


@dataclass(frozen=True)
class EvalResult(Games):
    """Returns in the order of streams; frames and seconds are of all."""

    steps: int
    frames: int
    seconds: float

    def describe(self) -> dict[str, Any]:
        """JSON facts."""
        return {"mean": self.mean, "std": self.std, "episodes": len(self.returns), **asdict(self)}


class Evaluation:
    """Episodes of one policy, a step at a time.

        evaluation = Evaluation(q_values, streams, episodes=10, seed=1)
        while not evaluation.done:
            evaluation.do_work()
        evaluation.result().mean

    It resets the streams. The random actions keep a greedy policy from standing still forever; the
    streams' limit on an episode's frames ends what still does not end.
    """

    def __init__(
        self,
        q_values: QValues,
        streams: Streams,
        episodes: int,
        *,
        seed: int,
        epsilon: float = EPSILON,
    ) -> None:
        if episodes < 1:
            raise ConfigError(f"episodes must be at least 1, got {episodes}")
        if not 0.0 <= epsilon <= 1.0:
            raise ConfigError(f"epsilon must be 0 to 1, got {epsilon}")
        self._q_values = q_values
        self._streams = streams
        self._epsilon = epsilon
        self._rng = np.random.default_rng(seed)
        count = streams.num_streams
        self._missing = np.array([(episodes - i - 1) // count + 1 for i in range(count)])
        self._episodes: list[Episode] = []
        self._began = time.perf_counter()
        self._obs = streams.reset()

    @property
    def done(self) -> bool:
        """Whether all episodes have been played."""
        return not self._missing.any()

    def do_work(self) -> int:
        """One step in every stream. Returns how many of them were steps of the evaluation."""
        playing = self._missing > 0
        if not playing.any():
            return 0
        actions = np.asarray(self._q_values(self._obs)).argmax(axis=1).astype(np.int64)
        at_random = self._rng.random(len(actions)) < self._epsilon
        random_actions = self._rng.integers(self._streams.spec.num_actions, size=len(actions))
        step = self._streams.step(np.where(at_random, random_actions, actions))
        self._obs = step.obs
        for episode in self._streams.finished:
            if self._missing[episode.stream]:
                self._missing[episode.stream] -= 1
                self._episodes.append(episode)
        return int((playing & ~step.started).sum())

    def result(self) -> EvalResult:
        """What came out, once `done`."""
        assert self.done, f"{self._missing.sum()} episodes are still to be played"
        episodes = sorted(self._episodes, key=lambda episode: episode.stream)
        return EvalResult(
            returns=tuple(episode.game_return for episode in episodes),
            steps=sum(episode.steps for episode in episodes),
            frames=sum(episode.frames for episode in episodes),
            seconds=time.perf_counter() - self._began,
        )


def evaluate(
    q_values: QValues,
    spec: EnvironmentSpec,
    episodes: int,
    *,
    seed: int,
    epsilon: float = EPSILON,
    noop_max: int = 30,
    num_threads: int = 1,
    video: Path | str | None = None,
) -> EvalResult:
    """Play `episodes` games, each cut at 108,000 frames (27,000 steps on ALE).

    video: an mp4 that shows these very games as a player would see them; they are then played one
    after the other.

    Raises:
        ConfigError: a number out of range, a game that cannot be filmed, or a missing encoder (the
            message says what to install).
    """
    with ExitStack() as stack:
        streams = make(
            spec,
            1 if video else max(1, min(episodes, MAX_STREAMS)),
            seed=seed,
            num_threads=num_threads,
            noop_max=noop_max,
            film=video is not None,
        )
        stack.callback(streams.close)
        evaluation = Evaluation(q_values, streams, episodes, seed=seed, epsilon=epsilon)
        if video is None:
            while not evaluation.done:
                evaluation.do_work()
        else:
            mp4 = stack.enter_context(Mp4Writer(video, streams.screens_per_s))
            while not evaluation.done:
                for frame in streams.screens:
                    mp4.add(frame)
                evaluation.do_work()
            for frame in streams.screens:
                mp4.add(frame)
        return evaluation.result()


class Evaluator:
    """The role: an evaluation of the newest parameters every `period_s`, a step at a time.

    report: takes the returns, the parameters' version, and the run's counters when they were taken.
    """

    def __init__(
        self,
        policy: Policy,
        make_streams: Callable[[], Streams],
        parameters: ParameterSource,
        metrics: RoleMetrics,
        report: Callable[[tuple[float, ...], int, dict[str, float]], object],
        *,
        episodes: int,
        epsilon: float,
        period_s: float,
        parameter_bytes: int,
        seed: int,
        clock_s: Callable[[], float],
        totals: Callable[[], dict[str, float]],
    ) -> None:
        self._policy, self._parameters, self._metrics = policy, parameters, metrics
        self._make_streams, self._report, self._totals = make_streams, report, totals
        self._episodes, self._epsilon, self._seed = episodes, epsilon, seed
        self._period_s, self._clock_s = period_s, clock_s
        self._due_s = clock_s() + period_s
        self._received = np.empty(parameter_bytes, np.uint8)
        self._version = 0
        self._streams: Streams | None = None
        self._evaluation: Evaluation | None = None
        self._at: dict[str, float] = {}
        metrics.enter("idle")

    def do_work(self) -> int:
        """One step of the evaluation that is under way, or 0 while none is due."""
        if self._evaluation is None and not self._begin():
            self._metrics.enter("idle")  # also its sign of life
            return 0
        assert self._evaluation is not None
        self._metrics.enter("evaluate")
        steps = self._evaluation.do_work()
        self._metrics.add("steps", steps)
        if self._evaluation.done:
            result = self._evaluation.result()
            self._evaluation = None
            self._metrics.add("frames", result.frames)
            self._metrics.add("episodes", len(result.returns))
            self._metrics.add("evaluations")
            self._report(result.returns, self._version, self._at)
            self._metrics.enter("idle")
        return max(steps, 1)

    def ready(self) -> bool:
        """An evaluation is due and there are new parameters for it."""
        return self._clock_s() >= self._due_s and self._parameters.version > self._version

    def close(self) -> None:
        """Stop; an evaluation under way is given up."""
        self._metrics.leave()

    def _begin(self) -> bool:
        if not self.ready():
            return False
        version = self._parameters.newer_than(self._version, self._received)
        if not version:
            return False
        self._policy.load_flat(self._received)
        self._version = version
        self._due_s = self._clock_s() + self._period_s
        self._at = self._totals()
        if self._streams is None:
            self._streams = self._make_streams()
        self._metrics.set("params_version", version)
        self._evaluation = Evaluation(
            self._policy.q_values, self._streams, self._episodes, seed=self._seed,
            epsilon=self._epsilon,
        )  # fmt: skip
        return True
