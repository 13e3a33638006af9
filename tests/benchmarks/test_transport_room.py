"""Quick forms of the benchmarks between processes: the bytes moved are those stated."""

import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks.support import cycles
from benchmarks.support.harness import in_rounds
from benchmarks.transport import bench_ring, server
from benchmarks.transport.cells import Cells
from benchmarks.transport.end_rows import ROUTERS, SOCKETS, URING
from benchmarks.transport.ends import BUSY_POLL_US
from benchmarks.transport.places import Places
from tests.benchmarks.quick import check_figures, quick
from tests.support import fstack

pytestmark = [pytest.mark.bench, pytest.mark.timeout(450)]

KINDS = ("shm", "ipc", "tcp", "tcp+curve")
NETWORK = KINDS[1:]
ZMTP = ("zmtp", "zmtp+curve")


def fstack_name() -> str:
    """How rows on F-Stack are called here."""
    return "fstack" if fstack.is_real() else fstack.standin() and "fstack stand-in"


def test_a_benchmark_whose_server_or_client_fails_ends_and_says_which() -> None:
    with Places() as places:
        cells = Cells(places, 0.1)
        endless = lambda: time.sleep(1000)  # noqa: E731
        for server, client, said in (
            (lambda: 1 / 0, endless, "the server has ended before its client"),
            (endless, lambda: 1 / 0, "a client has failed"),
        ):
            with pytest.raises(RuntimeError, match=f"one row, round 1: {said}"):
                in_rounds({"one row": partial(cells._with_server, server, client)}, 1)
        silent = places.start(1, endless)
        with pytest.raises(TimeoutError):
            silent.result(timeout_s=0.1)
        silent.kill()


def test_cycles_a_second_are_those_of_a_processor() -> None:
    found, how = cycles.per_second()
    assert 2e8 < found < 1e10
    assert "perf" in how or "not readable" in how


def test_links_deliver_whole_messages_and_rates_follow_from_their_bytes(tmp_path: Path) -> None:
    cells = quick(tmp_path, "ring")["cells"]
    check_figures(cells)
    assert {(one["kind"], one["contender"], one["bytes"]) for one in cells} == set(
        bench_ring.cells_of(quick=True)
    )
    one_way = [one for one in cells if one["kind"] == "throughput"]
    assert {one["contender"] for one in one_way} == set(bench_ring.LINKS)
    for one in one_way:
        assert one["received_bytes"] == one["received_messages"] * one["bytes"]
        rate = one["messages_per_s"] * one["bytes"] / 1e6
        assert one["mb_per_s"] == pytest.approx(rate)


def test_a_push_has_all_its_transitions_and_parameters_and_batches_their_bytes(
    tmp_path: Path,
) -> None:
    rows = quick(tmp_path, "transport", "--only", "rows")["rows"]
    check_figures(rows)
    bare = {f"zmq {kind}{tuned}" for kind in NETWORK for tuned in ("", ", our send buffer")}
    bare -= {"zmq ipc, our send buffer"}
    ours = (
        *KINDS, *ZMTP, *(f"{kind}, network process" for kind in ZMTP),
        *(f"{fstack_name()}{keys}" for keys in ("", "+curve")),
    )  # fmt: skip
    assert set(rows) - {"redis"} == {
        *(f"zapex {kind}" for kind in ours), *bare, "tcp", "memcpy", "bytes",
    }  # fmt: skip
    setting = server.atari()
    assert sum(setting.rows) == 800
    frame = 84 * 84
    whole = len(setting.rows) * setting.layout.chunk_layout.body_bytes
    pushes = {rows[f"zapex {kind}"]["push_bytes"] for kind in ours if kind != "shm"}
    assert len(pushes) == 1, "every transport moves the same push"
    assert 800 * frame < pushes.pop() < whole
    for kind in ours:
        found = rows[f"zapex {kind}"]
        assert found["pull_bytes"] == server.PARAMETER_BYTES == 13_171_348
        # At least every drawn transition's newest frame; at most both stacks of each.
        assert 512 * frame < found["sample_bytes"] < 1.05 * 512 * 8 * frame
    for name in (*bare, "tcp", "memcpy"):
        assert len(rows[name]) == len(rows["bytes"]) == 3, "push, pull and batch"


