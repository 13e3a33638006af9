"""How well a policy plays: the mean return of whole games, with a small epsilon.

Every stream plays a fixed share of the episodes: its first ones. The first episodes that end in any
stream would be a biased sample: short games would count more often than long ones.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zapex.agent.policy import Acting, epsilon_greedy
from zapex.envs.environments import EnvironmentSpec
from zapex.envs.scores import Games
from zapex.envs.streams import Episode, Streams, make
from zapex.envs.video import Mp4Writer
from zapex.errors import ConfigError
from zapex.host.metrics import RoleMetrics
from zapex.transport import ParameterSource

QValues = Callable[[NDArray[Any]], ArrayLike]
"""Observations (S, *observation_shape) -> Q values (S, num_actions)."""

EPSILON = 0.001
MAX_STREAMS = 10
"""With 100 streams most would idle until the longest episode ends."""


@dataclass(frozen=True)
class EvalResult(Games):
    """Returns in the order of streams; frames and seconds are totals."""

    steps: int
    frames: int
    seconds: float

    def describe(self) -> dict[str, Any]:
        """JSON facts."""
        return {"mean": self.mean, "std": self.std, "episodes": len(self.returns), **asdict(self)}


@dataclass(frozen=True)
class Moment:
    """One step of the first stream, as a spectator sees it.

    Attributes:
        screens: RGB frames (H, W, 3) that followed the action, in order.
        q: Q values, float (num_actions,), of the observation before the action; None at the start
            of a game.
        action: taken in that step.
        score: of the game so far.
        steps: of the game so far.
        game: number of the game, from 1.
    """

    screens: Sequence[NDArray[np.uint8]]
    q: NDArray[Any] | None
    action: int
    score: float
    steps: int
    game: int


class Spectator(Protocol):
    """Sees a game as it is played, and keeps its pace."""

    def begin(self, screens_per_s: float, action_names: Sequence[str]) -> None:
        """Called with what is known before the first moment."""

    def see(self, moment: Moment) -> bool:
        """Show it. Returns whether to continue."""


class RunningEvaluation:
    """Episodes of one policy, a step at a time.

        evaluation = RunningEvaluation(q_values, streams, episodes=10, seed=1)
        while not evaluation.done:
            evaluation.do_work()
        evaluation.result().mean

    It resets the streams. With some random actions a greedy policy does not repeat one state
    forever. The streams' limit on an episode's frames ends an episode that does not end otherwise.
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
        self._q: NDArray[Any] | None = None
        self._action = self._steps = 0

    def moment(self) -> Moment:
        """The step just played, in the first stream."""
        ended = [one.game_return for one in self._streams.finished if one.stream == 0]
        score = ended[0] if ended else float(self._streams.returns[0])
        game = len(self._episodes) + (0 if ended else 1)
        return Moment(self._streams.screens, self._q, self._action, score, self._steps, game)

    @property
    def played(self) -> int:
        """Episodes that have ended."""
        return len(self._episodes)

    @property
    def done(self) -> bool:
        """Whether all episodes have been played."""
        return not self._missing.any()

    def do_work(self) -> int:
        """One step in every stream. Returns how many of these were steps of the evaluation."""
        playing = self._missing > 0
        if not playing.any():
            return 0
        q = np.asarray(self._q_values(self._obs))
        actions = epsilon_greedy(q, self._epsilon, self._rng)
        step = self._streams.step(actions)
        self._obs = step.obs
        self._q, self._action = None if step.started[0] else q[0], int(actions[0])
        self._steps = 0 if step.started[0] else self._steps + 1
        for episode in self._streams.finished:
            if self._missing[episode.stream]:
                self._missing[episode.stream] -= 1
                self._episodes.append(episode)
        return int((playing & ~step.started).sum())

    def result(self) -> EvalResult:
        """The result of the episodes that have been played: all of them, once `done`."""
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
    spectator: Spectator | None = None,
    progress: Callable[[int], object] | None = None,
) -> EvalResult:
    """Play `episodes` games, each cut at 108,000 frames (27,000 steps on ALE).

    video: an mp4 of these games as a player sees them. spectator: sees them while they are played,
    and may end them. With either they are played one after the other. progress: called after each
    step, with the number of games that have ended.

    Raises:
        ConfigError: a number out of range, a game that cannot be filmed, or a missing encoder (the
            message says what to install).
    """
    with ExitStack() as stack:
        seen = video is not None or spectator is not None
        streams = make(
            spec,
            1 if seen else max(1, min(episodes, MAX_STREAMS)),
            seed=seed,
            num_threads=num_threads,
            noop_max=noop_max,
            film=seen,
        )
        stack.callback(streams.close)
        evaluation = RunningEvaluation(q_values, streams, episodes, seed=seed, epsilon=epsilon)
        mp4 = stack.enter_context(Mp4Writer(video, streams.screens_per_s)) if video else None
        if spectator is not None:
            spectator.begin(streams.screens_per_s, streams.action_names)
        while True:
            moment = evaluation.moment() if seen else None
            if mp4 is not None and moment is not None:
                for frame in moment.screens:
                    mp4.add(frame)
            left = spectator is not None and moment is not None and not spectator.see(moment)
            if evaluation.done or left:
                return evaluation.result()
            evaluation.do_work()
            if progress is not None:
                progress(evaluation.played)


class Evaluator:
    """The role: an evaluation of the newest parameters every `period_s`, a step at a time.

    Args:
        report: called with the returns, the parameters' version, and the run's counters at the
            time when these parameters were taken.
        totals: gives the run's counters.
    """

    def __init__(
        self,
        policy: Acting,
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
        self._evaluation: RunningEvaluation | None = None
        self._at: dict[str, float] = {}
        metrics.enter("idle")

    def do_work(self) -> int:
        """One step of the current evaluation. Returns 0 while none is due."""
        if self._evaluation is None and not self._begin():
            self._metrics.enter("idle")  # this also shows that the role is alive
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
        """Whether an evaluation is due and there are new parameters for it."""
        return self._clock_s() >= self._due_s and self._parameters.version > self._version

    def close(self) -> None:
        """Stop; an unfinished evaluation is dropped."""
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
        self._evaluation = RunningEvaluation(
            self._policy.q_values,
            self._streams,
            self._episodes,
            seed=self._seed,
            epsilon=self._epsilon,
        )
        return True
