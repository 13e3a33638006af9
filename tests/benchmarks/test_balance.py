"""`zapex balance` measures what it says: with environments whose step takes a known time."""

import json
import subprocess
import sys

import psutil
import pytest

from tests.benchmarks.quick import quick
from tests.support.toy_env import Sleepy
from zapex.cli import main as cli
from zapex.config.settings import Config
from zapex.envs import environments
from zapex.errors import PeerDied
from zapex.machine.resources import hardware_threads
from zapex.studies.crew import Crew

ENV = f"{Sleepy.__module__}:{Sleepy.__name__}"
MS = 10.0


@pytest.mark.bench
def test_a_balance_finds_the_time_of_a_step_and_the_paced_learners_rate(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = {name: tmp_path / f"b.{name}" for name in ("json", "png")}
    words = [ENV, "--env-kwargs", f"ms={MS}", "--quick", "--learner-ms", "50", "--batch-size", "32"]
    words += ["--samples-per-insert", "8", "--json", str(files["json"]), "--figure"]
    assert cli.main(["balance", *words, str(files["png"])]) == 0
    found = json.loads(files["json"].read_text())
    # The environments of an actor are stepped one after another.
    model = found["models"]["cpu"]
    assert MS <= 1e3 * model["each_s"] <= 2 * MS
    threads = len(hardware_threads())
    for point in found["points"]:
        best = min(point["actors"], threads if point["actors"] <= point["cores"] else 4096)
        assert 0.1 * best * 1e3 / MS <= point["steps_per_s"] <= 1.02 * best * 1e3 / MS
    # A batch of 32 each 50 ms, each row drawn 8 times: 80 steps a second.
    assert found["advice"]["batches_per_s"] == 20
    assert found["advice"]["threads_needed"] == 1
    assert found["advice"]["limit"] == "learner"
    assert found["advice"]["envs_per_actor"] <= 4
    assert files["png"].stat().st_size > 10_000
    assert not [p for p in psutil.Process().children() if "balance" in " ".join(p.cmdline())]


@pytest.mark.bench
def test_a_learner_on_the_cpu_and_its_kernels_are_measured(tmp_path):
    spec = environments.check("CartPole-v1", {})
    config = Config().replace(batch_size=32, hidden=64, learner_threads=1)
    cores = hardware_threads()
    with Crew(config, spec) as crew:
        kernels = crew.work([{"do": "profile", "cores": cores, "threads": 1}], 0.0)[0]["kernels"]
        order = {"do": "learn", "cores": cores[:1], "threads": 1}
        began = []
        (learned,) = crew.work([order], 1.0, lambda: began.append(1))
        assert began == [1]
        assert 0.9 <= learned["seconds"] <= 10
        assert learned["done"] > 10
        assert sum(kernels.values()) == pytest.approx(1)
        with pytest.raises(PeerDied, match="a worker failed: KeyError"):
            crew.work([{"do": "play", "cores": cores, "threads": 1}], 1.0)
    assert not [p for p in psutil.Process().children() if "balance" in " ".join(p.cmdline())]


def test_workers_end_with_their_parent():
    code = (
        "import os, sys\n"
        "from zapex.config.settings import Config\n"
        "from zapex.envs import environments\n"
        "from zapex.studies.crew import Crew\n"
        "crew = Crew(Config(), environments.check('CartPole-v1', {})).__enter__()\n"
        "order = {'do': 'learn', 'cores': [0], 'threads': 1}\n"
        "crew._start()\n"
        "print(crew._workers[0].pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate(timeout=60)
    assert worker.wait(60) is None or not worker.is_running()


@pytest.mark.bench
@pytest.mark.timeout(450)
def test_the_error_of_a_balance_is_that_of_its_worst_held_out_point(tmp_path):
    for env, found in quick(tmp_path, "balance").items():
        assert found["env"] == env
        assert found["quick"]
        held_out = [point for point in found["points"] if point["held_out"]]
        for point in held_out:
            seen, predicted = point["steps_per_s"], point["predicted_steps_per_s"]
            assert point["error"] == pytest.approx(predicted / seen - 1)
        assert found["held_out_error"] == max(abs(point["error"]) for point in held_out)