def test_rows_of_one_kind_stand_beside_their_bare_messages_the_roofs_and_redis(
    tmp_path: Path,
) -> None:
    rows = quick(tmp_path, "transport", "--only", "rows", "--over", "tcp")["rows"]
    assert set(rows) - {"redis"} == {
        "zapex tcp", "zmq tcp", "zmq tcp, our send buffer", "tcp", "memcpy", "bytes",
    }  # fmt: skip


def test_every_end_answers_and_its_figures_follow_from_what_it_did(tmp_path: Path) -> None:
    found = quick(tmp_path, "transport", "--only", "ends")["ends"]
    check_figures(found)
    routers = {f"{router} blocking{keys}" for router in ROUTERS for keys in ("", ", keys")}
    polls = {f"{fstack_name()}{keys}" for keys in ("", ", keys")}
    assert set(found) - {URING} == {*routers, *polls, *SOCKETS}
    for one in found.values():
        echo = one["echo_us"]
        assert 1 < echo["p50"] <= echo["p99"] <= echo["p99.9"]
        # A round trip lasts at least as long as the server's work for it, but for clock ticks.
        assert 0 < one["echo_server_cpu_us"] < 10 * echo["p99.9"]
        assert one["echo_server_cores"] < 3.2
        for size in ("1_mib", "8_mib"):
            # No core is busy for longer than the clock has run; F-Stack has one more thread.
            for end, threads in (("client", 2), ("server", 3)):
                busy = one[f"{size}_{end}_cpu_ns_per_byte"] * one[f"{size}_mb_per_s"] / 1000
                assert 0 < busy < threads + 0.2
            assert one[f"{size}_server_cores"] == pytest.approx(busy)
    assert found["socket polling"]["idle_cpu"] > found["zmtp blocking"]["idle_cpu"]
    assert found["zmtp blocking"]["idle_cpu"] < 0.2
    assert found["socket SO_BUSY_POLL"]["busy_poll_us"] == BUSY_POLL_US
    zero = found["socket MSG_ZEROCOPY"]
    assert zero["zerocopy_sends"] > 0
    assert 0 <= zero["zerocopy_copied"] <= zero["zerocopy_sends"]


def test_sizes_are_those_asked_for_and_every_transport_has_them_all(tmp_path: Path) -> None:
    sizes = quick(tmp_path, "transport", "--only", "sizes")["sizes"]
    check_figures(sizes)
    assert sizes["bytes"] == [64, 65536]
    for size in sizes["bytes"]:
        for kind in KINDS:
            found = sizes[f"zapex {kind} {size}"]
            assert found["pull_bytes"] == size
            if kind != "shm":  # a chunk with its columns and counts: what it says, and a little
                assert 0.9 * size < found["push_bytes"] < 1.2 * size + 512
    for name in ("zmq ipc", "zmq tcp", "zmq tcp+curve", "tcp", "memcpy"):
        assert len(sizes[name]) == len(sizes["bytes"])


def test_several_actors_push_the_same_bytes_over_every_transport(tmp_path: Path) -> None:
    actors = quick(tmp_path, "transport", "--only", "actors")["actors"]
    check_figures(actors)
    assert {f"{kind} 2" for kind in NETWORK} <= set(actors)
    assert len({one["push_bytes"] for name, one in actors.items() if "redis" not in name}) == 1


