"""The shell blocks of the documentation run as they are written, in a directory of their own.

Where a line would take minutes, the runner adds a limit that the line itself does not give.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.docs.test_blocks import PAGES, ROOT, blocks, lines_of
from tests.support.parts import free_port

NOT_RUN = {
    "CONTRIBUTING.md 1": "make: minutes",
    "README.md 1": "apt, and git clone; .ci/run makes the rest",
    "README.md 2": "an environment of .venv: the lines are those of docs/commands.md, which run",
    "benchmarks/README.md 1": "gigabytes of other libraries, and hours",
    "docs/clusters.md 1": "needs a scheduler: tests/scenarios/test_slurm.py starts one",
    "docs/compared.md 1": "gigabytes of other libraries",
    "docs/comparing.md 1": "twelve minutes of training: tests/scenarios/test_seeds.py",
    "docs/comparing.md 2": "pip's index",
    "docs/comparing.md 3": "the runs of the blocks before it; docs/commands.md compares two",
    "docs/fstack.md 1": "F-Stack, huge pages and a network card",
    "docs/fstack.md 2": "F-Stack, huge pages and a network card",
    "docs/fstack.md 3": "F-Stack, huge pages and a network card",
    "docs/install.md 1": "apt, and make venv, which takes minutes",
    "docs/install.md 2": "pip's index, and torch once more for each line",
    "docs/many_hosts.md 4": "a learner of a run elsewhere: tests/scenarios/test_cluster.py",
    "docs/paper.md 1": "takes an hour, and F-Stack: tests/benchmarks",
    "docs/releasing.md 1": "make release: tests/scenarios/test_index.py",
    "docs/watching.md 4": "pip's index, and an account at Weights & Biases",
}  # fmt: skip
"""Page and number of a block -> why nothing here runs it."""
LINES_NOT_RUN = {
    r"zapex demo\b": "a minute",
    r"zapex balance\b": "minutes: tests/run/test_balance.py",
    r"zapex train --actors auto": "what zapex balance has found",
    r"zapex bench\b": "make smoke",
    r"zapex watch --game": "a terminal: tests/scenarios/test_watching.py",
    r".* --terminal\b": "a terminal: tests/watch",
    r".* --render\b": "a display",
    r"tensorboard\b": "serves until it is stopped: tests/watch/test_dashboards.py",
}
"""Lines of blocks that are run -> why these are not."""
LINE_S = 170.0
SHORT = "--preset smoke --max-frames 2k --plain --eval-episodes 1"
"""What a line of training gets where it does not say so itself."""


def found() -> dict[str, str]:
    """Page and number -> text, of every shell block."""
    texts = {
        f"{page} {number}": block.text
        for page in PAGES for number, block in enumerate(blocks(page, "sh"), 1)
    }  # fmt: skip
    return texts


def why_not(line: str) -> str | None:
    return next((why for start, why in LINES_NOT_RUN.items() if re.match(start, line)), None)


def shortened(line: str) -> str:
    """The line with limits and other addresses, as far as it names none."""
    words = shlex.split(line.partition(" > ")[0])
    if words[:2] not in (["zapex", "train"], ["zapex", "learner"], ["zapex", "replay"]):
        return line
    if "--help" in line or "--schema" in words:
        return line
    limit = words.index("--max-frames") if "--max-frames" in words else 0
    if limit:
        words[limit + 1] = "2k"
    if "--stop-at-return" in words:
        words += ["--eval-period-s", "5"]
    resumed = "--resume" in words
    more = "--max-frames 4k --plain" if resumed else SHORT
    pairs = re.findall(r"(--[a-z-]+)((?: [^-][^ ]*)?)", more)
    config = {"--preset"} if "--config" in words else set()
    for flag, value in pairs:
        if flag not in words and flag not in config:
            words += [flag, *value.split()]
    return shlex.join(words)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with zapex on its PATH, in which runs of its own lie."""
    monkeypatch.chdir(tmp_path)
    commands = tmp_path / "bin"
    commands.mkdir()
    script = commands / "zapex"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m zapex "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@contextlib.contextmanager
