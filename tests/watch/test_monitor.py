"""Monitor: rates, shares, returns and outputs that may fail."""

import math
import os
import time

import numpy as np
import pytest

from tests.support import fake_run
from zapex.host.metrics import EPISODE, LIMITER_STATES
from zapex.replay.limiter import LimiterConfig
from zapex.watch.monitor import Episodes
from zapex.watch.recorders import JsonLines, read_evaluations, read_metrics, read_snapshot
from zapex.watch.report import Evaluation, RunFacts, best_of


class Recording:
    """An output that keeps what it gets."""

    def __init__(self):
        self.shown, self.written, self.closed = [], [], 0

    def show(self, snapshot):
        self.shown.append(snapshot)

    def write(self, snapshot, episodes, evaluations):
        self.written.append((snapshot, episodes, list(evaluations)))

    def close(self):
        self.closed += 1


class Broken(Recording):
    def show(self, snapshot):
        raise OSError("no terminal")

    def write(self, snapshot, episodes, evaluations):
        raise OSError("no space left on device")


def episodes(returns, stream=0, epsilon=0.4):
    records = np.zeros(len(returns), EPISODE)
    records["game_return"], records["stream"], records["epsilon"] = returns, stream, epsilon
    return records


def test_rates_are_differences_over_the_last_five_seconds():
    fake, monitor = fake_run.started()
    first = monitor.look()
    fake.advance(0.2)
    second = monitor.look()
    seconds = (second.time_ns - first.time_ns) / 1e9
    for name in ("steps", "frames", "batches", "inserted"):
        assert second.rates[name] == pytest.approx(
            (second.totals[name] - first.totals[name]) / seconds
        )
    assert second.totals["frames"] == 4 * second.totals["steps"] > 0
    fake.advance(10)
    assert monitor.look().rates["steps"] == 1650
    fake.now_ns += 6 * 10**9
    assert monitor.look().rates["steps"] == 0


def test_shares_of_every_role_sum_to_one():
    fake, monitor = fake_run.started()
    fake.advance(1000)
    snapshot = monitor.look()
    for view in snapshot.roles:
        for shares in (view.shares, view.shares_total, view.phases, view.phases_total):
            assert sum(shares.values()) == pytest.approx(1)
    actor = snapshot.role("actor")
    assert actor.processes == 2
    assert actor.shares_total["compute"] == pytest.approx(0.94, abs=0.01)


def test_samples_per_insert_and_the_stale_share_are_the_replays():
    fake, monitor = fake_run.started()
    fake.advance(100)
    snapshot = monitor.look()
    assert snapshot.samples_per_insert == pytest.approx(8, rel=0.01)
    assert snapshot.stale_share == pytest.approx(0.02 / 8.02, rel=0.05)


def test_a_resumed_run_counts_on_from_its_base():
    fake = fake_run.FakeRun()
    base = {"steps": 1000.0, "frames": 4000.0, "wall_s": 60.0}
    monitor = fake.monitor(facts=RunFacts("CartPole-v1", base=base))
    assert monitor.look().totals["steps"] == 1000
    fake.advance(1)
    snapshot = monitor.look()
    assert snapshot.totals["frames"] == 4 * snapshot.totals["steps"] > 4000
    assert snapshot.wall_s >= 60


def test_progress_is_that_of_the_limit_reached_first():
    fake = fake_run.FakeRun()
    facts = RunFacts("CartPole-v1", max_wall_s=1000, max_frames=100_000)
    monitor = fake.monitor(facts=facts)
    assert monitor.look().left_s == 1000
    fake.advance(10)  # 6,600 frames a second: the frames end it
    snapshot = monitor.look()
    assert snapshot.left_s == pytest.approx((100_000 - 66_000) / 6_600)
    assert snapshot.progress == pytest.approx(snapshot.totals["frames"] / 100_000)
    unlimited = fake_run.FakeRun().monitor().look()
    assert (unlimited.progress, unlimited.left_s) == (None, None)


def test_the_time_of_a_dead_role_stands_still():
    fake = fake_run.FakeRun(actors=1, begun=False)
    block = fake.roles[0][1]
    pid = os.fork()
    if not pid:
        block.enter("environment")
        os._exit(0)
    os.waitpid(pid, 0)
    assert block.pid == pid
    monitor = fake.monitor()
    monitor.look()
    fake.now_ns += 10**9
    actor = monitor.look().role("actor")
    assert actor.processes == 1
    assert not any(actor.phases.values())


