"""Role metrics: words in shared memory that one process writes and others read."""

import mmap
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from zapex.errors import SharedMemoryError
from zapex.host.metrics import TABLES, RoleMetrics, sums


def block(role="actor"):
    return RoleMetrics(bytearray(RoleMetrics.required_bytes()), role, create=True)


@pytest.mark.parametrize("role", TABLES)
def test_each_name_has_its_own_word(role):
    metrics = block(role)
    table = metrics.table
    for i, name in enumerate((*table.counters, *table.gauges)):
        metrics.set(name, i + 1)
    snapshot = metrics.snapshot()
    for i, name in enumerate((*table.counters, *table.gauges)):
        assert snapshot[name] == i + 1
    assert all(snapshot[f"phase/{name}"] == 0 for name in table.phases)


@pytest.mark.parametrize("role", TABLES)
def test_shown_phases_partition_all_phases(role):
    table = TABLES[role]
    shown = [phase for parts in table.shown_as.values() for phase in parts]
    assert sorted(shown) == sorted(table.phases)


def test_each_nanosecond_is_in_one_phase():
    metrics = block()
    begin = time.perf_counter()
    for _ in range(50):
        for phase in metrics.table.phases:
            metrics.enter(phase)
    snapshot = metrics.snapshot()
    took = time.perf_counter() - begin
    total = sum(snapshot[f"phase/{name}"] for name in metrics.table.phases)
    assert 0 <= took - total < 1e-3


def test_running_phase_counts():
    metrics = block()
    metrics.enter("environment")
    time.sleep(0.02)
    assert metrics.snapshot()["phase/environment"] >= 0.02
    assert metrics.snapshot(alive=False)["phase/environment"] == 0


def test_nothing_counts_after_leave():
    metrics = block()
    metrics.enter("environment")
    metrics.leave()
    first = metrics.snapshot()
    time.sleep(0.01)
    assert metrics.snapshot() == first
    assert metrics.pid == 0


def test_restarted_role_continues_counting():
    memory = bytearray(RoleMetrics.required_bytes())
    first = RoleMetrics(memory, "actor", create=True)
    first.enter("environment")
    time.sleep(0.01)
    first.enter("push")
    first.add("steps", 7)
    environment_s = first.snapshot()["phase/environment"]
    time.sleep(0.05)  # dead

    second = RoleMetrics(memory, "actor", create=False)
    second.enter("environment")
    second.add("steps", 5)
    snapshot = second.snapshot()
    assert snapshot["steps"] == 12
    assert snapshot["phase/push"] == 0
    assert environment_s <= snapshot["phase/environment"] < environment_s + 0.04


def test_other_process_reads_the_block():
    fd = os.memfd_create("metrics")
    os.ftruncate(fd, RoleMetrics.required_bytes())
    shared = mmap.mmap(fd, 0)
    reader = RoleMetrics(shared, "learner", create=True)
    code = (
        "import mmap, sys\n"
        "from zapex.host.metrics import RoleMetrics\n"
        "m = RoleMetrics(mmap.mmap(int(sys.argv[1]), 0), 'learner', create=False)\n"
        "m.enter('gather'); m.add('batches', 3); m.set('loss', 0.5); m.leave()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=[fd], check=True)
    snapshot = reader.snapshot()
    assert (snapshot["batches"], snapshot["loss"]) == (3, 0.5)
    assert snapshot["phase/gather"] > 0
    assert reader.phase == "gather"
    os.close(fd)


def test_block_of_another_role_is_refused():
    memory = bytearray(RoleMetrics.required_bytes())
    RoleMetrics(memory, "actor", create=True)
    with pytest.raises(SharedMemoryError, match="role 'learner'"):
        RoleMetrics(memory, "learner", create=False)


def test_small_buffer_is_refused():
    with pytest.raises(SharedMemoryError, match=f"{RoleMetrics.required_bytes()} bytes.* 64"):
        RoleMetrics(bytearray(64), "actor", create=True)


def test_metrics_import_neither_numba_nor_torch():
    code = "import sys, zapex.host.metrics; print({'numba', 'torch', 'rich'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_divide_loses_no_time() -> None:
    now = [1_000]
    block = bytearray(RoleMetrics.required_bytes())
    metrics = RoleMetrics(block, "learner", create=True, clock_ns=lambda: now[0])
    metrics.enter("forward")
    now[0] += 1_000
    metrics.divide({"forward": 1.0, "backward": 2.0, "optimiser": 0.5})
    now[0] += 100
    metrics.divide({})
    metrics.enter("update")
    seen = metrics.snapshot(alive=False)
    phases = {name: seen[f"phase/{name}"] * 1e9 for name in ("forward", "backward", "optimiser")}
    assert phases == pytest.approx({"forward": 387, "backward": 571, "optimiser": 142})
    assert sum(phases.values()) == pytest.approx(1_100)


def test_sums_equal_the_sum_of_snapshots() -> None:
    now = [1_000]
    blocks = []
    for i in range(5):
        memory = np.zeros(RoleMetrics.required_bytes(), np.uint8)
        block = RoleMetrics(memory, "learner", create=True, clock_ns=lambda: now[0])
        if i != 3:  # which has not begun
            now[0] += 7
            block.enter("gather")
            now[0] += 1_000 * i
            block.enter("forward")
            block.add("batches", i)
            block.set("loss", -1.5 - i)
        blocks.append(block)
    now[0] += 500
    blocks[1].leave()

    def naive(alive: bool) -> dict[str, float]:
        every = [block.snapshot(alive) for block in blocks]
        whole = {name: sum(one[name] for one in every) for name in every[0]}
        gauges = blocks[0].table.gauges
        return whole | {name: max(one[name] for one in every) for name in gauges}

    for alive in (True, False):
        assert sums(blocks, lambda pid, alive=alive: alive) == pytest.approx(naive(alive))
    assert naive(True) != naive(False)
    assert blocks[2].value("batches") == 2
    assert blocks[2].value("loss") == -3.5
