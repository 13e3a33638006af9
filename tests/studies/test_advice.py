"""What follows from a balance, and the file that `--actors auto` finds."""

import dataclasses
import json

import pytest

from zapex.cli import main as cli
from zapex.cli.resolve import actors_auto as taken
from zapex.cli.resolve import resolve
from zapex.config.settings import Config
from zapex.envs import environments
from zapex.machine.gpu import Gpu
from zapex.machine.resources import Machine
from zapex.studies import advice, figure
from zapex.studies.saturation import Model

SPEC = environments.check("CartPole-v1", {})
H200 = Gpu("NVIDIA H200", 141 << 30, (9, 0), "570", "12.8", True, "", "", 132)
MODEL = Model(1e-3, 2.5e-4, 0.01, 1.0, 16)


def result(device, rates, models=None, cpu_watts=None, gpu_watts=None, foreign=0.0):
    point = {
        "do": "together", "where": "cpu", "actors": 1, "envs": 8, "cores": 1, "held_out": False,
        "steps_per_s": 1.0, "cpu_watts": cpu_watts, "gpu_watts": gpu_watts,
    }  # fmt: skip
    return {
        "points": [point, {**point, "do": "play"}, {**point, "do": "play", "held_out": True}],
        "models": {w: dataclasses.asdict(m) for w, m in (models or {"cpu": MODEL}).items()},
        "held_out_error": 0.04,
        "learner": {
            "paced": device == "paced", "device": device, "batch_size": 512,
            "batches_per_s_by_threads": rates,
        },
        "kernels": {},
        "foreign_share": foreign,
        "power": {"cpu": "" if cpu_watts else "the kernel has no powercap zones", "gpu": ""},
    }  # fmt: skip


def test_a_fast_gpu_asks_for_more_cores_than_there_are_and_actors_are_the_limit():
    found = result("cuda", {1: 800.0}, cpu_watts=200.0, gpu_watts=300.0)
    machine = Machine(16, 2**36, 1, gpu=H200)
    advised = advice.advise(found, Config(), SPEC, machine, 16)
    assert (advised.limit, advised.actors, advised.cores) == ("actors", 14, 14)
    envs = advised.envs_per_actor
    assert envs == MODEL.enough_envs()
    assert advised.threads_needed == MODEL.cores_for(800 * 512 / 8, envs) > 14
    assert advised.cores_per_learner == advised.threads_needed
    assert advised.threads_per_sm == advised.threads_needed / 132
    assert advised.machine_threads_per_sm == 16 / 132
    assert advised.frames_per_joule == pytest.approx(MODEL.rate(14, envs, 14) / 500)
    text = "\n".join(advice.lines(found, advised))
    assert f"{advised.threads_needed} cores per GPU" in text
    assert "hardware threads per SM (this machine has 0.121)" in text
    assert f"use: --actors 14 --envs-per-actor {envs}" in text
    assert "WARNING" not in text


def test_a_slow_learner_gets_as_many_actors_as_keep_it_busy_and_no_more():
    found = result("cpu", {1: 20.0, 2: 21.0})
    advised = advice.advise(found, Config(), SPEC, Machine(16, 2**36, 0), 16)
    assert advised.limit == "learner"
    assert advised.actors == advised.threads_needed
    more = MODEL.rate(advised.actors, advised.envs_per_actor, advised.actors)
    assert more >= advised.batches_per_s * 512 / 8
    assert advised.frames_per_joule is None
    assert "not readable here (the kernel has no powercap zones)" in "\n".join(
        advice.lines(found, advised)
    )


def test_the_learners_threads_are_those_that_leave_enough_cores_to_the_actors():
    rates = {1: 10.0, 2: 18.0, 4: 30.0, 8: 31.0}
    plenty = Config().replace(samples_per_insert=64)
    few = Config().replace(samples_per_insert=0.4)
    machine = Machine(8, 2**36, 0)
    assert advice.advise(result("cpu", rates), plenty, SPEC, machine, 8).learner_threads == 4
    assert advice.advise(result("cpu", rates), few, SPEC, machine, 8).learner_threads <= 2


def test_on_one_core_there_is_one_actor_beside_the_learner():
    advised = advice.advise(result("cpu", {1: 5.0}), Config(), SPEC, Machine(1, 2**34, 0), 1)
    assert (advised.actors, advised.learner_threads) == (1, 1)


def test_actors_compute_where_they_are_faster():
    models = {"cpu": MODEL, "gpu": Model(3e-4, 1e-4, 0.01, 1.0, 16)}
    found = result("cuda", {1: 800.0}, models)
    machine = Machine(16, 2**36, 1, gpu=H200)
    advised = advice.advise(found, Config(), SPEC, machine, 16)
    assert advised.inference == "gpu"
    assert "--inference gpu" in "\n".join(advice.lines(found, advised))


