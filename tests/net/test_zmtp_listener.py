"""zmtp:// and fstack:// serve the clients of tcp://, with the same keys.

More: tests/test_transports.py.
"""

import sys
from pathlib import Path

import pytest

from tests.support import fstack
from tests.support.transport_rigs import (
    NO_KEYS,
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
from zapex.net.keys import RoleKeys, Security
from zapex.net.sockets import listen

__all__ = ["nothing_left_open"]  # a fixture of every test here
URL = "zmtp://127.0.0.1:0"


@pytest.fixture(params=["zmtp", "fstack"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, tmp_path)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    curve_keys.make(tmp_path / "keys")
    return tmp_path / "keys"


def test_with_keys_only_their_holders_come_in_and_only_as_their_role(
    keys: Path, tmp_path: Path, url: str
) -> None:
    layout = layout_of(400)
    server = NetworkReplay(Memory(layout, 1), url, Security(curve_keys.load(keys, "replay")))
    own = Security(curve_keys.load(keys, "relay"))
    relay = make_link(server.url, "relay", 1, layout, actors=1, security=own)
    until(lambda: relay.is_open, lambda: (server.turn(), relay.do_work()), "a welcome")

    thief = make_link(server.url, "learner", 2, layout, security=own)
    with pytest.raises(Refused, match="this key is not for the role learner"):
        until(lambda: False, lambda: (server.turn(), thief.do_work()))

    curve_keys.make(tmp_path / "other")
    stranger = curve_keys.load(tmp_path / "other", "relay")
    assert own.keys is not None
    forged = RoleKeys("relay", stranger.public, stranger.secret, own.keys.publics)
    gone: list[bytes] = []
    server.listener.on_gone = gone.append
    links = [
        make_link(server.url, "relay", 3, layout, actors=1, security=Security(forged)),
        make_link(server.url, "relay", 4, layout, actors=1),
    ]
    until(
        lambda: len(gone) >= 4, lambda: (server.turn(), *(link.do_work() for link in links)),
        "refusals of both connections of both",
    )  # fmt: skip
    assert not any(link.is_open for link in links)
    assert {session.host for session in server.server.sessions.of_roles("relay")} == {1}


def test_clients_are_told_the_address_that_they_connect_to() -> None:
    listener = listen(URL, Security(), 1 << 16)
    assert listener.url.startswith("tcp://127.0.0.1:")
    listener.close()


def test_an_address_that_is_taken_is_told(url: str) -> None:
    setup = fstack.in_this_process(url)
    listener = listen(url, NO_KEYS, 1 << 16, fstack=setup)
    own = url.partition(":")[0]
    taken = listener.url.replace("tcp", own)
    with pytest.raises(ConfigError, match=rf"--listen {own}://.* cannot be used: Address already"):
        listen(taken, NO_KEYS, 1 << 16, fstack=setup)
    listener.close()


def test_an_address_that_others_reach_needs_keys() -> None:
    with pytest.raises(ConfigError, match="there are no keys"):
        listen("zmtp://0.0.0.0:0", Security(), 1 << 16)


def test_keys_without_pynacl_are_refused_before_anything_listens(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = Security(curve_keys.load(keys, "replay"))
    monkeypatch.setitem(sys.modules, "nacl", None)
    with pytest.raises(ConfigError, match=r"need PyNaCl.*pip install 'zapex\[curve\]'"):
        security.check(URL, "--listen")
    security.check("tcp://127.0.0.1:0", "--listen")
