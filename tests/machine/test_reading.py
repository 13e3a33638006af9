"""Files of strangers: bounded, checked, and printed without escapes."""

import io
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from zapex.errors import ConfigError
from zapex.machine.disk import append_whole, is_locked
from zapex.machine.reading import (
    parse_json,
    parse_toml,
    printable,
    read_json_lines,
    read_text,
    say,
    typed,
)


@dataclass(frozen=True)
class Fact:
    name: str
    at: tuple[int, float]
    kind: Literal["a", "b"] = "a"
    values: dict[str, float] = field(default_factory=dict)
    more: tuple[int, ...] = ()
    limit: float | None = None


GOOD = {"name": "x", "at": [1, 2.5], "values": {"loss": None}, "more": [1, 2.0], "newer": []}


def test_values_become_what_their_fields_say():
    found = typed(Fact, json.loads(json.dumps(GOOD)))
    assert (found.name, found.at, found.kind, found.more) == ("x", (1, 2.5), "a", (1, 2))
    assert math.isnan(found.values["loss"])
    assert found.values["of a newer version"] == 0
    assert found.limit is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"name": 3}, "name"),
        ({"at": [1]}, "at"),
        ({"at": "ab"}, "at"),
        ({"at": [1.5, 2]}, "at"),
        ({"kind": "c"}, "kind"),
        ({"values": {"x": "1"}}, "values.x"),
        ({"values": {"x": 1e300}}, "values.x"),
        ({"values": {"x": True}}, "values.x"),
        ({"values": []}, "values"),
        ({"limit": math.inf}, "limit"),
        ({"more": [[]]}, "more"),
    ],
)
def test_a_value_of_another_type_is_named(change: dict[str, Any], name: str):
    with pytest.raises(ConfigError, match=name):
        typed(Fact, {**GOOD, **change})


def test_a_missing_field_is_named():
    with pytest.raises(ConfigError, match="at"):
        typed(Fact, {"name": "x"})


@pytest.mark.parametrize(
    "text",
    [
        f"x = {'9' * 5000}",
        f"x = 0x{'f' * 5000}",
        f"{'a.' * 100_000}a = 1",
        f"x = {'[' * 100_000}",
        f"x = {'{a=' * 100}1{'}' * 100}",
        "\n".join(f"a{'.b' * 50}{i}.c = {'[' * 50}{']' * 50}" for i in range(100)),
    ],
)
def test_what_breaks_a_toml_parser_is_an_error(text):
    began_s = time.process_time()
    with pytest.raises(ConfigError, match="FILE"):
        parse_toml(text, "FILE")
    assert time.process_time() - began_s < 2


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400, "[" * 100_000, "[" * 99 + "]" * 99, "{"])
def test_what_breaks_a_json_parser_is_an_error(text):
    with pytest.raises(ConfigError, match="FILE"):
        parse_json(text, "FILE")


def test_the_largest_file_takes_less_than_a_quarter_of_a_gigabyte(tmp_path):
    path = tmp_path / "file.json"
    path.write_text(f"[{'[],' * ((4 << 20) // 3 - 4)}[]]")
    code = (
        "import sys; from pathlib import Path\n"
        "from zapex.machine.reading import read_json; read_json(Path(sys.argv[1]))\n"
        "lines = Path('/proc/self/status').read_text().splitlines()\n"
        "print(next(line.split()[1] for line in lines if line.startswith('VmHWM')))"
    )
    words = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 250 << 10


def test_a_damaged_line_is_left_out_and_an_endless_one_an_error(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"a"\n[]\n' + "[" * 9999 + '\n{"a": 2}\n')
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 2}]
    os.truncate(path, 1 << 40)  # a sparse file of zeros
    with pytest.raises(ConfigError, match=str(path)):
        list(read_json_lines(path))


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "directory", "large"])
def test_only_small_regular_files_are_read(tmp_path, kind):
    path = tmp_path / "file"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "large":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to(kind)
    with pytest.raises(ConfigError, match=str(path)):
        read_text(path)
    assert not is_locked(path)


def test_nothing_is_written_through_a_link_or_into_a_fifo(tmp_path):
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(tmp_path / "new")
    os.mkfifo(fifo)
    for path in (link, fifo):
        with pytest.raises(OSError, match=str(path)):
            append_whole(path, b"x")
    assert not (tmp_path / "new").exists()


def test_a_terminal_gets_no_escapes_and_only_what_its_encoding_has():
    assert printable("a\x1b[2Jb\x07\n\tü\x9b\u202e\udcff") == "a?[2Jb?\n\tü???"
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    say("412 ± 3", out)
    assert out.buffer.getvalue() == b"412 ? 3\n"
