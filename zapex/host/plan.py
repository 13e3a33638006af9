"""A host's part of a run, as data: its processes and the layout of its memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.host.metrics import EPISODE, Role, RoleMetrics
from zapex.host.parts import PARTS, Part
from zapex.host.roster import Roster, Routes, SaveWords
from zapex.machine.exchange import ExchangeShape
from zapex.machine.mailbox import Mailbox
from zapex.machine.memory import Section, lay_out
from zapex.replay.core import ReplayLayout
from zapex.replay.draw import REQUEST, answer_dtype, update_dtype
from zapex.shm_ring import ShmRing

GRANT = np.dtype([("slot", np.int64), ("incarnation", np.int64)])
EVALUATION_FIELDS = ("steps", "frames", "wall_s")
_EPISODES = 1024
NOTICE = np.dtype([("kind", np.int64), ("text", "S496")])
"""A message to the parent, from a role with a link or with the experience. Kinds: NEWS, or the
reason of its end."""
NEWS, OVER, FENCED, REFUSED = range(4)
STRIDE_WORDS = 16  # two cache lines for each hot word


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class HostPlan:
    """The host's processes and their message sizes. All processes use it for the memory layout.

    actors: number on this host; in the whole run if statistics come from other hosts. exchange: of
    the actors with the inference role, if there is one.
    """

    replay: ReplayLayout
    actors: int
    envs_per_actor: int
    batch_size: int
    prefetch: int
    parameter_bytes: int
    beta: float
    eval_episodes: int
    part: Part = PARTS["all"]
    exchange: ExchangeShape | None = None

    @property
    def evaluation_dtype(self) -> np.dtype[Any]:
        """One evaluation: the returns of its games, and its time in the run."""
        returns = ("returns", np.float64, (self.eval_episodes,))
        numbers = [(name, np.float64) for name in EVALUATION_FIELDS]
        return np.dtype([returns, ("params_version", np.int64), *numbers])

    @property
    def roles(self) -> list[tuple[str, Role]]:
        """The name and the role of each process of this host."""
        return self._processes(self.part.roles)

    @property
    def elsewhere(self) -> list[tuple[str, Role]]:
        """Processes of other hosts whose statistics this host receives."""
        return self._processes(self.part.elsewhere)

    def _processes(self, roles: Iterable[Role]) -> list[tuple[str, Role]]:
        actors = [f"actor {i}" for i in range(self.actors)]
        return [(n, role) for role in roles for n in (actors if role == "actor" else [role])]

    @property
    def experience_bytes(self) -> int:
        """Bytes of the block of chunks; 0 if no role accepts chunks."""
        return self.replay.nbytes if self.part.intake else 0

    def role_index(self, name: str) -> int:
        """The index of a process in arrays with one word for each."""
        return self._indices[name]

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {name: i for i, (name, _) in enumerate(self.roles)}

    @cached_property
    def rings(self) -> dict[str, tuple[int, np.dtype[Any]]]:
        """Capacity and record of each ring."""
        credit = _power_of_two(2 * self.envs_per_actor + 1)
        # Twice the credit: when an actor dies, grants that it has not read stay in the ring.
        rings: dict[str, tuple[int, np.dtype[Any]]] = {}
        for i in range(self.actors if "actor" in self.part.roles else 0):
            rings[f"commits {i}"] = (2 * credit, np.dtype(np.int64))
            rings[f"grants {i}"] = (4 * credit, GRANT)
            rings[f"episodes {i}"] = (_EPISODES, EPISODE)
        if "replay" in self.part.roles and self.part.learns:
            window = _power_of_two(self.prefetch)
            rings["requests"] = (2 * window, REQUEST)
            rings["answers"] = (2 * window, answer_dtype(self.batch_size))
            rings["updates"] = (16, update_dtype(self.batch_size))
        if self.part.linked is not None:
            rings["episodes"] = (4 * _EPISODES, EPISODE)
        if self.part.linked is not None or self.part.holds_replay:
            rings["notices"] = (64, NOTICE)
        if self.part.listens and self.part.learns:
            rings["endings"] = (2, NOTICE)  # parent -> replay, which ends the other hosts
        if self.part.learns:
            rings["evaluations"] = (64, self.evaluation_dtype)
        return rings

    @cached_property
    def sections(self) -> dict[str, Section]:
        """The sections of the block, by name."""
        return self._layout[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self._layout[1]

    @cached_property
    def _layout(self) -> tuple[dict[str, Section], int]:
        words = len(self.roles) * STRIDE_WORDS * 8
        of_role, elsewhere = RoleMetrics.required_bytes(), [name for name, _ in self.elsewhere]
        sizes = {
            "incarnations": words,
            "sleeping": words,
            **{f"ring {name}": ShmRing.required_bytes(*ring) for name, ring in self.rings.items()},
            **{f"metrics {name}": of_role for name, _ in self.roles + self.elsewhere},
            **{f"last metrics {name}": of_role for name in elsewhere},
            "sources": 8 * len(elsewhere),
            "parameters": Mailbox.required_bytes(self.parameter_bytes),
            "saves": SaveWords.required_bytes(),
            "roster": Roster.required_bytes(self.actors),
            **({"exchange": self.exchange.nbytes} if self.exchange is not None else {}),
            "routes": Routes.required_bytes(self.actors if "relay" in self.part.roles else 0),
        }
        return lay_out([(name, (n,), np.uint8) for name, n in sizes.items()], boundary=128)

    def place(self, memory: NDArray[np.uint8], name: str) -> NDArray[np.uint8]:
        """The section `name` of the block."""
        return self.sections[name].view(memory)