def test_the_most_silent_process_of_a_role_is_named():
    fake, monitor = fake_run.started()
    fake.advance(7, stuck="actor 1")
    assert monitor.look().role("actor").silent == (7, "actor 1")


def test_recorders_get_every_episode_and_evaluation_once():
    recorder = Recording()
    fake, monitor = fake_run.started(recorders=[recorder], head_start_s=70)
    monitor.tick()
    fake_run.go_on(fake, monitor, 55)
    monitor.close()
    parts = [part for _, part, _ in recorder.written]
    assert sum(map(len, parts)) == int(1.5 * 125)
    assert [len(new) for *_, new in recorder.written] == [1, 1]
    assert recorder.closed == 1


def test_a_failing_output_is_reported_once(capsys):
    broken, good = Broken(), Recording()
    fake = fake_run.FakeRun()
    monitor = fake.monitor(broken, [Broken(), good], view_period_s=0, record_period_s=0)
    for _ in range(3):
        monitor.tick()
    snapshot = monitor.close()
    texts = [message.text for message in snapshot.messages]
    assert sum("no space left" in text for text in texts) == 1
    assert sum("no terminal" in text for text in texts) == 1
    assert capsys.readouterr().err.count("no terminal") == 1
    assert len(good.written) == 4


def test_a_closed_terminal_is_recognised_and_its_view_replaced():
    gone = Recording()
    gone.show = lambda snapshot: os.write(*unread)
    ours, theirs = os.openpty()
    os.close(ours)
    unread = theirs, b"a picture"
    fake = fake_run.FakeRun()
    monitor = fake.monitor(gone, view_period_s=0)
    monitor.tick()
    assert monitor.terminal_is_gone
    os.close(theirs)
    log = Recording()
    monitor.show_in(log)
    assert not monitor.terminal_is_gone
    assert gone.closed == 1
    monitor.tick()
    assert len(log.shown) == 1
    other = fake.monitor(Broken(), view_period_s=0)
    other.tick()
    assert not other.terminal_is_gone


LIMITER = LimiterConfig(
    samples_per_insert=4, min_size_to_sample=1000, tolerance=1024, grant=128, batch=64,
    capacity=4096,
)  # fmt: skip


def waits_of(role, phase, state, **gauges):
    """What the monitor says after a second in which all of a role waited in a phase."""
    fake = fake_run.FakeRun()
    monitor = fake.monitor(limiter=LIMITER)
    for _, block in fake.roles:
        if block.role == "replay":
            for name, value in {"capacity": 4096, **gauges}.items():
                block.set(name, value)
            block.set("limiter", LIMITER_STATES.index(state))
            block.enter("idle")
        elif block.role == role:
            block.enter(phase)
        else:
            block.enter("other" if "other" in block.table.phases else "idle")
    fake.now_ns += 10**9
    return monitor.look().waiting


@pytest.mark.parametrize(
    ("role", "phase", "state", "gauges", "facts"),
    [
        (
            "learner",
            "wait",
            "filling",
            {"live": 300},
            ["learner", "300", "min_size_to_sample=1000"],
        ),
        ("learner", "fill", "filling", {"live": 300}, ["learner", "min_size_to_sample=1000"]),
        ("learner", "wait", "learner waits", {"owed": 30}, ["30", "samples_per_insert=4"]),
        ("learner", "wait", "no role waits", {}, ["batches", "replay is busy 0%"]),
        ("actor", "wait", "actors wait", {"owed": 960}, ["actors", "960", "tolerance=1024"]),
        ("actor", "wait", "no free slots", {"slots_quarantined": 7}, ["actors", "slots", "7"]),
        ("actor", "wait", "no role waits", {}, ["slots", "replay is busy 0%"]),
        ("actor", "inference", "no role waits", {}, ["Q values", "replay is busy 0%"]),
    ],
)
def test_a_role_that_waits_has_a_reason(role, phase, state, gauges, facts):
    (text,) = waits_of(role, phase, state, **gauges)
    assert text.startswith("100% of the time")
    for fact in facts:
        assert fact in text


