"""A replay from other processes: the same rows, keys and errors; deaths leave nothing half done."""

import contextlib
import copy
import dataclasses
import gc
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import zapex
from tests.library.test_writer import check_rows, first_and_step, new_replay
from tests.support import handle_processes as processes
from tests.support.handle_processes import PATTERN, STREAMS, play, rows_from
from tests.support.keys import indices_of
from zapex import PrioritizedReplay
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.keys import NO_KEY
from zapex.chunks.layout import COUNT, EVICTED, LIVE, STATE
from zapex.errors import (
    ConfigError,
    InvalidPriority,
    NotEnoughData,
    PeerDied,
    PeerError,
    PeerTimeout,
    ReplayError,
    SchemaError,
    SharedMemoryError,
)
from zapex.library.handle_client import HandleLink
from zapex.library.handle_server import HandleServer
from zapex.replay.core import ReplayLayout
from zapex.wire.messages import Request

pytestmark = pytest.mark.timeout(300)
DEADLINE_S = 120.0  # a busy machine is no failure


@pytest.fixture(scope="module", autouse=True)
def kernels_are_compiled():
    """Otherwise all processes of the first tests compile them at once, beside each other."""
    replay = new_replay(n=3)
    with replay.writer(STREAMS) as writer:
        play(1, writer, steps=20)
    replay.extend(**rows_from(2)[0])
    replay.update_priorities(replay.sample(8).keys, np.ones(8))


def until(ready, what):
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.001)


def raises(error, call):
    """Whether it raised that."""
    try:
        call()
    except error:
        return True
    return False


def stopped(pid):
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(") ")[2][0] == "T" for task in tasks)


@contextlib.contextmanager
def served(replay):
    """A client in the owner's process: what travels is the same."""
    try:
        with zapex.connect(replay.handle, timeout_s=DEADLINE_S) as client:
            yield client
    finally:
        replay.close()


@contextlib.contextmanager
def process(target, *args, method="spawn"):
    child = multiprocessing.get_context(method).Process(target=target, args=args)
    child.start()
    try:
        yield child
        child.join(DEADLINE_S)
    finally:
        child.kill()
        child.join()


@contextlib.contextmanager
def foreign_owner():
    """A handle of a replay in another process, and that process."""
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    with process(processes.own_a_replay, theirs) as child:
        assert mine.poll(DEADLINE_S)
        source, _ = mine.recv()
        try:
            yield source, child
        finally:
            child.kill()


def pattern_rows(first, count):
    numbers = np.repeat(np.arange(first, first + count)[:, None], 257, axis=1)
    return {
        "obs": numbers, "action": numbers[:, 0] + 1, "reward": np.ones(count),
        "next_obs": numbers + 1, "terminated": np.zeros(count, bool),
    }  # fmt: skip


def check_pattern(batch):
    """Every row is whole: all of its numbers belong to the same step."""
    here = batch.keys != NO_KEY
    obs, next_obs, action = batch.obs[here], batch.next_obs[here], batch.action[here]
    np.testing.assert_array_equal(obs, np.repeat(obs[:, :1], 257, axis=1))
    np.testing.assert_array_equal(next_obs, obs + 1)
    np.testing.assert_array_equal(action, next_obs[:, 0])


@pytest.mark.parametrize("method", processes.CONTEXTS)
def test_two_writers_and_an_extender_bring_every_transition_of_the_naive_twins(method):
    replay = new_replay(n=3)
    work = [(processes.play_from_afar, seed) for seed in (1, 2)]
    work.append((processes.extend_from_afar, 3))
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(process(target, replay.handle, seed, method=method))
            for target, seed in work
        ]
    assert [child.exitcode for child in children] == [0, 0, 0]
    expected = play(1, None) + play(2, None) + rows_from(3)[1]
    assert len(replay) == len(expected) == replay.core.inserted
    assert check_rows(replay, expected) == len(expected)
    until(lambda: replay.links == 0, "clients that are gone")
    assert replay.stats()["slots_granted"] == 0
    replay.close()


