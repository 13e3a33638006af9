"""Placements: mistakes in a table, the hosts, what would be submitted."""

import dataclasses
import json
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from zapex.cli import main as cli
from zapex.clusters import placement, ray, slurm
from zapex.clusters.host import publish, published
from zapex.clusters.placement import Host, Launched, launch, summary
from zapex.clusters.slurm import sbatch_word
from zapex.errors import ConfigError, ZapexError

RUN = '[env]\nenv = "CartPole-v1"\n[run]\npreset = "laptop"\n'


def place(table: str, name: str = "a", directory: str = "/nowhere", run: str = RUN) -> Launched:
    """A run of SLURM that is not submitted."""
    return placement.place(tomllib.loads(run + table), "slurm", name, directory)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("[slurm]\nminuts = 3", ["[slurm]", "'minuts'; did you mean minutes?"]),
        ("[slurm]\nactor = { host = 3 }", ["[slurm] actor", "'host'; did you mean hosts?"]),
        ("[slurm]\nactor = { hosts = 0 }", ["[slurm] actor hosts", "at least 1, got 0"]),
        ("[slurm]\nreplay = 3", ["[slurm] replay must be a table, got 3"]),
        ("[kubernets]", ["'kubernets'; did you mean kubernetes?"]),
        ("[ray]\nwait = 3", ["[ray]", "'wait'"]),  # also in the table of another scheduler
        ("[slurm]\nshards = 2\nwith_learner = true", ["with_learner", "shards = 2"]),
        ("[slurm]\nshards = 0", ["shards must be at least 1"]),
    ],
)
def test_a_mistake_in_a_table_names_table_and_setting(table: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        place(table)
    assert all(text in str(caught.value) for text in says), caught.value


def test_other_commands_read_the_same_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN + "[slurm]\nminutes = 3\n[ray]\n")
    assert cli.main(["config", "--config", str(path)]) == 0
    assert "slurm" not in capsys.readouterr().out
    path.write_text(RUN + "[slurm]\nminuts = 3\n")
    assert cli.main(["train", "--config", str(path)]) == 2
    assert "did you mean minutes?" in capsys.readouterr().err


def test_the_replay_counts_the_actors_of_all_hosts() -> None:
    table = "[slurm]\nactor = { hosts = 3, cores = 8 }\nlearner = { gpus = 1 }"
    replay, learner, actor = place(table).placement.groups.values()
    assert actor.hosts == 3
    assert "--actors 7 " in shlex.join(actor.command)  # one core is for the relay
    assert "--actors 21 " in shlex.join(replay.command)
    assert "--actors" not in learner.command
    assert (replay.gpus, learner.gpus) == (0, 1)
    both = place(table + "\nwith_learner = true").placement
    assert list(both.groups) == ["replay", "actor"]
    assert both.ends == "replay"
    assert both.group("replay").command[:2] == ("replay", "--with-learner")
    assert (both.group("replay").gpus, both.group("replay").cores) == (1, 4)


def test_each_shard_is_a_host_and_knows_its_number() -> None:
    table = "[slurm]\nshards = 3\nactor = { hosts = 2, cores = 5 }"
    run = place(table)
    replay, learner, actor = run.placement.groups.values()
    assert (replay.hosts, learner.hosts, actor.hosts) == (3, 1, 2)
    # Every actor may move to any of them.
    assert "--actors 8 --shards 3 --shard '{index}'" in shlex.join(replay.command)
    assert "--shards" not in actor.command
    assert "#SBATCH --array=0-2" in run.text()


def test_hosts_wait_for_the_addresses_of_all_shards(tmp_path: Path) -> None:
    publish(tmp_path, 0, "tcp://a:1")
    assert published(tmp_path, 2) == ""
    publish(tmp_path, 1, "tcp://b:2")
    assert published(tmp_path, 2) == "tcp://a:1,tcp://b:2"
    assert published(tmp_path, 1, 1) == "tcp://b:2"