def test_a_role_that_works_has_no_reason():
    assert waits_of("learner", "forward", "actors wait") == ()


def test_returns_that_are_not_finite_cost_only_themselves(tmp_path):
    fake = fake_run.FakeRun()
    monitor = fake.monitor(None, [JsonLines(tmp_path)], record_period_s=1)
    bad = episodes([math.nan, 10.0, math.inf, 20.0, -math.inf], stream=0)
    for evaluation in ((math.nan,), (1.0,), (math.inf,)):
        monitor.add_evaluation(Evaluation(evaluation, 1, 10, 40, 1.0))
    for _ in range(3):
        fake.advance(2)
        monitor.add_episodes(bad)
        snapshot = monitor.tick()
    assert snapshot.returns.all_mean == 15
    assert snapshot.best_evaluation.mean == 1
    texts = [note.text for note in monitor.close().messages]
    assert [text for text in texts if "finite" in text] == texts[:1] == texts
    metrics = [line for line in read_metrics(tmp_path) if line["kind"] == "metrics"]
    assert [line["charts/episodic_return"] for line in metrics] == [15, 15, 15]
    assert best_of(read_evaluations(tmp_path)).mean == 1
    assert read_snapshot(tmp_path).best_evaluation.mean == 1


def test_a_young_run_is_recorded_every_second_and_an_old_one_every_five():
    recorder = Recording()
    fake = fake_run.FakeRun()
    monitor = fake.monitor(None, [recorder], facts=RunFacts("x"))
    for second in (*range(1, 100), *range(600, 640)):
        fake.now_ns = monitor.facts.started_ns + second * 10**9
        monitor.tick()
    times = np.diff([snapshot.wall_s for snapshot, *_ in recorder.written])
    assert times[:90].tolist() == [1] * 90
    assert times[-5:].tolist() == [5] * 5


def test_returns_are_means_of_the_last_hundred():
    all_episodes = Episodes(greedy_stream=3)
    all_episodes.add(episodes([0.0] * 50))
    all_episodes.add(episodes([1.0] * 100))
    assert all_episodes.returns().all_mean == 1
    assert math.isnan(all_episodes.returns().greedy_mean)


def test_returns_are_counted_by_stream_and_by_epsilon():
    all_episodes = Episodes(greedy_stream=3)
    all_episodes.add(episodes([1.0, 2.0], stream=0, epsilon=0.4))
    all_episodes.add(episodes([5.0, 7.0], stream=3, epsilon=0.0005))
    returns = all_episodes.returns()
    assert (returns.greedy_mean, returns.greedy_last, returns.all_mean) == (6, 7, 3.75)
    assert list(returns.bands.values()) == [6, 1.5]
    assert returns.greedy_history == (5, 7)
    for epsilon in (0.0, 1.0):
        all_episodes.add(episodes([1.0], epsilon=epsilon))
    assert len(all_episodes.returns().bands) == 2


def test_the_greedy_history_is_thinned_evenly_and_stays_bounded():
    all_episodes = Episodes(greedy_stream=0)
    all_episodes.add(episodes(np.arange(100_000)))
    history = np.array(all_episodes.returns().greedy_history)
    assert len(history) <= 512
    steps = np.diff(history)
    np.testing.assert_allclose(steps, steps[0])


def test_the_use_of_this_process_is_measured_once():
    fake, monitor = fake_run.started()  # all roles are in this process
    monitor.look()
    enough = time.process_time() + 0.3  # of the processor, however busy the machine is
    while time.process_time() < enough:
        pass
    fake.advance(10)  # long enough for the kernel to be asked again
    snapshot = monitor.look()
    assert snapshot.cpu_cores == snapshot.parent_cpu_cores > 0.0
    private = snapshot.memory_bytes - snapshot.facts.shared_bytes
    assert {view.private_bytes for view in snapshot.roles} == {private}
    assert private > 0


def test_the_last_snapshot_has_what_the_roles_used():
    fake, monitor = fake_run.started()
    before = monitor.look()
    for _, block in fake.roles:
        block.leave()
    for then, now in zip(before.roles, monitor.look(final=True).roles, strict=True):
        assert (now.cpu_cores, now.private_bytes) == (then.cpu_cores, then.private_bytes)
    assert any(view.private_bytes for view in before.roles)
