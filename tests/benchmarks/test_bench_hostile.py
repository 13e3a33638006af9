"""The benchmark of hostile peers: its flood reaches the server, but no handler."""

import json
import subprocess
import sys

import pytest

# It forks: not here, where other tests' threads are.
SCRIPT = """
import json
from benchmarks.transport.bench_hostile import floods
from benchmarks.transport.server import of_size
print(json.dumps(floods(of_size(4096), 20.0, "garbage", 2.0, 1, connections=50, bytes_per_s=2e7)))
"""


@pytest.mark.bench
@pytest.mark.timeout(110)
def test_a_flood_is_measured_and_reaches_no_handler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["rounds_per_s_quiet"] > 0
    assert result["garbage_connections_made"] >= 50
    assert result["messages"] == {"bad": 0, "before_hello": 0, "hung_up": 0}