def test_one_role_for_all_may_be_the_fastest_place():
    models = {"cpu": MODEL, "central": Model(3e-4, 1e-4, 0.01, 1.0, 16)}
    found = result("cuda", {1: 800.0}, models)
    advised = advice.advise(found, Config(), SPEC, Machine(16, 2**36, 1, gpu=H200), 16)
    assert advised.inference == "central"
    assert "--inference central" in "\n".join(advice.lines(found, advised))


def test_a_busy_machine_and_a_given_time_are_told():
    found = result("paced", {0: 5.5}, foreign=0.4)
    advised = advice.advise(found, Config(), SPEC, Machine(4, 2**34, 0), 4)
    text = "\n".join(advice.lines(found, advised))
    assert "its time was given, not measured" in text
    assert "other processes took up to 40% of the cores" in text


def report(quick=False, actors=3):
    found, machine = result("cpu", {1: 20.0}), Machine(16, 2**36, 0)
    advised = advice.advise(found, Config(), SPEC, machine, 16)
    advised = dataclasses.replace(advised, actors=actors, envs_per_actor=24)
    when = "2026-11-22T10:00:00+00:00"
    return advice.report_of(found, advised, Config(), machine, when, quick), advised


def test_a_result_is_kept_and_a_quick_one_never_takes_the_place_of_a_whole_one(tmp_path):
    path = tmp_path / "a" / "b.json"
    assert advice.kept(path) is None
    for quick, actors, wanted in ((True, 3, 3), (True, 4, 4), (False, 5, 5), (True, 6, 5)):
        advice.keep(path, report(quick, actors)[0])
        assert advice.kept(path)["advice"]["actors"] == wanted


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"advice": {}}', '{"quick": false, "time": "x", "advice": {"actors": 0}}',
     '{"quick":false,"time":1,"advice":{"actors":1,"envs_per_actor":1,"inference":"cpu"}}',
     '{"quick":false,"time":"","advice":{"actors":1e9,"envs_per_actor":1,"inference":"cpu"}}',
     '{"quick":false,"time":"","advice":{"actors":1,"envs_per_actor":1,"inference":"x; rm"}}'],
)  # fmt: skip
def test_a_damaged_result_is_none(tmp_path, text):
    path = tmp_path / "balance.json"
    path.write_text(text)
    assert advice.kept(path) is None


@pytest.mark.parametrize(
    ("words", "rest", "found"),
    [("--actors auto --lr 1", "--lr 1", True), ("X --actors=auto", "X", True),
     ("--actors 4 --device auto", "--actors 4 --device auto", False),
     ("--device auto --actors 2", "--device auto --actors 2", False)],
)  # fmt: skip
def test_the_word_auto_is_taken_only_from_actors(words, rest, found):
    assert taken(words.split()) == (rest.split(), found)


def keep_for(args):
    run = resolve(args, "train", "")
    from zapex.cli.resolve import cache_directory

    advice.keep(advice.kept_at(cache_directory(), run.config, run.spec, run.machine), report()[0])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_actors_auto_uses_what_was_found_for_this_environment_and_network(cache):
    keep_for(["CartPole-v1"])
    run = resolve(["CartPole-v1", "--actors", "auto"], "train", "")
    assert (run.config.actor.actors, run.config.actor.envs_per_actor) == (3, 24)
    assert run.chosen["actors"].reason == "`zapex balance`, 2026-11-22"
    given = resolve(["CartPole-v1", "--actors", "auto", "--envs-per-actor", "5"], "train", "")
    assert (given.config.actor.actors, given.config.actor.envs_per_actor) == (3, 5)
    other = resolve(["CartPole-v1", "--actors", "auto", "--hidden", "77"], "train", "")
    assert "`zapex balance CartPole-v1` has not run here" in other.chosen["actors"].reason
    preset = resolve(["CartPole-v1", "--hidden", "77"], "train", "")
    assert other.config.actor.actors == preset.config.actor.actors


def test_a_replays_host_has_no_auto(capsys):
    assert cli.main(["replay", "--listen", "tcp://127.0.0.1:1", "--actors", "auto"]) == 2
    assert "--actors: a count must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "mend"),
    [("--learner-ms -1", "--learner-ms must be 0"), ("--figure a.pdf", "must end in .png"),
     ("--json nowhere/a.json", "does not exist")],
)  # fmt: skip
def test_a_mistake_in_the_flags_is_one_line(words, mend, capsys):
    assert cli.main(["balance", "CartPole-v1", *words.split()]) == 2
    assert mend in capsys.readouterr().err


def test_the_figure_is_a_png(tmp_path):
    made, advised = report()
    figure.draw(json.loads(json.dumps(made)), advised, 16, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
