"""`zapex simulate`: its lines, files and refusals; times come from a file, but for one test."""

import json
from dataclasses import asdict

import pytest

pytest.importorskip("simpy", reason="pip install simpy")

from tests.studies.test_simulation import TIMES
from zapex.cli import main as cli

WORDS = ["--env", "CartPole-v1", "--preset", "smoke", "--actor-steps", "2000", "--learner-ms", "20"]


@pytest.fixture
def times(tmp_path):
    path = tmp_path / "times.json"
    sizes = {"chunk_bytes": 2_600, "batch_bytes": 39_000}
    path.write_text(json.dumps({"times": asdict(TIMES), "sizes": sizes}))
    return str(path)


def simulate(*words):
    return cli.main(["simulate", *WORDS, *words])


def test_a_settings_file_is_simulated_printed_written_and_drawn(tmp_path, times, capsys):
    assert cli.main(["config", *WORDS[:4], "--batch-size", "64"]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    files = {name: str(tmp_path / f"s.{name}") for name in ("json", "png")}
    words = ["--times", times, "--most-actors", "30", "--json", files["json"]]
    words += ["--figure", files["png"], "--want-steps", "100k", "--want-batches", "20"]
    assert cli.main(["simulate", str(tmp_path / "run.toml"), *WORDS[4:], *words]) == 0
    said = capsys.readouterr().out
    assert "an actor plays 2,000 steps/s, a learner's step takes 20 ms: as given" in said
    assert "buy: " in said
    report = json.loads((tmp_path / "s.json").read_text())
    assert [point["actors"] for point in report["points"]] == [1, 2, 5, 10, 20, 30]
    assert report["points"][0]["steps_per_s"] == pytest.approx(2_000, rel=0.05)
    assert report["cluster"]["batch"] == 64
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    # A result serves as the times of another.
    assert simulate("--times", files["json"], "--most-actors", "1") == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--shards", "0"], "--shards must be 1 to 64, got 0"),
        (["--host-gbit", "-1"], "--host-gbit must be 0 or more"),
        (["--figure", "x.pdf"], "--figure must end in .png"),
        (["--json", "nowhere/x.json"], "a directory that does not exist"),
        (["--times", "nowhere.json"], "--times nowhere.json cannot be read: No such file"),
        (["--times", "x", "--measure"], "give one of both"),
        (["--want-stepps", "3"], "did you mean --want-steps?"),
        (["--most-actors", "0"], "--most-actors must be 1 to 100,000"),
    ],
)
def test_a_mistake_is_one_line(words, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert simulate(*words) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert why in said[0]


@pytest.mark.parametrize("change", [{"insert_s": -1}, {"insert_s": "1"}, {"more": 1}, {}])
def test_a_file_that_holds_no_times_is_refused(change, tmp_path, capsys):
    path = tmp_path / "times.json"
    sizes = {"chunk_bytes": 2_600, "batch_bytes": 0}
    path.write_text(json.dumps({"times": {**asdict(TIMES), **change}, "sizes": sizes}))
    assert simulate("--times", str(path)) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.slow
def test_times_are_measured_here_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for source in ("measured here now", "measured here before"):
        assert simulate("--most-actors", "2", "--json", str(tmp_path / "s.json")) == 0
        assert source in capsys.readouterr().out
    times = json.loads((tmp_path / "s.json").read_text())["times"]
    # sample_s is in row_s; hop_s is what is left of a round trip.
    for name, value in times.items():
        assert 0 < value < 0.1 or (value == 0 and name in ("sample_s", "hop_s")), name
