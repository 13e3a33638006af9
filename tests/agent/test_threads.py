"""The trial of threads, and threads that follow idle cores, on a simulated clock."""

import pytest

from zapex.agent.threads import IdleCores, fastest


class Machine:
    """A step takes `seconds[threads]`."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.now_s, self.threads, self.tried = seconds, 0.0, 0, []

    def set_threads(self, threads: int) -> None:
        self.threads = threads
        self.tried.append(threads)

    def step(self) -> None:
        self.now_s += self.seconds[self.threads]

    def fastest(self, most: int) -> int:
        return fastest(self.step, most, set_threads=self.set_threads, clock_s=lambda: self.now_s)


@pytest.mark.parametrize(
    ("seconds", "most", "best"),
    [
        ({1: 0.1}, 1, 1),
        ({1: 0.1, 2: 0.06, 4: 0.04, 6: 0.03}, 6, 6),
        ({1: 0.1, 2: 0.06, 4: 0.06}, 8, 2),  # four gain nothing: eight are not tried
        ({1: 0.1, 2: 0.2}, 47, 1),  # beside busy actors
    ],
)
def test_the_fastest_number_of_threads_is_set(
    seconds: dict[int, float], most: int, best: int
) -> None:
    machine = Machine(seconds)
    assert machine.fastest(most) == best
    assert machine.threads == best


def test_the_trial_ends_after_about_a_second() -> None:
    machine = Machine({1: 0.4, 2: 0.2, 4: 0.1})
    assert machine.fastest(64) == 1
    assert machine.tried == [1, 1]


class Run:
    """A learner on a machine of `cores`, whose actors want so many of them.

    Every further thread adds `gain` threads' speed, and uses `use` of a core.
    """

    def __init__(
        self, cores: int = 2, actors: float = 0.0, gain: float = 0.9, use: float = 1.0
    ) -> None:
        self.cores, self.actors, self.gain, self.use = cores, actors, gain, use
        self.now_s = self.idle_s = self.used_s = 0.0
        self.threads, self.tried = 1, []
        self.team = IdleCores(
            1,
            cores,
            idle_s=lambda: self.idle_s,
            used_s=lambda: self.used_s,
            set_threads=self.set_threads,
            clock_s=lambda: self.now_s,
        )

    def set_threads(self, threads: int) -> None:
        self.threads = threads
        self.tried.append(threads)

    def learn(self, seconds: float, share: float = 1.0) -> None:
        """Learn for so long, `share` of the time."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            has = min(self.threads, self.cores - min(self.actors, self.cores / 2))
            took_s = 0.1 / (1 + self.gain * (has - 1)) / share
            self.now_s += took_s
            used = share * (1 + self.use * (has - 1))
            self.used_s += used * took_s
            self.idle_s += max(0.0, self.cores - self.actors - used) * took_s
            self.team.look()


def test_a_core_goes_back_to_actors_that_need_it() -> None:
    run = Run(actors=0.2)
    run.learn(30)
    run.actors = 1.0
    run.learn(30)
    assert run.tried == [2, 1]
    run.actors = 0.2
    run.learn(30)
    assert run.tried == [2, 1, 2]


@pytest.mark.parametrize(
    ("options", "share", "tried"),
    [
        ({"actors": 0.2}, 1.0, [2]),
        ({"actors": 1.0}, 1.0, []),  # no core idles
        ({"actors": 0.5}, 0.5, []),  # the learner waits for batches
        ({"actors": 0.3, "gain": 0.2, "use": 0.4}, 1.0, [2]),  # its threads wait for each other
        ({"actors": 2.0, "cores": 6}, 1.0, [2, 3, 4]),
        ({"cores": 3}, 1.0, [2, 3]),
    ],
)
def test_an_idle_core_becomes_a_thread_of_a_busy_learner(
    options: dict[str, float], share: float, tried: list[int]
) -> None:
    run = Run(**options)  # type: ignore[arg-type]
    run.learn(200, share)
    assert run.tried == tried


def test_a_thread_that_gains_nothing_is_given_back_and_retried_after_minutes() -> None:
    run = Run(actors=0.2, gain=0.02)
    run.learn(200)
    assert run.tried == [2, 1]
    run.learn(300)
    assert run.tried == [2, 1, 2, 1]
