"""Keys: made private, refused when open to others, and each good for one role only."""

from pathlib import Path

import pytest

from tests.transport_rigs import (
    Memory,
    NetworkReplay,
    layout_of,
    make_link,
    nothing_left_open,
    until,
)
from zapex import curve_keys
from zapex.errors import ConfigError, Refused
from zapex.message_header import MAX_PARTS
from zapex.zmq_socket import Security

__all__ = ["nothing_left_open"]  # a fixture of every test here


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    curve_keys.make(tmp_path / "keys")
    return tmp_path / "keys"


def test_keys_are_private_and_are_read_again(keys: Path) -> None:
    assert keys.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in keys.iterdir()} == {0o600}
    loaded = curve_keys.load(keys, "relay")
    assert loaded.role_of(loaded.public) == "relay"
    assert loaded.role_of(loaded.publics["replay"]) is None
    assert loaded.secret not in repr(loaded)


@pytest.mark.parametrize(
    ("name", "mode"), [("", 0o750), ("relay.key", 0o640), ("public.json", 0o604)]
)
def test_keys_open_to_others_are_refused_with_the_command_that_mends_it(
    keys: Path, name: str, mode: int
) -> None:
    (keys / name).chmod(mode)
    with pytest.raises(ConfigError, match=r"chmod [67]00"):
        curve_keys.load(keys, "relay")


def test_keys_are_never_overwritten_and_missing_or_damaged_ones_are_told(keys: Path) -> None:
    with pytest.raises(ConfigError, match="never overwritten"):
        curve_keys.make(keys)
    (keys / "learner.key").unlink()
    with pytest.raises(ConfigError, match="zapex keygen"):
        curve_keys.load(keys, "learner")
    for text in ("", "[]", '{"role": "relay"}', '{"role": "relay", "public": "x", "secret": "y"}'):
        (keys / "relay.key").write_text(text)
        with pytest.raises(ConfigError, match="damaged"):
            curve_keys.load(keys, "relay")
    (keys / "reader.key").unlink()
    (keys / "reader.key").symlink_to(keys / "relay.key")
    with pytest.raises(ConfigError, match="a file of your own"):
        curve_keys.load(keys, "reader")


def test_a_pair_of_another_set_is_refused(keys: Path, tmp_path: Path) -> None:
    curve_keys.make(tmp_path / "other")
    (keys / "relay.key").write_text((tmp_path / "other" / "relay.key").read_text())
    with pytest.raises(ConfigError, match="not of the same set"):
        curve_keys.load(keys, "relay")


def test_with_keys_only_their_holders_come_in_and_only_as_their_role(
    keys: Path, tmp_path: Path
) -> None:
    layout = layout_of(400)
    security = {role: Security(curve_keys.load(keys, role)) for role in ("relay", "learner")}
    server = NetworkReplay(
        Memory(layout, 1), "tcp://127.0.0.1:0", Security(curve_keys.load(keys, "replay"))
    )
    relay = make_link(server.url, "relay", 1, layout, actors=1, security=security["relay"])
    until(lambda: relay.is_open, lambda: (server.turn(), relay.do_work()), "a welcome")

    # A relay's key does not make a learner.
    thief = make_link(server.url, "learner", 2, layout, security=security["relay"])
    with pytest.raises(Refused, match="this key is not for the role learner"):
        until(lambda: False, lambda: (server.turn(), thief.do_work()))

    # Another set's key, and no key at all, come to nothing.
    curve_keys.make(tmp_path / "other")
    stranger = curve_keys.load(tmp_path / "other", "relay")
    forged = curve_keys.RoleKeys(
        "relay", stranger.public, stranger.secret, security["relay"].keys.publics
    )
    links = [
        make_link(server.url, "relay", 3, layout, actors=1, security=Security(forged)),
        make_link(server.url, "relay", 4, layout, actors=1),
    ]
    until(
        lambda: server.server._gate.refused > 0,
        lambda: (server.turn(), *(link.do_work() for link in links)),
        "a refusal",
    )
    assert not any(link.is_open for link in links)
    assert {session.host for session in server.server.sessions("relay")} == {1}
    for link in (relay, thief, *links):
        link.close()
    server.close()


def test_the_gatekeeper_answers_malformed_questions_with_no() -> None:
    server = NetworkReplay(Memory(layout_of(400), 1), "tcp://127.0.0.1:0")
    gate = server.server._gate
    for request in (
        [],
        [b"1.0"],
        [b"1.0"] * MAX_PARTS,
        [b"2.0", b"1", b"zapex", b"", b"", b"NULL"],
    ):
        assert gate._answer(request)[2] == b"400"
    good = [b"1.0", b"1", b"zapex", b"127.0.0.1", b"", b"NULL"]
    assert gate._answer(good)[2] == b"200"
    assert gate._answer([*good[:5], b"PLAIN", b"a", b"b"])[2] == b"400"
    server.close()
