"""Settings: checked when constructed, and unchanged by TOML."""

import dataclasses
import json
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zapex.config.fields import flag_of, parse_count
from zapex.config.settings import FIELDS, SECTIONS, Config, flatten, merged
from zapex.errors import ConfigError


def test_defaults_are_the_papers_values() -> None:
    config = Config()
    assert (config.replay.n_step, config.replay.gamma) == (3, 0.99)
    assert (config.replay.alpha, config.replay.beta) == (0.6, 0.4)
    assert (config.replay.capacity, config.replay.learning_starts) == (2_000_000, 50_000)
    assert config.learner.batch_size == 512
    assert config.learner.target_period == 2_500
    assert config.learner.lr == 0.00025 / 4
    assert config.learner.max_grad_norm == 40
    assert config.actor.param_period == 400
    assert (config.actor.eps_base, config.actor.eps_alpha) == (0.4, 7.0)


def test_field_names_are_unique_over_all_sections() -> None:
    names = [spec.name for kind in SECTIONS.values() for spec in dataclasses.fields(kind)]
    assert sorted(names) == sorted(FIELDS)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"batch_size": 0}, ("at least 1", "0")),
        ({"lr": 0.0}, ("more than 0", "0.0")),
        ({"lr": float("nan")}, ("finite", "nan")),
        ({"gamma": 1.5}, ("at most 1", "1.5")),
        ({"actors": True}, ("whole number", "True")),
        ({"actors": 2.0}, ("whole number", "2.0")),
        ({"inline": 1}, ("true or false", "1")),
        ({"exp": 3}, ("text", "3")),
        ({"optimiser": "sgd"}, ("'rmsprop', 'adam', 'adam-rel'", "'sgd'")),
        ({"stop_at_return": "high"}, ("finite number", "'high'")),
        ({"env": " "}, ("' '",)),
        ({"env_kwargs": {"a": object()}}, (" a ", "object")),
        ({"env_kwargs": [1]}, ("table", "[1]")),
    ],
)
def test_a_bad_value_is_refused_with_setting_rule_and_value(
    values: dict[str, Any], says: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config().replace(**values)
    (name,) = values
    said = str(caught.value)
    assert all(text in said for text in (flag_of(name), *says)), said


def test_an_unknown_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'bach_size'; did you mean batch_size\?"):
        Config().replace(bach_size=3)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"capacity": 1_000}, "--learning-starts"),
        ({"learning_starts": 100}, "--batch-size"),
        ({"capacity": 40_000_000}, "slots"),
        ({"samples_per_insert": 8.0, "samples_per_insert_tolerance": 99}, "at least 8,704"),
        ({"stop_at_return": 30.0}, "--eval-period-s"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(values: dict[str, Any], said: str) -> None:
    merged(vars(Config()), values)  # each by itself is good
    with pytest.raises(ConfigError) as caught:
        Config().replace(**values)
    assert said in str(caught.value)


def test_an_unknown_table_or_a_key_in_the_wrong_one_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'lerner'; did you mean learner\?"):
        flatten({"lerner": {}})
    with pytest.raises(ConfigError, match=r"'lr' belongs in the table \[learner\]"):
        flatten({"replay": {"lr": 1.0}})
    with pytest.raises(ConfigError, match="got 'lr'"):
        flatten({"lr": 1.0})


def test_counts_in_a_file_may_be_text() -> None:
    assert Config.from_dict({"replay": {"capacity": "200k"}}).replay.capacity == 200_000


def test_settings_that_a_file_leaves_out_keep_their_values() -> None:
    base = Config().replace(lr=1.0, seed=7)
    config = base.replace(**flatten({"learner": {"batch_size": 64}}))
    assert (config.learner.lr, config.learner.batch_size, config.run.seed) == (1.0, 64, 7)


# A learner in another test may have told the processor to flush subnormal numbers to zero.
floats = st.floats(allow_nan=False, allow_subnormal=False)
plain = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | floats | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(
    kwargs=st.dictionaries(st.text(), plain, max_size=3),
    exp=st.from_regex(r"[\w.+=@-]+", fullmatch=True),
    lr=st.floats(1e-12, 1e3, allow_subnormal=False),
    seed=st.integers(0, 2**63 - 1),
    target=st.none() | st.floats(-1e9, 1e9, allow_subnormal=False),
)
def test_toml_round_trips(
    kwargs: dict[str, Any], exp: str, lr: float, seed: int, target: float | None
) -> None:
    config = Config().replace(
        env_kwargs=kwargs, exp=exp, lr=lr, seed=seed, stop_at_return=target, eval_period_s=1.0
    )
    assert Config.from_dict(tomllib.loads(config.to_toml())) == config
    assert Config.from_dict(config.to_dict()) == config


def test_settings_of_one_invocation_are_not_saved() -> None:
    text = Config().replace(run_dir="runs/a", resume="runs/b").to_toml()
    assert "runs/" not in text


def test_hosts_may_differ_only_in_local_and_replay_settings() -> None:
    config = Config()
    local = config.replace(learner_threads=4, run_dir="elsewhere", device="cuda", plain=True)
    assert local.shared() == config.shared()
    larger = config.replace(capacity=9_000_000, samples_per_insert=8)
    assert larger.shared() == config.shared()
    assert larger.shared(replays=True) != config.shared(replays=True)
    other = config.replace(gamma=0.5, n_step=1)
    assert other.shared() == {**config.shared(), "gamma": 0.5, "n_step": 1} != config.shared()


def test_a_whole_number_and_its_float_are_the_same_setting() -> None:
    whole, fraction = (Config().replace(gamma=gamma).shared() for gamma in (1, 1.0))
    assert json.dumps(whole) == json.dumps(fraction)


def test_a_chunk_always_holds_an_n_step_return() -> None:
    config = Config().replace(capacity=600, learning_starts=512, actors=1, n_step=5)
    assert config.chunk_transitions == 5  # 600 // (16 x 16 streams) alone would be 2
    assert config.slots == 120 + 2 * 16 + 8


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("200k", 200_000),
        ("2e5", 200_000),
        ("10M", 10_000_000),
        ("1.5m", 1_500_000),
        (".5k", 500),
        ("50_000", 50_000),
        ("-3", -3),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_counts_may_have_suffixes(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "0.1e0", "1e99", "inf", "nan", "1 k", "1kk", "٣"])
def test_other_texts_are_not_counts(text: str) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        parse_count(text)


@pytest.mark.parametrize("values", [{"quantiles": 8}, {"share_trunk": True}])
def test_what_only_nature_has_is_refused_for_other_networks(values: dict[str, Any]) -> None:
    Config().replace(**values)
    with pytest.raises(ConfigError, match=r"--network nature.* impala"):
        Config().replace(network="impala", **values)
