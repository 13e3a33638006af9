"""The actor: plays its streams in lockstep and commits their experience in chunks."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from zapex.agent.exploration import epsilon_greedy
from zapex.chunks.builder import CUT, END, ChunkBuilder
from zapex.envs.streams import Step, Streams
from zapex.host.metrics import EPISODE, RoleMetrics
from zapex.transport import ExperienceSink, ValueSource


class Actor:
    """One step of every stream is one duty cycle.

    The forward pass that chooses the next actions also gives max Q(s'). That completes the initial
    priorities |R + discount * max Q(s') - Q(s, a)| of the transitions that end at s', so a second
    pass is not needed (Horgan et al. 2018, appendix).

    values: gives the Q values. epsilons: float64 (S,). anneal: the epsilon of all streams after so
    many steps of this actor, in place of `epsilons`. priorities: whether it gives any. report:
    takes finished episodes (dtype EPISODE).
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
        clock_ns: Callable[[], int],
    ) -> None:
        self._streams, self._values, self._sink = streams, values, sink
        self._builder, self._metrics = builder, metrics
        self._report, self._epsilons, self._first_stream = report, epsilons, first_stream
        self._reward_clip = reward_clip
        self._priorities, self._rng, self._clock_ns = priorities, rng, clock_ns
        self._anneal = anneal
        self._version = 0
        self._q: NDArray[np.float32] | None = None  # of the streams' newest observations
        self._then: Callable[[NDArray[np.float32]], object] | None = None  # with the values asked
        # The unfinished calls of a step: the first one waits for slots.
        self._left: list[Callable[[], int]] = []
        shape = streams.num_streams
        self._everyone = np.ones(shape, np.bool_)
        self._flags = np.zeros(shape, np.int64)
        metrics.enter("other")

    def do_work(self) -> int:
        """One step, or the rest of one. Returns 0 while there are no values or no credit."""
        if self._then is not None:
            return self._go_on(self._then)
        if not self._finish():
            return 0
        if self._q is None:
            obs = self._streams.reset()
            return self._look(obs, lambda q: self._begin(obs))
        return self._act(self._q)

    def ready(self) -> bool:
        """Whether values or slots may have come: for `wait(ready, timeout_s)`."""
        if self._then is not None:
            return self._values.answered()
        return self._sink.ready() if self._left else True

    def close(self) -> None:
        """Commit unfinished chunks, and stop. A step without its values is not in them."""
        if not self._left:
            self._builder.flush()
            self._sink.commit(self._builder.take_closed())
        self._metrics.leave()

    def _look(self, obs: NDArray[np.generic], then: Callable[[NDArray[np.float32]], object]) -> int:
        """Ask for the values of all streams' newest observations; with them go on with `then`."""
        self._metrics.enter(self._values.phase)
        self._values.ask(obs)
        self._then = then
        return self._go_on(then)

    def _go_on(self, then: Callable[[NDArray[np.float32]], object]) -> int:
        answer = self._values.take()
        if answer is None:
            self._metrics.enter(self._values.phase)
            return 0
        self._then = None
        q, version = answer
        if version != self._version:
            self._version = version
            self._metrics.set("params_version", version)
        then(q)
        self._q = q
        return 0 if self._left else self._streams.num_streams

    def _begin(self, obs: NDArray[np.generic]) -> None:
        self._finish(lambda: self._builder.begin(self._everyone, {"obs": obs}))

    def _act(self, q: NDArray[np.float32]) -> int:
        if self._anneal is not None:
            self._epsilons = np.full(len(q), self._anneal(self._metrics.value("steps")))
        actions = epsilon_greedy(q, self._epsilons, self._rng)
        self._metrics.enter("environment")
        step = self._streams.step(actions)
        return self._look(step.obs, lambda new: self._push(step, actions, q, new))

    def _push(
        self, step: Step, actions: NDArray[np.int64], q: NDArray[np.float32],
        new: NDArray[np.float32],
    ) -> None:  # fmt: skip
        """Hand the step on. q, new: values before and after it."""
        self._metrics.enter("push")
        taken = best = None
        if self._priorities:
            taken = q[np.arange(len(actions)), actions].astype(np.float64)
            best = new.max(axis=1).astype(np.float64)
        self._count(step)
        self._builder.staged["action"] = actions
        begun = bool(step.started.any())
        playing = ~step.started if begun else self._everyone
        reward = step.reward.astype(np.float64)
        if self._reward_clip:
            np.clip(reward, -1.0, 1.0, out=reward)
        flags = self._flags
        flags[:] = CUT * (step.terminated | step.life_lost)
        flags[step.terminated | step.truncated] |= END

        def add() -> int:
            return self._builder.add(
                playing, flags, {"obs": step.obs}, reward, value=taken, next_value=best
            )

        def begin() -> int:
            return self._builder.begin(step.started, {"obs": step.obs})

        self._finish(add, *([begin] if begun else []))

    def _finish(self, *calls: Callable[[], int]) -> bool:
        """Make the unfinished calls of the builder, then `calls`. Returns whether all are done."""
        builder, sink = self._builder, self._sink
        waited = bool(self._left)
        self._left += calls
        while self._left:
            done = self._left[0]() == self._streams.num_streams
            closed = builder.take_closed()
            if len(closed):
                sink.commit(closed)
                self._metrics.add("chunks", len(closed))
            if done:
                self._left.pop(0)
                continue
            slots = sink.try_claim()
            if slots is None:
                if not waited:
                    self._metrics.add("credit_waits")
                self._metrics.enter("wait")
                return False
            builder.provide(slots)
        return True

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
