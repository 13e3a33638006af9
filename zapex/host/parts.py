"""One table of the parts of a run: the roles that a host runs for each part, and their links."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from zapex.host.metrics import Role

PartName = Literal["all", "replay", "replay with learner", "actor", "learner"]
Link = Literal["memory", "listens", "dials"]
"""The link of a role to the others: this host's memory, a socket that listens, or a socket that
connects to the replay's host."""


@dataclass(frozen=True)
class Part:
    """The part of a run that one host runs.

    roles: role -> its link, in the order of their start; one process each, except actors.
    elsewhere: roles of other hosts whose statistics this host receives.
    rejoins: the host joins again, as a new host, if the replay gave its actor numbers to another.
    """

    name: PartName
    roles: "Mapping[Role, Link]"
    elsewhere: "tuple[Role, ...]" = ()
    rejoins: bool = False

    @property
    def linked(self) -> "Role | None":
        """The role with a link to other hosts; the host has its key. None: no other hosts."""
        return next((role for role, link in self.roles.items() if link != "memory"), None)

    @property
    def words(self) -> tuple[str, ...]:
        """The command and the flag that choose this part."""
        if self.listens and self.learns:
            return ("replay", "--with-learner")
        return (self.name,)

    @property
    def listens(self) -> bool:
        """Whether it listens at an address; otherwise it connects to the replay's."""
        return "listens" in self.roles.values()

    @property
    def address(self) -> str:
        """The option that gives the address."""
        return "listen" if self.listens else "replay"

    @property
    def intake(self) -> str:
        """The role that accepts chunks on this host; "" if there is none."""
        return next((role for role in ("replay", "relay") if role in self.roles), "")

    @property
    def holds_replay(self) -> bool:
        """Whether the run's experience is in this host's memory."""
        return "replay" in self.roles

    @property
    def learns(self) -> bool:
        """Whether it has the learner, and with it checkpoints, evaluations and limits."""
        return "learner" in self.roles

    def acting(self, inference: str) -> "Part":
        """This part where actors compute as `--inference` says: "central" takes one role more."""
        if inference != "central" or "actor" not in self.roles:
            return self
        return replace(self, roles={"actor": "memory", "inference": "memory", **self.roles})

    def processes(self, actors: int) -> int:
        """How many processes it has, with the parent."""
        return 1 + sum(actors if role == "actor" else 1 for role in self.roles)


PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part(
            "all",
            {"actor": "memory", "replay": "memory", "learner": "memory", "evaluator": "memory"},
        ),
        Part("replay", {"replay": "listens"}, elsewhere=("actor", "learner")),
        Part(
            "replay with learner",
            {"replay": "listens", "learner": "memory", "evaluator": "memory"},
            elsewhere=("actor",),
        ),
        Part("actor", {"actor": "memory", "relay": "dials"}, rejoins=True),
        Part(
            "learner",
            {"learner": "dials", "evaluator": "memory"},
            elsewhere=("actor", "replay"),
        ),
    )
}
