"""The table of `make atari57`."""

from typing import Any

from benchmarks.learning import each_game


def run_of(game: str, score: float, frames: float = 2e6) -> dict[str, Any]:
    return {
        "env": f"ALE/{game}-v5", "minutes": 20, "final_returns": [score],
        "curve": [[60.0, 1e6, None], [120.0, frames, score]],
    }  # fmt: skip


def test_a_game_counts_with_its_run_of_the_most_frames() -> None:
    runs = {"long": run_of("Pong", 14.6), "short": run_of("Pong", -20.7, 1.5e6)}
    _, pong, *_ = each_game(runs)
    assert pong[:6] == ("Pong", "20", "2.0", "14.6", "1.00", "1.00")


def test_a_failed_run_and_a_game_that_dopamine_lacks_do_not_count() -> None:
    runs = {"a": run_of("Pong", -3.05), "b": run_of("Defender", 2_874.5)}
    _, defender, _, median, middle = each_game(runs | {"c": {"failed": "no memory"}})
    assert defender[4:] == ("0.00", "0.00", "", "")
    assert median[0] == "median of 1 games"
    assert median[4:6] == middle[4:6] == ("0.50", "0.50")
