"""Questions and answers in shared memory: many askers, each with its own place, and one answerer.

Layout, 64-byte aligned; words are int64, two cache lines apart:

    | magic, shape | asked 0 | answered 0 | asked 1 | ... | notes | items | values |

    items [places, rows, *item]     the questions, written in place by the askers
    values [places, rows, width]    float32, the answers; notes [places]: a number with each

    I1  0 <= answered <= asked; both only grow, also when an asker is restarted
    I2  every word has exactly one writer (asked: the asker; answered: the answerer)
    I3  an asker takes only the answer with the number of its own question
    SYNC asked:     ask (release asked)       -> find (acquire asked)
    SYNC answered:  answer (release answered) -> take (acquire answered)
    Crash: a process that dies before its one store has asked or answered nothing. The next asker at
           that place uses a larger number, so it never takes its predecessor's answer. The next
           answerer finds and answers every open question.

An asker writes items only while it has no open question. Only if its predecessor left one open may
the answerer read items that are being written; that answer's number is then ignored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError, SharedMemoryError
from zapex.machine.atomics import (
    Words,
    load_acquire,
    load_kernel,
    load_relaxed,
    store_kernel,
    store_relaxed,
    store_release,
)
from zapex.machine.jit import kernel
from zapex.machine.memory import Section, lay_out
from zapex.machine.segment import view_bytes

Wake = Callable[[], object]
_MAGIC = 0x7A61706578_0401  # "zapex", exchange, layout 1
_HOT_WORDS = 16  # two cache lines
_PLACE_WORDS = 2 * _HOT_WORDS
_MAGIC_WORD, _PLACES_WORD, _ITEM_BYTES_WORD, _VALUES_WORD = range(4)


@kernel
def _create_kernel(words: Any, places: int, item_bytes: int, values: int) -> None:
    for i in range(words.size):
        store_relaxed(words, i, 0)
    store_relaxed(words, _PLACES_WORD, places)
    store_relaxed(words, _ITEM_BYTES_WORD, item_bytes)
    store_relaxed(words, _VALUES_WORD, values)
    store_release(words, _MAGIC_WORD, _MAGIC)  # last: the header is complete


@kernel
def _find_kernel(words: Any, found: Any, numbers: Any) -> int:
    """Places with an open question into `found`, their numbers into `numbers`; how many."""
    count = 0
    for place in range(found.size):
        asked = _HOT_WORDS + place * _PLACE_WORDS
        number = load_acquire(words, asked)  # SYNC asked
        if number != load_relaxed(words, asked + _HOT_WORDS):  # I2: only this end writes it
            found[count], numbers[count] = place, number
            count += 1
    return count


@dataclass(frozen=True)
class ExchangeShape:
    """The sizes of an exchange.

    Attributes:
        places: the most askers.
        rows: items of each question.
        item, dtype: the shape and dtype of one item.
        width: values of each item.
    """

    places: int
    rows: int
    item: tuple[int, ...]
    dtype: str
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self.layout[1]

    @property
    def layout(self) -> tuple[dict[str, Section], int]:
        """Its sections, and its bytes."""
        if min(self.places, self.rows, self.width) < 1:
            raise ConfigError(f"an exchange needs places, rows and values, got {self}")
        return lay_out(
            [
                ("words", (_HOT_WORDS + self.places * _PLACE_WORDS,), np.int64),
                ("notes", (self.places,), np.int64),
                ("items", (self.places, self.rows, *self.item), self.dtype),
                ("values", (self.places, self.rows, self.width), np.float32),
            ]
        )


class Exchange:
    """An exchange over a buffer of `shape.nbytes`.

    create: make a new one; the old content is lost. Otherwise attach.
    Raises SharedMemoryError if the buffer does not fit, or has no exchange of this shape.
    """

    def __init__(self, buffer: Any, shape: ExchangeShape, *, create: bool = False) -> None:
        self.shape = shape
        sections, nbytes = shape.layout
        memory = view_bytes(buffer, nbytes, "an exchange")
        self.words: Words = sections["words"].view(memory)
        self.notes: NDArray[np.int64] = sections["notes"].view(memory)
        self.items: NDArray[Any] = sections["items"].view(memory)
        self.values: NDArray[np.float32] = sections["values"].view(memory)
        header = shape.places, self.items[0].nbytes, self.values[0].size
        if create:
            _create_kernel(self.words, *header)
        elif load_kernel(self.words, _MAGIC_WORD) != _MAGIC:
            raise SharedMemoryError("the buffer holds no exchange of this version: create it first")
        elif tuple(self.words[_PLACES_WORD : _VALUES_WORD + 1].tolist()) != header:
            raise SharedMemoryError(
                "the exchange has another shape: both ends must be started from the same config"
            )

    def check_valid(self) -> tuple[bool, str]:
        """Whether I1 holds, and where it does not."""
        for place in range(self.shape.places):
            answered = load_kernel(self.words, self._asked(place) + _HOT_WORDS)  # before asked
            asked = load_kernel(self.words, self._asked(place))
            if not 0 <= answered <= asked:
                return False, f"place {place}: asked {asked}, answered {answered} (I1)"
        return True, ""

    def asker(self, place: int, wake: Wake) -> "Asker":
        """The asker's end at a place. Only one process may use it at a time.

        wake: wakes the answerer.
        """
        return Asker(self, place, wake)

    def answerer(self, wake: Sequence[Wake]) -> "Answerer":
        """The answerer's end. Only one process may use it at a time.

        wake: wakes the asker of each place.
        """
        return Answerer(self, wake)

    @staticmethod
    def _asked(place: int) -> int:
        return _HOT_WORDS + place * _PLACE_WORDS


class Asker:
    """Asks one question at a time, and takes its answer."""

    phase = "inference"

    def __init__(self, exchange: Exchange, place: int, wake: Wake) -> None:
        self._wake = wake
        self._words, self._word = exchange.words, exchange._asked(place)
        self._items, self._values = exchange.items[place], exchange.values[place]
        self._notes = exchange.notes[place : place + 1]
        # A former incarnation's question, perhaps still open: its answer is not for this one.
        self._number = load_kernel(self._words, self._word)
        self._waits = False

    @property
    def waits(self) -> bool:
        """Whether a question was asked whose answer was not taken."""
        return self._waits

    def ask(self, items: NDArray[Any]) -> None:
        """Ask about items (rows, *item): one copy. RuntimeError while a question is open."""
        if self._waits:
            raise RuntimeError("a question is open: take its answer first")
        np.copyto(self._items, items)
        self._number += 1
        self._waits = True
        # STEP question-written
        store_kernel(self._words, self._word, self._number)  # SYNC asked
        # STEP question-asked
        self._wake()

    def answered(self) -> bool:
        """Whether `take` would return an answer."""
        return self._waits and load_kernel(self._words, self._word + _HOT_WORDS) == self._number

    def take(self) -> tuple[NDArray[np.float32], int] | None:
        """A copy of the values (rows, width) and the note of the open question, or None."""
        if not self.answered():  # SYNC answered
            return None
        self._waits = False
        return self._values.copy(), int(self._notes[0])


class Answerer:
    """Finds questions and answers them."""

    def __init__(self, exchange: Exchange, wake: Sequence[Wake]) -> None:
        self._exchange, self._wake = exchange, wake
        self._found = np.empty(exchange.shape.places, np.int64)
        self._numbers = np.empty(exchange.shape.places, np.int64)

    def find(self) -> NDArray[np.int64]:
        """The places with an open question, growing; valid until the next call."""
        count = _find_kernel(self._exchange.words, self._found, self._numbers)
        return self._found[:count]

    def items(self, places: NDArray[np.int64]) -> NDArray[Any]:
        """The items (n * rows, *item) of these places: in place where they are neighbours."""
        items, first, count = self._exchange.items, int(places[0]), len(places)
        adjoin = int(places[-1]) - first == count - 1
        chosen = items[first : first + count] if adjoin else items[places]
        return chosen.reshape(-1, *items.shape[2:])

    def answer(self, values: NDArray[np.float32], note: int) -> None:
        """Answer the questions that `find` found, with values (n * rows, width) and a note."""
        exchange, rows = self._exchange, self._exchange.shape.rows
        for i in range(len(values) // rows):
            place = int(self._found[i])
            exchange.values[place] = values[i * rows : (i + 1) * rows]
            exchange.notes[place] = note
            # STEP values-written
            word = exchange._asked(place) + _HOT_WORDS
            store_kernel(exchange.words, word, int(self._numbers[i]))  # SYNC answered
            # STEP question-answered
            self._wake[place]()
