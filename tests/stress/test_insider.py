"""An insider with a host's key takes nothing from the others."""

from collections.abc import Iterator

import pytest

from tests.stress.insider import LIES, Attack
from zapex.net import keys as curve_keys

SLOW = [pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("zmtp", "fstack")]


@pytest.fixture(scope="module", params=["tcp", *SLOW])
def attack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attack]:
    keys = tmp_path_factory.mktemp("insider") / "keys"
    curve_keys.make(keys)
    made = Attack(keys, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_counted_and_the_honest_go_on(attack: Attack, name: str) -> None:
    attack.tell(name)


def test_false_priorities_win_no_more_than_their_share_of_the_samples(attack: Attack) -> None:
    assert attack.win(batches=300) < 1.25


def test_in_the_end_nothing_honest_is_lost_and_a_newcomer_comes_in(attack: Attack) -> None:
    # Another process of the test run may have told some of them, to its own world.
    for name in LIES.keys() - attack.told.keys():
        attack.tell(name)
    found = attack.world.settle()
    assert found["chunks"] > 100
    assert 0 < found["told"] < sum(found["counts"].values())
    assert len(LIES) >= 30
