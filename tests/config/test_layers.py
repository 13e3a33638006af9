"""Settings in layers: the later one wins, and each value keeps the reason of its layer."""

import pytest

from zapex.config.layers import Choice, Layers, explain
from zapex.config.words import did_you_mean
from zapex.errors import ConfigError


def test_a_later_layer_wins_and_a_value_keeps_the_reason_of_the_layer_that_changed_it() -> None:
    layers = Layers({"lr": Choice(0.5, "preset"), "seed": Choice(1, "preset")})
    assert layers.put({"lr": 0.5, "hidden": 64, "gamma": 0.99}, "file") == {"hidden"}
    assert layers.put({"hidden": 32}, "flag") == {"hidden"}
    config = layers.config()
    assert (config.learner.lr, config.learner.hidden, config.run.seed) == (0.5, 32, 1)
    assert layers.chosen == {
        "lr": Choice(0.5, "preset"),
        "seed": Choice(1, "preset"),
        "hidden": Choice(32, "flag"),
    }
    assert "--hidden   32  flag" in explain(layers.chosen)


def test_each_value_is_checked_at_once_and_all_of_them_together() -> None:
    layers = Layers({})
    with pytest.raises(ConfigError, match="--lr"):
        layers.put({"lr": -1.0}, "flag")
    with pytest.raises(ConfigError, match=r"did you mean lr\?"):
        layers.put({"lrr": 1.0}, "flag")
    layers.put({"capacity": 100}, "flag")
    with pytest.raises(ConfigError, match="--learning-starts"):
        layers.config()


@pytest.mark.parametrize(
    ("name", "names", "near"),
    [
        ("--lrr", ["--lr", "--seed"], "--lr"),
        ("num_envs", ["envs_per_actor", "actors"], "envs_per_actor"),
        ("--port", ["--listen"], "--listen"),
        ("--port", ["--replay"], "--replay"),
        ("frobnicate", ["train", "eval"], ""),
    ],
)
def test_did_you_mean(name: str, names: list[str], near: str) -> None:
    assert did_you_mean(name, names) == (f"; did you mean {near}?" if near else "")
