"""Actors that ask one worker, as with `--inference central`: the memory between them, and its ends.

Each number of actors and environments has its own exchange in the memory, so a worker that still
answers the last trial's actors meets no other. Nobody waits for long: a worker may die.
"""

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from zapex.envs.environments import EnvironmentSpec
from zapex.errors import PeerTimeout
from zapex.machine.exchange import Exchange, ExchangeShape
from zapex.machine.segment import Segment
from zapex.machine.waiting import Waiter, Waker

if TYPE_CHECKING:
    from zapex.agent.policy import Acting

_WORDS = 16  # two cache lines for each worker's word
_ANSWER_S = 60.0
_LOOK_S = 0.05


class Desk:
    """The memory: a word and an eventfd for each worker, and an exchange for each kind of trial."""

    def __init__(
        self, segment: Segment, spec: EnvironmentSpec, kinds: Sequence[tuple[int, int]],
        eventfds: Sequence[int],
    ) -> None:  # fmt: skip
        """kinds: actors and environments of each."""
        self.segment, self._spec, self.kinds, self.eventfds = segment, spec, kinds, eventfds
        self._offsets, self.nbytes = self._layout(spec, kinds, len(eventfds))
        self._words = segment.buffer[: 8 * _WORDS * len(eventfds)].view(np.int64)

    @classmethod
    def create(cls, spec: EnvironmentSpec, kinds: Sequence[tuple[int, int]]) -> Self:
        """New memory, for the most workers of these kinds and one that answers."""
        workers = 1 + max(actors for actors, _ in kinds)
        fds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(workers)]
        segment = Segment.create("zapex-balance", cls._layout(spec, kinds, workers)[1])
        desk = cls(segment, spec, kinds, fds)
        for kind in kinds:
            desk._exchange(*kind, create=True)
        return desk

    @staticmethod
    def _shape(spec: EnvironmentSpec, actors: int, envs: int) -> ExchangeShape:
        dtype = np.dtype(spec.observation_dtype).str
        return ExchangeShape(actors, envs, tuple(spec.observation_shape), dtype, spec.num_actions)

    @classmethod
    def _layout(
        cls, spec: EnvironmentSpec, kinds: Sequence[tuple[int, int]], workers: int
    ) -> tuple[dict[tuple[int, int], int], int]:
        offsets, end = {}, 8 * _WORDS * workers
        for kind in kinds:
            offsets[kind] = end
            end += -(-cls._shape(spec, *kind).nbytes // 64) * 64
        return offsets, end

    def _exchange(self, actors: int, envs: int, create: bool = False) -> Exchange:
        place = self.segment.buffer[self._offsets[actors, envs] :]
        return Exchange(place, self._shape(self._spec, actors, envs), create=create)

    def _waker(self, worker: int) -> Waker:
        return Waker(self._words, worker * _WORDS, self.eventfds[worker])

    def _waiter(self, worker: int) -> Waiter:
        return Waiter(self._words, worker * _WORDS, self.eventfds[worker])

    def asking(self, actor: int, actors: int, envs: int) -> "Asking":
        """What an actor computes with. The worker behind the last actor answers."""
        return Asking(self, self._exchange(actors, envs), actor, actors)

    def answering(self, policy: "Acting", actors: int, envs: int) -> "Answering":
        """Answers these actors from now on, until it is closed."""
        return Answering(self, self._exchange(actors, envs), policy, actors)

    def close(self) -> None:
        """Free it; only its creator does."""
        for fd in self.eventfds:
            os.close(fd)
        self.segment.close()


class Asking:
    """A policy whose values another worker computes."""

    def __init__(self, desk: Desk, exchange: Exchange, actor: int, server: int) -> None:
        self._asker = exchange.asker(actor, desk._waker(server).wake)
        self._wait = desk._waiter(actor).wait

    def load_flat(self, buffer: Any) -> None:
        """Nothing: who answers has the parameters."""

    def q_values(self, obs: NDArray[Any]) -> NDArray[np.float32]:
        """Q values, float32 (S, num_actions). Raises PeerTimeout if nobody answers."""
        self._asker.ask(obs)
        self._wait(self._asker.answered, _ANSWER_S)
        answer = self._asker.take()
        if answer is None:
            raise PeerTimeout(f"no answer of the inference worker within {_ANSWER_S:g} s")
        return answer[0]


class Answering:
    """A thread that answers whoever waits, as the inference role does."""

    def __init__(self, desk: Desk, exchange: Exchange, policy: "Acting", actors: int) -> None:
        self._answerer = exchange.answerer([desk._waker(i).wake for i in range(actors)])
        self._policy, self._waiter = policy, desk._waiter(actors)
        self.passes = self.answers = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        find = self._answerer.find
        while not self._stop.is_set():
            if not self._waiter.wait(lambda: len(find()) > 0, _LOOK_S):
                continue
            places = find()
            self._answerer.answer(self._policy.q_values(self._answerer.items(places)), 1)
            self.passes += 1
            self.answers += len(places)

    def close(self) -> None:
        """Stop after the present answer."""
        self._stop.set()
        self._thread.join(_ANSWER_S)