def started(line: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command of a group of its own, of which nothing stays."""
    with log.open("ab") as out:
        one = subprocess.Popen(
            ["bash", "-c", line], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield one
    finally:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        one.wait(10)


def run(line: str, log: Path) -> None:
    """A command that must end with 0, in time."""
    with started(line, log) as one:
        try:
            code = one.wait(LINE_S)
        except subprocess.TimeoutExpired:
            code = None
    assert code == 0, f"{line}\nexit code {code}\n{log.read_text(errors='replace')[-6000:]}"


def prepare(lines: Sequence[str], place: Path) -> None:
    """The runs and files that the lines name and do not make."""
    text = "\n".join(lines)
    log = place / "prepared.log"
    names = set(re.findall(r"runs/[A-Z]+", text))
    if re.search("^zapex (runs|watch)$", text, re.M):
        names.add("runs/RUN")
    for name in sorted(names):
        run(f"zapex train CartPole-v1 {SHORT} --inline --run-dir {name}", log)
    if "--config run.toml" in text or "run.toml --" in text:
        (place / "run.toml").write_text('[env]\nenv = "CartPole-v1"\n')


def page_files(page: str) -> None:
    """The files that the page's own Python blocks are."""
    for block in blocks(page, "python"):
        if title := re.search(r'title="(.+?)"', block.info):
            Path(title[1]).write_text(block.text)


BY_THEMSELVES = [
    "docs/atari.md 1", "docs/atari.md 2", "docs/commands.md 1", "docs/install.md 3",
    "docs/own_env.md 1", "docs/own_network.md 1", "docs/python.md 1",
    "docs/quickstart.md 1", "docs/quickstart.md 2",
    "docs/repeatable.md 1", "docs/two_processes.md 1", "docs/watching.md 1", "docs/watching.md 2",
    "docs/watching.md 3",
]  # fmt: skip
"""Blocks whose lines run one after the other."""
TOGETHER = [
    "docs/many_hosts.md 1",
    "docs/many_hosts.md 2",
    "docs/many_hosts.md 3",
    "docs/several_hosts.md 1",
]
"""Blocks whose lines are of several hosts: they run at the same time."""
SERVERS = ["docs/two_processes.md 2"]
"""Blocks of one line that serves until it is stopped."""


def test_every_block_is_run_or_has_a_reason_and_no_reason_is_left_over() -> None:
    texts = found()
    listed = [*NOT_RUN, *BY_THEMSELVES, *TOGETHER, *SERVERS]
    assert len(set(listed)) == len(listed)
    assert set(texts) == set(listed)
    run_here = {*BY_THEMSELVES, *TOGETHER, *SERVERS}
    lines = [line for name in run_here for line in lines_of(texts[name])]
    for start in LINES_NOT_RUN:
        assert any(re.match(start, line) for line in lines), start


def test_limits_are_added_only_where_a_line_has_none() -> None:
    assert shortened("zapex runs") == "zapex runs"
    assert shortened("zapex train X --max-frames 50M --preset paper") == (
        "zapex train X --max-frames 2k --preset paper --plain --eval-episodes 1"
    )
    assert "--preset" not in shortened("zapex learner --config run.toml")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_the_commands_of_a_block_run_one_after_the_other(name: str, place: Path) -> None:
    lines = [line for line in lines_of(found()[name]) if not why_not(line)]
    assert lines
    page_files(name.split(maxsplit=1)[0])
    prepare(lines, place)
    log = place / "output.txt"
    for line in lines:
        run(placed(shortened(line)), log)


def placed(line: str) -> str:
    """The settings get the table of the scheduler that the line names."""
    if line.startswith("zapex launch"):
        return f"printf '\\n[slurm]\\n' >> run.toml; {line}"
    return line


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", TOGETHER)
def test_the_hosts_of_a_block_are_one_run_on_loopback(name: str, place: Path) -> None:
    """The replays start first, and the learner's limit ends all."""
    text = found()[name]
    port = {host: str(free_port()) for host in ("replay.lan", "a", "b")}
    (place / "run.toml").write_text(
        '[env]\nenv = "CartPole-v1"\n\n[run]\npreset = "smoke"\n\n[actor]\nenvs_per_actor = 2\n'
    )
    run("zapex keygen keys", place / "keys.log")
    with contextlib.ExitStack() as held:
        hosts = {}
        shard = iter(("a", "b"))
        lines = [line for line in lines_of(text) if re.match("zapex (replay|actor|learner)", line)]
        for number, line in enumerate(lines):
            host = next(shard) if "--shard " in line else "replay.lan"
            here = line.replace("tcp://0.0.0.0:7711", f"tcp://127.0.0.1:{port[host]}")
            for other, where in port.items():
                here = here.replace(f"tcp://{other}:7711", f"tcp://127.0.0.1:{where}")
            here = here.replace("tcp://127.0.0.1:7711", f"tcp://127.0.0.1:{port['replay.lan']}")
            here = here.replace("--actors 32", "--actors 2").replace("--actors 16", "--actors 1")
            here = shortened(here) if "learner" in here else f"{here} --plain"
            directory = place / f"host{number}"
            directory.mkdir()
            (directory / "run.toml").write_text((place / "run.toml").read_text())
            shutil.copytree(place / "keys", directory / "keys")
            log = place / f"host{number}.txt"
            hosts[line] = held.enter_context(started(f"cd {directory} && exec {here}", log)), log
        if not any("zapex actor" in line for line in lines):
            url = f"tcp://127.0.0.1:{port['replay.lan']}"
            actor = f"zapex actor --replay {url} --actors 1 --config run.toml --keys keys --plain"
            hosts[actor] = (
                held.enter_context(started(f"exec {actor}", place / "a.txt")),
                (place / "a.txt"),
            )
        deadline_s = time.monotonic() + LINE_S
        ends = {line for line in hosts if "learner" in line or "actor --replay" in line}
        while any(hosts[line][0].poll() is None for line in ends):
            said = "\n".join(
                f"{line}\n{log.read_text()[-3000:]}" for line, (_, log) in hosts.items()
            )
            assert time.monotonic() < deadline_s, said
            time.sleep(0.2)
        for line in ends:
            one, log = hosts[line]
            assert one.poll() == 0, f"{line}\n{log.read_text()[-6000:]}"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SERVERS)
def test_a_server_of_a_block_listens_and_ends_when_it_is_interrupted(
    name: str, place: Path
) -> None:
    import zapex

    (line,) = lines_of(found()[name])
    schema = zapex.Schema({"obs": zapex.Column((4,), "f4"), "action": zapex.Column((), "i8")})
    (place / "schema.json").write_text(schema.to_json())
    log = place / "output.txt"
    here = line.replace(":7711", f":{free_port()}").replace("1M", "100k")
    with started(f"trap - INT; exec {here}", log) as one:
        deadline_s = time.monotonic() + LINE_S
        while "serving a replay" not in log.read_text():
            assert one.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        one.send_signal(signal.SIGINT)
        assert one.wait(LINE_S) == 0, log.read_text()