def test_updates_from_another_process_are_applied_and_the_stale_are_counted():
    replay = new_replay(n=3)
    replay.extend(**rows_from(1)[0])
    queue = multiprocessing.get_context("spawn").Queue()
    with process(processes.update_from_afar, replay.handle, queue):
        keys, (applied, stale) = queue.get(timeout=DEADLINE_S)
        assert queue.get(timeout=DEADLINE_S) == (0, 1)
    assert (applied, stale) == (64, 0)
    indices, _ = indices_of(replay.core.store, np.array(keys))
    np.testing.assert_allclose(replay.core.tree.leaves[indices], indices + 1.0)
    stats = replay.stats()
    assert (stats["updates_applied"], stats["updates_stale"]) == (64, 1)
    replay.close()


@pytest.mark.parametrize("normalise", ["batch", "memory"])
@pytest.mark.parametrize("method", ["stratified", "independent", "without_replacement"])
def test_a_client_gives_what_the_replay_itself_gives(method, normalise):
    local, shared = new_replay(n=3, capacity=600, alpha=0.7), new_replay(
        n=3, capacity=600, alpha=0.7
    )  # fmt: skip
    with served(shared) as client:
        for seed in range(1, 6):
            rows = rows_from(seed)[0]
            np.testing.assert_array_equal(local.extend(**rows), client.extend(**rows))
            with local.writer(STREAMS) as here, client.writer(STREAMS) as there:
                play(10 + seed, here)
                play(10 + seed, there)
            mine = local.sample(32, 0.6, method=method, normalise=normalise)
            theirs = client.sample(32, 0.6, method=method, normalise=normalise)
            for name, column in mine.items():
                np.testing.assert_array_equal(column, theirs[name], err_msg=name)
            errors = np.random.default_rng(seed).normal(size=32)
            assert local.update_priorities(mine.keys, errors) == client.update_priorities(
                theirs.keys, errors
            )
            assert len(client) == len(local)
            assert client.can_sample(32)
        assert client.stats() == local.stats()
        assert client.torn == 0


def test_errors_are_those_of_the_replay_and_change_nothing():
    replay = new_replay(n=3)
    with served(replay) as client:
        with pytest.raises(NotEnoughData, match="holds 0 transitions"):
            client.sample(4)
        rows = rows_from(1)[0]
        with pytest.raises(SchemaError, match="terminated or discount"):
            client.extend(**{**rows, "terminated": None})
        with pytest.raises(InvalidPriority):
            client.extend(**{**rows, "priorities": np.full(200, np.nan)})
        keys = client.extend(**rows)
        before = client.stats()
        with pytest.raises(InvalidPriority, match="row 3"):
            client.update_priorities(keys[:4], [1, 2, 3, np.inf])
        with pytest.raises(InvalidPriority, match="finite"):
            client.update_priorities(keys[:1], [1e308])
        with pytest.raises(ConfigError, match="method must be"):
            client.sample(4, method="uniform")
        with pytest.raises(ConfigError, match="streams"):
            client.writer(500)
        with pytest.raises(ConfigError, match="at most 32768 rows"):
            client.sample(1 << 16)
        assert client.stats() == before
        many = np.tile(keys, 200)  # goes in two pieces
        assert client.update_priorities(many, np.arange(len(many))) == (len(many), 0)
        np.testing.assert_array_equal(
            replay.core.tree.leaves[indices_of(replay.core.store, keys)[0]],
            np.arange(len(many))[-200:],
        )


def test_a_handle_is_text_and_numbers_and_the_memory_moves_with_what_is_in_it():
    replay = new_replay(n=3)
    writer = replay.writer(STREAMS)
    expected = play(1, writer, steps=80)
    before = replay.core.store.mem.tobytes(), replay.core.tree.arrays[0].tobytes()
    source = pickle.loads(pickle.dumps(replay.handle))
    assert source == replay.handle
    assert (replay.core.store.mem.tobytes(), replay.core.tree.arrays[0].tobytes()) == before
    with served(replay) as client:
        client.extend(**rows_from(2)[0])
        writer.flush()
        replay.extend(**rows_from(3)[0])
        assert len(replay) == replay.core.inserted
        check_rows(replay, expected + rows_from(2)[1] + rows_from(3)[1])
    layout = ReplayLayout(PATTERN, 100, 8)
    with pytest.raises(ConfigError, match="without buffer"):
        _ = PrioritizedReplay(100, PATTERN, buffer=aligned_zeros(layout.nbytes)).handle


