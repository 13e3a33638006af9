"""A short form of the differential twin: some plays at each place, the same ones every time."""

import pytest

from tests.library.twin import PLACES, play


@pytest.mark.parametrize("place", PLACES)
def test_the_replay_gives_back_what_its_twin_holds(place):
    # A call over the network takes longer.
    plays, calls = {"owner": (2, 30), "handle": (2, 30), "url": (1, 20)}[place]
    for seed in range(plays):
        assert play(seed, place, calls) > 50
