"""Questions and answers: each is answered once, whole, and only who asked takes the answer."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.naive import NaiveExchange
from tests.test_shm_ring import aligned
from zapex.errors import ConfigError, SharedMemoryError
from zapex.machine.exchange import Answerer, Asker, Exchange, ExchangeShape

PLACES = 3
SHAPE = ExchangeShape(PLACES, 2, (3,), "<i8", 4)


def make(shape: ExchangeShape = SHAPE) -> Exchange:
    return Exchange(aligned(shape.nbytes), shape, create=True)


def asker(exchange: Exchange, place: int) -> Asker:
    return exchange.asker(place, lambda: None)


def answerer(exchange: Exchange) -> Answerer:
    return exchange.answerer([lambda: None] * PLACES)


def judge(items: np.ndarray) -> np.ndarray:
    """Values (n, 4) that say which items they are of."""
    return (items.sum(axis=1)[:, None] * [1, 2, 3, 4]).astype(np.float32)


def answer_all(one: Answerer, note: int = 1) -> int:
    places = one.find()
    if len(places):
        one.answer(judge(one.items(places)), note)
    return len(places)


def items(number: int) -> np.ndarray:
    return np.arange(6).reshape(2, 3) + 100 * number


events = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["ask", "take", "die"]), st.integers(0, PLACES - 1)),
        st.tuples(st.sampled_from(["answer", "restart"]), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(events)
def test_exchange_equals_a_dict_of_questions_under_deaths(found: list[tuple[str, int]]) -> None:
    exchange, naive = make(), NaiveExchange()
    askers, one = [asker(exchange, place) for place in range(PLACES)], answerer(exchange)
    for place in range(PLACES):
        naive.begin(place)
    for number, (what, place) in enumerate(found):
        if what == "ask" and not askers[place].waits:
            askers[place].ask(items(number))
            naive.ask(place, items(number))
        elif what == "die":
            askers[place] = asker(exchange, place)
            naive.begin(place)
        elif what == "restart":
            one = answerer(exchange)
        elif what == "answer":
            assert answer_all(one, number) == len(naive.open)
            naive.answer(judge, number)
        elif what == "take" and askers[place].waits:
            taken, wanted = askers[place].take(), naive.take(place)
            assert (taken is None) == (wanted is None)
            if taken is not None:
                np.testing.assert_array_equal(taken[0], wanted[0])
                assert taken[1] == wanted[1]
        assert exchange.check_valid() == (True, "")


def test_an_answer_to_a_former_incarnations_question_is_never_taken() -> None:
    exchange = make()
    one = answerer(exchange)
    asker(exchange, 1).ask(items(1))
    places = one.find()
    values = judge(one.items(places))
    second = asker(exchange, 1)  # the first one died while its question was being answered
    second.ask(items(2))
    one.answer(values, 7)
    assert not second.answered()
    assert second.take() is None
    assert answer_all(one, 8) == 1
    answer = second.take()
    assert answer is not None
    np.testing.assert_array_equal(answer[0], judge(items(2)))
    assert answer[1] == 8
    assert second.take() is None, "an answer is taken once"


def test_what_a_dead_answerer_had_begun_its_successor_answers() -> None:
    exchange = make()
    asks = [asker(exchange, place) for place in range(2)]
    for place, one in enumerate(asks):
        one.ask(items(place))
    dies = answerer(exchange)
    places = dies.find()
    exchange.values[places[0]] = 5.0  # it died before its store
    assert not any(one.answered() for one in asks)
    assert answer_all(answerer(exchange)) == 2
    for place, one in enumerate(asks):
        answer = one.take()
        assert answer is not None
        np.testing.assert_array_equal(answer[0], judge(items(place)))


def test_neighbours_are_read_in_place_and_others_are_gathered() -> None:
    exchange = make()
    asks = [asker(exchange, place) for place in range(PLACES)]
    asks[1].ask(items(1))
    asks[2].ask(items(2))
    one = answerer(exchange)
    together = one.items(one.find())
    assert np.shares_memory(together, exchange.items)
    np.testing.assert_array_equal(together, np.concatenate([items(1), items(2)]))
    answer_all(one)
    asks[1].take()
    asks[0].ask(items(3))
    asks[2].take()
    asks[2].ask(items(4))
    apart = one.items(one.find())
    assert not np.shares_memory(apart, exchange.items)
    np.testing.assert_array_equal(apart, np.concatenate([items(3), items(4)]))


def test_both_ends_are_woken_after_the_store() -> None:
    exchange, woken = make(), []
    one = exchange.answerer([lambda i=i: woken.append(asks[i].answered()) for i in range(PLACES)])
    asks = [
        exchange.asker(place, lambda: woken.append(len(one.find()) > 0)) for place in range(PLACES)
    ]
    asks[2].ask(items(1))
    answer_all(one)
    assert woken == [True, True]


def test_a_second_question_waits_for_the_first_ones_answer() -> None:
    one = asker(make(), 0)
    one.ask(items(1))
    with pytest.raises(RuntimeError, match="open"):
        one.ask(items(2))


def test_both_ends_must_be_of_the_same_config() -> None:
    memory: Any = aligned(SHAPE.nbytes + 4096)
    with pytest.raises(SharedMemoryError, match="create it first"):
        Exchange(memory, SHAPE)
    Exchange(memory, SHAPE, create=True)
    with pytest.raises(SharedMemoryError, match="same config"):
        Exchange(memory, ExchangeShape(PLACES, 2, (3,), "<i8", 5))
    with pytest.raises(SharedMemoryError, match="needs"):
        Exchange(memory[:64], SHAPE)
    with pytest.raises(ConfigError, match="places"):
        _ = ExchangeShape(0, 2, (3,), "<i8", 4).nbytes


def test_damage_is_found() -> None:
    exchange = make()
    exchange.words[16 + 32 * 2 + 16] = 3  # answered, of place 2
    assert exchange.check_valid() == (False, "place 2: asked 0, answered 3 (I1)")