def test_a_killed_owner_is_an_error_at_once_and_a_stopped_one_at_the_deadline():
    with foreign_owner() as (source, child):
        client = zapex.connect(source, timeout_s=1.0)
        patient = zapex.connect(source, timeout_s=DEADLINE_S)
        writer = patient.writer(STREAMS)
        play(5, writer, steps=3)
        assert len(client) > 100
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: stopped(child.pid), "a stop of all its threads")
        start = time.monotonic()
        with pytest.raises(PeerTimeout, match="did not answer in 1 s"):
            client.stats()
        assert time.monotonic() - start < 30
        with pytest.raises(PeerDied, match="failed before"):
            client.sample(4)
        failures = []

        def wait_for_it():
            with pytest.raises(PeerDied, match="gone") as caught:
                patient.sample(4)
            failures.append(caught.value)

        waiting = threading.Thread(target=wait_for_it)
        waiting.start()
        time.sleep(0.05)
        os.kill(child.pid, signal.SIGKILL)
        start = time.monotonic()
        waiting.join(DEADLINE_S)
        assert failures
        assert time.monotonic() - start < 30
        start = time.monotonic()
        # A writer that waits for nothing looks every now and then.
        while not raises(PeerDied, lambda: play(6, writer, steps=3)):
            assert time.monotonic() - start < 30
        with pytest.raises(PeerDied, match="gone"):
            zapex.connect(source)


def test_an_owner_that_died_while_its_client_stood_still_is_gone_and_not_slow():
    with foreign_owner() as (source, child), zapex.connect(source) as client:
        child.kill()
        child.join(DEADLINE_S)
        client._link._looked_s = math.inf  # it looks at its owner in the wait alone
        client._link._timeout_s = 0.0  # as if all of it had passed by then
        with pytest.raises(PeerDied):
            client.stats()


def test_a_client_killed_in_the_middle_gives_its_slots_back_and_leaves_no_half_row():
    replay = PrioritizedReplay(4000, PATTERN, seed=0)
    start = 0
    for _ in range(4):
        start += 1 << 40
        before = replay.core.inserted
        with process(processes.write_for_ever, replay.handle, start) as child:
            until(lambda seen=before: len(replay) and replay.core.inserted > seen + 150, "rows")
            until(lambda: replay.stats()["slots_granted"] == 1, "a slot that it fills")
            child.kill()
            until(lambda: replay.links == 0, "the end of the links")
        stats = replay.stats()
        assert stats["slots_granted"] == 0
        states = replay.core.store.header_rows[:, STATE]
        assert (states == LIVE).sum() == stats["slots_live"]
        assert len(replay) == np.count_nonzero(replay.core.tree.leaves)
        check_pattern(replay.sample(len(replay), method="without_replacement"))
    replay.close()


def test_a_client_that_goes_without_a_word_is_forgotten():
    replay = new_replay(n=3)
    client = zapex.connect(replay.handle)
    writer = client.writer(STREAMS)
    play(1, writer, steps=20)
    assert replay.stats()["slots_granted"] == STREAMS
    del client, writer
    until(lambda: replay.links == 0, "links that were collected")
    assert replay.stats()["slots_granted"] == 0
    assert check_rows(replay, play(1, None, steps=20)) == replay.core.inserted
    replay.writer(100)  # its streams were given back too
    replay.close()


def test_an_owner_waits_awake_only_for_who_asks_soon_again():
    requests = iter([True])
    server = types.SimpleNamespace(
        _spin_s=DEADLINE_S, _answered_s=time.monotonic(), _asks_soon=False, _sleepy=0,
        _is_ready=lambda: next(requests, False),
    )  # fmt: skip
    assert not HandleServer._stays_awake(server)  # the last two answers were far apart
    server._asks_soon = True
    assert HandleServer._stays_awake(server)
    server._spin_s = 1e-3
    assert not HandleServer._stays_awake(server)  # none came in time
    assert not server._asks_soon
    assert server._sleepy


