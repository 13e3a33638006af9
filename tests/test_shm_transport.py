"""The links of one host: who gets what, in which order, and what a former incarnation left."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.fake_system import spec
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.layout import GENERATION, BatchLayout
from zapex.config.settings import Config
from zapex.errors import PeerError
from zapex.host.plan import HostPlan
from zapex.replay.draw import Draw
from zapex.run.run import Run
from zapex.shm_ring import RingConsumer
from zapex.shm_transport import HostMemory
from zapex.transport import Incarnation

STREAMS, BATCH, PREFETCH = 3, 4, 3


def make_plan(actors: int = 2, stack: int = 1) -> HostPlan:
    config = Config().replace(
        actors=actors, envs_per_actor=STREAMS, capacity=64, learning_starts=BATCH,
        batch_size=BATCH, prefetch=PREFETCH, hidden=8,
    )  # fmt: skip
    return Run(config, spec(stack), None).plan  # type: ignore[arg-type]


def make_host(plan: HostPlan | None = None) -> HostMemory:
    plan = plan or make_plan()
    memory = aligned_zeros(plan.nbytes), aligned_zeros(plan.replay.nbytes)
    host = HostMemory(plan, *memory, [-1] * len(plan.roles), create=True)
    host.set_incarnation("learner", 1)
    return host


def other(host: HostMemory) -> HostMemory:
    """The same memory, as another process maps it."""
    return HostMemory(host.plan, host.control, host.experience, host.eventfds)


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def draw(host: HostMemory, keys: np.ndarray) -> Draw:
    leaves = np.linspace(1.0, 2.0, len(keys))
    return Draw(keys, np.arange(len(keys)), leaves, 10.0, 50, 0.5)


@pytest.mark.parametrize("stack", [1, 4])
def test_sections_are_aligned_and_disjoint(stack: int) -> None:
    plan = make_plan(actors=3, stack=stack)
    places = sorted((section.offset, section.nbytes) for section in plan.sections.values())
    assert all(start % 128 == 0 for start, _ in places)
    ends = [start + nbytes for start, nbytes in places]
    assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False))
    assert plan.nbytes - 128 < ends[-1] <= plan.nbytes
    assert {f"ring {name}" for name in plan.rings} < plan.sections.keys()


def test_each_process_has_its_own_words() -> None:
    host = make_host()
    names = [name for name, _ in host.plan.roles]
    for i, name in enumerate(names, 1):
        host.set_incarnation(name, i)
    assert [other(host).incarnation(name) for name in names] == list(range(1, len(names) + 1))
    assert len({host.sleeping_word(name) for name in names}) == len(names)


def test_grants_belong_to_one_incarnation() -> None:
    host = make_host()
    source = host.experience_source()
    source.grant(0, 1, slots(4, 5, 6))
    source.grant(0, 2, slots(7, 8, 9))
    sink = other(host).experience_sink(0, 2)
    assert sink.ready()
    claimed = sink.try_claim()
    assert claimed is not None
    assert claimed.tolist() == [7, 8, 9]
    assert sink.try_claim() is None
    assert not sink.ready()
    assert other(host).experience_sink(1, 2).try_claim() is None, "actor 1 was granted nothing"


def test_commits_arrive_in_order_and_once() -> None:
    host = make_host()
    source = host.experience_source()
    source.take_in()
    assert not source.ready()
    sink = other(host).experience_sink(1, 1)
    sink.commit(slots(3, 1))
    sink.commit(slots())
    sink.commit(slots(2))
    assert source.ready()
    assert source.committed(0).tolist() == []
    assert source.committed(1).tolist() == [3, 1, 2]
    assert source.committed(1).tolist() == []
    assert not source.ready()


def test_full_grant_ring_is_reported() -> None:
    host = make_host()
    source = host.experience_source()
    granted = 0
    while source.has_room(0, STREAMS):
        source.grant(0, 1, slots(0, 1, 2))
        granted += 1
    assert granted >= 4, "two credits of two lives"
    with pytest.raises(PeerError, match="ring is full"):
        source.grant(0, 1, slots(0, 1, 2))
    assert other(host).experience_sink(0, 2).try_claim() is None, "it drops what is not its own"
    assert source.has_room(0, STREAMS)


def test_incarnations_are_reported_once_and_death_as_0() -> None:
    host = make_host()
    source = other(host).experience_source()
    assert source.ready()
    assert source.take_in() == [Incarnation(0, 0), Incarnation(1, 0)]
    assert not source.ready()
    assert source.take_in() == []
    host.set_incarnation("actor 1", 5)
    assert source.ready()
    assert source.take_in() == [Incarnation(1, 5)]
    assert source.take_in() == []
    host.set_incarnation("actor 1", 0)
    host.set_incarnation("actor 0", 7)
    assert source.take_in() == [Incarnation(0, 7), Incarnation(1, 0)]
    host.set_incarnation("actor 1", 0)
    assert source.take_in() == []
    newcomer = other(host).experience_source()
    told = newcomer.take_in()
    assert told == [Incarnation(0, 7), Incarnation(1, 0)], "a replay that starts again asks for all"


def test_batch_arrives_with_weights() -> None:
    host = make_host()
    source, sink = other(host).sample_source(), host.sample_sink()
    source.request()
    assert (sink.requests(), sink.issued, sink.released) == (1, 0, 0)
    keys = host.store().keys_of(np.arange(BATCH))
    sink.answer(draw(host, keys))
    assert (sink.requests(), sink.issued, sink.released) == (0, 1, 0)
    assert source.ready()
    batch = Batch.empty(BatchLayout(host.plan.replay.schema, BATCH))
    sampled = source.poll(batch)
    assert sampled is not None
    assert (sampled.torn, sampled.live) == (0, 50)
    assert batch.keys.tolist() == keys.tolist()
    assert batch.indices.tolist() == list(range(BATCH))
    wanted = np.linspace(1.0, 2.0, BATCH) ** -host.plan.beta
    assert np.allclose(batch.weights, wanted / wanted.max())
    assert (sink.issued, sink.released, source.outstanding) == (1, 1, 0)
    assert source.poll(batch) is None


def test_rows_of_an_evicted_slot_have_no_weight() -> None:
    host = make_host()
    source, sink = other(host).sample_source(), host.sample_sink()
    chunk = host.plan.replay.chunk
    keys = host.store().keys_of(np.array([0, chunk, 0, chunk]))
    source.request()
    sink.answer(draw(host, keys))
    host.store().header_rows[1, GENERATION] += 1
    batch = Batch.empty(BatchLayout(host.plan.replay.schema, BATCH))
    sampled = source.poll(batch)
    assert sampled is not None
    assert sampled.torn == 2
    assert (batch.keys == -1).tolist() == [False, True, False, True]
    assert (batch.weights == 0).tolist() == [False, True, False, True]


def test_restarted_learner_finds_its_requests() -> None:
    host = make_host()
    former, sink = other(host).sample_source(), host.sample_sink()
    for _ in range(PREFETCH):
        former.request()
    sink.answer(draw(host, host.store().keys_of(np.arange(BATCH))))
    newcomer = other(host).sample_source()
    assert newcomer.outstanding == PREFETCH
    assert newcomer.ready()
    batch = Batch.empty(BatchLayout(host.plan.replay.schema, BATCH))
    assert newcomer.poll(batch) is not None
    assert newcomer.outstanding == PREFETCH - 1


def test_restarted_replay_answers_no_request_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = make_host()
    source, sink = other(host).sample_source(), host.sample_sink()
    keys = host.store().keys_of(np.arange(BATCH))
    for _ in range(PREFETCH):
        source.request()
    sink.answer(draw(host, keys))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RingConsumer, "release", die)
    with pytest.raises(KeyboardInterrupt):
        sink.answer(draw(host, keys))
    monkeypatch.undo()
    assert (sink.issued, sink.requests()) == (2, PREFETCH - 1), "given, and asked for still"
    assert source.outstanding == other(host).sample_source().outstanding == PREFETCH
    newcomer = other(host).sample_sink()
    assert (newcomer.issued, newcomer.requests()) == (2, PREFETCH - 2)
    assert source.outstanding == PREFETCH
    assert other(host).sample_sink().requests() == PREFETCH - 2


def test_dead_learner_holds_no_slots() -> None:
    host = make_host()
    source, sink = other(host).sample_source(), host.sample_sink()
    source.request()
    sink.answer(draw(host, host.store().keys_of(np.arange(BATCH))))
    assert sink.released == 0
    host.set_incarnation("learner", 0)
    assert sink.released == 1, "nobody reads it"
    host.set_incarnation("learner", 2)
    assert sink.released == 0, "the next life will"


def test_answers_never_exceed_requests() -> None:
    host = make_host()
    source, sink = other(host).sample_source(), host.sample_sink()
    keys = host.store().keys_of(np.arange(BATCH))
    capacity = host.ring("answers").capacity
    assert capacity >= PREFETCH
    for _ in range(capacity):
        source.request()
        sink.answer(draw(host, keys))
    source.request()
    with pytest.raises(PeerError, match="ring of answers"):
        sink.answer(draw(host, keys))
    for _ in range(capacity - 1):
        source.request()
    with pytest.raises(PeerError, match="ring of requests"):
        source.request()


def test_updates_arrive_in_order_until_the_ring_is_full() -> None:
    host = make_host()
    source, sink = other(host).sample_source(), host.sample_sink()
    keys = np.arange(BATCH)
    sent = 0
    while source.update(keys + sent, np.full(BATCH, sent, np.float32)):
        sent += 1
    assert sent > PREFETCH
    assert sink.ready()
    updates = [(int(k[0]), float(p[-1])) for k, p in sink.updates()]
    assert updates == [(i, float(i)) for i in range(sent)]
    assert list(sink.updates()) == []
    assert not sink.ready()
    assert source.update(keys, np.zeros(BATCH, np.float32))


def test_unreleased_updates_are_applied_after_a_restart() -> None:
    host = make_host()
    source, sink = other(host).sample_source(), host.sample_sink()
    for i in range(3):
        assert source.update(np.full(BATCH, i), np.full(BATCH, i, np.float32))
    taken = iter(sink.updates())
    assert int(next(taken)[0][0]) == 0
    assert int(next(taken)[0][0]) == 1  # killed here: 0 is done with, 1 is not
    assert [int(k[0]) for k, _ in other(host).sample_sink().updates()] == [1, 2]


def test_refused_update_does_not_come_again() -> None:
    host = make_host()
    source, sink = other(host).sample_source(), host.sample_sink()
    for i in range(3):
        assert source.update(np.full(BATCH, i), np.full(BATCH, i, np.float32))

    def refuse() -> None:
        for _ in sink.updates():
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        refuse()
    assert [int(k[0]) for k, _ in other(host).sample_sink().updates()] == [1, 2]


def test_update_records_are_aligned() -> None:
    host = make_host(replace(make_plan(), batch_size=3))
    ring = host.ring("updates")
    assert ring.records["keys"].flags.aligned
    assert ring.records["priorities"].flags.aligned


def test_only_newer_parameters_are_read() -> None:
    host = make_host()
    sink, source = host.mailbox(), other(host).mailbox()
    size = host.plan.parameter_bytes
    out = np.zeros(size, np.uint8)
    assert (source.version, source.newer_than(0, out)) == (0, 0)
    for version in (1, 2, 5):
        sink.publish(version, np.full(size, version, np.uint8))
    assert source.version == 5
    assert source.newer_than(2, out) == 5
    assert (out == 5).all()
    assert source.newer_than(5, out) == 0
    assert other(host).mailbox().version == 5, "a learner's next life goes on from here"


@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_batches_gathered_ahead_are_the_same(threads: int, stack: int) -> None:
    host = make_host(make_plan(stack=stack))
    store, rng = host.store(), np.random.default_rng(threads)
    body = store.mem[store.bodies_offset :]
    body[:] = rng.integers(0, 256, body.size)
    for slot in range(store.slots):  # frame numbers that exist
        for name in ("obs_frames", "next_obs_frames"):
            column = store.column(slot, name)
            column[:] = rng.integers(0, store.layout.frames, column.shape)
    source, sink = other(host).sample_source(threads), host.sample_sink()
    layout = BatchLayout(host.plan.replay.schema, BATCH, channels_last=True)
    free = [Batch.empty(layout) for _ in range(2)]
    expected = Batch.empty(layout)
    for number in range(40):
        while source.outstanding < PREFETCH:
            source.request()
        for _ in range(sink.requests()):
            sink.answer(draw(host, store.keys_of(rng.integers(0, store.num_indices, BATCH))))
        head = host.ring("answers").head
        record = host.ring("answers").record(head)
        Draw.read(record["draw"]).gather(store, expected, host.plan.beta)
        batch, following = free
        sampled = source.poll(batch, following)
        assert sampled is not None
        assert (sampled.torn, sampled.live) == (0, 50)
        assert np.array_equal(batch.memory, expected.memory), number
        assert sink.released == number + 1, "answers are released one by one, when they are polled"
        free.reverse()


def test_rows_torn_ahead_have_no_weight() -> None:
    host = make_host()
    source, sink = other(host).sample_source(2), host.sample_sink()
    batches = [Batch.empty(BatchLayout(host.plan.replay.schema, BATCH)) for _ in range(2)]
    chunk = host.plan.replay.chunk
    keys = host.store().keys_of(np.array([0, chunk, 0, chunk]))
    for _ in range(2):
        source.request()
        sink.answer(draw(host, keys))
    host.store().header_rows[1, GENERATION] += 1
    for batch, following in (batches, batches[::-1]):
        sampled = source.poll(batch, following)
        assert sampled is not None
        assert sampled.torn == 2
        assert (batch.weights == 0).tolist() == [False, True, False, True]
