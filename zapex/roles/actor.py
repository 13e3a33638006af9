"""The actor: plays its streams in lockstep and commits their experience in chunks."""

from collections.abc import Callable, Generator, Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from zapex.agent.policy import epsilon_greedy
from zapex.chunks.builder import ChunkBuilder
from zapex.envs.streams import Step, Streams
from zapex.host.metrics import EPISODE, RoleMetrics
from zapex.transport import ExperienceSink, ValueSource


class Actor:
    """One step of every stream is one duty cycle.

    The forward pass that chooses the next actions also gives max Q(s'). That completes the initial
    priorities |R + discount * max Q(s') - Q(s, a)| of the transitions that end at s', so a second
    pass is not needed (Horgan et al. 2018, appendix).

    Args:
        streams: the environments.
        values: gives the Q values.
        sink: takes the chunks.
        builder: fills them.
        metrics: of the role.
        report: takes finished episodes (dtype EPISODE).
        epsilons: float64 (S,).
        first_stream: the number of its first stream in the run.
        reward_clip: clip rewards to [-1, 1] in the chunks.
        priorities: whether it gives any.
        rng: chooses actions.
        anneal: the epsilon of all streams after so many steps of this actor, instead of `epsilons`.
        cut_exploratory: end n-step returns before an action that is not the greedy one.
        may_step: asked before each step; once it is false the actor waits for its end.
        clock_ns: the time at an episode's end.
    """

    def __init__(
        self,
        streams: Streams,
        values: ValueSource,
        sink: ExperienceSink,
        builder: ChunkBuilder,
        metrics: RoleMetrics,
        report: Callable[[NDArray[np.void]], object],
        *,
        epsilons: NDArray[np.float64],
        first_stream: int,
        reward_clip: bool,
        priorities: bool,
        rng: np.random.Generator,
        anneal: Callable[[float], float] | None = None,
        cut_exploratory: bool = False,
        may_step: Callable[[], bool] = lambda: True,
        clock_ns: Callable[[], int],
    ) -> None:
        self._streams, self._values, self._sink = streams, values, sink
        self._builder, self._metrics = builder, metrics
        self._report, self._epsilons, self._first_stream = report, epsilons, first_stream
        self._reward_clip = reward_clip
        self._priorities, self._rng, self._clock_ns = priorities, rng, clock_ns
        self._cut_exploratory = cut_exploratory
        self._anneal, self._may_step = anneal, may_step
        self._version = 0
        self._awaits: Literal["", "values", "slots", "end"] = ""
        self._game = self._play()
        self._everyone = np.ones(streams.num_streams, np.bool_)
        metrics.enter("other")

    def do_work(self) -> int:
        """One step, or the rest of one. Returns 0 while there are no values or no credit, and once
        it may not step."""
        return next(self._game)

    def ready(self) -> bool:
        """Whether values or slots may have come: for `wait(ready, timeout_s)`."""
        if self._awaits == "values":
            return self._values.answered()
        return self._sink.ready() if self._awaits == "slots" else self._awaits != "end"

    def close(self) -> None:
        """Commit unfinished chunks, and stop. A step without its values is not in them."""
        if self._awaits != "slots":
            self._builder.flush()
            self._sink.commit(self._builder.take_closed())
        self._metrics.leave()

    def _play(self) -> Iterator[int]:
        """All games. Yields after each step, and 0 wherever the actor must wait."""
        streams, builder = self._streams, self._builder
        obs = streams.reset()
        q = yield from self._look(obs)
        waited = yield from self._store(lambda: builder.begin(self._everyone, {"obs": obs}))
        while True:
            if not waited:
                yield streams.num_streams
            while not self._may_step():
                self._metrics.enter("wait")
                self._awaits = "end"
                yield 0
            if self._anneal is not None:
                self._epsilons = np.full(len(q), self._anneal(self._metrics.value("steps")))
            actions = epsilon_greedy(q, self._epsilons, self._rng)
            self._metrics.enter("environment")
            step = streams.step(actions)
            next_q = yield from self._look(step.obs)
            waited = yield from self._push(step, actions, q, next_q)
            q = next_q

    def _look(self, obs: NDArray[np.generic]) -> Generator[int, None, NDArray[np.float32]]:
        """The values of all streams' newest observations; yields 0 until they have come."""
        self._metrics.enter(self._values.phase)
        self._values.ask(obs)
        while (answer := self._values.take()) is None:
            self._metrics.enter(self._values.phase)
            self._awaits = "values"
            yield 0
        self._awaits = ""
        q, version = answer
        if version != self._version:
            self._version = version
            self._metrics.set("params_version", version)
        return q

    def _push(
        self,
        step: Step,
        actions: NDArray[np.int64],
        q: NDArray[np.float32],
        next_q: NDArray[np.float32],
    ) -> Generator[int, None, bool]:
        """Store a step. q, next_q: values before and after it. Returns whether it waited."""
        self._metrics.enter("push")
        values = explored = None
        if self._priorities:
            values = np.empty((2, len(actions)))
            values[0] = q[np.arange(len(actions)), actions]
            values[1] = next_q.max(axis=1)
        if self._cut_exploratory:
            explored = q[np.arange(len(actions)), actions] < q.max(axis=1)
        self._count(step)
        builder, obs = self._builder, {"obs": step.obs}
        reward = step.reward.astype(np.float64)
        if self._reward_clip:
            np.clip(reward, -1.0, 1.0, out=reward)
        builder.staged["action"] = actions
        waited = yield from self._store(
            lambda: builder.add(
                obs,
                reward,
                step.terminated,
                step.truncated,
                cut=step.life_lost,
                exploratory=explored,
                values=values,
            )
        )
        if step.started.any():
            waited |= yield from self._store(lambda: builder.begin(step.started, obs))
        return waited

    def _store(self, write: Callable[[], int]) -> Generator[int, None, bool]:
        """Repeat `write` with more slots until all streams are stored, and commit full chunks.

        Yields 0 while there is no credit. Returns whether it waited.
        """
        builder, sink, metrics = self._builder, self._sink, self._metrics
        self._awaits, waited = "slots", False
        while True:
            done = write() == self._streams.num_streams
            closed = builder.take_closed()
            if len(closed):
                sink.commit(closed)
                metrics.add("chunks", len(closed))
            if done:
                self._awaits = ""
                return waited
            while (slots := sink.try_claim()) is None:
                if not waited:
                    waited = True
                    metrics.add("credit_waits")
                metrics.enter("wait")
                yield 0
            builder.provide(slots)

    def _count(self, step: Step) -> None:
        metrics, streams = self._metrics, self._streams
        steps = streams.num_streams - int(step.started.sum())
        metrics.add("steps", steps)
        metrics.add("transitions", steps)
        metrics.add("frames", steps * streams.spec.frames_per_step)
        if not streams.finished:
            return
        records = np.zeros(len(streams.finished), EPISODE)
        for record, episode in zip(records, streams.finished, strict=True):
            record["stream"] = self._first_stream + episode.stream
            record["epsilon"] = self._epsilons[episode.stream]
            record["game_return"] = episode.game_return
            record["steps"], record["frames"] = episode.steps, episode.frames
            record["time_ns"], record["params_version"] = self._clock_ns(), self._version
        metrics.add("episodes", len(records))
        self._report(records)