def test_slots_that_a_reader_holds_are_filled_last_and_their_rows_come_back_torn():
    replay = PrioritizedReplay(200, PATTERN, seed=0, chunk=8, streams=1)
    replay.extend(**pattern_rows(0, 160))
    with served(replay) as client:
        link = HandleLink(replay.handle, DEADLINE_S)
        link.call(Request.SAMPLE, 64)
        keys = link.calls.draw(64).keys.copy()
        batch = client.empty_batch(64)
        while not replay.stats()["slots_quarantined"]:  # evicted, and nobody writes there yet
            replay.extend(**pattern_rows(160, 10))
        oldest = np.flatnonzero(replay.core.store.header_rows[:, STATE] == EVICTED)[0]
        body = replay.core.store.body(oldest)
        bytes_before = replay.core.store.mem[
            body : body + replay.core.layout.chunk_layout.body_bytes
        ].copy()
        replay.extend(**pattern_rows(280, 40))
        np.testing.assert_array_equal(
            replay.core.store.mem[body : body + replay.core.layout.chunk_layout.body_bytes],
            bytes_before,
        )
        for i in range(20):  # a stopped reader blocks nobody
            replay.extend(**pattern_rows(1000 + 100 * i, 100))
        torn = link.store.gather(keys, batch.layout, batch.memory, batch.keys)
        assert torn == 64
        link.calls.release()
        link.close()
        replay.extend(**pattern_rows(9000, 100))
        assert replay.stats()["slots_quarantined"] == 0
        check_pattern(client.sample(64))


def test_threads_of_one_client_and_of_the_owner_get_on_with_each_other():
    replay = PrioritizedReplay(2000, PATTERN, seed=0, streams=4)
    replay.extend(**pattern_rows(0, 256))
    failures, stop = [], threading.Event()

    def guarded(work):
        def run():
            try:
                for i in range(40):
                    work(i)
            except BaseException as error:
                failures.append(error)

        return threading.Thread(target=run)

    with served(replay) as client:

        def read(reader):
            batch = reader.sample(32)
            check_pattern(batch)
            applied, stale = reader.update_priorities(batch.keys, np.ones(32))
            assert applied + stale == 32 - np.count_nonzero(batch.keys == NO_KEY)

        threads = [guarded(lambda i: read(client)), guarded(lambda i: read(replay))]
        for place in range(3):
            owner = replay if place == 0 else client
            threads.append(
                guarded(
                    lambda i, o=owner, p=place: o.extend(**pattern_rows(10**6 * (p + 1) + i, 30))
                )
            )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        stop.set()
        assert not failures
        assert client.stats()["inserted"] == 256 + 3 * 40 * 30
        assert replay.core.tree.check_valid() == (True, "")


def test_the_limiter_lets_clients_wait_as_it_lets_threads():
    replay = PrioritizedReplay(
        1000, PATTERN, seed=0, samples_per_insert=2.0, tolerance=128, timeout_s=0.3,
        min_size_to_sample=32,
    )  # fmt: skip
    with served(replay) as client:
        client.extend(**pattern_rows(0, 32))
        extend = lambda: client.extend(**pattern_rows(100, 16))  # noqa: E731
        while not raises(ReplayError, extend):
            assert replay.stats()["inserted"] < 1000
        with pytest.raises(ReplayError, match=r"after 0\.3 s: actors wait for the learner"):
            extend()
        assert replay.stats()["inserted"] <= 32 + 64 + 16
        drawn = client.stats()["sampled"]
        extended = threading.Thread(target=extend)
        replay.core.timeout_s = DEADLINE_S
        extended.start()
        time.sleep(0.02)
        client.sample(32)  # makes room for it
        extended.join(DEADLINE_S)
        assert not extended.is_alive()
        assert client.stats()["sampled"] == drawn + 32
        replay.core.timeout_s = 0.1
        while not raises(NotEnoughData, lambda: client.sample(32)):
            pass
        with pytest.raises(NotEnoughData, match="the learner waits for actors"):
            client.sample(32)


