"""The parent's side of the workers: they are started, told what to do together, and ended."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Self

from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.errors import PeerDied, PeerTimeout
from zapex.machine.child import PARENT_VARIABLE, thread_environment
from zapex.studies.central import Desk

_PREPARED_S = 300.0  # torch, the games and kernels to compile, for many at the same time
_LATE_S = 60.0  # after the end of its work
_LEAD_S = 0.05  # from the last "ready" to the common beginning


class Crew:
    """Workers, numbered from 0; started when they are first needed."""

    def __init__(
        self, config: Config, spec: EnvironmentSpec, kinds: Sequence[tuple[int, int]] = ()
    ) -> None:
        """kinds: actors and environments of each trial in which one worker answers the others."""
        self._config, self._spec = config, spec
        self._desk = Desk.create(spec, kinds) if kinds else None
        self._workers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.communicate()
        if self._desk is not None:
            self._desk.close()

    def work(
        self,
        orders: Sequence[dict[str, Any]],
        seconds: float,
        begun: Callable[[], object] = lambda: None,
    ) -> list[dict[str, Any]]:
        """Give an order to each of the first workers; they begin and end together.

        begun: called when all have prepared and begin.
        Raises PeerDied or PeerTimeout for a worker that fails or does not answer.
        """
        while len(self._workers) < len(orders):
            self._start()
        told = list(zip(self._workers, orders, strict=False))
        for worker, order in told:
            self._tell(worker, json.dumps({**order, "seconds": seconds, "warm_up_s": seconds / 4}))
        for worker, _ in told:
            self._answer(worker, _PREPARED_S)
        begin_s = time.monotonic() + _LEAD_S
        for worker, _ in told:
            self._tell(worker, str(begin_s))
        begun()
        return [self._answer(worker, seconds + _LATE_S) for worker, _ in told]

    def _start(self) -> None:
        number = len(self._workers)
        config, desk = self._config, self._desk
        fds = [] if desk is None else [desk.segment.fd, *desk.eventfds]
        about = {
            "config": config.to_dict(), "spec": asdict(self._spec), "number": number,
            "desk": desk and {"fd": fds[0], "eventfds": fds[1:], "kinds": desk.kinds},
        }  # fmt: skip
        threads = max(config.actor.actor_threads, config.learner.learner_threads, 1)
        self._workers.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "zapex.studies.worker", json.dumps(about)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                pass_fds=fds,
                env={
                    **os.environ,
                    **thread_environment(threads),
                    PARENT_VARIABLE: str(os.getpid()),
                },
            )
        )

    def _tell(self, worker: subprocess.Popen[str], line: str) -> None:
        assert worker.stdin is not None
        try:
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
        except BrokenPipeError:
            raise PeerDied(f"a worker ended with status {worker.wait(_LATE_S)}") from None

    def _answer(self, worker: subprocess.Popen[str], patience_s: float) -> Any:
        assert worker.stdout is not None
        if not select.select([worker.stdout], [], [], patience_s)[0]:
            raise PeerTimeout(f"a worker has not answered within {patience_s:g} s")
        line = worker.stdout.readline()
        if not line:
            raise PeerDied(f"a worker ended with status {worker.wait(_LATE_S)}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise PeerDied(f"a worker failed: {answer['error']}")
        return answer
