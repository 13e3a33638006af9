"""Addresses of links: a mistake is reported, with what was meant, before anything waits."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.support import fstack
from tests.support.transport_rigs import NO_KEYS, url_of
from zapex.errors import ConfigError
from zapex.net import addresses
from zapex.net import keys as curve_keys
from zapex.net.keys import Security
from zapex.net.sockets import listen
from zapex.run import preflight


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ socket that listens; the test binds it."""
    context = zmq.Context()
    made = context.socket(zmq.ROUTER)
    made.linger = 0
    yield made
    made.close()
    context.term()


def refusal(url: str, check: str) -> str:
    address = url if check == "check_free" else addresses.parse(url, "--url")
    with pytest.raises(ConfigError) as told:
        getattr(addresses, check)(address)
    return str(told.value)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("tpc://x:1", "tcp://x:1"),
        ("tcp://host", "tcp://host:7711"),
        ("tcp:/127.0.0.1:1", "tcp://127.0.0.1:1"),
        ("10.0.0.1:80", "tcp://10.0.0.1:80"),
        ("http://h:1/path", "tcp://h:1"),
        ("zmtp://h:1", "tcp://h:1"),
        ("tcp://h:1/", "tcp://h:1"),
        ("tcp://[::1]", "tcp://[::1]:7711"),
        ("ipc://tmp/x", "ipc:///tmp/x"),
        ("/tmp/x", "ipc:///tmp/x"),
    ],
)
def test_a_url_that_is_none_is_told_with_what_was_meant(url: str, meant: str) -> None:
    with pytest.raises(ConfigError, match="--replay must be tcp://HOST:PORT") as told:
        addresses.parse(url, "--replay")
    assert str(told.value).endswith(f"got {url!r}; did you mean {meant}?")
    addresses.parse(meant, "--replay")


@pytest.mark.parametrize(
    "url", ["", "tcp://", "tcp://h:99999", "tcp://u@h:1", "tcp://[::1:7", "x y"]
)
def test_a_url_that_may_be_anything_is_refused_without_a_guess_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError) as told:
        addresses.parse(url, "--replay")
    guess = str(told.value).partition("did you mean ")[2].rstrip("?")
    assert not guess or addresses.parse(guess, "")


def test_zmtp_is_only_to_listen_at() -> None:
    assert addresses.parse("zmtp://127.0.0.1:7711", "--listen").is_loopback


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        addresses.parse("ipc:///" + "x" * 107, "--listen")


def test_only_what_this_machine_alone_reaches_is_loopback() -> None:
    for url, loopback in (
        ("tcp://127.0.0.1:1", True), ("tcp://[::1]:1", True), ("tcp://localhost:1", True),
        ("ipc:///tmp/x", True), ("tcp://0.0.0.0:1", False), ("tcp://*:1", False),
        ("tcp://10.0.0.1:1", False), ("tcp://[::]:1", False), ("tcp://localhost.evil:1", False),
    ):  # fmt: skip
        assert addresses.parse(url, "").is_loopback == loopback, url


def test_an_address_that_cannot_be_listened_at_is_refused(
    router: zmq.Socket[bytes], tmp_path: Path
) -> None:
    port = router.bind_to_random_port("tcp://127.0.0.1")
    taken = refusal(f"tcp://127.0.0.1:{port}", "check_free")
    assert "another process listens there" in taken
    assert "does not have that address" in refusal("tcp://192.0.2.1:7711", "check_free")
    assert "must name an IP address: tcp://127.0.0.1:7711" in refusal(
        "tcp://localhost:7711", "check_free"
    )
    assert "needs a fixed port" in refusal("tcp://127.0.0.1:0", "check_free")
    assert "there is no directory /nowhere" in refusal("ipc:///nowhere/x", "check_free")
    router.bind(f"ipc://{tmp_path}/taken")
    assert "another process listens there" in refusal(f"ipc://{tmp_path}/taken", "check_free")
    (tmp_path / "file").write_text("")
    assert "a file has this name" in refusal(f"ipc://{tmp_path}/file", "check_free")
    addresses.check_free(f"ipc://{tmp_path}/free")
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(f"{tmp_path}/left")
    addresses.check_free(f"ipc://{tmp_path}/left")


