"""Runs and the terminals beside them: closed ones, other ones, and the command that ends a run."""

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import psutil
import pytest

from zapex.watch import runs
from zapex.watch.recorders import read_metrics

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "TERM": "xterm-256color",
    "LC_ALL": "C.UTF-8",
}
WAIT_S = 100.0
pytestmark = pytest.mark.timeout(400)


class Terminal:
    """A terminal of its own, whose shell is one zapex command; `hang_up` closes it."""

    def __init__(self, directory, *words, columns=100, rows=40):
        self.pid, self._ours = pty.fork()
        if not self.pid:
            os.chdir(directory)
            # A shell that closes with its terminal: what it starts gets SIGHUP.
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            argv = [sys.executable, "-m", "zapex", *words]
            os.execve(sys.executable, argv, ENVIRONMENT)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
        self.output = b""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with contextlib.suppress(OSError):  # EIO: nobody holds the other end
            while data := os.read(self._ours, 1 << 16):
                self.output += data

    def press(self, key):
        os.write(self._ours, key)

    def hang_up(self):
        """What closing a window does: the kernel sends SIGHUP, and output fails with EIO."""
        os.close(self._ours)

    def wait_for(self, what, why):
        deadline_s = time.monotonic() + WAIT_S
        while not (found := what()):
            assert time.monotonic() < deadline_s, f"no {why}: {self.output[-3000:].decode()}"
            time.sleep(0.1)
        return found

    def ended(self):
        return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid

    def kill(self):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            for one in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.Error):
                    one.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


@pytest.fixture
def terminal(tmp_path):
    with contextlib.ExitStack() as stack:

        def begin(*words, **more):
            made = Terminal(tmp_path, *words, **more)
            stack.callback(made.kill)
            return made

        yield begin


def zapex(directory, *words):
    return subprocess.run(
        [sys.executable, "-m", "zapex", *words],
        cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip


def last(run):
    return max((x["batches"] for x in read_metrics(run) if x["kind"] == "metrics"), default=0)


@pytest.mark.slow
def test_training_goes_on_when_the_terminal_closes_and_others_watch_and_end_it(tmp_path, terminal):
    run = tmp_path / "runs" / "mine"
    words = "train CartPole-v1 --preset smoke --max-frames 0 --actors 1 --run-dir runs/mine"
    shell = terminal(*words.split())
    shell.wait_for(lambda: last(run), "batch")
    shell.hang_up()
    log = run / "logs" / "terminal.log"
    shell.wait_for(log.exists, "log of what was said without a terminal")
    before = last(run)
    shell.wait_for(lambda: last(run) > before, "batch without a terminal")
    assert "the terminal was closed; the run continues" in log.read_text()
    assert "\x1b" not in log.read_text()

    listed = zapex(tmp_path, "runs")
    assert listed.stdout.splitlines()[1].startswith("running")
    watcher, second = terminal("watch"), terminal("watch", "mine", "--plain")
    watcher.wait_for(lambda: watcher.output.count(b"role       ") >= 4, "pictures")
    second.wait_for(lambda: b"frames" in second.output, "line")
    watcher.press(b"\x03")
    watcher.wait_for(watcher.ended, "end of the view")
    assert f"continues in process {shell.pid}".encode() in watcher.output
    assert runs.training_process(run) == shell.pid

    ended = zapex(tmp_path, "stop", "mine")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("ended")
    shell.wait_for(shell.ended, "end of the run")
    second.wait_for(second.ended, "end of the other view")
    assert b"stopped by SIGTERM" in second.output
    assert "stopped by SIGTERM" in log.read_text()
    again = zapex(tmp_path, "stop", "mine")
    assert (again.returncode, again.stdout) == (0, "runs/mine is not being trained\n")

    game = terminal("watch", "--game")
    game.wait_for(lambda: "▀".encode() in game.output, "picture of a game")
    game.wait_for(lambda: "▶".encode() in game.output, "Q values")
    game.press(b"\x03")
    game.wait_for(game.ended, "end of the game")
    assert b"\x1b[?1049l" in game.output
    assert b"Traceback" not in game.output + watcher.output + second.output
