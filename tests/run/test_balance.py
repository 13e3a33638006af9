"""`zapex balance`: what follows from its measurements, and the file that `--actors auto` finds."""

import json
from pathlib import Path
from typing import Any

import pytest

from zapex.cli import balance as command
from zapex.cli import main as cli
from zapex.cli.resolve import cache_directory, resolve
from zapex.config.settings import Config
from zapex.machine.gpu import Gpu
from zapex.machine.resources import Machine
from zapex.run import balance
from zapex.run.balance import Rates, advise, count_for, knee, rate_at

H200 = Gpu("NVIDIA H200", 141 << 30, (9, 0), "570", "12.8", True, "", "", 132)
LINEAR = {1: 1000.0, 2: 2000.0, 4: 4000.0, 8: 8000.0, 16: 16000.0}


def advice_of(rates: Rates, learned: Rates, device: str, cores: int, **settings: Any) -> Any:
    machine = Machine(cores, 2**36, int(device == "cuda"), gpu=H200 if device == "cuda" else None)
    config = Config().replace(batch_size=512, **settings)
    return advise({"cpu": rates}, {"cpu": 16}, learned, device, config, machine, cores)


def test_rates_are_read_between_the_points_and_beyond_them() -> None:
    assert rate_at(LINEAR, 3) == 3000
    assert rate_at(LINEAR, 32) == 32_000
    assert rate_at({1: 10.0}, 2) == 20
    assert count_for(LINEAR, 2500) == 3
    assert count_for(LINEAR, 20_000) == 20
    assert count_for({1: 1000.0, 2: 900.0}, 2000) is None


def test_the_knee_is_where_doubling_gains_less_than_a_tenth() -> None:
    assert knee({1: 100.0, 2: 180.0, 4: 250.0, 8: 260.0, 16: 262.0}) == 4
    assert knee({1: 100.0, 8: 700.0, 32: 710.0}) == 8
    assert knee({1: 100.0, 2: 200.0}) == 2


def test_a_fast_gpu_needs_more_cores_than_there_are_and_actors_are_the_limit() -> None:
    found = advice_of(LINEAR, {1: 800.0}, "cuda", 16)
    assert (found.limit, found.actors, found.envs_per_actor) == ("actors", 14, 16)
    assert found.threads_needed == 52  # 800 * 512 / 8 = 51,200 steps/s
    assert found.threads_per_sm == 52 / 132
    assert found.machine_threads_per_sm == 16 / 132


def test_a_slow_learner_gets_as_many_actors_as_keep_it_busy_and_no_more() -> None:
    found = advice_of(LINEAR, {1: 40.0, 2: 41.0}, "cpu", 16)
    assert (found.limit, found.actors, found.threads_needed) == ("learner", 3, 3)


def test_the_learners_threads_leave_enough_cores_to_the_actors() -> None:
    learned = {1: 10.0, 2: 18.0, 4: 30.0, 8: 31.0}
    rates = {n: 1000.0 * n for n in (1, 2, 4, 8)}
    assert advice_of(rates, learned, "cpu", 8, samples_per_insert=64).learner_threads in (4, 8)
    assert advice_of(rates, learned, "cpu", 8, samples_per_insert=0.4).learner_threads <= 2
    assert advice_of({1: 1000.0}, {1: 5.0}, "cpu", 1).actors == 1


def report(quick: bool = False, actors: int = 3) -> dict[str, Any]:
    advice = {"actors": actors, "envs_per_actor": 24, "inference": "cpu"}
    return {"quick": quick, "time": "2026-11-22T10:00:00+00:00", "advice": advice}


def test_quick_result_never_replaces_a_full_one(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    assert balance.kept(path) is None
    for quick, actors, wanted in ((True, 3, 3), (True, 4, 4), (False, 5, 5), (True, 6, 5)):
        balance.keep(path, report(quick, actors))
        kept = balance.kept(path)
        assert kept is not None
        assert kept["advice"]["actors"] == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"quick": false, "time": "x", "advice": {"actors": 0}}',
        '{"quick":false,"time":"","advice":{"actors":1e9,"envs_per_actor":1,"inference":"cpu"}}',
        '{"quick":false,"time":"","advice":{"actors":1,"envs_per_actor":1,"inference":"x; rm"}}',
    ],
)
def test_a_damaged_result_is_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "balance.json"
    path.write_text(text)
    assert balance.kept(path) is None


def test_actors_auto_uses_the_result_for_this_environment_and_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = resolve(["CartPole-v1"], "balance", "", command.BalanceOptions)
    path = balance.kept_at(cache_directory(), run.config, run.spec, run.machine)
    balance.keep(path, report())
    auto = resolve(["CartPole-v1", "--actors", "auto"], "train", "")
    assert (auto.config.actor.actors, auto.config.actor.envs_per_actor) == (3, 24)
    assert "2026-11-22" in auto.chosen["actors"].reason
    given = resolve(["CartPole-v1", "--actors", "auto", "--envs-per-actor", "5"], "train", "")
    assert (given.config.actor.actors, given.config.actor.envs_per_actor) == (3, 5)
    other = resolve(["CartPole-v1", "--actors", "auto", "--hidden", "77"], "train", "")
    assert "has not run here" in other.chosen["actors"].reason


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--learner-ms -1", "--learner-ms"),
        ("--figure a.pdf", "a.pdf"),
        ("--json no/a.json", "no/"),
        ("--max-minutes 1", "--max-minutes"),
    ],
)
def test_a_wrong_flag_is_named(words: str, names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["balance", "CartPole-v1", *words.split()]) == 2
    assert names in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_real_one_measures_both_alone_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = {name: str(tmp_path / f"b.{name}") for name in ("json", "png")}
    words = ["CartPole-v1", "--preset", "smoke", "--quick", "--json", files["json"]]
    assert cli.main(["balance", *words, "--figure", files["png"]]) == 0
    out = capsys.readouterr().out
    for words_of in ("in balance at 8 samples per insert: ", "use: --actors ", "together: "):
        assert words_of in out
    found = json.loads(Path(files["json"]).read_text())
    assert found["together"]["steps_per_s"] > 0
    assert found["together"]["batches_per_s"] > 0
    assert all(0 <= point["cpu_share"] <= 1 for point in found["points"])
    assert Path(files["png"]).read_bytes().startswith(b"\x89PNG")