def test_an_address_that_no_replay_can_have_is_refused(tmp_path: Path) -> None:
    assert "typing error" in refusal("tcp://no-such-host.invalid:1", "check_known")
    assert "typing error" in refusal(f"tcp://{'x' * 70}:1", "check_known")
    assert "only an address to listen at" in refusal("tcp://0.0.0.0:7711", "check_known")
    assert "there is no directory /nowhere" in refusal("ipc:///nowhere/x", "check_known")
    for url in ("tcp://127.0.0.1:7711", "tcp://localhost:1", f"ipc://{tmp_path}/later"):
        addresses.check_known(addresses.parse(url, ""))


def test_who_answers_is_known_by_his_greeting(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    path = f"ipc://{tmp_path}/x"
    with pytest.raises(ConnectionError, match="No such file"):
        addresses.mechanism(addresses.parse(path, ""), 5)
    router.bind(path)
    assert addresses.mechanism(addresses.parse(path, ""), 5) == "NULL"
    router.curve_publickey, router.curve_secretkey = zmq.curve_keypair()
    router.curve_server = True
    port = router.bind_to_random_port("tcp://127.0.0.1")
    assert addresses.mechanism(addresses.parse(f"tcp://127.0.0.1:{port}", ""), 5) == "CURVE"


@pytest.mark.parametrize("says", [b"HTTP/1.1 400\r\n\r\n", b""])
def test_what_is_not_a_replay_is_told_apart(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            peer.sendall(says)
            peer.recv(64)
            peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match="not a replay"):
            addresses.check_known(addresses.parse(url, ""))
        thread.join(5)


def test_the_doctor_knows_what_a_host_of_several_lacks(
    router: zmq.Socket[bytes], tmp_path: Path
) -> None:
    keys = str(tmp_path / "keys")
    curve_keys.make(Path(keys))

    def lacking(part: str, keys: str = "") -> dict[str, str]:
        found = preflight.check_link(part, url, keys, False)
        return {finding.what: str(finding) for finding in found if not finding.enough}

    port = router.bind_to_random_port("tcp://127.0.0.1")
    url = f"tcp://127.0.0.1:{port}"
    assert lacking("actor") == {}
    assert "leave --keys out" in lacking("learner", keys)["replay"]
    assert "another process" in lacking("replay", keys)["address"]
    router.close()
    deadline = time.monotonic() + 10
    while lacking("replay", keys) and time.monotonic() < deadline:
        time.sleep(0.05)  # libzmq closes its descriptors in a thread
    assert lacking("replay", keys) == {}
    assert "start `zapex replay" in lacking("actor")["replay"]
    Path(keys, "relay.key").chmod(0o640)
    assert "chmod 600" in lacking("actor", keys)["keys"]
    url = "tcp://192.0.2.1:7711"
    assert "there are no keys" in lacking("replay")["keys"]


@pytest.mark.parametrize("kind", ["zmtp", "fstack"])
def test_listeners_without_libzmq_refuse_a_taken_address(kind: str, tmp_path: Path) -> None:
    url = url_of(kind, tmp_path)
    setup = fstack.in_this_process(url)
    listener = listen(url, NO_KEYS, 1 << 16, fstack=setup)
    assert listener.url.startswith("tcp://")  # where clients connect
    with pytest.raises(ConfigError, match=f"{kind}://"):
        listen(listener.url.replace("tcp", kind), NO_KEYS, 1 << 16, fstack=setup)
    listener.close()


def test_an_address_that_others_reach_needs_keys() -> None:
    with pytest.raises(ConfigError, match="zapex keygen"):
        listen("zmtp://0.0.0.0:0", Security(), 1 << 16)
