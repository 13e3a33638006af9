"""The trial of threads, on a clock that only its steps move."""

import pytest

from zapex.agent.threads import fastest


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
def test_the_fastest_team_is_taken_and_set(seconds: dict[int, float], most: int, best: int) -> None:
    machine = Machine(seconds)
    assert machine.fastest(most) == best
    assert machine.threads == best


def test_the_trial_ends_after_about_a_second() -> None:
    machine = Machine({1: 0.4, 2: 0.2, 4: 0.1})
    assert machine.fastest(64) == 1
    assert machine.tried == [1, 1]
