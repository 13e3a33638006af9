"""Keys: created private, refused when open to others, and each valid for one role only."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.lossy_link import LossyLink
from tests.support.relays import Accounts, Relay, contents
from tests.support.transport_rigs import (
    Memory,
    NetworkReplay,
    layout_of,
    make_link,
    nothing_left_open,
    until,
    url_of,
)
from zapex.errors import ConfigError, Refused
from zapex.net import keys as curve_keys
from zapex.net.keys import Security
from zapex.run import preflight
from zapex.wire.protocol import MAGIC, MAX_BUFFERS

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
def test_keys_open_to_others_are_refused_with_the_fix(keys: Path, name: str, mode: int) -> None:
    (keys / name).chmod(mode)
    with pytest.raises(ConfigError, match=r"chmod [67]00"):
        curve_keys.load(keys, "relay")


def test_missing_or_damaged_keys_are_refused_and_none_overwritten(keys: Path) -> None:
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


def test_full_disk_leaves_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = curve_keys._write

    def write(path: Path, table: dict[str, str]) -> None:
        if path.name == "learner.key":
            path.touch()
            raise OSError(28, "No space left on device")
        real(path, table)

    monkeypatch.setattr(curve_keys, "_write", write)
    with pytest.raises(ConfigError, match="No space left"):
        curve_keys.make(tmp_path / "keys")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(curve_keys, "_write", real)
    curve_keys.make(tmp_path / "keys")


def test_a_pair_of_another_set_is_refused(keys: Path, tmp_path: Path) -> None:
    curve_keys.make(tmp_path / "other")
    (keys / "relay.key").write_text((tmp_path / "other" / "relay.key").read_text())
    with pytest.raises(ConfigError, match="not of the same set"):
        curve_keys.load(keys, "relay")


@pytest.mark.parametrize("kind", ["tcp", "zmtp", "fstack"])
def test_a_key_admits_its_holder_and_only_as_its_role(
    keys: Path, tmp_path: Path, kind: str
) -> None:
    layout = layout_of(400)
    own = Security(curve_keys.load(keys, "relay"))
    server = NetworkReplay(
        Memory(layout, 1), url_of(kind, tmp_path), Security(curve_keys.load(keys, "replay"))
    )
    relay = make_link(server.url, "relay", 1, layout, actors=1, security=own)
    until(lambda: relay.is_open, lambda: (server.turn(), relay.do_work()), "a welcome")

    thief = make_link(server.url, "learner", 2, layout, security=own)
    with pytest.raises(Refused, match="not for the role learner"):
        until(lambda: False, lambda: (server.turn(), thief.do_work()))

    curve_keys.make(tmp_path / "other")
    stranger = curve_keys.load(tmp_path / "other", "relay")
    assert own.keys is not None
    forged = curve_keys.RoleKeys("relay", stranger.public, stranger.secret, own.keys.publics)
    gone, listener = [], server.listener
    take_gone = listener.gone
    listener.gone = lambda: (found := take_gone(), gone.extend(found))[0]
    links = [
        make_link(server.url, "relay", 3, layout, actors=1, security=Security(forged)),
        make_link(server.url, "relay", 4, layout, actors=1),
    ]
    until(
        lambda: server.listener.zap.refused if kind == "tcp" else len(gone) >= 4,
        lambda: (server.turn(), *(link.do_work() for link in links)),
        "refusals",
    )
    assert not any(link.is_open for link in links)
    assert {session.host for session in server.server.sessions.of_roles("relay")} == {1}
    for link in (relay, thief, *links):
        link.close()
    server.close()


def test_keys_over_zmtp_without_pynacl_are_refused(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = Security(curve_keys.load(keys, "replay"))
    monkeypatch.setitem(sys.modules, "nacl", None)
    with pytest.raises(ConfigError, match=r"pip install 'zapex\[curve\]'"):
        security.check("zmtp://127.0.0.1:0", "--listen")
    security.check("tcp://127.0.0.1:0", "--listen")


def test_the_doctor_tries_the_keys_at_the_replay(keys: Path, tmp_path: Path) -> None:
    server = NetworkReplay(
        Memory(layout_of(400), 1), "tcp://127.0.0.1:0", Security(curve_keys.load(keys, "replay"))
    )
    other = tmp_path / "other"
    curve_keys.make(other)
    with ThreadPoolExecutor(1) as pool:
        for directory, admitted in ((keys, True), (other, False)):
            asked = pool.submit(
                preflight.check_link, "actor", server.url, str(directory), False, 2.0
            )
            until(asked.done, server.turn, "an answer")
            lacking = [str(finding) for finding in asked.result() if not finding.enough]
            assert (not lacking) == admitted
    assert "does not admit the key" in lacking[0]
    assert "copy relay.key" in lacking[0]
    assert not list(server.server.sessions.of_roles("relay")), "the doctor takes no place"
    server.close()


def test_a_malformed_admission_request_is_refused() -> None:
    server = NetworkReplay(Memory(layout_of(400), 1), "tcp://127.0.0.1:0")
    zap = server.listener.zap
    for request in (
        [],
        [b"1.0"],
        [b"1.0"] * MAX_BUFFERS,
        [b"2.0", b"1", b"zapex", b"", b"", b"NULL"],
    ):
        assert zap.answer(request)[2] == b"400"
    good = [b"1.0", b"1", b"zapex", b"127.0.0.1", b"", b"NULL"]
    assert zap.answer(good)[2] == b"200"
    assert zap.answer([*good[:5], b"PLAIN", b"a", b"b"])[2] == b"400"
    server.close()


def test_more_actors_than_the_run_has_are_refused() -> None:
    layout = layout_of(400)
    server = NetworkReplay(Memory(layout, 2), "tcp://127.0.0.1:0")
    link = make_link(server.url, "relay", 1, layout, actors=3)
    with pytest.raises(Refused, match="--actors"):
        until(lambda: False, lambda: (server.turn(), link.do_work()))
    link.close()
    server.close()


@pytest.mark.parametrize("scheme", ["tcp", "zmtp"])
@pytest.mark.parametrize("encrypted", [True, False])
def test_keys_encrypt_every_message(scheme: str, encrypted: bool, keys: Path) -> None:
    own, relays = (
        Security(curve_keys.load(keys, who) if encrypted else None) for who in ("replay", "relay")
    )
    layout = layout_of(400)
    server = NetworkReplay(Memory(layout, 1), f"{scheme}://127.0.0.1:0", own)
    accounts = Accounts()
    accounts.watch(server)
    with LossyLink(int(server.url.rpartition(":")[2])) as wire:
        wire.captured = bytearray()
        relay = Relay(layout, wire.url, security=relays)
        until(lambda: relay.link.is_open, lambda: (server.turn(), relay.turn()), "a welcome")
        relay.make()
        until(lambda: relay.acknowledged, lambda: (server.turn(), relay.turn()), "the chunk")
        relay.kill()
        seen = bytes(wire.captured)
    accounts.settle([relay])
    (who,) = relay.offered
    chunk = layout.chunk_layout
    frame = contents(who, chunk.frames, chunk.chunk)["obs"][:2].tobytes()
    # A frame, the magic of every message, and the settings that a hello says.
    for plain in (frame, MAGIC, b"gamma"):
        assert (plain in seen) != encrypted, plain
    assert len(seen) > 1000
    server.close()