def test_too_little_memory_for_the_settings_is_refused() -> None:
    run = '[env]\nenv = "ALE/Breakout-v5"\n[replay]\ncapacity = 2_000_000\n'
    table = "[slurm]\nreplay = { memory_gb = 4 }"
    with pytest.raises(ConfigError, match=r"\[slurm\] replay memory_gb is 4, and .* about 2\d"):
        place(table, run=run)


def dry_run(capsys: pytest.CaptureFixture[str], home: Path, table: str) -> str:
    """What `zapex launch --dry-run` prints."""
    path = home.parent / "run.toml"
    path.write_text(RUN + "[slurm]\n" + table)
    words = ["launch", str(path), "--dry-run", "--name", "n", "--dir", str(home)]
    assert cli.main(words) == 0
    assert not home.exists()
    return capsys.readouterr().out


def test_a_dry_run_prints_the_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = 'minutes = 60\noptions = "--account=a"\nsetup = "module load x"\n'
    actor = 'actor = { hosts = 4, options = "--partition=cpu" }\n'
    said = dry_run(capsys, tmp_path / "home", table + actor)
    for line in (
        "--array=0-3", "--requeue", "--signal=B:USR1@120", "--time=60", "--account=a",
        "--partition=cpu", "--job-name=zapex-n-actor",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in said
    assert (said.count("--account=a"), said.count("--partition=cpu")) == (3, 1)
    assert "module load x\nexec " in said


@pytest.mark.parametrize("name", ["a run", "INDEX", 'it\'s #1 "x"', "100%a $HOME `date`"])
def test_a_script_starts_the_host_with_any_directory(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / name
    said = dry_run(capsys, home, "actor = { hosts = 2 }\n")
    script = said.split("# sbatch --parsable, from standard input: actor\n")[1]
    # Bash runs the script with a program that prints its words in the place of Python.
    words = "exec() { shift; printf '%s\\n' \"$@\"; }\n" + script.replace("#!/bin/bash", "")
    env = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "7", "PATH": "/bin:/usr/bin"}
    printed = subprocess.run(
        ["bash", "-c", words], capture_output=True, text=True, env=env, timeout=60, check=True
    ).stdout.splitlines()
    assert printed[-6:] == [str(home), "actor", "1", "scontrol", "requeue", "7"]
    output = next(line for line in script.splitlines() if "--output=" in line)
    (word,) = sbatch_words(output.removeprefix("#SBATCH "))
    assert word.replace("%%", "%") == f"--output={home}/logs/actor-%a.job"


def sbatch_words(line: str) -> list[str]:
    """The words that sbatch finds in an #SBATCH line (_get_argument in its src/sbatch/opt.c)."""
    words, quote, escaped = [""], "", False
    for letter in line:
        if escaped or not (letter in "\\#" or letter == quote or (not quote and letter in " '\"")):
            words[-1] += letter
            escaped = False
        elif letter == "\\":
            escaped = True
        elif letter == "#":
            break  # a comment
        elif letter == " ":
            words.append("")
        else:
            quote = "" if quote else letter
    return words


def test_an_option_of_sbatch_is_quoted_and_has_no_line_break() -> None:
    assert sbatch_word("--time=3") == "--time=3"
    assert sbatch_word(r'--comment=a "b" \ #') == r'"--comment=a \"b\" \\ \#"'
    with pytest.raises(ConfigError, match="line break"):
        sbatch_word("--comment=a\n#SBATCH --uid=0")


def test_a_directory_with_a_line_break_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--dir"):
        place("[slurm]", directory="/a\n#SBATCH --uid=0")


@pytest.mark.parametrize(
    ("table", "setting"),
    [('setup = "if"', "setup"), ('options = "-p x"', "options"), ('options = "\'"', "options")],
)
def test_a_script_that_cannot_run_is_refused(table: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[slurm\] {setting}"):
        place(f"[slurm]\n{table}\n").text()


@pytest.mark.parametrize("name", ["A", "a_b", "-a", "a-", "a" * 41])
def test_a_name_that_a_scheduler_would_refuse_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        place("[slurm]", name)


class Scheduler:
    """Stands in for SLURM's commands: what they were called with, and their answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.refuses = ""
        monkeypatch.setattr(slurm, "tool", self)

    def __call__(self, *words: str, given: str = "") -> str:
        self.calls.append(words)
        if words[0] == self.refuses:
            raise ZapexError(f"{words[0]} refuses: no such partition")
        return str(40 + len(self.calls)) if words[0] == "sbatch" else ""


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    return Scheduler(monkeypatch)


def test_a_refused_launch_leaves_neither_directory_nor_keys_and_can_be_repeated(
    scheduler: Scheduler, tmp_path: Path
) -> None:
    tables: dict[str, Any] = {"env": {"env": "CartPole-v1"}, "slurm": {}}
    scheduler.refuses = "sbatch"
    with pytest.raises(ZapexError, match="no such partition"):
        launch(tables, "slurm", directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    scheduler.refuses = ""
    launch(tables, "slurm", directory=tmp_path / "run")
    assert (tmp_path / "run" / "keys" / "replay.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="exists"):
        launch(tables, "slurm", directory=tmp_path / "run")


def test_a_launched_run_is_found_again_without_importing_what_it_names(
    scheduler: Scheduler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = launch({"env": {"env": "CartPole-v1"}, "slurm": {}}, "slurm", directory=tmp_path / "run")
    settings = tmp_path / "run" / "run.toml"
    settings.write_text(settings.read_text().replace("CartPole-v1", "no_such_module:Env"))
    for command in (["status"], ["logs", "learner"], ["stop"]):
        assert cli.main([*command, str(tmp_path / "run")]) == 0
    assert capsys.readouterr().err == ""
    assert {"squeue", "sacct", "scancel"} <= {words[0] for words in scheduler.calls}
    assert Launched.find(tmp_path / "run").placement == run.placement


def test_a_ray_cluster_that_only_a_strangers_directory_names_is_not_connected_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connected: list[str] = []

    def connect(address: str) -> None:
        connected.append(address)
        raise ConfigError("no cluster")

    monkeypatch.setattr(ray, "_connected", connect)
    tables = {"env": {"env": "CartPole-v1"}, "ray": {"address": "evil:6379"}}
    run = placement.place(tables, "ray", "a", tmp_path / "run")
    placement.make_directory(run)
    dataclasses.replace(run.placement, ids={"address": "evil:6379"}).write(run.directory)
    for command in (["status"], ["logs", "actor"], ["stop"], ["launch", "--attach"]):
        assert cli.main([*command, str(run.directory)]) == 2
        assert "evil:6379" in capsys.readouterr().err
    assert connected == []
    assert cli.main(["status", str(run.directory), "--trust"]) == 2
    assert connected == ["evil:6379"]


@pytest.mark.parametrize(
    "change",
    [{"ids": {"learner": "--user=root"}}, {"on": "../x"}, {"name": "-n"}, {"groups": 3},
     {"ids": {}}, {"shards": "two"}, {"groups": {"learner": {"cores": -1}}}],
)  # fmt: skip
def test_a_strangers_launch_json_is_one_error_and_reaches_no_command(
    change: dict[str, Any], scheduler: Scheduler, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = launch({"env": {"env": "CartPole-v1"}, "slurm": {}}, "slurm", directory=tmp_path / "run")
    facts = dataclasses.asdict(run.placement) | change
    (tmp_path / "run" / "launch.json").write_text(json.dumps(facts))
    scheduler.calls.clear()
    for command in ("status", "stop"):
        assert cli.main([command, str(tmp_path / "run")]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert scheduler.calls == []


def test_hosts_that_wait_for_the_same_reason_are_one_line() -> None:
    waiting = [Host("actor", i, "pending", why="Resources", waited_s=40) for i in range(3)]
    lines = summary([Host("replay", 0, "running", "n1"), *waiting])
    assert lines == [
        "replay 0: running on n1",
        "actor 0: pending for 40 s: Resources (and 2 more of actor)",
    ]


def test_settings_from_python_are_the_same_as_a_file(tmp_path: Path) -> None:
    tables = {"env": {"env": "CartPole-v1"}, "slurm": {"minutes": 3, "actor": {"hosts": 2}}}
    run = placement.place(tables, "slurm", "a", tmp_path)
    assert (run.table.minutes, run.placement.group("actor").hosts) == (3, 2)
