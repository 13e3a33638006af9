"""What a host has of a run, as data: who is there, and where everything lies in its memory."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zapex.metrics import EPISODE, Role, RoleMetrics
from zapex.replay import ReplayLayout
from zapex.roster import Roster
from zapex.schema import align
from zapex.shm_mailbox import Mailbox
from zapex.shm_ring import ShmRing

GRANT = np.dtype([("slot", np.int64), ("incarnation", np.int64)])
EVALUATION_FIELDS = ("steps", "frames", "wall_s")
_EPISODES = 1024
NOTICE = np.dtype([("kind", np.int64), ("text", "S496")])
"""What a role with a link tells its parent; kinds are NEWS or why it has ended."""
NEWS, OVER, FENCED, REFUSED = range(4)
Part = Literal["all", "replay", "actor", "learner"]
"""What a host has of a run: all of it, or one of three parts (`zapex replay`, ...)."""
STRIDE_WORDS = 16  # two cache lines for each hot word


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class HostPlan:
    """Who is on the host and how large their messages are: both sides lay out memory by it.

    actors: of this host; where their statistics come from other hosts, of the whole run.
    """

    replay: ReplayLayout
    actors: int
    envs_per_actor: int
    batch_size: int
    prefetch: int
    parameter_bytes: int
    beta: float
    eval_episodes: int
    part: Part = "all"

    @property
    def evaluation_dtype(self) -> np.dtype[Any]:
        """One evaluation: the returns of its games, and when it was in the run."""
        returns = ("returns", np.float64, (self.eval_episodes,))
        numbers = [(name, np.float64) for name in EVALUATION_FIELDS]
        return np.dtype([returns, ("params_version", np.int64), *numbers])

    @property
    def answer_dtype(self) -> np.dtype[Any]:
        """One sampled batch: what a learner needs to gather it and to weigh it."""
        rows = (self.batch_size,)
        return np.dtype(
            [("total", np.float64), ("live", np.int64), ("smallest", np.float64),
             ("keys", np.int64, rows), ("indices", np.int64, rows), ("leaves", np.float64, rows)]
        )  # fmt: skip

    @property
    def update_dtype(self) -> np.dtype[Any]:
        """New priorities of one batch."""
        rows = (self.batch_size,)
        fields = [("keys", np.int64, rows), ("priorities", np.float32, rows)]
        return np.dtype(fields, align=True)

    @property
    def roles(self) -> list[tuple[str, Role]]:
        """Every process of this host: its name and its role."""
        there: dict[Part, list[tuple[str, Role]]] = {
            "all": [("replay", "replay"), ("learner", "learner"), ("evaluator", "evaluator")],
            "replay": [("replay", "replay")],
            "actor": [("relay", "relay")],
            "learner": [("learner", "learner"), ("evaluator", "evaluator")],
        }
        return (self._actors if self.part in ("all", "actor") else []) + there[self.part]

    @property
    def elsewhere(self) -> list[tuple[str, Role]]:
        """Processes of other hosts whose statistics are known here."""
        there: dict[Part, list[tuple[str, Role]]] = {
            "replay": [*self._actors, ("learner", "learner")],
            "learner": [*self._actors, ("replay", "replay")],
        }
        return there.get(self.part, [])

    @property
    def _actors(self) -> list[tuple[str, Role]]:
        return [(f"actor {i}", "actor") for i in range(self.actors)]

    @property
    def intake(self) -> str:
        """Who takes chunks over on this host; "" where nobody does."""
        return {"all": "replay", "replay": "replay", "actor": "relay", "learner": ""}[self.part]

    def role_index(self, name: str) -> int:
        """The place of a process among the words that each has one of."""
        return [known for known, _ in self.roles].index(name)

    @cached_property
    def rings(self) -> dict[str, tuple[int, np.dtype[Any]]]:
        """Capacity and record of each ring."""
        credit = _power_of_two(2 * self.envs_per_actor + 1)
        # Twice the credit: a life's unread grants stay in the ring when it dies.
        rings: dict[str, tuple[int, np.dtype[Any]]] = {}
        for i in range(self.actors if self.part in ("all", "actor") else 0):
            rings[f"commits {i}"] = (2 * credit, np.dtype(np.int64))
            rings[f"grants {i}"] = (4 * credit, GRANT)
            rings[f"episodes {i}"] = (_EPISODES, EPISODE)
        if self.part == "all":
            window = _power_of_two(self.prefetch)
            rings["requests"] = (2 * window, np.dtype(np.int64))
            rings["answers"] = (2 * window, self.answer_dtype)
            rings["updates"] = (16, self.update_dtype)
        else:
            rings["episodes"] = (4 * _EPISODES, EPISODE)
            rings["notices"] = (64, NOTICE)
        if self.part in ("all", "learner"):
            rings["evaluations"] = (64, self.evaluation_dtype)
        return rings

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        places: dict[str, tuple[int, int]] = {}
        at = 0

        def place(name: str, nbytes: int) -> None:
            nonlocal at
            places[name] = (at, nbytes)
            at = align(at + nbytes, 128)

        words = len(self.roles) * STRIDE_WORDS * 8
        place("lives", words)
        place("sleeping", words)
        for name, (capacity, dtype) in self.rings.items():
            place(f"ring {name}", ShmRing.required_bytes(capacity, dtype))
        for name, _ in self.roles + self.elsewhere:
            place(f"metrics {name}", RoleMetrics.required_bytes())
        for name, _ in self.elsewhere:
            place(f"last metrics {name}", RoleMetrics.required_bytes())
        place("sources", 8 * len(self.elsewhere))
        place("parameters", Mailbox.required_bytes(self.parameter_bytes))
        place("roster", Roster.required_bytes(self.actors))
        places[""] = (at, 0)
        return places

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self._places[""][0]

    def place(self, memory: NDArray[np.uint8], name: str) -> NDArray[np.uint8]:
        """The part of the block called `name`."""
        start, nbytes = self._places[name]
        return memory[start : start + nbytes]
