"""What a model of a run on many hosts is told: hosts, links, sizes, and the time of each piece."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from zapex.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """gbit: rate of each direction; 0: no limit. rtt_ms: there and back."""

    gbit: float = 0.0
    rtt_ms: float = 0.0

    @property
    def byte_s(self) -> float:
        """Seconds for a byte."""
        return 8e-9 / self.gbit if self.gbit else 0.0


@dataclass(frozen=True)
class Times:
    """Seconds of one core for one piece of work, as `calibration.measure` finds them.

    insert_s: the replay takes in a chunk. sample_s, row_s: it draws and packs a batch, and, for
    each of its rows, so much more. update_s: it applies a batch's priorities. serve_s: it sends
    parameters to one host. move_s, byte_s: its I/O thread moves a chunk, or a byte of another
    message. push_s: a relay sends a chunk. unpack_s: the learner has a batch in its memory. hop_s:
    from a message's end on the line until its reader works on it.
    """

    insert_s: float
    sample_s: float
    row_s: float
    update_s: float
    serve_s: float
    move_s: float
    byte_s: float
    push_s: float
    unpack_s: float
    hop_s: float

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not isinstance(value, int | float) or not 0 <= value < 3600:
                raise ConfigError(f"{one.name} must be 0 to 3,600 seconds, got {value!r}")

    @classmethod
    def of(cls, values: Any) -> "Times":
        """From a table of a file. Raises ConfigError if it is not one."""
        names = {one.name for one in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise ConfigError(f"times must be a table of {', '.join(sorted(names))}")
        return cls(**values)


@dataclass(frozen=True)
class Cluster:
    """A run on many hosts.

    actors: all of them. per_host: of one actor host. burst: chunks that an actor hands over at a
    time. ahead: bursts under way while it plays on; 0: it waits for each one's acknowledgement.
    rows: transitions of a burst. play_s: seconds an actor plays for a burst. chunk_bytes,
    batch_bytes, parameter_bytes: of a message. batch: rows. prefetch: batches asked for ahead.
    learn_s: seconds of a learner's step. publish_s: between two versions of the parameters; 0:
    after each batch. look_s: seconds of play between an actor's two looks for parameters. reuse:
    samples per insert; 0: no limit. tolerance: samples that this may be off.

    host, replay, learner: the link of each such host. site: one link that all actor hosts share.
    The round trip to the replay is that of `site` for actors, and that of `learner` for it.
    """

    actors: int
    per_host: int
    rows: int
    play_s: float
    chunk_bytes: int
    batch: int
    batch_bytes: int
    parameter_bytes: int
    learn_s: float
    times: Times
    burst: int = 1
    ahead: int = 1
    prefetch: int = 2
    publish_s: float = 1.0
    look_s: float = 0.0
    reuse: float = 0.0
    tolerance: float = 0.0
    shards: int = 1
    host: Link = field(default_factory=Link)
    site: Link = field(default_factory=Link)
    replay: Link = field(default_factory=Link)
    learner: Link = field(default_factory=Link)

    @property
    def hosts(self) -> int:
        """Actor hosts."""
        return -(-self.actors // self.per_host)

    @property
    def placed(self) -> list[int]:
        """How many actors push to each shard that has any: in turn, as a run spreads them."""
        shards = min(self.shards, self.actors)
        return [len(range(shard, self.actors, shards)) for shard in range(shards)]

    @property
    def share(self) -> float:
        """Of a batch's rows from each shard: all are alike once their memories are full."""
        return 1 / len(self.placed)

    @property
    def unpacks_beside(self) -> bool:
        """Whether a thread of its own checks and unpacks batches while the learner learns.

        The parts of several shards are received and checked by the learner's thread. That is most
        of the work, so all of it counts as the learner's.
        """
        return self.prefetch >= 3 and len(self.placed) == 1

    @property
    def step_s(self) -> float:
        """Seconds of the learner's thread for a batch."""
        return self.learn_s + (0.0 if self.unpacks_beside else self.times.unpack_s)

    @property
    def own_steps_per_s(self) -> float:
        """Of all actors, if nothing ever kept them waiting."""
        return self.actors * self.rows / self.play_s

    def of(self, actors: int) -> "Cluster":
        """The same with another number of actors."""
        return replace(self, actors=actors)
