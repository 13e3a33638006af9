"""The parts of a run: the roles that a host runs for each part, and its link to other hosts."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from zapex.host.metrics import Role

PartName = Literal["all", "replay", "replay with learner", "actor", "learner"]


@dataclass(frozen=True)
class Part:
    """The part of a run that one host runs.

    Attributes:
        name: of the part.
        command: the command, and the flag, that choose it.
        roles: in the order of their start; one process each, except actors.
        linked: the role with a link to other hosts; the host has its key. None: no other hosts.
        listens: it listens at an address; otherwise it connects to the replay's.
        elsewhere: roles of other hosts whose statistics this host receives.
        rejoins: the host joins again, as a new host, if the replay gave its actor numbers to
            another.
    """

    name: PartName
    command: tuple[str, ...]
    roles: "tuple[Role, ...]"
    linked: "Role | None" = None
    listens: bool = False
    elsewhere: "tuple[Role, ...]" = ()
    rejoins: bool = False

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
        """This part where actors compute as `--inference` says: "central" adds a role."""
        if inference != "central" or "actor" not in self.roles:
            return self
        others = tuple(role for role in self.roles if role != "actor")
        return replace(self, roles=("actor", "inference", *others))

    def processes(self, actors: int) -> int:
        """How many processes it has, with the parent."""
        return 1 + sum(actors if role == "actor" else 1 for role in self.roles)


PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part("all", ("train",), ("actor", "replay", "learner", "evaluator")),
        Part(
            "replay",
            ("replay",),
            ("replay",),
            linked="replay",
            listens=True,
            elsewhere=("actor", "learner"),
        ),
        Part(
            "replay with learner",
            ("replay", "--with-learner"),
            ("replay", "learner", "evaluator"),
            linked="replay",
            listens=True,
            elsewhere=("actor",),
        ),
        Part("actor", ("actor",), ("actor", "relay"), linked="relay", rejoins=True),
        Part(
            "learner",
            ("learner",),
            ("learner", "evaluator"),
            linked="learner",
            elsewhere=("actor", "replay"),
        ),
    )
}
