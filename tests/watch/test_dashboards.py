"""The paper's dashboard as a user sees it: TensorBoard in a browser, and Visdom."""

import http.server
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support import fake_run
from tests.support.browser import WAIT_MS, browser_page, needs_chromium, needs_playwright
from zapex.errors import ConfigError, PeerError
from zapex.watch import recorders
from zapex.watch.recorders import PAPERS, JsonLines, TensorBoard, Visdom, check_visdom

TAGS = ("actors/episodic_return_0", "actors/episodic_return_1", "replay/live", "losses/td_loss")


@contextmanager
def child(code_or_module, *args, **more):
    process = subprocess.Popen([sys.executable, *code_or_module, *args], **more)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@contextmanager
def tensorboard(logdir):
    """A TensorBoard that looks at its files every second; its URL."""
    args = ("--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0", "--reload_interval", "1")
    module = ("-m", "tensorboard.main")
    with child(module, *args, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
                yield found[0]
                return
        raise AssertionError("TensorBoard has not started")


def shown(page):
    """Tag -> (value, step) as the page's tables show it."""
    found = {}
    for card in page.locator("scalar-card").all():
        text = card.inner_text().replace("\n/", "/")
        tag = next((tag for tag in TAGS if tag in text), None)
        numbers = re.findall(r"^[\d.,e+-]+$", text.partition("Relative")[2], re.M)
        if tag and len(numbers) >= 3:
            found[tag] = float(numbers[1].replace(",", "")), int(numbers[2].replace(",", ""))
    return found


def wait_until_shown(page, wanted):
    deadline = time.monotonic() + WAIT_MS / 1000
    while time.monotonic() < deadline:
        if (found := shown(page)).keys() == wanted.keys() and all(
            found[tag] == (pytest.approx(value, rel=0.01), step)
            for tag, (value, step) in wanted.items()
        ):
            return
        time.sleep(0.3)
        page.locator("button.reload-button").click()
    assert found == wanted


def written(run_dir):
    accumulator = EventAccumulator(str(run_dir))
    accumulator.Reload()
    last = {tag: accumulator.Scalars(tag)[-1] for tag in TAGS}
    return {tag: (event.value, event.step) for tag, event in last.items()}


@pytest.mark.slow
@needs_chromium
@needs_playwright
def test_a_browser_shows_scores_of_every_actor_memory_and_loss_and_new_ones_as_they_come(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    fake, monitor = fake_run.started(None, [TensorBoard(run_dir, {"lr": 1e-4})], 60, run_dir)
    for _ in range(10):
        fake_run.go_on(fake, monitor, 6.0)
        monitor.tick()
    first = written(run_dir)
    with tensorboard(tmp_path) as url, browser_page() as page:
        page.goto(f"{url}#custom_scalars")
        for title in PAPERS:
            page.get_by_text(title, exact=True).first.wait_for()
        page.get_by_text("Matches (3)").wait_for()  # two actors, and the mean of all
        tags = "|".join(f"^{tag}$" for tag in TAGS)
        page.goto(f"{url}?tagFilter={tags}#timeseries")
        wait_until_shown(page, first)
        for _ in range(10):
            fake_run.go_on(fake, monitor, 6.0)
            monitor.tick()
        second = written(run_dir)
        assert all(second[tag][1] > first[tag][1] for tag in TAGS)
        wait_until_shown(page, second)
    monitor.close()


@contextmanager
def visdom_server(tmp_path, port=0):
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    # Its own command would fetch the page's scripts from the internet first.
    code = (
        "import sys; from visdom.server.run_server import start_server\n"
        "start_server(port=int(sys.argv[1]), env_path=sys.argv[2], base_url='', bind_local=True)"
    )
    url = f"http://127.0.0.1:{port}"
    where = str(tmp_path / f"visdom-{time.monotonic_ns()}")
    os.mkdir(where)
    with child(("-c", code), str(port), where, stdout=subprocess.DEVNULL,
               stderr=subprocess.DEVNULL) as process:  # fmt: skip
        deadline = time.monotonic() + 60
        while True:
            try:
                check_visdom(url)
                break
            except ConfigError:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.1)
        yield url


needs_visdom = pytest.mark.skipif(
    importlib.util.find_spec("visdom") is None, reason="no visdom: docs/install.md"
)


def windows(url, name="run"):
    """Title -> line -> (x, y), as the server gives it."""
    stored = json.loads(recorders.post(url, "win_data", json.dumps({"eid": name, "win": None})))
    return {
        title: {line["name"]: (line["x"], line["y"]) for line in window["content"]["data"]}
        for title, window in stored.items()
    }


@needs_visdom
def test_visdom_has_the_score_of_every_actor_the_memory_and_the_loss(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with visdom_server(tmp_path) as url:
        fake_run.record([Visdom(run_dir, url), JsonLines(run_dir)], 300, run_dir)
        found = windows(url)
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = [line for line in metrics if line["kind"] != "evaluation"]
    steps = [line["steps"] for line in metrics]
    live = [line["replay/live"] for line in metrics]
    loss = [line["losses/td_loss"] for line in metrics]
    assert found["transitions in memory"] == {"replay/live": (steps, live)}
    assert found["Q loss"] == {"losses/td_loss": (steps, loss)}
    scores = found["score of every actor"]
    assert scores.keys() == {*TAGS[:2], "charts/episodic_return_last100"}
    assert all(len(y) > 30 and max(y) > 10 for _, y in scores.values())


def test_a_visdom_server_that_hangs_delays_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("zapex.watch.recorders.VISDOM_TIMEOUT_S", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        recorder = Visdom(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
        fake = fake_run.FakeRun()
        monitor = fake.monitor(facts=fake_run.facts(tmp_path))
        problem, deadline = None, time.monotonic() + 60
        while problem is None:
            assert time.monotonic() < deadline
            episodes, snapshot = fake.advance(5), monitor.look()
            try:
                recorder.write(snapshot, episodes, [])
            except PeerError as error:
                problem = error
            time.sleep(0.02)
        assert "timed out" in str(problem)
        began_s = time.monotonic()
        recorder.close()
        assert time.monotonic() - began_s < 20


def test_a_visdom_server_that_answers_byte_by_byte_delays_the_end_for_two_timeouts(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("zapex.watch.recorders.VISDOM_TIMEOUT_S", 0.5)
    ended = threading.Event()

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            while not ended.wait(0.1):
                self.wfile.write(b" ")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        recorder = Visdom(tmp_path, f"http://127.0.0.1:{server.server_port}")
        fake = fake_run.FakeRun()
        monitor = fake.monitor(facts=fake_run.facts(tmp_path))
        recorder.write(monitor.look(), fake.advance(5), [])
        began_s = time.monotonic()
        recorder.close()
        assert time.monotonic() - began_s < 20
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def sent(monkeypatch):
    """The windows that a Visdom server would get: title -> the last message."""
    windows = {}

    def post(url, endpoint, text):
        message = json.loads(text)
        windows[message["win"]] = message
        return b""

    monkeypatch.setattr("zapex.watch.recorders.post", post)
    return windows


def test_a_resumed_run_shows_its_earlier_sessions_in_visdom(tmp_path, sent):
    first = fake_run.record([JsonLines(tmp_path)], 60, tmp_path)
    fake_run.record([Visdom(tmp_path, "http://localhost:1")], 5, tmp_path)
    memory = sent["transitions in memory"]
    assert memory["eid"] == tmp_path.name
    assert memory["data"][0]["x"][11] == first.totals["steps"]
    assert len(memory["data"][0]["x"]) == 13


def test_a_long_line_is_thinned_over_its_whole_length(tmp_path, sent):
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for i in range(4096):
            line = {"kind": "metrics", "steps": float(i), "replay/live": 2.0 * i}
            file.write(json.dumps(line) + "\n")
    fake_run.record([Visdom(tmp_path, "http://localhost:1")], 5, tmp_path)
    line = sent["transitions in memory"]["data"][0]
    x, y = np.array(line["x"][:-1]), np.array(line["y"][:-1])  # without the new point
    assert 512 <= len(x) < 1024
    assert x[0] == 0
    assert x[-1] > 4000
    assert (np.diff(x) > 0).all()
    np.testing.assert_array_equal(y, 2 * x)


def test_another_server_is_refused_before_the_run():
    class Page(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ConfigError, match=url):
            check_visdom(url)
        server.shutdown()