def test_paced_learners_keep_their_pace_and_shares_of_time_add_up(tmp_path: Path) -> None:
    paced = quick(tmp_path, "transport", "--only", "paced")["paced"]
    check_figures(paced, may_be_zero={"learner_wait", "replay_insert"})
    assert set(paced) == {f"{kind} {ms} ms" for kind in ("tcp", "tcp+curve") for ms in (180, 20)}
    for name, found in paced.items():
        parts = sum(found[f"replay_{what}"] for what in ("insert", "sample", "update"))
        assert found["replay_communication"] == pytest.approx(parts)
        for role in ("actor", "learner", "replay"):
            assert 0 < found[f"{role}_communication"] <= 1
        step_s = float(name.split()[1]) / 1000
        assert found["step_s"] >= step_s, "a step took less than its pace"
        assert 1 <= found["batches"] <= 1.0 / step_s + 1, "more batches than the pace allows"
        assert found["learner_wait"] + found["learner_communication"] < 1


def test_a_run_over_tcp_has_every_roles_shares_with_and_without_keys(tmp_path: Path) -> None:
    results = quick(tmp_path, "cluster")
    # A paced actor sleeps: in a short window it may use less than the clock's tick of 10 ms.
    check_figures(
        results, may_be_zero={"shares", "communication", "backward", "busy", "cores_used"}
    )
    assert sorted(name.rpartition(", ")[2] for name in results) == ["CURVE", "NULL"]
    for found in results.values():
        assert {"learner", "relay"} <= set(found["busy"])
        for busy in found["busy"].values():
            assert busy["communication"] == pytest.approx(busy["libzmq"] + busy["own"])
            assert 0 <= busy["communication"] <= 1
        assert found["busy"]["learner"]["libzmq"] > 0, "its threads received the batches"
        assert found["cores_used"]["all"] > 0
    real = next(one for name, one in results.items() if name.startswith("real"))
    paced = next(one for name, one in results.items() if name.startswith("paced at 20 ms"))
    assert real["step_s"]["backward"] > 0
    assert real["cores_used"]["learner"] > 0.1
    assert real["cores_used"]["actor"] > 0.01
    assert paced["step_s"]["backward"] == 0, "the paced learner computes"
    assert paced["step_s"]["forward"] >= 0.9 * 0.020, "a paced step took less than its pace"
    for found in (real, paced):
        assert set(found["shares"]) == {"replay", "actor", "relay", "learner"}
        for shares in found["shares"].values():
            assert 0 < sum(shares.values()) <= 1.05
        learner, actor = found["shares"]["learner"], found["shares"]["actor"]
        assert found["communication"] == {
            "actor": pytest.approx(actor["pull"] + actor["push"]),
            "learner": pytest.approx(learner["sample"] + learner["set"]),
        }


def test_floods_reach_the_server_and_memory_is_looked_at_under_overload(tmp_path: Path) -> None:
    raw = quick(tmp_path, "hostile")
    facts = {"machine", "during", "doubts"}
    assert all(one.keys() >= facts for one in raw.values())
    results = {n: {k: v for k, v in one.items() if k not in facts} for n, one in raw.items()}
    check_figures(results, may_be_zero={
        "rate_asked", "cores_the_server_spends_more", "messages", "honest_reconnects", "counts",
    })  # fmt: skip
    floods = {
        f"flood_{what}_{pace}" for what in ("garbage", "noise") for pace in ("paced", "saturated")
    }
    assert set(results) == {*floods, "memory_under_overload"}
    for name in floods:
        found = results[name]
        assert found["share_kept"] == pytest.approx(
            found["rounds_per_s_flooded"] / found["rounds_per_s_quiet"], abs=0.01
        )
        if "noise" in name:
            assert found["messages"]["bad"] > 0, "the flood reached nobody"
        else:
            assert found["garbage_connections_made"] >= found["connections"] == 1000
        if "paced" in name:  # 2 rounds a second, and what fell due in a second before
            assert found["rounds_per_s_quiet"] < 6
    memory = results["memory_under_overload"]
    assert memory["processes_alive_at_the_end"] == memory["processes"] == 8
    assert memory["share_of_bound"] == pytest.approx(
        memory["peak_mib"] / memory["bound_mib"], abs=0.01
    )
    assert memory["counts"]["without_credit"] > 0, "nobody pushed without credit"
    assert memory["counts"]["chunks_taken"] > 0
