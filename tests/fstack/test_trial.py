"""A wrong set-up is one clear line, with exit code 2, before anything else starts."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support import fstack
from tests.support.transport_rigs import SCHEMA
from zapex.cli.main import main
from zapex.errors import ConfigError
from zapex.fstack import Setup, trial

STANDIN = fstack.standin()
HOST = fstack.addresses(STANDIN)[0]


def refusal(setup: Setup | None, host: str = HOST) -> str:
    with pytest.raises(ConfigError) as told:
        trial.check(setup, host, fstack.free_port(), "--listen")
    assert "\n" not in str(told.value)
    return str(told.value)


def changed(tmp_path: Path, *pair: str) -> Setup:
    """The stand-in, with another configuration."""
    path = tmp_path / "config.ini"
    path.write_text(Path(STANDIN.config).read_text().replace(*pair))
    return Setup(STANDIN.library, str(path), STANDIN.arguments)


def rebuilt(tmp_path: Path, *pair: str) -> Setup:
    """The stand-in, with another source."""
    source, library = tmp_path / "standin.c", tmp_path / "libfstack.so"
    source.write_text(fstack.SOURCE.read_text().replace(*pair))
    build = ["cc", "-shared", "-fPIC", "-pthread", "-o", str(library), str(source)]
    subprocess.run(build, check=True, timeout=100)
    return Setup(str(library), STANDIN.config, STANDIN.arguments)


def test_a_working_setup_passes() -> None:
    trial.check(STANDIN, HOST, fstack.free_port(), "--listen")


def test_a_setup_without_library_or_config_is_refused() -> None:
    for setup in (None, Setup("", STANDIN.config), Setup(STANDIN.library, "")):
        assert "needs --fstack-lib PATH" in refusal(setup)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    missing = refusal(Setup(str(tmp_path / "none.so"), STANDIN.config))
    assert "none.so cannot be loaded" in missing
    (tmp_path / "text.so").write_text("no library")
    assert "text.so cannot be loaded" in refusal(Setup(str(tmp_path / "text.so"), STANDIN.config))


def test_another_version_of_the_library_is_refused(tmp_path: Path) -> None:
    renamed = rebuilt(tmp_path, "ff_writev", "ff_renamed")
    assert "libfstack.so lacks ff_writev: it must be F-Stack" in refusal(renamed)
    shorter = rebuilt(tmp_path, "uint64_t ext[4];", "")  # as before FreeBSD 12
    assert "its struct kevent is not 1.25's" in refusal(shorter)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("[dpdk]", "what is this"), "parse .* failed on line 1"),
        (("addr=", "adr="), "no addr"),
        (("memory=64", "memory=9999999"), "Cannot init memory"),
        (("port_list=0", "port_list=1"), "No probed ethernet devices"),
    ],
)
def test_the_output_of_a_failed_start_is_quoted(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    told = refusal(changed(tmp_path, *change))
    assert told.startswith("F-Stack cannot start with --fstack-lib ")
    assert re.search(said, told)


def test_a_crash_is_reported_with_its_signal(tmp_path: Path) -> None:
    begins = "int ff_freebsd_init(void) {"
    crashes = rebuilt(tmp_path, begins, begins + "abort();")
    assert "F-Stack was ended by SIGABRT when it started" in refusal(crashes)


def test_a_foreign_address_is_refused() -> None:
    assert "F-Stack cannot listen at 203.0.113.9:" in refusal(STANDIN, "203.0.113.9")


@pytest.mark.parametrize("library", [False, True])
def test_the_command_ends_with_2_and_one_line(
    library: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = changed(tmp_path, "addr=", "adr=")
    (tmp_path / "schema.json").write_text(SCHEMA.to_json())
    what = ["--schema", str(tmp_path / "schema.json")] if library else ["--env", "CartPole-v1"]
    code = main(
        ["replay", "--listen", f"fstack://{HOST}:{fstack.free_port()}", *what,
         f"--fstack-lib={setup.library}", f"--fstack-conf={setup.config}"]
    )  # fmt: skip
    said = capsys.readouterr().err
    assert code == 2
    assert said.count("\n") == 1
    assert "no addr" in said


def test_doctor_names_what_is_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["doctor", "replay", "--listen", f"fstack://{HOST}:{fstack.free_port()}", "--env",
         "CartPole-v1", "--capacity", "10000"]
    )  # fmt: skip
    assert code == 1
    assert "address: " in capfd.readouterr().out
