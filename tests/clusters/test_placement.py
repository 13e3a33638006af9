"""Where hosts are placed: mistakes of a table, the table of hosts, what would be submitted."""

import shlex
import subprocess
from pathlib import Path

import pytest

from zapex.cli import main as cli
from zapex.clusters.host import published, url_name
from zapex.clusters.launched import Launched, adapter_of, launch, settings_of, summary
from zapex.clusters.placement import Host, place
from zapex.clusters.slurm import Slurm
from zapex.errors import ConfigError

RUN = '[env]\nenv = "CartPole-v1"\n[run]\npreset = "laptop"\n'


def mistake(table: str) -> str:
    """What is said of a settings file with this table."""
    with pytest.raises(ConfigError) as caught:
        place("slurm", "a", Path("/nowhere"), RUN + table)
    return str(caught.value)


def test_a_mistake_in_a_table_is_told_with_the_nearest_name() -> None:
    assert mistake("[slurm]\nminuts = 3").endswith("'minuts'; did you mean minutes?")
    said = mistake("[slurm]\nactor = { host = 3 }")
    assert said == "[slurm] actor has no setting 'host'; did you mean hosts?"
    assert mistake("[slurm]\nactor = { hosts = 0 }").startswith("[slurm] actor hosts must be at")
    assert mistake("[slurm]\nreplay = 3") == "[slurm] replay must be a table, got 3"
    assert mistake("[kubernets]").endswith("got 'kubernets'; did you mean kubernetes?")
    # Also in the table of another scheduler, and by any command that reads the file.
    assert "[ray] has no setting 'wait'" in mistake("[ray]\nwait = 3")


def test_the_same_file_is_for_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN + "[slurm]\nminutes = 3\n[ray]\n")
    assert cli.main(["config", "--config", str(path)]) == 0
    assert "slurm" not in capsys.readouterr().out
    path.write_text(RUN + "[slurm]\nminuts = 3\n")
    assert cli.main(["train", "--config", str(path)]) == 2
    assert "did you mean minutes?" in capsys.readouterr().err


def test_the_table_of_hosts_counts_the_actors_of_all_hosts() -> None:
    table = "[slurm]\nactor = { hosts = 3, cores = 8 }\nlearner = { gpus = 1 }"
    placement = place("slurm", "a", Path("/shared"), RUN + table)
    replay, learner, actor = placement.groups
    assert (actor.hosts, actor.actors) == (3, 7)  # a core is the relay's
    words = placement.command(replay)
    assert words[words.index("--actors") + 1] == "21"
    assert "--actors" not in placement.command(learner)
    assert learner.gpus == 1
    both = place("slurm", "a", Path("/shared"), RUN + table + "\nwith_learner = true")
    assert [group.name for group in both.groups] == ["replay", "actor"]
    assert both.command(both.groups[0])[:2] == ["replay", "--with-learner"]
    assert both.groups[0].gpus == 1


def test_a_table_with_shards_has_so_many_replay_hosts_and_each_knows_which_it_is() -> None:
    table = "[slurm]\nshards = 3\nactor = { hosts = 2, cores = 5 }"
    placement = place("slurm", "a", Path("/shared"), RUN + table)
    replay, learner, actor = placement.groups
    assert (replay.hosts, learner.hosts, actor.hosts) == (3, 1, 2)
    words = placement.command(replay)
    assert words[words.index("--shards") :][:4] == ["--shards", "3", "--shard", "{index}"]
    assert words[words.index("--actors") + 1] == "8"  # every actor may move to any of them
    assert "--shards" not in placement.command(actor)
    assert placement.facts()["shards"] == 3
    assert placement.facts()["cores"]["actor"] == 5
    scripts = Slurm(placement).text()
    assert "#SBATCH --array=0-2" in scripts
    assert "with_learner is for one replay" in mistake("[slurm]\nshards = 2\nwith_learner = true")
    assert "shards must be at" in mistake("[slurm]\nshards = 0")


def test_hosts_wait_for_the_addresses_of_all_shards(tmp_path: Path) -> None:
    facts = {"shards": 2}
    assert published(tmp_path, facts) == ""
    (tmp_path / url_name(0)).write_text("tcp://a:1\n")
    assert published(tmp_path, facts) == ""
    (tmp_path / url_name(1)).write_text("tcp://b:2\n")
    assert published(tmp_path, facts) == "tcp://a:1,tcp://b:2"
    assert published(tmp_path, {}) == "tcp://a:1"


def test_too_little_memory_for_the_settings_is_told_before_anything_is_submitted() -> None:
    run = '[env]\nenv = "ALE/Breakout-v5"\n[replay]\ncapacity = 2_000_000\n'
    table = "[slurm]\nreplay = { memory_gb = 4 }"
    with pytest.raises(
        ConfigError, match=r"\[slurm\] replay memory_gb is 4, and .* need about 2\d"
    ):
        place("slurm", "a", Path("/nowhere"), run + table)


def test_a_dry_run_prints_the_scripts_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    table = '[slurm]\nminutes = 60\noptions = "--account=a"\nsetup = "module load x"\n'
    path.write_text(RUN + table + 'actor = { hosts = 4, options = "--partition=cpu" }\n')
    home = tmp_path / "a run"
    words = ["launch", str(path), "--dry-run", "--name", "n", "--dir", str(home)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert not home.exists()
    for line in (
        "--array=0-3", "--requeue", "--signal=B:USR1@120", "--time=60", "--account=a",
        "--partition=cpu", "--job-name=zapex-n-actor",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in said
    assert said.count("--account=a") == 3
    assert said.count("--partition=cpu") == 1
    assert "module load x\nexec " in said
    assert shlex.quote(str(home)) in said
    script = said.split("# sbatch --parsable, from standard input: actor\n")[1]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        ('setup = "if"', "setup is no shell script"),
        ('options = "-p x"', "options must be like --name"),
        ('options = "\'"', "cannot be read"),
    ],
)
def test_a_script_that_cannot_run_is_refused_offline(table: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        adapter_of(place("slurm", "a", Path("/x"), f"{RUN}[slurm]\n{table}\n")).text()


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a" * 41])
def test_a_name_that_a_scheduler_would_refuse_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--name must be small letters"):
        place("slurm", name, Path("/x"), RUN + "[slurm]")


def test_a_missing_scheduler_and_a_run_that_was_never_submitted_are_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin-without-slurm:/bin")
    monkeypatch.setattr("zapex.clusters.slurm._check_syntax", lambda script: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch is not here"):
        launch({"env": {"env": "CartPole-v1"}, "slurm": {}}, "slurm", directory=tmp_path / "run")
    assert (tmp_path / "run" / "keys" / "replay.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="was made and never submitted"):
        Launched.find(tmp_path / "run")
    with pytest.raises(ConfigError, match="is not a launched run"):
        Launched.find(tmp_path)


def test_hosts_that_wait_for_the_same_are_one_line() -> None:
    waiting = [Host("actor", i, "pending", why="Resources", waited_s=40) for i in range(3)]
    lines = summary([Host("replay", 0, "running", "n1"), *waiting])
    assert lines == [
        "replay 0: running on n1",
        "actor 0: pending for 40 s: Resources (and 2 more of actor)",
    ]


def test_settings_from_python_are_the_same_as_a_file(tmp_path: Path) -> None:
    tables = {"env": {"env": "CartPole-v1"}, "slurm": {"minutes": 3, "actor": {"hosts": 2}}}
    placement = place("slurm", "a", tmp_path, settings_of(tables))
    assert placement.table.minutes == 3
    assert placement.groups[-1].hosts == 2
