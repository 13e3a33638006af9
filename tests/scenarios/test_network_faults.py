"""Real links that hang and tear messages, and peers that differ: who is refused is told why."""

from pathlib import Path
from unittest import mock

import pytest

from tests.support.lossy_link import LossyLink
from tests.support.relays import Accounts, Relay, serving
from tests.support.transport_rigs import (
    BATCH,
    NO_KEYS,
    OPEN,
    Memory,
    NetworkReplay,
    form_of,
    layout_of,
    make_link,
    nothing_left_open,
    until,
    url_of,
)
from zapex.errors import PeerTimeout, Refused
from zapex.net.link import ZmqLink
from zapex.wire import messages as m
from zapex.wire import protocol as message_header

__all__ = ["nothing_left_open"]  # a fixture of every test here


@pytest.mark.parametrize("fault", ["frozen", "truncated"])
@pytest.mark.parametrize("kind", ["tcp", "zmtp", "fstack"])
def test_a_link_that_hangs_or_tears_messages_is_left_behind_and_nothing_is_lost(
    kind: str, fault: str, tmp_path: Path
) -> None:
    layout, accounts = layout_of(400), Accounts()
    with serving(Memory(layout, 1), accounts, url_of(kind, tmp_path)) as server:
        host, _, port = server.url.removeprefix("tcp://").rpartition(":")
        with LossyLink(int(port), target_host=host) as link:
            relay = Relay(layout, link.url)

            def turn() -> None:
                server.turn()
                relay.turn()

            until(lambda: relay.link.is_open, turn, "a welcome")
            if fault == "truncated":
                link.truncate_after = 3000
            for _ in range(30):
                relay.make()
                turn()
            if fault == "frozen":
                link.freeze()
                until(lambda: "waiting for the replay" in relay.link.waiting, turn, "silence")
            link.heal()
            until(lambda: relay.sender.unacknowledged == 0, turn, "the rest")
            server.turn()
            accounts.settle([relay])
            assert relay.link.waiting == ""
            relay.kill()


def test_another_config_schema_or_role_is_refused_in_words() -> None:
    layout = layout_of(400)
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")

    def refused(link: ZmqLink, words: str) -> None:
        with pytest.raises(Refused, match=words):
            until(lambda: False, lambda: (server.turn(), link.do_work()))
        link.close()

    other = {"env": "game", "gamma": 0.5, "lr": 1}
    words = "gamma is 0.9 at the replay and 0.5 here, lr is None at the replay and 1 here"
    refused(make_link(server.url, "learner", 1, layout, config=other), words)
    link = ZmqLink(
        server.url, "learner", 1, 1, form_of(layout), {}, NO_KEYS, schema_hash=77
    )  # fmt: skip
    OPEN.append(link)
    refused(link, f"{77:#018x}.*{layout.schema.hash:#018x}")
    link = make_link(server.url, "reader", 1, layout)
    until(lambda: link.is_open, lambda: (server.turn(), link.do_work()))
    link.send(m.SMALL, m.Sample(0, BATCH))
    refused(link, "a reader may not send SAMPLE")
    server.close()


def test_another_version_of_the_protocol_is_refused_by_either_end() -> None:
    layout = layout_of(400)
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")
    link = make_link(server.url, "reader", 1, layout)
    real, ours = message_header.HEADER.pack, message_header.VERSION

    def of_the_next(magic: bytes, version: int, *rest: int) -> bytes:
        return real(magic, version + 1, *rest)

    packed = mock.Mock(wraps=message_header.HEADER)
    packed.pack, packed.size = of_the_next, message_header.HEADER.size
    with (
        mock.patch.object(message_header, "HEADER", packed),
        pytest.raises(Refused, match=f"speaks version {ours}, the peer version {ours + 1}"),
    ):
        until(lambda: False, lambda: (server.turn(), link.do_work()))
    assert server.server.counts["bad"] > 0
    link.close()
    server.close()


def test_nobody_there_is_a_timeout_that_says_whom_it_waited_for(tmp_path: Path) -> None:
    link = make_link(f"ipc://{tmp_path}/none", "reader", 1, layout_of(400))
    with pytest.raises(PeerTimeout, match=r"replay at ipc://"):
        link.open(0.2)
    link.close()