def test_nonsense_from_a_client_changes_nothing_and_the_others_go_on():
    replay = PrioritizedReplay(1000, PATTERN, seed=0)
    with served(replay) as client:
        client.extend(**pattern_rows(0, 10))
        greedy = HandleLink(replay.handle, DEADLINE_S)
        for _ in range(2):  # the second without a release of the first answer
            greedy.calls.ask(Request.SAMPLE, 4)
        until(greedy.calls.ready, "an answer")
        odd = HandleLink(replay.handle, DEADLINE_S)
        odd.at.commits.producer().try_offer(np.array([5, -1, 1 << 50]))
        with pytest.raises(PeerError, match="kind 77"):
            odd.ask(77)
        with pytest.raises(PeerError, match="at most"):
            odd.ask(Request.UPDATE, -1)
        with pytest.raises(ReplayError, match="all of them do"):
            odd.ask(Request.SLOT)
        odd.reserve_streams(1)
        slot = odd.open_slot()
        for count in (-1, 1 << 50):
            odd.store.header_rows[slot, COUNT] = count
            assert len(client) == 10 == len(replay)
        odd.close()
        greedy.close()
        until(lambda: replay.links == 2, "the end of the links")
        assert replay.stats()["slots_granted"] == 1, "the extender's"


def test_a_writer_whose_link_has_ended_writes_no_row():
    replay = new_replay(n=1)
    with served(replay) as client:
        writer = client.writer(STREAMS)
        play(1, writer, steps=5)
        held = writer._builder.held
        writer._replay._fail("its owner took too long")
        until(lambda: replay.links == 2, "the end of the link")
        counts = replay.core.store.header_rows[:, COUNT].copy()
        assert raises(PeerDied, lambda: play(2, writer, steps=3))
        assert counts[held].all()
        np.testing.assert_array_equal(replay.core.store.header_rows[:, COUNT], counts)


def test_a_snapshot_holds_the_rows_that_were_taken_in_and_no_others(tmp_path, monkeypatch):
    replay = new_replay(n=3, chunk=16)
    with served(replay) as client:
        writer = client.writer(STREAMS)
        expected = play(1, writer, steps=30)
        ledger, counts = replay.core.ledger, replay.core.store.header_rows[:, COUNT]
        rows = len(replay)
        slots = np.flatnonzero(ledger.taken >= 0)
        assert ledger.taken[slots].sum() > 0
        monkeypatch.setattr(replay.core, "catch_up", lambda: None)
        counts[slots] += 1  # a row that was written since
        replay.save(tmp_path)
        counts[slots] -= 1
        monkeypatch.undo()
        again = PrioritizedReplay.load(tmp_path)
        assert len(again) == rows == check_rows(again, expected)
        writer.close()


def test_after_close_clients_fail_and_a_new_handle_serves_again():
    replay = PrioritizedReplay(1000, PATTERN, seed=0)
    first = replay.handle
    client = zapex.connect(first)
    client.extend(**pattern_rows(0, 10))
    replay.close()
    with pytest.raises(PeerDied):
        client.stats()
    with pytest.raises(PeerDied):
        zapex.connect(first)
    with served(replay) as again:
        assert len(again) == 10
        check_pattern(again.sample(8))


def test_in_a_fork_the_replay_and_its_clients_are_refused_and_the_handle_is_good():
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    with process(processes.fork_an_owner, theirs):
        said = []
        for _ in range(5):
            assert mine.poll(DEADLINE_S)
            said.append(mine.recv())
        assert "fork of the one that owns the replay" in said[0] == said[1]
        assert "forked from" in said[2]
        assert said[3:] == [9, 9]


