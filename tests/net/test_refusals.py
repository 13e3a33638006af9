"""What an operator is told of peers that send impossible values: little, but never nothing."""

from tests.support.transport_rigs import Memory, NetworkReplay, layout_of, nothing_left_open
from zapex.net.sessions import Session

__all__ = ["nothing_left_open"]  # a fixture of every test here


def test_refusals_are_told_at_most_every_five_seconds_and_the_last_one_is_told_too() -> None:
    now_s, lines = [0.0], list[str]()
    replay = NetworkReplay(
        Memory(layout_of(100, 2), 1), "tcp://127.0.0.1:0",
        tell=lines.append, clock_s=lambda: now_s[0],
    )  # fmt: skip
    insider = Session("relay", 1, 1, 0.0, "10.0.0.7", actors=(3,))
    for what in ("a reward", "a discount", "an action"):
        replay.server.refuse(insider, what)
    assert lines == ["the relay of actor 3 at 10.0.0.7 sent a reward: refused"]
    now_s[0] = 4.9
    replay.turn()
    assert len(lines) == 1
    now_s[0] = 5.1
    replay.turn()
    assert lines[1:] == [
        "the relay of actor 3 at 10.0.0.7 sent an action: refused (1 more since the last line)"
    ]
    now_s[0] = 20.0
    replay.turn()
    assert len(lines) == 2
    assert replay.server.counts["lies"] == 3
