"""`zapex bench edge`: its link delays, limits, loses and compresses as it says."""

import socket
import threading
import time

import numpy as np
import pytest

from benchmarks.transport.long_link import Line, LongLink
from tests.benchmarks.quick import check_figures, quick


class Echo:
    """Sends back what it gets; or, told so by a "c", says when so many bytes have come."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    @staticmethod
    def _serve(end):
        with end:
            if end.recv(1) == b"e":
                while data := end.recv(1 << 20):
                    end.sendall(data)
                return
            left = int.from_bytes(end.recv(8, socket.MSG_WAITALL), "little")
            end.sendall(b"?")
            while left and (data := end.recv(1 << 20)):
                left -= len(data)
            end.sendall(b"!")

    def close(self):
        self._listener.close()


@pytest.fixture
def ends():
    echo = Echo()
    with LongLink(echo.port) as link, socket.create_connection(("127.0.0.1", link.port)) as end:
        end.settimeout(60)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield link, end
    echo.close()


def round_trip_ms(end, data=b"x"):
    began = time.perf_counter()
    end.sendall(data)
    got = 0
    while got < len(data):
        got += len(end.recv(1 << 20))
    return 1e3 * (time.perf_counter() - began)


def announce(end, nbytes):
    """Say how many bytes will come, and wait until that is known."""
    end.sendall(b"c" + nbytes.to_bytes(8, "little"))
    assert end.recv(1) == b"?"


def test_a_long_link_takes_its_round_trip_time(ends):
    link, end = ends
    end.sendall(b"e")
    for rtt_ms in (40.0, 10.0):
        link.set(Line(rtt_ms))
        times = [round_trip_ms(end) for _ in range(10)]
        assert rtt_ms <= min(times) < rtt_ms + 25


def test_a_long_link_has_its_rate_and_data_is_whole(ends):
    link, end = ends
    data = np.random.default_rng(0).bytes(4_000_000)
    announce(end, len(data))
    link.set(Line(mbit=80))
    began = time.perf_counter()
    end.sendall(data)
    assert end.recv(1) == b"!"
    seconds = time.perf_counter() - began
    assert len(data) * 8 / 80e6 - 0.05 <= seconds < 3.0  # 0.4 s
    passed = link.set(Line())
    assert passed["up"] == len(data)
    assert passed["up_on_the_line"] == passed["up"]


def test_a_long_link_holds_many_small_parts_as_it_holds_few_large_ones(ends):
    link, end = ends
    parts, size = 3_000, 1_000
    announce(end, parts * size)
    link.set(Line(rtt_ms=20_000.0))
    passed, deadline = 0, time.monotonic() + 8.0  # before the first has come
    for _ in range(parts):
        end.sendall(bytes(size))
        time.sleep(1e-4)  # so that most are read one by one
    while passed < parts * size and time.monotonic() < deadline:
        passed += link.set(Line(rtt_ms=20_000.0))["up"]
        time.sleep(0.05)
    assert passed == parts * size


def test_what_can_be_compressed_takes_less_of_the_line(ends):
    link, end = ends
    announce(end, 4_000_000)
    link.set(Line(mbit=8, compressed=True))
    end.sendall(bytes(4_000_000))  # 4 s, as it is
    assert end.recv(1) == b"!"
    passed = link.set(Line())
    assert passed["up"] == 4_000_000
    assert passed["up_on_the_line"] < 100_000


def test_losses_delay_what_follows_by_a_round_trip(ends):
    link, end = ends
    end.sendall(b"e")
    link.set(Line(50.0, loss=0.5))
    times = [round_trip_ms(end) for _ in range(12)]
    assert sum(t > 95 for t in times) >= 3
    assert round_trip_ms(end, np.random.default_rng(0).bytes(1000)) > 45


def test_a_long_link_shares_its_rate_between_connections(ends):
    link, end = ends
    end.sendall(b"e")
    link.set(Line(mbit=40))
    with socket.create_connection(("127.0.0.1", link.port)) as other:
        announce(other, 5_000_000)
        sender = threading.Thread(target=other.sendall, args=(bytes(5_000_000),), daemon=True)
        sender.start()
        time.sleep(0.1)
        assert round_trip_ms(end) < 500  # 5 MB before it would be a second
        sender.join(60)


@pytest.mark.bench
@pytest.mark.timeout(500)
def test_the_quick_form_measures_waiting_staleness_and_bytes(tmp_path):
    figure = tmp_path / "edge.png"
    results = quick(tmp_path, "edge", "--figure", str(figure))
    cells = results["cells"]
    short, narrow = (next(c for c in cells if c["line"]["mbit"] == mbit) for mbit in (0, 100))
    assert short["batches_per_s"] <= 1.05e3 / short["step_ms"]
    assert narrow["batches_per_s"] < short["batches_per_s"]
    # The line carries what its rate allows, and no more.
    assert narrow["down_mbit"] <= 1.1 * 100
    assert narrow["wait_share"] > 0.3
    assert 0 < narrow["staleness_batches"] <= narrow["prefetch"] + 1
    packed = next(c for c in cells if c["compress"])
    assert packed["line"] == narrow["line"]

    def bytes_each(cell):
        return cell["down_mbit"] / cell["batches_per_s"]

    assert bytes_each(packed) < bytes_each(narrow) / 4
    assert packed["batches_per_s"] > narrow["batches_per_s"]
    assert all(codec["batch_ratio"] > 4 for codec in results["compression"])
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
@pytest.mark.timeout(500)
def test_the_model_of_a_cluster_is_compared_with_points_that_it_has_not_seen(tmp_path):
    pytest.importorskip("simpy", reason="pip install simpy")
    figure = tmp_path / "simulate.png"
    results = quick(tmp_path, "simulate", "--figure", str(figure))
    check_figures(results["times"], may_be_zero={"sample_s", "hop_s"})  # a hop is a difference
    assert max(results["times"].values()) < 0.1
    assert [row["point"]["shards"] for row in results["points"]] == [1, 2]
    for row in results["points"]:
        point, found, said = row["point"], row["measured"], row["predicted"]
        # No role is faster than its pace, measured or predicted.
        for rates in (found, said):
            assert 0 < rates["steps_per_s"] <= 1.05 * point["actors"] * 100 / point["actor_s"]
            assert 0 < rates["batches_per_s"] <= 1.05 / point["learner_s"]
            assert rates["push_ms"] > 0
        assert row["counts"] == (found["load"] <= 0.8)
    assert figure.read_bytes().startswith(b"\x89PNG")