def forked_while_held(lock, failures):
    """The status of a fork that counts `failures()`, made while another thread has the lock."""
    held, free = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            free.wait(DEADLINE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(DEADLINE_S)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(failures())
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    free.set()
    thread.join(DEADLINE_S)
    return status


@pytest.mark.parametrize("is_served", [False, True])
def test_in_a_fork_every_call_of_a_replay_and_its_writer_is_refused(is_served):
    replay = new_replay(n=1)
    obs, step = first_and_step()
    writer = replay.writer(2)
    writer.reset(obs)
    writer.add(**step)
    if is_served:
        assert len(zapex.connect(replay.handle)) == 2
    keys, batch = replay.sample(2).keys, replay.sample(2)
    rows = {name: step[name] for name in ("action", "reward", "terminated")}
    calls = [
        lambda: replay.extend(obs=obs, next_obs=obs, mask=step["mask"], **rows),
        lambda: replay.update_priorities(keys, np.ones(2)),
        lambda: replay.sample(2),
        lambda: replay.sample(2, out=batch),
        lambda: replay.can_sample(2),
        lambda: replay.handle,
        lambda: replay.save("nowhere"),
        lambda: replay.writer(1),
        lambda: len(replay),
        lambda: writer.add(**step),
        lambda: writer.reset(obs),
        replay.stats, replay.close, writer.flush, writer.close,
    ]  # fmt: skip
    refused = partial(raises, ReplayError)
    assert forked_while_held(replay.core.lock, lambda: len(calls) - sum(map(refused, calls))) == 0
    assert len(replay) == 2
    replay.close()


def test_a_replay_that_is_sent_to_another_process_says_what_to_send():
    replay = new_replay()
    with served(replay) as client:
        for each in (replay, client, replay.writer(1)):
            for copied in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(ReplayError, match=r"send replay\.handle"):
                    copied(each)


def test_in_a_fork_a_client_raises_even_if_another_thread_was_using_it():
    replay = PrioritizedReplay(1000, PATTERN, seed=0)
    with served(replay):
        link = HandleLink(replay.handle, DEADLINE_S)
        asks = partial(link.ask, Request.STATS)
        assert forked_while_held(link.lock, lambda: not raises(ReplayError, asks)) == 0
        link.close()


def descriptors():
    """How many are open, but for those of what earlier tests left to be collected."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_handle_of_another_schema_is_a_clear_error_and_leaves_no_descriptor():
    replay = PrioritizedReplay(1000, PATTERN, seed=0)
    other = PrioritizedReplay(1000, new_replay(n=3).schema)
    wrong = dataclasses.replace(replay.handle, schema=other.handle.schema)
    other.close()
    with served(replay) as client:
        until(lambda: replay.links == 2, "both links of the client")
        before = descriptors()
        with pytest.raises(PeerError, match=r"another replay.*new handle"):
            zapex.connect(wrong)
        until(lambda: replay.links == 2 and descriptors() <= before, "the end of the link")
        assert len(client) == 0


@pytest.mark.parametrize("stop", ["os.pidfd_open", "zapex.library.handle_client.Segment.attach"])
def test_a_client_that_cannot_attach_leaves_no_descriptor(monkeypatch, stop):
    replay = PrioritizedReplay(1000, PATTERN, seed=0)
    with served(replay) as client:
        until(lambda: replay.links == 2, "both links of the client")
        before = descriptors()

        def stops(*_):
            raise SharedMemoryError("no more")

        monkeypatch.setattr(stop, stops)
        with pytest.raises((PeerDied, SharedMemoryError), match="no more"):
            HandleLink(replay.handle, DEADLINE_S)
        monkeypatch.undo()
        until(lambda: replay.links == 2 and descriptors() <= before, "the end of the link")
        assert len(client) == 0


def test_another_user_is_handed_nothing(monkeypatch):
    replay = PrioritizedReplay(1000, PATTERN, seed=0)
    source = replay.handle
    module = "zapex.library.handle_server.peer_of"
    monkeypatch.setattr(module, lambda connection: (1, os.getuid() + 1))
    with pytest.raises(PeerDied, match="closed the connection too early"):
        zapex.connect(source, timeout_s=DEADLINE_S)
    assert replay.links == 0
    monkeypatch.undo()
    with served(replay) as client:
        assert len(client) == 0


UNGUARDED = """
import multiprocessing, numpy as np, zapex
def work(handle): pass
schema = zapex.Schema({"obs": zapex.Column((2,), np.float32),
                       "action": zapex.Column((), np.int64)}, n_step=1)
replay = zapex.PrioritizedReplay(1000, schema)
process = multiprocessing.get_context(METHOD).Process(target=work, args=(replay.handle,))
process.start()
process.join(60)
print("exit code", process.exitcode)
"""


@pytest.mark.parametrize("method", processes.CONTEXTS)
def test_a_script_without_a_main_guard_is_told_so(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.replace("METHOD", repr(method)))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": str(root)}, timeout=90,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert 'if __name__ == "__main__":' in done.stderr
    assert "while a new process imports your script" in done.stderr
    assert done.stdout == "exit code 1\n"
