"""Runs that a scheduler on this machine places, asked with the commands that a user types."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from tests.support.audit import ChunkAudit, attach
from zapex.cli import main as cli
from zapex.cli.flags import read_settings
from zapex.config.settings import Config
from zapex.envs.environments import check
from zapex.run.run import Membership, Run

DEADLINE_S = 150.0  # a busy machine is no failure
SETTINGS: dict[str, dict[str, Any]] = {
    "env": {"env": "CartPole-v1"},
    "run": {"preset": "smoke", "max_frames": 0, "checkpoint_minutes": 0.05},
    "evaluator": {"eval_period_s": 0.0},
    "replay": {"capacity": 4096, "learning_starts": 256, "samples_per_insert": 2.0},
    "actor": {"envs_per_actor": 2},
    "learner": {"learner_threads": 1, "batch_size": 128},
}


class Launch:
    """A launched run, asked with the commands that a user types."""

    def __init__(self, capsys: pytest.CaptureFixture[str], directory: Path) -> None:
        self.capsys, self.directory = capsys, directory

    def zapex(self, *words: str) -> str:
        """A command that must succeed; what it prints."""
        code = cli.main(words)
        said = self.capsys.readouterr()
        assert code == 0, said.out + said.err
        return said.out

    def log(self, role: str) -> str:
        return self.zapex("logs", role, str(self.directory), "--lines", "1000")

    def snapshot(self, run: str) -> dict[str, Any]:
        """The newest that a host has written of its run."""
        with contextlib.suppress(OSError, ValueError):
            facts: dict[str, Any] = json.loads((self.directory / run / "snapshot.json").read_text())
            return facts
        return {"totals": {"frames": 0, "batches": 0}, "relay": {}, "replay": {}}

    def wait_for(
        self, ready: Callable[[], object], what: str, beside: Popen[bytes] | None = None
    ) -> None:
        """Wait until it is so. beside: a command that must not end before."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not ready():
            assert beside is None or beside.poll() is None, f"{what}: exit {beside.poll()}"
            if time.monotonic() > deadline_s:
                logs = "\n".join(self.log(role) for role in ("replay", "learner", "actor"))
                pytest.fail(f"waited for {what}\n{self.zapex('status', str(self.directory))}{logs}")
            time.sleep(0.3)

    def account(self) -> ChunkAudit:
        """What looks into the memory of the replay's parent."""
        run_dir = self.directory / "replay-0"
        config = Config().replace(**read_settings(str(run_dir / "config.toml")))
        membership = Membership("replay", "tcp://127.0.0.1:1")
        run = Run(config, check("CartPole-v1"), run_dir, membership=membership)
        host = attach(int((run_dir / ".lock").read_text()), run)
        assert host is not None
        return ChunkAudit(host.store())
